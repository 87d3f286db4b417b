"""Attention of one token per sequence over a cache whose slots are split among programs.

Letters: B sequences, H query heads, J kv heads, G = H/J query heads of one kv head, C channels of a key, U channels of
a value, M cache slots, N projected columns, R rotated channel pairs. A row of C channels is cut into a block of a
power of two and, behind it, a smaller one (96 = 64 + 32, 576 = 512 + 64).

Every program leaves the largest score, the sum of exponentials and the weighted sum of values over its slots; a second
launch adds these in the order of the slots, so that the result does not depend on timing.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"
# ruff: noqa: SIM108

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_settings import AttendSettings
from .launch import cdiv, launch_options, next_power_of_2, wait_for_previous


@triton.jit
def load_slots(p, slots, inside, o_c, stride, C: tl.constexpr, EVEN: tl.constexpr):
    """Load channels o_c of cache slots; 0 where not inside."""
    at = p + slots.to(tl.int64)[:, None] * stride + o_c[None, :]
    if EVEN:
        v = tl.load(at, mask=inside[:, None], other=0.0)
    else:
        v = tl.load(at, mask=inside[:, None] & (o_c[None, :] < C), other=0.0)
    return v


@triton.jit
def load_keys(
    k, v, slots, inside, stride_k, stride_v, C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, U: tl.constexpr,
    UA: tl.constexpr, UB: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Load a block of keys and of values, (k_a, k_b, v_a, v_b); what has no second block gives the first again."""
    k_a = load_slots(k, slots, inside, tl.arange(0, CA), stride_k, C, CA <= C)
    if CB:
        k_b = load_slots(k, slots, inside, CA + tl.arange(0, CB), stride_k, C, CA + CB <= C)
    else:
        k_b = k_a
    if SHARED:
        v_a = k_a
    else:
        v_a = load_slots(v, slots, inside, tl.arange(0, UA), stride_v, U, UA <= U)
    if UB:
        v_b = load_slots(v, slots, inside, UA + tl.arange(0, UB), stride_v, U, UA + UB <= U)
    else:
        v_b = v_a
    return k_a, k_b, v_a, v_b


@triton.jit
def attend_block(
    q_a, q_b, block, slots, inside, top, total, acc_a, acc_b, since, until, SCALE: tl.constexpr, CB: tl.constexpr,
    UB: tl.constexpr,
):  # fmt: skip
    """Go on with a softmax over one block of keys and values, as ``attend_slots``."""
    k_a, k_b, v_a, v_b = block
    scores = tl.dot(q_a, k_a.T, input_precision="ieee")
    if CB:
        scores = tl.dot(q_b, k_b.T, scores, input_precision="ieee")
    seen = inside[None, :]
    if since is not None:
        seen = seen & (slots[None, :] >= since[:, None])
    if until is not None:
        seen = seen & (slots[None, :] < until[:, None])
    scores = tl.where(seen, scores * (SCALE * 1.4426950408889634), float("-inf"))
    larger = tl.maximum(top, tl.max(scores, 1))
    # Where nothing was seen yet, -inf - -inf would be NaN.
    base = tl.where(larger == float("-inf"), 0.0, larger)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    acc_a = tl.dot(weights.to(v_a.dtype), v_a, acc_a * shrink[:, None], input_precision="ieee")
    if UB:
        acc_b = tl.dot(weights.to(v_b.dtype), v_b, acc_b * shrink[:, None], input_precision="ieee")
    return larger, total, acc_a, acc_b


@triton.jit
def inside_of(mask, slots, last, HAS_MASK: tl.constexpr):
    """Tell which slots are before the last and not masked."""
    inside = slots < last
    if HAS_MASK:
        inside = inside & (tl.load(mask + slots, mask=inside, other=0) != 0)
    return inside


@triton.jit
def attend_slots(
    q_a, q_b, k, v, mask, stride_k, stride_v, first, last, top, total, acc_a, acc_b, SCALE: tl.constexpr,
    C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, U: tl.constexpr, UA: tl.constexpr, UB: tl.constexpr,
    SHARED: tl.constexpr, HAS_MASK: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, since=None, until=None,
):  # fmt: skip
    """Go on with a softmax over the slots [first, last) of one kv head.

    ``top`` is the largest score so far, times log2(e), ``total`` the sum of exponentials, ``acc`` the sum of values.
    With SHARED, the values are the first U channels of the keys. A row sees slots from its ``since`` on and before its
    ``until``, where these are given.
    """
    for n in tl.range(first, last, BN, num_stages=STAGES):
        slots = n + tl.arange(0, BN)
        inside = inside_of(mask, slots, last, HAS_MASK)
        block = load_keys(k, v, slots, inside, stride_k, stride_v, C, CA, CB, U, UA, UB, SHARED)
        top, total, acc_a, acc_b = attend_block(
            q_a, q_b, block, slots, inside, top, total, acc_a, acc_b, since, until, SCALE, CB, UB
        )
    return top, total, acc_a, acc_b


@triton.jit
def share_of(split, splits, start, stop, BN: tl.constexpr):
    """Cut [start, stop) into equal shares of whole blocks, and give the split's own."""
    share = tl.cdiv(tl.cdiv(stop - start, BN), splits) * BN
    first = tl.minimum(start + split * share, stop)
    return first, tl.minimum(first + share, stop)


@triton.jit
def leave_sums(
    sums, tops, totals, head, split, ok, top, total, acc_a, acc_b, U: tl.constexpr, UA: tl.constexpr, UB: tl.constexpr,
):  # fmt: skip
    """Store what one split found for the heads; ``head`` counts over all sequences. No sums where no slot was seen."""
    place = head * tl.num_programs(0) + split
    tl.store(tops + place, top, mask=ok)
    tl.store(totals + place, total, mask=ok)
    seen = (ok & (top > float("-inf")))[:, None]
    o_ua = tl.arange(0, UA)[None, :]
    tl.store(sums + place[:, None] * U + o_ua, acc_a, mask=seen & (o_ua < U))
    if UB:
        o_ub = UA + tl.arange(0, UB)[None, :]
        tl.store(sums + place[:, None] * U + o_ub, acc_b, mask=seen & (o_ub < U))


@triton.jit
def attend_splits(
    q, k, v, mask, lengths, sums, tops, totals, M, stride_qb, stride_kb, stride_kj, stride_km, stride_vb, stride_vj,
    stride_vm, stride_mb, SCALE: tl.constexpr, WINDOW: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr,
    C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, U: tl.constexpr, UA: tl.constexpr, UB: tl.constexpr,
    SHARED: tl.constexpr, HAS_MASK: tl.constexpr, HAS_LENGTHS: tl.constexpr, BH: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One share of the slots and BH query heads of a kv head; grid (splits, J * GROUPS, B)."""
    split = tl.program_id(0)
    j = (tl.program_id(1) // GROUPS).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    o_g = (tl.program_id(1) % GROUPS) * BH + tl.arange(0, BH)
    ok = o_g < G
    o_ca = tl.arange(0, CA)
    o_cb = CA + tl.arange(0, CB if CB else 16)
    wait_for_previous(PDL)
    start = 0
    stop = M
    if HAS_LENGTHS:
        stop = tl.minimum(tl.load(lengths + b), M).to(tl.int32)
        if WINDOW:
            start = tl.maximum(stop - WINDOW, 0)
    first, last = share_of(split, tl.num_programs(0), start, stop, BN)
    if HAS_MASK:
        mask += b * stride_mb
    q_row = q + b * stride_qb + (j * G + o_g)[:, None] * C
    q_a = tl.load(q_row + o_ca[None, :], mask=ok[:, None] & (o_ca[None, :] < C), other=0.0)
    if CB:
        q_b = tl.load(q_row + o_cb[None, :], mask=ok[:, None] & (o_cb[None, :] < C), other=0.0)
    else:
        q_b = q_a
    top, total, acc_a, acc_b = attend_slots(
        q_a, q_b, k + b * stride_kb + j * stride_kj, v + b * stride_vb + j * stride_vj, mask, stride_km,
        stride_vm, first, last, tl.full((BH,), float("-inf"), tl.float32), tl.zeros((BH,), tl.float32),
        tl.zeros((BH, UA), tl.float32), tl.zeros((BH, UB if UB else 16), tl.float32), SCALE, C, CA, CB, U, UA, UB,
        SHARED, HAS_MASK, BN, STAGES,
    )  # fmt: skip
    head = (b * tl.num_programs(1) // GROUPS + j) * G + o_g
    leave_sums(sums, tops, totals, head, split, ok, top, total, acc_a, acc_b, U, UA, UB)


@triton.jit
def add_splits(
    sums, tops, totals, gate, out, stride_g, splits, U: tl.constexpr, SP: tl.constexpr, HAS_GATE: tl.constexpr,
    BU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BU channels of one head: the splits' sums in order, then the gate; grid (U / BU, H, B). Zero without a slot."""
    o_u = tl.program_id(0) * BU + tl.arange(0, BU)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    head = b * tl.num_programs(1) + h
    o_s = tl.arange(0, SP)
    if HAS_GATE:
        # Written before the launch in front, which has waited for that.
        g = tl.load(gate + b * stride_g + h * U + o_u, mask=o_u < U, other=0.0)
    wait_for_previous(PDL)
    top = tl.load(tops + head * splits + o_s, mask=o_s < splits, other=float("-inf"))
    total = tl.load(totals + head * splits + o_s, mask=o_s < splits, other=0.0)
    inside = (o_s[:, None] < splits) & (o_u[None, :] < U)
    part = tl.load(sums + (head * splits + o_s)[:, None] * U + o_u[None, :], mask=inside, other=0.0)
    # A split that saw nothing left no sum; reading past it costs less than waiting to know.
    part = tl.where((top > float("-inf"))[:, None], part, 0.0)
    largest = tl.max(top, 0)
    weights = tl.exp2(top - tl.where(largest == float("-inf"), 0.0, largest))
    denominator = tl.sum(weights * total, 0)
    # NaN stays NaN: only a row without any visible slot has no sum.
    y = tl.sum(weights[:, None] * part, 0) / tl.where(denominator == 0.0, 1.0, denominator)
    if HAS_GATE:
        y *= tl.sigmoid(g.to(tl.float32))
    tl.store(out + head * U + o_u, y.to(out.dtype.element_ty), mask=o_u < U)


def cut_channels(size: int, /) -> tuple[int, int]:
    """Cut channels into a power of two and a smaller one, each at least 16; (128, 0) is a single block."""
    large = 1 << max(size.bit_length() - 1, 4)
    rest = size - large
    if rest <= 0:
        return large, 0
    small = max(next_power_of_2(rest), 16)
    return (large, small) if small < large else (2 * large, 0)


def sum_splits(
    sums: Tensor, tops: Tensor, totals: Tensor, gate_BN: Tensor | None, dtype: torch.dtype, settings: AttendSettings
) -> Tensor:
    """Add what the splits left, [B, H, splits, U]; gives [B, 1, H, U]."""
    batch, heads, splits, size = sums.shape
    out_B1HU = torch.empty(batch, 1, heads, size, dtype=dtype, device=sums.device)
    add_splits[(cdiv(size, settings.channels), heads, batch)](
        sums, tops, totals, gate_BN, out_B1HU, 0 if gate_BN is None else gate_BN.stride(0), splits, U=size,
        SP=next_power_of_2(splits), HAS_GATE=gate_BN is not None, BU=settings.channels, PDL=settings.pdl,
        num_warps=4, **launch_options(settings.pdl),
    )  # fmt: skip
    return out_B1HU


def empty_sums(like: Tensor, batch: int, heads: int, splits: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make what the splits leave: sums of values, largest scores, sums of exponentials."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=like.device)

    return empty(batch, heads, splits, size), empty(batch, heads, splits), empty(batch, heads, splits)


def with_rows(x: Tensor) -> Tensor:
    """Give the tensor with its channels side by side, copied only where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def mask_bytes(mask_B1M: Tensor | None) -> tuple[Tensor | None, int]:
    """Give the mask as bytes and the distance of its rows."""
    if mask_B1M is None:
        return None, 0
    mask_BM = with_rows(mask_B1M[:, 0]).view(torch.uint8)
    return mask_BM, mask_BM.stride(0)


def is_start_of(v: Tensor, k: Tensor) -> bool:
    """Tell whether the values are the first channels of the keys, so that one read serves both."""
    size = v.shape[-1]
    same = v.data_ptr() == k.data_ptr() and v.stride() == k.stride()
    return same and size < k.shape[-1] and size == cut_channels(k.shape[-1])[0]


def block_options(settings: AttendSettings) -> dict[str, Any]:
    """Name the blocks and launch options of the first launch."""
    return {
        "BH": settings.heads,
        "BN": settings.slots,
        "STAGES": settings.stages,
        "PDL": settings.pdl,
        "num_warps": settings.warps,
        **launch_options(settings.pdl),
    }


def attend_one_token(
    q_B1HC: Tensor,
    k_BJMC: Tensor,
    v_BJMU: Tensor,
    mask_B1M: Tensor | None,
    lengths_B: Tensor | None,
    gate_BN: Tensor | None,
    settings: AttendSettings,
    /,
    *,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Compute ``attend`` for one token of each sequence; two launches.

    Args:
        q_B1HC: queries.
        k_BJMC: keys of the visible slots.
        v_BJMU: values; where they are the first channels of the very same keys, these are read once.
        mask_B1M: True where the token may look; or None.
        lengths_B: int64, slots [0, length) are looked at, and the programs share these alone; or None, all M.
        gate_BN: [B, H * U], whose sigmoid multiplies the output; or None.
        settings: blocks and splits.
        scale: of the scores.
        window: with lengths, only the last ``window`` slots; 0 is no window.

    Returns:
        [B, 1, H, U], dtype of q; 0 where a token sees no slot.
    """
    batch, _, heads, size = q_B1HC.shape
    kv_heads, slots, width = v_BJMU.shape[1:]
    q_BHC, k_BJMC = q_B1HC[:, 0], with_rows(k_BJMC)
    q_BHC = q_BHC if q_BHC.stride()[1:] == (size, 1) else q_BHC.contiguous()
    shared = is_start_of(v_BJMU, k_BJMC)
    v_BJMU = k_BJMC if shared else with_rows(v_BJMU)
    (ca, cb), (ua, ub) = cut_channels(size), cut_channels(width)
    mask, stride_m = mask_bytes(mask_B1M)
    groups = cdiv(heads // kv_heads, settings.heads)
    sums, tops, totals = empty_sums(q_B1HC, batch, heads, settings.splits, width)
    attend_splits[(settings.splits, kv_heads * groups, batch)](
        q_BHC, k_BJMC, v_BJMU, mask, lengths_B, sums, tops, totals, slots, q_BHC.stride(0), *k_BJMC.stride()[:3],
        *v_BJMU.stride()[:3], stride_m, SCALE=scale, WINDOW=window, G=heads // kv_heads, GROUPS=groups, C=size, CA=ca,
        CB=cb, U=width, UA=ua, UB=ub, SHARED=shared, HAS_MASK=mask is not None, HAS_LENGTHS=lengths_B is not None,
        **block_options(settings),
    )  # fmt: skip
    return sum_splits(sums, tops, totals, gate_BN, q_B1HC.dtype, settings)
