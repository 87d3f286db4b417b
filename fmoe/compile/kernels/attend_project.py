"""Attention of one token per sequence from its projection: norm, rotation, cache write and output gate included.

Letters: as in attend_decode.py; N projected columns, R rotated channel pairs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"
# ruff: noqa: SIM108

import triton
import triton.language as tl
from torch import Tensor

from ..decode_settings import AttendSettings
from .attend_decode import (
    attend_block,
    attend_slots,
    block_options,
    cut_channels,
    empty_sums,
    inside_of,
    leave_sums,
    load_keys,
    mask_bytes,
    share_of,
    sum_splits,
    with_rows,
)
from .launch import cdiv, wait_for_previous


@triton.jit
def load_turn(w, cos, sin, rows, ok, o_c, C: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Load what norm and rotation take besides the heads: weights of channels o_c and of their pairs, angles.

    Channels (r, r + HALF) are a pair. All heads are of the token at cos and sin; where these are columns of pointers,
    each is of a token of its own.
    """
    turned = o_c < 2 * HALF
    pair = tl.where(o_c < HALF, o_c + HALF, o_c - HALF)
    o_r = tl.where(o_c < HALF, o_c, pair)
    c = tl.load(cos + o_r, mask=turned, other=1.0)
    s = tl.load(sin + o_r, mask=turned, other=0.0)
    if HAS_NORM:
        own = tl.load(w + rows[:, None] * C + o_c[None, :], mask=ok[:, None] & (o_c < C)[None, :], other=0.0)
        others = tl.load(w + rows[:, None] * C + pair[None, :], mask=ok[:, None] & turned[None, :], other=0.0)
    else:
        own = 1.0
        others = 1.0
    return own, others, c, s


@triton.jit
def load_turns(
    w, cos, sin, rows, ok, C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """``load_turn`` for both blocks of channels; with CB = 0 the second is the first."""
    turn_a = load_turn(w, cos, sin, rows, ok, tl.arange(0, CA), C, HALF, HAS_NORM)
    if CB:
        turn_b = load_turn(w, cos, sin, rows, ok, CA + tl.arange(0, CB), C, HALF, HAS_NORM)
    else:
        turn_b = turn_a
    return turn_a, turn_b


@triton.jit
def load_pairs(p, rows, ok, o_c, C: tl.constexpr, HALF: tl.constexpr):
    """Load channels o_c of the heads of the token at p, and the channels that these are paired with."""
    pair = tl.where(o_c < HALF, o_c + HALF, o_c - HALF)
    x = tl.load(p + rows[:, None] * C + o_c[None, :], mask=ok[:, None] & (o_c < C)[None, :], other=0.0)
    inside = ok[:, None] & (o_c < 2 * HALF)[None, :]
    return x, tl.load(p + rows[:, None] * C + pair[None, :], mask=inside, other=0.0)


@triton.jit
def norm_heads(x, weight, inverse, HAS_NORM: tl.constexpr):
    """Divide heads by their root mean square and weigh them; rounded as ``rms_norm`` does."""
    y = x.to(tl.float32)
    if HAS_NORM:
        y = (y * inverse[:, None]).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
        y = y.to(x.dtype).to(tl.float32)
    return y


@triton.jit
def turn_heads(x, other, turn, inverse, o_c, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Norm channels o_c of heads, and rotate them by what ``load_turn`` gave; in the dtype of x."""
    own, others, c, s = turn
    s = s.to(tl.float32)
    s = tl.where((o_c < HALF)[None, :], -s, s)
    y = norm_heads(x, own, inverse, HAS_NORM) * c.to(tl.float32)
    return (y + norm_heads(other, others, inverse, HAS_NORM) * s).to(x.dtype)


@triton.jit
def place_heads(
    p, rows, ok, turns, C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, HALF: tl.constexpr,
    HAS_NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads at p, in its dtype: both blocks of channels (with CB = 0 the second is the first).

    All loads stand before the first sum, so that they are one wait. Where p is a column of pointers, each head is of a
    token of its own.
    """
    o_ca = tl.arange(0, CA)
    o_cb = CA + tl.arange(0, CB if CB else 16)
    turn_a, turn_b = turns
    x_a, other_a = load_pairs(p, rows, ok, o_ca, C, HALF)
    if CB:
        x_b, other_b = load_pairs(p, rows, ok, o_cb, C, HALF)
    inverse = tl.full((rows.shape[0],), 1.0, tl.float32)
    if HAS_NORM:
        squares = tl.sum(x_a.to(tl.float32) * x_a.to(tl.float32), 1)
        if CB:
            squares += tl.sum(x_b.to(tl.float32) * x_b.to(tl.float32), 1)
        inverse = tl.rsqrt(squares / C + EPS)
    y_a = turn_heads(x_a, other_a, turn_a, inverse, o_ca, HALF, HAS_NORM)
    if CB:
        y_b = turn_heads(x_b, other_b, turn_b, inverse, o_cb, HALF, HAS_NORM)
    else:
        y_b = y_a
    return y_a, y_b


@triton.jit
def attend_projected(
    projected, w, cos, sin, positions, k, v, mask, sums, tops, totals, stride_p, stride_kb, stride_kj, stride_km,
    stride_vb, stride_vj, stride_vm, stride_mb, H: tl.constexpr, J: tl.constexpr, SCALE: tl.constexpr,
    WINDOW: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, HALF: tl.constexpr,
    HAS_NORM: tl.constexpr, EPS: tl.constexpr, HAS_MASK: tl.constexpr, BH: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``attend_splits`` that takes q, k and v of the token as projected; grid (splits, J * GROUPS, B).

    Every program norms and rotates its query heads. The last split of a kv head begins its softmax with the token's
    own key and value, kept in registers, and writes them to the cache; nobody reads that slot, so nobody waits.

    All but the projection is read before the launch in front is over: weights, the first block of earlier
    slots, and the token's position and angles. The slots were written by earlier steps or by kernels launched without
    PDL; so were positions and angles, by the first kernels of the step. Such a kernel is over before one launched
    behind it begins, however early the launches between them let the next one start.
    """
    split = tl.program_id(0)
    group = tl.program_id(1) % GROUPS
    j = (tl.program_id(1) // GROUPS).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    G: tl.constexpr = H // J
    # A row without a query head takes the key head, which then needs no rows of its own.
    ROOM: tl.constexpr = (GROUPS == 1) and (G < BH)
    o_g = group * BH + tl.arange(0, BH)
    ok = o_g < G
    o_ca = tl.arange(0, CA)
    o_cb = CA + tl.arange(0, CB if CB else 16)
    owns = split == tl.num_programs(0) - 1
    k_j = k + b * stride_kb + j * stride_kj
    v_j = v + b * stride_vb + j * stride_vj
    cos_b = cos + b * HALF
    sin_b = sin + b * HALF
    if ROOM:
        rows = tl.where(o_g == G, H + j, j * G + o_g)
        placed = o_g <= G
    else:
        rows = j * G + o_g
        placed = ok
    stop = tl.load(positions + b).to(tl.int32)
    turns = load_turns(w, cos_b, sin_b, rows, placed, C, CA, CB, HALF, HAS_NORM)
    start = 0
    if WINDOW:
        start = tl.maximum(stop - (WINDOW - 1), 0)
    # The last program has nothing but the token itself, unless it is alone.
    first, last = share_of(split, tl.maximum(tl.num_programs(0) - 1, 1), start, stop, BN)
    if HAS_MASK:
        mask += b * stride_mb
    slots = first + tl.arange(0, BN)
    inside = inside_of(mask, slots, last, HAS_MASK)
    block = load_keys(k_j, v_j, slots, inside, stride_km, stride_vm, C, CA, CB, C, CA, CB, False)
    wait_for_previous(PDL)
    p = projected + b * stride_p
    at_v = p + (H + J + j) * C
    v_a = tl.load(at_v + o_ca, mask=owns & (o_ca < C), other=0.0)
    v_b = v_a
    if CB:
        v_b = tl.load(at_v + o_cb, mask=owns & (o_cb < C), other=0.0)
    q_a, q_b = place_heads(p, rows, placed, turns, C, CA, CB, HALF, HAS_NORM, EPS)
    top = tl.full((BH,), float("-inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc_a = tl.zeros((BH, CA), tl.float32)
    acc_b = tl.zeros((BH, CB if CB else 16), tl.float32)
    if owns:
        if ROOM:
            writes = o_g == G
            new_a = q_a
            new_b = q_b
            key_a = tl.sum(tl.where(writes[:, None], q_a.to(tl.float32), 0.0), 0)[None, :]
        else:
            # All rows hold the one new key, as the products below need it.
            writes = (group == 0) & (o_g == 0)
            keys = H + j + 0 * o_g
            key_turns = load_turns(w, cos_b, sin_b, keys, keys >= 0, C, CA, CB, HALF, HAS_NORM)
            new_a, new_b = place_heads(p, keys, keys >= 0, key_turns, C, CA, CB, HALF, HAS_NORM, EPS)
            key_a = new_a.to(tl.float32)
        score = tl.sum(q_a.to(tl.float32) * key_a, 1)
        acc_a += v_a.to(tl.float32)[None, :]
        to_k = k_j + stop.to(tl.int64) * stride_km
        to_v = v_j + stop.to(tl.int64) * stride_vm
        tl.store(to_k + 0 * o_g[:, None] + o_ca[None, :], new_a, mask=writes[:, None] & (o_ca[None, :] < C))
        tl.store(to_v + o_ca, v_a, mask=(group == 0) & (o_ca < C))
        if CB:
            if ROOM:
                key_b = tl.sum(tl.where(writes[:, None], q_b.to(tl.float32), 0.0), 0)[None, :]
            else:
                key_b = new_b.to(tl.float32)
            score += tl.sum(q_b.to(tl.float32) * key_b, 1)
            acc_b += v_b.to(tl.float32)[None, :]
            tl.store(to_k + 0 * o_g[:, None] + o_cb[None, :], new_b, mask=writes[:, None] & (o_cb[None, :] < C))
            tl.store(to_v + o_cb, v_b, mask=(group == 0) & (o_cb < C))
        top = score * (SCALE * 1.4426950408889634)
        total += 1.0
    if first < last:
        top, total, acc_a, acc_b = attend_block(
            q_a, q_b, block, slots, inside, top, total, acc_a, acc_b, None, None, SCALE, CB, CB
        )
        top, total, acc_a, acc_b = attend_slots(
            q_a, q_b, k_j, v_j, mask, stride_km, stride_vm, first + BN, last, top, total, acc_a, acc_b, SCALE, C, CA,
            CB, C, CA, CB, False, HAS_MASK, BN, STAGES,
        )  # fmt: skip
    leave_sums(sums, tops, totals, b * H + j * G + o_g, split, ok, top, total, acc_a, acc_b, C, CA, CB)


def attend_projected_token_(
    projected_BN: Tensor,
    norm_HC: Tensor | None,
    cos_BR: Tensor,
    sin_BR: Tensor,
    positions_B: Tensor,
    k_BJMC: Tensor,
    v_BJMC: Tensor,
    mask_B1M: Tensor | None,
    settings: AttendSettings,
    /,
    *,
    heads: int,
    eps: float,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Norm, rotate, remember and attend for one token of each sequence, and gate the output; two launches.

    Args:
        projected_BN: [q | k | v | gate] of all heads; the gate may be absent.
        norm_HC: weights of the q and then the k heads' norms, [H + J, C]; or None.
        cos_BR: contiguous.
        sin_BR: contiguous.
        positions_B: int64, below M; slots [0, position) are looked at, besides the token itself.
        k_BJMC: cache, whose slot ``position`` is written.
        v_BJMC: the same.
        mask_B1M: False where the token may not look; or None.
        settings: blocks and splits.
        heads: H.
        eps: of the norm.
        scale: of the scores.
        window: the token sees itself and ``window - 1`` slots before; 0 is no window.

    Returns:
        [B, 1, H, C], dtype of the projection.
    """
    batch, kv_heads, _, size = k_BJMC.shape
    projected_BN = with_rows(projected_BN)
    split_at = (heads + 2 * kv_heads) * size
    gate_BN = projected_BN[:, split_at:] if projected_BN.shape[1] > split_at else None
    (ca, cb), half = cut_channels(size), cos_BR.shape[-1]
    mask, stride_m = mask_bytes(mask_B1M)
    groups = cdiv(heads // kv_heads, settings.heads)
    sums, tops, totals = empty_sums(projected_BN, batch, heads, settings.splits, size)
    attend_projected[(settings.splits, kv_heads * groups, batch)](
        projected_BN, norm_HC, cos_BR, sin_BR, positions_B, k_BJMC, v_BJMC, mask, sums, tops, totals,
        projected_BN.stride(0), *k_BJMC.stride()[:3], *v_BJMC.stride()[:3], stride_m, H=heads, J=kv_heads, SCALE=scale,
        WINDOW=window, GROUPS=groups, C=size, CA=ca, CB=cb, HALF=half, HAS_NORM=norm_HC is not None, EPS=eps,
        HAS_MASK=mask is not None, **block_options(settings),
    )  # fmt: skip
    return sum_splits(sums, tops, totals, gate_BN, projected_BN.dtype, settings)
