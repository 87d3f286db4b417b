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
    attend_slots,
    block_options,
    cut_channels,
    empty_sums,
    leave_sums,
    mask_bytes,
    share_of,
    sum_splits,
    with_rows,
)
from .launch import wait_for_previous


@triton.jit
def read_normed(p, w, rows, ok, o_c, inverse, C: tl.constexpr, HAS_NORM: tl.constexpr):
    """Channels o_c of the given heads, divided by their root mean square and weighed; rounded as ``rms_norm`` does."""
    inside = ok[:, None] & (o_c[None, :] < C)
    x = tl.load(p + rows[:, None] * C + o_c[None, :], mask=inside, other=0.0)
    y = x.to(tl.float32)
    if HAS_NORM:
        weight = tl.load(w + rows[:, None] * C + o_c[None, :], mask=inside, other=0.0)
        y = (y * inverse[:, None]).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
        y = y.to(x.dtype).to(tl.float32)
    return y


@triton.jit
def rotate_heads(p, w, cos, sin, rows, ok, o_c, inverse, C: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Channels o_c of the given heads, normed, and rotated in pairs (r, r + HALF); in the dtype of p.

    All heads are of the token at p, cos and sin; where these are columns of pointers, each is of a token of its own.
    """
    y = read_normed(p, w, rows, ok, o_c, inverse, C, HAS_NORM)
    turned = o_c < 2 * HALF
    is_first = o_c < HALF
    pair = tl.where(is_first, o_c + HALF, o_c - HALF)
    other = read_normed(p, w, rows, ok, tl.where(turned, pair, C), inverse, C, HAS_NORM)
    o_r = tl.where(is_first, o_c, pair)
    c = tl.load(cos + o_r, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + o_r, mask=turned, other=0.0).to(tl.float32)
    s = tl.where(is_first, -s, s)
    return (y * c + other * s).to(p.dtype.element_ty)


@triton.jit
def place_heads(
    p, w, cos, sin, rows, ok, C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, HALF: tl.constexpr,
    HAS_NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Norm and rotate heads, as ``rotate_heads``: both blocks of channels (with CB = 0 the second is the first)."""
    o_ca = tl.arange(0, CA)
    o_cb = CA + tl.arange(0, CB if CB else 16)
    inverse = tl.full((rows.shape[0],), 1.0, tl.float32)
    if HAS_NORM:
        x = tl.load(p + rows[:, None] * C + o_ca[None, :], mask=ok[:, None] & (o_ca[None, :] < C), other=0.0)
        squares = tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
        if CB:
            x = tl.load(p + rows[:, None] * C + o_cb[None, :], mask=ok[:, None] & (o_cb[None, :] < C), other=0.0)
            squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
        inverse = tl.rsqrt(squares / C + EPS)
    y_a = rotate_heads(p, w, cos, sin, rows, ok, o_ca, inverse, C, HALF, HAS_NORM)
    if CB:
        y_b = rotate_heads(p, w, cos, sin, rows, ok, o_cb, inverse, C, HALF, HAS_NORM)
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
    """
    split = tl.program_id(0)
    group = tl.program_id(1) % GROUPS
    j = (tl.program_id(1) // GROUPS).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    G: tl.constexpr = H // J
    o_g = group * BH + tl.arange(0, BH)
    ok = o_g < G
    o_ca = tl.arange(0, CA)
    o_cb = CA + tl.arange(0, CB if CB else 16)
    wait_for_previous(PDL)
    stop = tl.load(positions + b).to(tl.int32)
    start = 0
    if WINDOW:
        start = tl.maximum(stop - (WINDOW - 1), 0)
    # The last program has nothing but the token itself, unless it is alone.
    first, last = share_of(split, tl.maximum(tl.num_programs(0) - 1, 1), start, stop, BN)
    if HAS_MASK:
        mask += b * stride_mb
    p = projected + b * stride_p
    cos_b = cos + b * HALF
    sin_b = sin + b * HALF
    q_a, q_b = place_heads(p, w, cos_b, sin_b, j * G + o_g, ok, C, CA, CB, HALF, HAS_NORM, EPS)
    top = tl.full((BH,), float("-inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc_a = tl.zeros((BH, CA), tl.float32)
    acc_b = tl.zeros((BH, CB if CB else 16), tl.float32)
    if split == tl.num_programs(0) - 1:
        # All rows hold the one new key, as the products below need it.
        rows = H + j + 0 * o_g
        new_a, new_b = place_heads(p, w, cos_b, sin_b, rows, rows >= 0, C, CA, CB, HALF, HAS_NORM, EPS)
        at_v = p + (H + J + j) * C
        v_a = tl.load(at_v + o_ca, mask=o_ca < C, other=0.0)
        score = tl.sum(q_a.to(tl.float32) * new_a.to(tl.float32), 1)
        acc_a += v_a.to(tl.float32)[None, :]
        to_k = k + b * stride_kb + j * stride_kj + stop.to(tl.int64) * stride_km
        to_v = v + b * stride_vb + j * stride_vj + stop.to(tl.int64) * stride_vm
        writes = (group == 0) & (o_g == 0)
        tl.store(to_k + 0 * o_g[:, None] + o_ca[None, :], new_a, mask=writes[:, None] & (o_ca[None, :] < C))
        tl.store(to_v + o_ca, v_a, mask=(group == 0) & (o_ca < C))
        if CB:
            v_b = tl.load(at_v + o_cb, mask=o_cb < C, other=0.0)
            score += tl.sum(q_b.to(tl.float32) * new_b.to(tl.float32), 1)
            acc_b += v_b.to(tl.float32)[None, :]
            tl.store(to_k + 0 * o_g[:, None] + o_cb[None, :], new_b, mask=writes[:, None] & (o_cb[None, :] < C))
            tl.store(to_v + o_cb, v_b, mask=(group == 0) & (o_cb < C))
        top = score * (SCALE * 1.4426950408889634)
        total += 1.0
    top, total, acc_a, acc_b = attend_slots(
        q_a, q_b, k + b * stride_kb + j * stride_kj, v + b * stride_vb + j * stride_vj, mask, stride_km,
        stride_vm, first, last, top, total, acc_a, acc_b, SCALE, C, CA, CB, C, CA, CB, False, HAS_MASK, BN, STAGES,
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
    groups = triton.cdiv(heads // kv_heads, settings.heads)
    sums, tops, totals = empty_sums(projected_BN, batch, heads, settings.splits, size)
    attend_projected[(settings.splits, kv_heads * groups, batch)](
        projected_BN, norm_HC, cos_BR, sin_BR, positions_B, k_BJMC, v_BJMC, mask, sums, tops, totals,
        projected_BN.stride(0), *k_BJMC.stride()[:3], *v_BJMC.stride()[:3], stride_m, H=heads, J=kv_heads, SCALE=scale,
        WINDOW=window, GROUPS=groups, C=size, CA=ca, CB=cb, HALF=half, HAS_NORM=norm_HC is not None, EPS=eps,
        HAS_MASK=mask is not None, **block_options(settings),
    )  # fmt: skip
    return sum_splits(sums, tops, totals, gate_BN, projected_BN.dtype, settings)
