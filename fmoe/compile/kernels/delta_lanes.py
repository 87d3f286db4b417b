"""``delta_token`` for sizes that are powers of two, each warp holding columns of the state with all their key channels.

So the sums over the key channels stay within a warp. Query and key enter the state's sums as they are convolved; what
their norms divide by is multiplied onto the sums, of which there are few. All past inputs are read before the wait.

Letters: as in delta_decode.py; I key channels side by side in the lanes of a warp, A = K / I of them in one thread,
D columns of a warp, C = R * V / D of these blocks.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc, assignment"
# ruff: noqa: E741, SIM102

import triton
import triton.language as tl

from .delta_parts import add_pair, add_triple, load_rows, silu, softplus
from .launch import wait_for_previous


@triton.jit
def round_product(x, tap):
    """Multiply an input and its tap, rounded as in the model's dtype."""
    return (x.to(tl.float32) * tap.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def sum_past(past, taps, COUNT: tl.constexpr):
    """Sum the products of the past inputs."""
    y = round_product(past[0], taps[0])
    for w in tl.static_range(1, COUNT):
        y += round_product(past[w], taps[w])
    return y


@triton.jit
def add_present(y, x, tap):
    """Add the token's own product, and apply silu; rounded as in the model's dtype."""
    return silu((y + round_product(x, tap)).to(x.dtype).to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def move_rows(window, past, x, at, inside, COUNT: tl.constexpr, N: tl.constexpr):
    """Drop the oldest of COUNT past inputs; a barrier must stand between all reads of these channels and this."""
    for w in tl.static_range(1, COUNT):
        tl.store(window + (w - 1) * N + at, past[w], mask=inside)
    tl.store(window + (COUNT - 1) * N + at, x, mask=inside)


@triton.jit
def delta_token_lanes(
    projected, window, state, w_conv, decay, dt_bias, norm, y, arrivals, G: tl.constexpr, RATIO: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, I: tl.constexpr, D: tl.constexpr,
    PAIRS: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R value heads of one key head of one sequence; grid (B * G * RATIO / R,)."""
    H: tl.constexpr = G * RATIO
    N: tl.constexpr = 2 * G * K + H * V
    SHARES: tl.constexpr = RATIO // R
    A: tl.constexpr = K // I
    C: tl.constexpr = R * V // D
    PER: tl.constexpr = V // D  # blocks of a head
    group = tl.program_id(0) // SHARES
    b = (group // G).to(tl.int64)
    g = group % G
    first = g * RATIO + tl.program_id(0) % SHARES * R
    row = projected + b * (N + H * V + 2 * H)
    window += b * ((W - 1) * N)
    # Rows of a pair are query and key, again and again until each thread has one channel: what is less than the
    # threads hold is loaded and convolved anew by each that needs a part.
    o_p = tl.arange(0, PAIRS)[:, None]
    o_k = tl.arange(0, K)[None, :]
    n_p = (o_p % 2) * (G * K) + g * K + o_k
    inside_p = (o_p < PAIRS) & (o_k < K)
    o_c = tl.arange(0, C)
    heads = first + o_c // PER
    values = first * V + o_c[:, None] * D + tl.arange(0, D)[None, :]
    in_head = (o_c % PER * D)[:, None] + tl.arange(0, D)[None, :]
    n_v = 2 * G * K + values
    inside_v = values >= 0
    # The compiler gives the lanes of a warp to the last dimension and then to the first, and warps to the second.
    channels = tl.arange(0, I)[:, None, None, None] * A + tl.arange(0, A)[None, None, :, None]
    columns = (b * H + heads)[None, :, None, None] * (K * V) + in_head[None, :, None, :]
    at = state + columns + channels * V

    # What the launch in front does not write is read first: weights, and what the last step left.
    s = tl.load(at)
    taps_p = load_rows(w_conv, n_p, inside_p, W, N)
    past_p = load_rows(window, n_p, inside_p, W - 1, N)
    taps_v = load_rows(w_conv, n_v, inside_v, W, N)
    past_v = load_rows(window, n_v, inside_v, W - 1, N)
    weight = tl.load(norm + in_head)
    rate = tl.load(decay + heads)
    bias = tl.load(dt_bias + heads)
    sum_p = sum_past(past_p, taps_p, W - 1)
    sum_v = sum_past(past_v, taps_v, W - 1)
    wait_for_previous(PDL)
    x_p = tl.load(row + n_p)
    b_in = tl.load(row + N + H * V + heads).to(tl.float32)
    a_in = tl.load(row + N + H * V + H + heads).to(tl.float32)
    x_v = tl.load(row + n_v)
    z = tl.load(row + N + values).to(tl.float32)

    pair = add_present(sum_p, x_p, taps_p[W - 1])
    q, k = tl.reduce((tl.where(o_p == 0, pair, 0.0), tl.where(o_p == 1, pair, 0.0)), 0, add_pair)
    qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, add_triple)
    q = tl.reshape(q, (I, A))[:, None, :, None]
    k = tl.reshape(k, (I, A))[:, None, :, None]
    beta = (1.0 / (1.0 + tl.exp(-b_in)))[:, None]
    kept = tl.exp(rate * softplus(a_in + bias))[:, None]
    v = add_present(sum_v, x_v, taps_v[W - 1])

    # All of the program has read its part of the window, and of the state. Each is written by the program that owns it.
    tl.debug_barrier()
    o_t = tl.arange(0, THREADS)
    if SHARES > 1:
        # One thread counts. Its answer is asked for at the end, so that it is under way behind the state.
        count = tl.atomic_add(arrivals + group + 0 * o_t, 1, mask=o_t == 0, sem="acq_rel")
    else:
        move_rows(window, past_p, x_p, n_p, o_p < 2, W - 1, N)
    move_rows(window, past_v, x_v, n_v, inside_v, W - 1, N)

    # One pass reads for key and query: the new state's answer to q is that of the old one, and what was written times
    # k q.
    read_k, read_q = tl.reduce((s * k, s * q), 2, add_pair)
    read_k, read_q = tl.reduce((read_k, read_q), 0, add_pair)
    by_q = tl.rsqrt(qq + 1e-6) * SCALE
    by_k = tl.rsqrt(kk + 1e-6)
    delta = (v - kept * by_k * read_k) * beta
    tl.store(at, s * kept[None, :, None, :] + k * (by_k * delta)[None, :, None, :])
    o = kept * by_q * read_q + qk * by_q * by_k * delta
    squares = tl.sum(tl.reshape(tl.sum(o * o, 1), (R, PER)), 1)
    inverse = tl.rsqrt(squares / V + EPS)
    n = o * tl.reshape(inverse[:, None] + tl.zeros((R, PER), tl.float32), (C,))[:, None]
    n = n.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    n = n.to(weight.dtype).to(tl.float32) * silu(z)
    tl.store(y + b * (H * V) + values, n.to(y.dtype.element_ty))
    if SHARES > 1:
        if tl.sum(tl.where(o_t == 0, count, 0), 0) == SHARES - 1:
            move_rows(window, past_p, x_p, n_p, o_p < 2, W - 1, N)
            tl.store(arrivals + group, 0)
