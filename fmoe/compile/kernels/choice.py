"""The choice of K experts and their weights for one token, as parts of kernels, from logits that are there.

Letters: T tokens, E routed experts, R rows of the router (E and the shared gates'), K routed experts per token, S
shared slots. The rule is that of ``fmoe.functional.routing``, in float32; a plain softmax ranks by logits, which is the
same order.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"
# ruff: noqa: SIM108

import triton
import triton.language as tl


@triton.jit
def round_to(v, ROUND: tl.constexpr):
    """Round float32 to the dtype of the model and back: 1 bfloat16, 2 float16, 0 not at all."""
    if ROUND == 1:
        v = v.to(tl.bfloat16).to(tl.float32)
    if ROUND == 2:
        v = v.to(tl.float16).to(tl.float32)
    return v


@triton.jit
def read_logits(logits, t, o, inside, T, R: tl.constexpr, SPLITS: tl.constexpr, ROUND: tl.constexpr):
    """Add the partial sums of token t's logits at the columns ``o``; -inf outside."""
    v = tl.load(logits + t.to(tl.int64) * R + o, mask=inside, other=float("-inf"))
    for part in tl.static_range(1, SPLITS):
        v += tl.load(logits + (part * T + t).to(tl.int64) * R + o, mask=inside, other=0.0)
    return round_to(v, ROUND)


@triton.jit
def sigmoid_exact(v):
    """Sigmoid rounded once to float32, so that equal scores tie where the reference's do."""
    return (1.0 / (1.0 + tl.exp(-v.to(tl.float64)))).to(tl.float32)


@triton.jit
def ordered_key(v, ids):
    """Map float32 to integers of the same order, equal values to the lowest id first; NaN is the largest."""
    bits = (v + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(v != v, 0x7FC00000, bits)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def short_key(v, ids, ROUND: tl.constexpr, FREE: tl.constexpr):
    """``ordered_key`` as uint32, of v rounded to 16 bits, whose last bits, FREE, hold the id; 0 is below all."""
    bits = v.to(tl.int32, bitcast=True)
    if ROUND == 1:
        # The same as converting, in instructions of the full rate.
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & (-1 - FREE)
    else:
        bits = round_to(v, ROUND).to(tl.int32, bitcast=True)
    bits = (bits.to(tl.float32, bitcast=True) + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(v != v, 0x7FC00000, bits)
    ordered = (bits ^ ((bits >> 31) | -0x80000000)) & (-1 - FREE)
    return (ordered | (FREE - ids)).to(tl.uint32, bitcast=True)


@triton.jit
def value_of_key(key, FREE: tl.constexpr):
    """Give the value that ``short_key`` made a key of."""
    ordered = key.to(tl.int32, bitcast=True)
    bits = (ordered ^ ((-1 - (ordered >> 31)) | -0x80000000)) & (-1 - FREE)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def take_largest(key, best, K: tl.constexpr, KP: tl.constexpr):
    """Take the K largest [KP] of uint32 keys [N] that all differ, ``best`` and on, one a turn.

    The next smaller key is the nearest one counted downwards; those taken before are almost all the way round. Of
    integers, a warp finds the least in one instruction. No key is 0, but a compiler that knew would unroll the loop:
    the fewer lines of code, the sooner a program that runs alone and once has them all.
    """
    o_k = tl.arange(0, KP)
    top = tl.zeros((KP,), tl.uint32) + best
    for k in tl.range(1, K + (best == 0).to(tl.int32)):
        best = best - tl.min(best - key - 1, 0) - 1
        top = tl.where(o_k == k, best, top)
    return top


@triton.jit
def drop_groups(rank, GP: tl.constexpr, EP: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, TOP2: tl.constexpr,
                DROPPED: tl.constexpr):  # fmt: skip
    """Replace the values of all but the KEPT best groups; rank is [GP, EP], a group a row, -inf where empty."""
    best = tl.max(rank, 1)
    if TOP2:
        o_e = tl.arange(0, EP)[None, :]
        first = tl.min(tl.where(rank == best[:, None], o_e, EP), 1)
        best += tl.max(tl.where(o_e == first[:, None], float("-inf"), rank), 1)
    o_g = tl.arange(0, GP)
    mine = tl.where(o_g < G, best, float("-inf"))
    # How many groups come before each: a [GP, GP] comparison, the group itself along axis 0.
    column = tl.max(tl.where(o_g[:, None] == o_g[None, :], mine[:, None], float("-inf")), 0)
    before = (column[None, :] > mine[:, None]) | ((column[None, :] == mine[:, None]) & (o_g[None, :] < o_g[:, None]))
    keep = tl.sum((before & (o_g[None, :] < G)).to(tl.int32), 1) < KEPT
    return tl.where(keep[:, None], rank, DROPPED)


@triton.jit
def choose_row(
    logits, bias, t, T, E: tl.constexpr, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    GP: tl.constexpr, EP: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, TOP2: tl.constexpr, SCORING: tl.constexpr,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Choose K experts of token t: ids [KP], the row's largest logit and the sum of its exponentials."""
    size: tl.constexpr = E // G
    o_g = tl.arange(0, GP)[:, None]
    o_e = tl.arange(0, EP)[None, :]
    inside = (o_g < G) & (o_e < size)
    ids = o_g * size + o_e
    raw = read_logits(logits, t, ids, inside, T, R, SPLITS, 0)
    v = round_to(raw, ROUND)
    free: tl.constexpr = 0xFFFF if ROUND == 1 else 0x1FFF
    short: tl.constexpr = (ROUND > 0) and (SCORING != 1) and (not HAS_BIAS) and (free + 1 >= E)
    if short and G == 1:
        key = tl.reshape(tl.where(inside, short_key(raw, ids, ROUND, free), 0), (GP * EP,))
        best = tl.max(key, 0)
        largest = value_of_key(best, free)
    else:
        largest = tl.max(tl.max(v, 1), 0)
    total = tl.sum(tl.sum(tl.where(inside, tl.exp(v - largest), 0.0), 1), 0)
    rank = v
    if SCORING == 1:
        rank = sigmoid_exact(v)
    if HAS_BIAS:
        if SCORING == 0:
            rank = tl.exp(v - largest) / total
        rank += tl.load(bias + ids, mask=inside, other=0.0)
    if G > 1:
        rank = tl.where(inside, rank, float("-inf"))
        by_logit: tl.constexpr = (SCORING == 0) and (not HAS_BIAS)
        dropped: tl.constexpr = float("-inf") if (TOP2 or by_logit) else 0.0
        rank = drop_groups(rank, GP, EP, G, KEPT, TOP2, dropped)
    if short:
        if G > 1:
            key = tl.reshape(tl.where(inside, short_key(rank, ids, ROUND, free), 0), (GP * EP,))
            best = tl.max(key, 0)
        chosen = free - (take_largest(key, best, K, KP) & free).to(tl.int32)
    else:
        key = tl.where(inside, ordered_key(rank, ids), -0x7FFFFFFFFFFFFFFF)
        key = tl.reshape(key, (GP * EP,))
        if KP == GP * EP:
            top = tl.sort(key, descending=True)
        else:
            top = tl.topk(key, KP)
        chosen = (0x7FFFFFFF - (top & 0xFFFFFFFF)).to(tl.int32)
    return chosen, largest, total


@triton.jit
def weigh_row(
    logits, chosen, t, T, largest, total, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SCORING: tl.constexpr,
    RENORM: tl.constexpr, FLOOR: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, SPLITS: tl.constexpr,
    ROUND: tl.constexpr, ROUND_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Weights [KP] of the chosen experts, 0 past K."""
    o_k = tl.arange(0, KP)
    v = read_logits(logits, t, chosen, o_k < K, T, R, SPLITS, ROUND)
    # The sum over all experts cancels where only the chosen ones' is added to nothing.
    cancels: tl.constexpr = RENORM and (FLOOR == 0) and (EPS == 0)
    if SCORING == 0:
        v = tl.exp(v - largest)
        if not cancels:
            v = v / total
    if SCORING == 1:
        v = sigmoid_exact(v)
    if SCORING == 2:
        v = tl.exp(v - tl.max(v, 0))
        v = v / tl.sum(tl.where(o_k < K, v, 0.0), 0)
    if SCORING == 3:
        v = tl.sigmoid(v)
    v = tl.where(o_k < K, v, 0.0)
    if RENORM:
        if cancels:
            v = v / tl.sum(v, 0)
        else:
            v = v / (tl.maximum(tl.sum(v, 0), FLOOR) + EPS)
    return round_to(v * SCALE, ROUND_WEIGHTS)


@triton.jit
def weigh_shared(
    logits, t, T, E: tl.constexpr, R: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, SPLITS: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """Weights [SP] of token t's shared slots."""
    o_s = tl.arange(0, SP)
    shared = tl.full((SP,), 1.0, tl.float32)
    if R > E:
        gate = read_logits(logits, t, E + (o_s if R - E == S else 0 * o_s), o_s < S, T, R, SPLITS, ROUND)
        shared = tl.sigmoid(gate)
    return shared


@triton.jit
def store_row(
    chosen, weights, shared, ids_out, weights_out, t, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    S: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """Store the routed columns of token t and, behind them, those of the shared slots."""
    o_k = tl.arange(0, KP)
    row = t.to(tl.int64) * (K + S)
    tl.store(ids_out + row + o_k, chosen, mask=o_k < K)
    tl.store(weights_out + row + o_k, weights, mask=o_k < K)
    if S > 0:
        o_s = tl.arange(0, SP)
        tl.store(ids_out + row + K + o_s, E + o_s, mask=o_s < S)
        tl.store(weights_out + row + K + o_s, shared, mask=o_s < S)


@triton.jit
def write_row(
    logits, chosen, weights, ids_out, weights_out, t, T, E: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, SPLITS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """``store_row`` with the weights of the shared slots."""
    shared = weigh_shared(logits, t, T, E, R, S, SP, SPLITS, ROUND)
    store_row(chosen, weights, shared, ids_out, weights_out, t, E, K, KP, S, SP)
