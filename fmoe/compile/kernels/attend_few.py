"""Attention of a few tokens of each sequence, the newest one and its drafts: T tokens that all stand at the end.

A program's rows are the tokens and query heads of one kv head, (t g), so that keys and values are read once for all T.

Letters: as in attend_project.py; T tokens of each sequence.
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
    is_start_of,
    leave_sums,
    load_keys,
    share_of,
    sum_splits,
    with_rows,
)
from .attend_project import load_turns, place_heads
from .launch import cdiv, next_power_of_2, wait_for_previous


@triton.jit
def drop_infinite(x):
    """Replace NaN and infinities by 0: a weight of zero would not keep those of a draft from the tokens before it."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def score_tokens(q, k, T: tl.constexpr):
    """``q k^T`` of the first T rows of k; in float32 one after the other, for such a product spills registers."""
    if q.dtype == tl.float32:
        o_t = tl.arange(0, k.shape[0])
        scores = tl.zeros((q.shape[0], k.shape[0]), tl.float32)
        for n in range(T):
            k_n = tl.sum(tl.where((o_t == n)[:, None], k, 0.0), 0)
            scores = tl.where((o_t == n)[None, :], tl.sum(q * k_n[None, :], 1)[:, None], scores)
    else:
        scores = tl.dot(q, k.T)
    return scores


@triton.jit
def attend_few_projected(
    projected, w, cos, sin, positions, k, v, sums, tops, totals, stride_pb, stride_pt, stride_kb, stride_kj, stride_km,
    stride_vb, stride_vj, stride_vm, T: tl.constexpr, BT: tl.constexpr, H: tl.constexpr, J: tl.constexpr,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, CA: tl.constexpr,
    CB: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, EPS: tl.constexpr, BH: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``attend_projected`` for T tokens of each sequence; grid (splits, J * GROUPS, B).

    The last split of a kv head begins its softmax with the T new keys and values, causal among themselves, and writes
    them to the cache; all others look only at the slots before the first of them, so nobody waits.
    """
    split = tl.program_id(0)
    group = tl.program_id(1) % GROUPS
    j = (tl.program_id(1) // GROUPS).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    G: tl.constexpr = H // J
    o_r = group * BH + tl.arange(0, BH)
    ok = o_r < T * G
    t = tl.minimum(o_r // G, T - 1)
    head = j * G + o_r % G
    o_ca = tl.arange(0, CA)
    o_cb = CA + tl.arange(0, CB if CB else 16)
    k_j = k + b * stride_kb + j * stride_kj
    v_j = v + b * stride_vb + j * stride_vj
    angle_t = ((b * T + t) * HALF)[:, None]
    # What may be read before the wait, and why: as in attend_projected.
    stop = tl.load(positions + b * T).to(tl.int32)
    start = 0
    since = None
    if WINDOW:
        start = tl.maximum(stop - (WINDOW - 1), 0)
        since = stop + t - (WINDOW - 1)
    # The last program has nothing but the tokens themselves, unless it is alone.
    first, last = share_of(split, tl.maximum(tl.num_programs(0) - 1, 1), start, stop, BN)
    turns = load_turns(w, cos + angle_t, sin + angle_t, head, ok, C, CA, CB, HALF, HAS_NORM)
    earlier = first + tl.arange(0, BN)
    inside = earlier < last
    block = load_keys(k_j, v_j, earlier, inside, stride_km, stride_vm, C, CA, CB, C, CA, CB, False)
    wait_for_previous(PDL)
    p = projected + b * stride_pb
    p_t = (p + t.to(tl.int64) * stride_pt)[:, None]
    q_a, q_b = place_heads(p_t, head, ok, turns, C, CA, CB, HALF, HAS_NORM, EPS)
    top = tl.full((BH,), float("-inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc_a = tl.zeros((BH, CA), tl.float32)
    acc_b = tl.zeros((BH, CB if CB else 16), tl.float32)
    if split == tl.num_programs(0) - 1:
        o_t = tl.arange(0, BT)
        new = o_t < T
        p_new = (p + o_t.to(tl.int64) * stride_pt)[:, None]
        angle_new = ((b * T + tl.minimum(o_t, T - 1)) * HALF)[:, None]
        at_v = p_new + (H + J + j) * C
        inside_a = new[:, None] & (o_ca[None, :] < C)
        inside_b = new[:, None] & (o_cb[None, :] < C)
        v_a = tl.load(at_v + o_ca[None, :], mask=inside_a, other=0.0)
        if CB:
            v_b = tl.load(at_v + o_cb[None, :], mask=inside_b, other=0.0)
        keys = H + j + 0 * o_t
        key_turns = load_turns(w, cos + angle_new, sin + angle_new, keys, new, C, CA, CB, HALF, HAS_NORM)
        k_a, k_b = place_heads(p_new, keys, new, key_turns, C, CA, CB, HALF, HAS_NORM, EPS)
        k_a = drop_infinite(k_a)
        k_b = drop_infinite(k_b)
        slots = (stop + o_t).to(tl.int64)[:, None]
        to_k = k_j + slots * stride_km
        tl.store(to_k + o_ca[None, :], k_a, mask=(group == 0) & inside_a)
        scores = score_tokens(q_a, k_a, T)
        if CB:
            tl.store(to_k + o_cb[None, :], k_b, mask=(group == 0) & inside_b)
            scores += score_tokens(q_b, k_b, T)
        seen = o_t[None, :] <= t[:, None]
        if WINDOW:
            seen = seen & (o_t[None, :] > t[:, None] - WINDOW)
        scores = tl.where(seen, scores * (SCALE * 1.4426950408889634), float("-inf"))
        top = tl.max(scores, 1)
        # Where no score is a number, the largest may be -inf.
        weights = tl.exp2(scores - tl.where(top == float("-inf"), 0.0, top)[:, None])
        total = tl.sum(weights, 1)
        to_v = v_j + slots * stride_vm
        v_a = drop_infinite(v_a)
        tl.store(to_v + o_ca[None, :], v_a, mask=(group == 0) & inside_a)
        acc_a = tl.dot(weights.to(v_a.dtype), v_a, acc_a, input_precision="ieee")
        if CB:
            v_b = drop_infinite(v_b)
            tl.store(to_v + o_cb[None, :], v_b, mask=(group == 0) & inside_b)
            acc_b = tl.dot(weights.to(v_b.dtype), v_b, acc_b, input_precision="ieee")
    if first < last:
        top, total, acc_a, acc_b = attend_block(
            q_a, q_b, block, earlier, inside, top, total, acc_a, acc_b, since, None, SCALE, CB, CB
        )
        top, total, acc_a, acc_b = attend_slots(
            q_a, q_b, k_j, v_j, None, stride_km, stride_vm, first + BN, last, top, total, acc_a, acc_b, SCALE, C, CA,
            CB, C, CA, CB, False, False, BN, STAGES, since,
        )  # fmt: skip
    leave_sums(sums, tops, totals, (b * T + t) * H + head, split, ok, top, total, acc_a, acc_b, C, CA, CB)


@triton.jit
def attend_few_splits(
    q, k, v, lengths, sums, tops, totals, M, stride_qb, stride_qt, stride_kb, stride_kj, stride_km, stride_vb,
    stride_vj, stride_vm, T: tl.constexpr, SCALE: tl.constexpr, H: tl.constexpr, J: tl.constexpr, GROUPS: tl.constexpr,
    C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, U: tl.constexpr, UA: tl.constexpr, UB: tl.constexpr,
    SHARED: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``attend_splits`` for T tokens, of which each sees one slot less than the next; grid (splits, J * GROUPS, B)."""
    split = tl.program_id(0)
    j = (tl.program_id(1) // GROUPS).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    G: tl.constexpr = H // J
    o_r = (tl.program_id(1) % GROUPS) * BH + tl.arange(0, BH)
    ok = o_r < T * G
    t = tl.minimum(o_r // G, T - 1)
    head = j * G + o_r % G
    o_ca = tl.arange(0, CA)
    o_cb = CA + tl.arange(0, CB if CB else 16)
    wait_for_previous(PDL)
    stop = tl.minimum(tl.load(lengths + b), M).to(tl.int32)
    first, last = share_of(split, tl.num_programs(0), 0, stop, BN)
    q_row = q + b * stride_qb + (t.to(tl.int64) * stride_qt + head * C)[:, None]
    q_a = tl.load(q_row + o_ca[None, :], mask=ok[:, None] & (o_ca[None, :] < C), other=0.0)
    if CB:
        q_b = tl.load(q_row + o_cb[None, :], mask=ok[:, None] & (o_cb[None, :] < C), other=0.0)
    else:
        q_b = q_a
    top, total, acc_a, acc_b = attend_slots(
        q_a, q_b, k + b * stride_kb + j * stride_kj, v + b * stride_vb + j * stride_vj, None, stride_km, stride_vm,
        first, last, tl.full((BH,), float("-inf"), tl.float32), tl.zeros((BH,), tl.float32),
        tl.zeros((BH, UA), tl.float32), tl.zeros((BH, UB if UB else 16), tl.float32), SCALE, C, CA, CB, U, UA, UB,
        SHARED, False, BN, STAGES, None, stop - (T - 1) + t,
    )  # fmt: skip
    leave_sums(sums, tops, totals, (b * T + t) * H + head, split, ok, top, total, acc_a, acc_b, U, UA, UB)


def attend_projected_few_(
    projected_BTN: Tensor,
    norm_HC: Tensor | None,
    cos_BTR: Tensor,
    sin_BTR: Tensor,
    positions_BT: Tensor,
    k_BJMC: Tensor,
    v_BJMC: Tensor,
    settings: AttendSettings,
    /,
    *,
    heads: int,
    eps: float,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Norm, rotate, remember and attend for T tokens of each sequence, and gate the output; two launches.

    Args:
        projected_BTN: [q | k | v | gate] of all heads; the gate may be absent.
        norm_HC: weights of the q and then the k heads' norms, [H + J, C]; or None.
        cos_BTR: contiguous.
        sin_BTR: contiguous.
        positions_BT: int64, contiguous, each one more than the one before, below M; a token looks at itself and all
            slots before.
        k_BJMC: cache, whose slots at the positions are written, 0 for what is NaN or infinite.
        v_BJMC: the same.
        settings: blocks and splits; ``heads`` counts rows, of which each token has H / J.
        heads: H.
        eps: of the norm.
        scale: of the scores.
        window: a token sees itself and ``window - 1`` slots before; 0 is no window.

    Returns:
        [B, T, H, C], dtype of the projection.
    """
    batch, kv_heads, _, size = k_BJMC.shape
    tokens, columns = projected_BTN.shape[1:]
    projected_BTN = projected_BTN.contiguous()
    split_at = (heads + 2 * kv_heads) * size
    gate_NU = projected_BTN.flatten(0, 1)[:, split_at:] if columns > split_at else None
    (ca, cb), half = cut_channels(size), cos_BTR.shape[-1]
    groups = cdiv(tokens * heads // kv_heads, settings.heads)
    sums, tops, totals = empty_sums(projected_BTN, batch * tokens, heads, settings.splits, size)
    attend_few_projected[(settings.splits, kv_heads * groups, batch)](
        projected_BTN, norm_HC, cos_BTR, sin_BTR, positions_BT, k_BJMC, v_BJMC, sums, tops, totals,
        *projected_BTN.stride()[:2], *k_BJMC.stride()[:3], *v_BJMC.stride()[:3], T=tokens,
        BT=max(next_power_of_2(tokens), 16), H=heads, J=kv_heads, SCALE=scale, WINDOW=window, GROUPS=groups,
        C=size, CA=ca, CB=cb, HALF=half, HAS_NORM=norm_HC is not None, EPS=eps,
        **block_options(settings),
    )  # fmt: skip
    out_N1HC = sum_splits(sums, tops, totals, gate_NU, projected_BTN.dtype, settings)
    return out_N1HC.view(batch, tokens, heads, size)


def attend_few_tokens(
    q_BTHC: Tensor,
    k_BJMC: Tensor,
    v_BJMU: Tensor,
    lengths_B: Tensor,
    settings: AttendSettings,
    /,
    *,
    scale: float,
) -> Tensor:
    """Compute ``attend`` for T tokens of each sequence by lengths; two launches.

    Args:
        q_BTHC: queries.
        k_BJMC: keys of all slots.
        v_BJMU: values; where they are the first channels of the very same keys, these are read once.
        lengths_B: int64; token t looks at slots [0, length - (T - 1 - t)).
        settings: blocks and splits, as for ``attend_projected_few_``.
        scale: of the scores.

    Returns:
        [B, T, H, U], dtype of q; 0 where a token sees no slot.
    """
    batch, tokens, heads, size = q_BTHC.shape
    kv_heads, slots, width = v_BJMU.shape[1:]
    k_BJMC = with_rows(k_BJMC)
    q_BTHC = q_BTHC if q_BTHC.stride()[2:] == (size, 1) else q_BTHC.contiguous()
    shared = is_start_of(v_BJMU, k_BJMC)
    v_BJMU = k_BJMC if shared else with_rows(v_BJMU)
    (ca, cb), (ua, ub) = cut_channels(size), cut_channels(width)
    groups = cdiv(tokens * heads // kv_heads, settings.heads)
    sums, tops, totals = empty_sums(q_BTHC, batch * tokens, heads, settings.splits, width)
    attend_few_splits[(settings.splits, kv_heads * groups, batch)](
        q_BTHC, k_BJMC, v_BJMU, lengths_B, sums, tops, totals, slots, *q_BTHC.stride()[:2], *k_BJMC.stride()[:3],
        *v_BJMU.stride()[:3], T=tokens, SCALE=scale, H=heads, J=kv_heads, GROUPS=groups, C=size, CA=ca, CB=cb, U=width,
        UA=ua, UB=ub, SHARED=shared, **block_options(settings),
    )  # fmt: skip
    return sum_splits(sums, tops, totals, None, q_BTHC.dtype, settings).view(batch, tokens, heads, width)
