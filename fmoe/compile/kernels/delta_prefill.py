"""The chunk rule of Gated DeltaNet in two launches; ``delta_chunked``, forward only.

The first makes, for each chunk and head at once, what depends on no state: the triangular inverse, with the write
strengths, and the decayed products of queries and keys. The second goes through the chunks, one program for some
columns of one head's state, which it keeps in registers. With D_i = exp(g_1 + .. + g_i) from the chunk's start,

    X = V - D (K S),  U = inverse X,  O = D (Q S) + scores U,  S <- D_C S + K^T (D_C / D U).

Log decays are summed from the start of each chunk, in float64: differences of two sums keep what stands behind a strong
decay. All exponents are of numbers <= 0.

Letters: B sequences, T tokens, H heads (RATIO of them share a head of queries and keys), K key channels, V value
channels, BV of them at a time, C tokens of a chunk, N chunks.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chunk_settings import MOST_CHANNELS, ChunkSettings
from .launch import cdiv, next_power_of_2

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 16  # rows that are inverted by substitution


@triton.jit
def load_chunk(p, o_row, inside, stride, o_column, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Load the channels o_column of the chunk's tokens; 0 outside."""
    at = p + o_row.to(tl.int64)[:, None] * stride + o_column[None, :]
    if EVEN:
        v = tl.load(at, mask=inside[:, None], other=0.0)
    else:
        v = tl.load(at, mask=inside[:, None] & (o_column < COLUMNS)[None, :], other=0.0)
    return v


@triton.jit
def multiply(a, b, SPLIT: tl.constexpr):
    """a b, float32; with SPLIT of each the two larger parts in bfloat16, which errs by 2^-16 and not by 2^-24."""
    if SPLIT:
        a0 = a.to(tl.bfloat16)
        b0 = b.to(tl.bfloat16)
        y = tl.dot((a - a0.to(tl.float32)).to(tl.bfloat16), b0)
        y = tl.dot(a0, (b - b0.to(tl.float32)).to(tl.bfloat16), y)
        y = tl.dot(a0, b0, y)
    else:
        y = tl.dot(a, b, input_precision="ieee")
    return y


@triton.jit
def invert_blocks(a, C: tl.constexpr, BLOCK: tl.constexpr):
    """Inverses of the diagonal blocks of I + a, a strictly lower triangular, row after row; 0 beside the blocks."""
    NB: tl.constexpr = C // BLOCK
    o_b = tl.arange(0, NB)
    o_r = tl.arange(0, BLOCK)
    diagonal = o_b[:, None, None, None] == o_b[None, None, :, None]
    blocks = tl.sum(tl.where(diagonal, tl.reshape(a, (NB, BLOCK, NB, BLOCK)), 0.0), 2)
    columns = tl.permute(blocks, (0, 2, 1))
    x = tl.zeros((NB, BLOCK, BLOCK), tl.float32) + tl.where(o_r[:, None] == o_r[None, :], 1.0, 0.0)[None, :, :]
    for i in range(1, BLOCK):
        row = tl.sum(tl.where((o_r == i)[None, None, :], columns, 0.0), 2)
        solved = tl.sum(row[:, :, None] * x, 1)
        x -= tl.where((o_r == i)[None, :, None], solved[:, None, :], 0.0)
    return tl.reshape(tl.where(diagonal, x[:, :, None, :], 0.0), (C, C))


@triton.jit
def join_blocks(x, a, C: tl.constexpr, SIDE: tl.constexpr, SPLIT: tl.constexpr):
    """Make inverses of blocks of 2 SIDE rows from x, those of SIDE rows."""
    o_c = tl.arange(0, C)
    pair = o_c[:, None] // (2 * SIDE) == o_c[None, :] // (2 * SIDE)
    below = tl.where(pair & (o_c[:, None] // SIDE != o_c[None, :] // SIDE), a, 0.0)
    return x - multiply(multiply(x, below, SPLIT), x, SPLIT)


@triton.jit
def invert_unit_lower(a, C: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, SPLIT: tl.constexpr):
    """Invert I + a, a strictly lower triangular [C, C]: blocks by substitution, then pairs of them by products."""
    x = invert_blocks(a, C, BLOCK)
    for level in tl.static_range(LEVELS):
        x = join_blocks(x, a, C, BLOCK << level, SPLIT)
    return x


@triton.jit
def powers_around(most):
    """Give 2^-n and 2^n with 1 <= 2^-n most < 2, for any positive most but the smallest and largest."""
    n = tl.minimum(tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 64), 190)
    return ((254 - n) << 23).to(tl.float32, bitcast=True), (n << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["T"])
def make_matrices(
    q, k, g, beta, inverse, scores, decays, q_b, q_t, q_h, k_b, k_t, k_h, T, H: tl.constexpr, RATIO: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """inverse [B H, N, C, C] = (I + tril(beta K K^T decay))^-1 beta, scores = tril(Q K^T decay), decays [B H, N, 2, C].

    The two rows of decays are those from the chunk's start to each token, and from each token to the chunk's end.
    """
    chunks = tl.cdiv(T, C)
    n = tl.program_id(0) % chunks
    head = tl.program_id(0) // chunks
    b = (head // H).to(tl.int64)
    h = head % H
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, KP)
    o_t = n * C + o_c
    inside = o_t < T
    gates = (b * T + o_t) * H + h
    sums = tl.cumsum(tl.load(g + gates, mask=inside, other=0.0).to(tl.float64), 0)
    strength = tl.load(beta + gates, mask=inside, other=0.0)
    keys = load_chunk(k + b * k_b + (h // RATIO).to(tl.int64) * k_h, o_t, inside, k_t, o_k, K, K == KP)
    queries = load_chunk(q + b * q_b + (h // RATIO).to(tl.int64) * q_h, o_t, inside, q_t, o_k, K, K == KP)

    # A float64 sum in two float32 parts: the parts' differences are as good as the sums', and cost half.
    high = sums.to(tl.float32)
    low = (sums - high.to(tl.float64)).to(tl.float32)
    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    decay = tl.where(o_c[:, None] >= o_c[None, :], tl.exp(tl.minimum(between, 0.0)), 0.0)
    last = tl.sum(tl.where(o_c == C - 1, sums, 0.0), 0)
    slot = head.to(tl.int64) * chunks + n
    tl.store(decays + slot * (2 * C) + o_c, tl.exp(high))
    tl.store(decays + slot * (2 * C) + C + o_c, tl.exp((last - sums).to(tl.float32)))

    at = slot * (C * C) + o_c[:, None] * C + o_c[None, :]
    weights = tl.dot(queries, keys.T, input_precision="ieee") * decay
    tl.store(scores + at, weights.to(scores.dtype.element_ty))
    a = tl.dot(keys, keys.T, input_precision="ieee") * decay * strength[:, None]
    a = tl.where(o_c[:, None] > o_c[None, :], a, 0.0)
    x = invert_unit_lower(a, C, BLOCK, LEVELS, SPLIT) * strength[None, :]
    tl.store(inverse + at, x.to(inverse.dtype.element_ty))


@triton.jit(do_not_specialize=["T"])
def advance_chunks(
    q, k, v, inverse, scores, decays, state, o, new_state, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, T,
    H: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take BV columns of one head's state through all chunks, and write the outputs [B, T, H, V]."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    even: tl.constexpr = V % BV == 0
    head = tl.program_id(0) // blocks
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, KP)
    o_v = (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    columns = (o_v < V)[None, :]
    at_state = head.to(tl.int64) * (K * V) + o_k[:, None] * V + o_v[None, :]
    of_state = (o_k < K)[:, None] & columns
    s = tl.load(state + at_state, mask=of_state, other=0.0)
    chunks = tl.cdiv(T, C)
    square = o_c[:, None] * C + o_c[None, :]
    for n in tl.range(0, chunks, num_stages=STAGES):
        o_t = n * C + o_c
        inside = o_t < T
        slot = head.to(tl.int64) * chunks + n
        keys = load_chunk(k + b * k_b + h // RATIO * k_h, o_t, inside, k_t, o_k, K, K == KP)
        queries = load_chunk(q + b * q_b + h // RATIO * q_h, o_t, inside, q_t, o_k, K, K == KP)
        values = load_chunk(v + b * v_b + h * v_h, o_t, inside, v_t, o_v, V, even).to(tl.float32)
        solve = tl.load(inverse + slot * (C * C) + square)
        weights = tl.load(scores + slot * (C * C) + square)
        decay = tl.load(decays + slot * (2 * C) + o_c)
        kept = tl.load(decays + slot * (2 * C) + C + o_c)
        whole = tl.load(decays + slot * (2 * C) + C - 1)

        # Keys of length one keep all operands of float16 below 64 (1 + K^1/2), where S and V are below 1.
        if keys.dtype == tl.float16:
            up, down = powers_around(tl.maximum(tl.max(tl.abs(s)), tl.max(tl.abs(values))))
        else:
            up = 1.0
            down = 1.0
        operand = (s * up).to(keys.dtype)
        x = values * up - decay[:, None] * tl.dot(keys, operand, input_precision="ieee")
        u = tl.dot(solve, x.to(keys.dtype), input_precision="ieee")
        y = decay[:, None] * tl.dot(queries, operand, input_precision="ieee")
        y = tl.dot(weights, u.to(keys.dtype), y, input_precision="ieee") * down
        s = tl.dot(keys.T, (u * kept[:, None]).to(keys.dtype), s * (whole * up), input_precision="ieee") * down
        at_o = ((b * T + o_t) * H + h)[:, None] * V + o_v[None, :]
        if even:
            tl.store(o + at_o, y, mask=inside[:, None])
        else:
            tl.store(o + at_o, y, mask=inside[:, None] & columns)
    tl.store(new_state + at_state, s, mask=of_state)


def check_chunked(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor, state_BHKV: Tensor, /
) -> None:
    """Refuse what the kernels would read wrongly.

    Raises:
        ValueError: shapes that do not fit, or mixed dtypes.
        NotImplementedError: a dtype or a size without a kernel.
    """
    batch, tokens, groups, key_size = q_BTHK.shape
    heads, value_size = v_BTHV.shape[2:]
    if groups == 0 or heads % groups:
        raise ValueError(f"the {heads} heads of v must be a multiple of the {groups} heads of q and k")
    expected = {
        "k": (k_BTHK, (batch, tokens, groups, key_size)),
        "v": (v_BTHV, (batch, tokens, heads, value_size)),
        "g": (g_BTH, (batch, tokens, heads)),
        "beta": (beta_BTH, (batch, tokens, heads)),
        "state": (state_BHKV, (batch, heads, key_size, value_size)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape} beside q {tuple(q_BTHK.shape)}, got {tuple(tensor.shape)}")
    for name, tensor in (("q", q_BTHK), ("v", v_BTHV)):
        if tensor.dtype not in DTYPES:
            raise NotImplementedError(
                f"no chunk kernel reads {name} in {tensor.dtype}; use bfloat16, float16 or float32"
            )
    if key_size > MOST_CHANNELS:
        raise NotImplementedError(
            f"no chunk kernel has {key_size} key channels, {MOST_CHANNELS} at most; use delta_chunked"
        )
    dtypes = [str(x.dtype) for x in (q_BTHK, k_BTHK, g_BTH, beta_BTH, state_BHKV)]
    if dtypes[0] != dtypes[1] or set(dtypes[2:]) != {str(torch.float32)}:
        raise ValueError(f"q and k must have one dtype, g, beta and the state float32, got {dtypes}")


def make_chunk_matrices(
    q_BTHK: Tensor, k_BTHK: Tensor, g_BTH: Tensor, beta_BTH: Tensor, settings: ChunkSettings, /
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the first kernel alone.

    Args:
        q_BTHK: T >= 1, rows without gaps; the arguments are those of ``chunk_delta``.

    Returns:
        inverse and scores [B H, N, C, C] in the dtype of q, decays [B H, N, 2, C].
    """
    batch, tokens, groups, key_size = q_BTHK.shape
    heads = g_BTH.shape[2]
    chunk, count = settings.chunk, cdiv(tokens, settings.chunk)
    inverse, scores = (q_BTHK.new_empty(batch * heads, count, chunk, chunk) for _ in range(2))
    decays = g_BTH.new_empty(batch * heads, count, 2, chunk)
    on_cpu = q_BTHK.device.type == "cpu"  # where the interpreter's products of bfloat16 are wrong
    make_matrices[(batch * heads * count,)](
        q_BTHK, k_BTHK, g_BTH.contiguous(), beta_BTH.contiguous(), inverse, scores, decays, *q_BTHK.stride()[:3],
        *k_BTHK.stride()[:3], tokens, H=heads, RATIO=heads // groups, K=key_size, KP=_pad(key_size), C=chunk,
        BLOCK=BLOCK, LEVELS=(chunk // BLOCK).bit_length() - 1, SPLIT=settings.split and not on_cpu,
        num_warps=settings.matrix_warps,
    )  # fmt: skip
    return inverse, scores, decays


def chunk_delta(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    settings: ChunkSettings,
    /,
    *,
    into_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run ``delta_chunked`` in two launches.

    Sums are float32, so are the state between chunks and the inverse until it is stored. Operands of products are
    rounded to the dtype of the keys; float16 ones are scaled by powers of two where they depend on V or S, so that
    nothing overflows, and err eight times less than bfloat16 ones.

    Args:
        q_BTHK: T >= 0; bfloat16, float16 or float32; a row is at most of length one. The heads of q and k may be
            fewer than those of v, which share them in their order.
        k_BTHK: like q.
        v_BTHV: any of these dtypes.
        g_BTH: float32, <= 0.
        beta_BTH: float32.
        state_BHKV: float32, read.
        settings: sizes of programs.
        into_BHKV: float32, contiguous, where the new state goes, which may be the state itself; None makes one.

    Returns:
        (o_BTHV, the state after the last token), float32.
    """
    check_chunked(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV)
    batch, tokens, groups, key_size = q_BTHK.shape
    heads, value_size = v_BTHV.shape[2:]
    o_BTHV = torch.empty(v_BTHV.shape, dtype=torch.float32, device=v_BTHV.device)
    if o_BTHV.numel() == 0 or key_size == 0:
        return o_BTHV.zero_(), state_BHKV.clone() if into_BHKV is None else into_BHKV.copy_(state_BHKV)
    q_BTHK, k_BTHK, v_BTHV = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BTHK, k_BTHK, v_BTHV))
    state_BHKV = state_BHKV.contiguous()
    new_BHKV = torch.empty_like(state_BHKV) if into_BHKV is None else into_BHKV
    columns = min(settings.columns, _pad(value_size))
    matrices = make_chunk_matrices(q_BTHK, k_BTHK, g_BTH, beta_BTH, settings)
    of_q, of_k, of_v = (x.stride()[:3] for x in (q_BTHK, k_BTHK, v_BTHV))
    advance_chunks[(batch * heads * cdiv(value_size, columns),)](
        q_BTHK, k_BTHK, v_BTHV, *matrices, state_BHKV, o_BTHV, new_BHKV, *of_q, *of_k, *of_v, tokens, H=heads,
        RATIO=heads // groups, K=key_size, KP=_pad(key_size), V=value_size, BV=columns, C=settings.chunk,
        STAGES=settings.stages, num_warps=settings.warps,
    )  # fmt: skip
    return o_BTHV, new_BHKV


def _pad(size: int) -> int:
    return max(int(next_power_of_2(size)), 16)
