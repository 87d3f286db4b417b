"""``delta_tokens`` for sizes that are powers of two, each warp with columns of the state and all their key channels.

Nothing but the state goes from token to token: queries, keys and values of all tokens are convolved and normed
together, before, and the outputs after.

Letters: as in delta_verify.py; I, A, D and C as in delta_lanes.py, Q rows of a tile, which are query and key of each
token and behind them, where there are more, nothing.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc, assignment"
# ruff: noqa: E741, RUF005

import triton
import triton.language as tl

from .delta_parts import add_pair, move_on, silu, softplus
from .launch import wait_for_previous


@triton.jit
def load_settled(window, inputs, i, stayed, at, inside, W: tl.constexpr, N: tl.constexpr):
    """Load input i of the settled window's W - 1, ``stayed`` behind those of the window."""
    n = i + stayed
    old = tl.load(window + n * N + at, mask=inside & (n < W - 1), other=0.0)
    new = tl.load(inputs + (n - (W - 1)) * N + at, mask=inside & (n >= W - 1), other=0.0)
    return tl.where(n < W - 1, old, new)


@triton.jit
def add_tap(y, x, tap):
    """Add the product of one tap, rounded as in the model's dtype."""
    return (y.to(tl.float32) + x.to(tl.float32) * tap.to(tl.float32)).to(x.dtype)


@triton.jit
def first_tap(x, tap):
    """The product of the first tap, rounded as in the model's dtype."""
    return (x.to(tl.float32) * tap.to(tl.float32)).to(x.dtype)


@triton.jit
def load_values(projected, t, n_v, values, heads, H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, ROW: tl.constexpr):
    """Load of token t the inputs of the values, z, b and a."""
    row = projected + t * ROW
    b_in = tl.load(row + N + H * V + heads).to(tl.float32)
    a_in = tl.load(row + N + H * V + H + heads).to(tl.float32)
    return tl.load(row + n_v), tl.load(row + N + values), b_in, a_in


@triton.jit
def load_pending(k, written, g, t, n_k, values, heads, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
                 V: tl.constexpr):  # fmt: skip
    """Load of token t its key, what it writes, and its log decays."""
    return tl.load(k + t * (G * K) + n_k), tl.load(written + t * (H * V) + values), tl.load(g + t * H + heads)


@triton.jit
def delta_tokens_lanes(
    projected, window, state, inputs, k, written, g, stride_inputs, stride_k, stride_written, stride_g, w_conv, decay,
    dt_bias, norm, kept, y, START: tl.constexpr, PARTS: tl.constexpr, SHARED: tl.constexpr, T: tl.constexpr,
    G: tl.constexpr, RATIO: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    I: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R value heads of one key head of one sequence, grid (B * G * PARTS,); with SHARED, what the key head has, too."""
    H: tl.constexpr = G * RATIO
    N: tl.constexpr = 2 * G * K + H * V
    ROW: tl.constexpr = N + H * V + 2 * H
    A: tl.constexpr = K // I
    C: tl.constexpr = R * V // D
    PER: tl.constexpr = V // D  # blocks of a head
    group = tl.program_id(0) // PARTS % G
    b = (tl.program_id(0) // (PARTS * G)).to(tl.int64)
    first = group * RATIO + (START + tl.program_id(0) % PARTS) * R
    projected += b * (T * ROW)
    window += b * ((W - 1) * N)
    inputs += b * stride_inputs
    k += b * stride_k
    written += b * stride_written
    g += b * stride_g
    y += b * (T * H * V)
    o_q = tl.arange(0, Q)[:, None]
    o_t = o_q // 2
    o_k = tl.arange(0, K)
    n_p = (o_q % 2) * (G * K) + group * K + o_k[None, :]
    o_c = tl.arange(0, C)
    heads = first + o_c // PER
    values = first * V + o_c[:, None] * D + tl.arange(0, D)[None, :]
    in_head = (o_c % PER * D)[:, None] + tl.arange(0, D)[None, :]
    n_v = 2 * G * K + values
    inside_v = values >= 0
    # The compiler gives the lanes of a warp to the last dimension and then to the first, and warps to the second.
    channels = tl.arange(0, I)[:, None, None, None] * A + tl.arange(0, A)[None, None, :, None]
    columns = (b * H + heads)[None, :, None, None] * (K * V) + in_head[None, :, None, :]

    # What the launch in front does not write is read before the wait: all that the last step left, and weights.
    stayed = tl.load(kept + b).to(tl.int32)
    # Unknown to the compiler, which would keep the addresses of the loads for the stores.
    nothing = tl.minimum(stayed, 0) * 1024
    s = tl.load(state + columns + channels * V)
    for t in tl.range(0, stayed, num_stages=1):
        k_t, written_t, g_t = load_pending(k, written, g, t, group * K + channels, values, heads, G, H, K, V)
        s = s * tl.exp(g_t)[None, :, None, None] + k_t * written_t[None, :, None, :]
    past_p, taps_p, past_v, taps_v = (), (), (), ()
    for w in tl.static_range(W):
        taps_p += (tl.load(w_conv + w * N + n_p),)
        taps_v += (tl.load(w_conv + w * N + n_v),)
    for w in tl.static_range(W - 1):
        i = o_t + w
        past_p += (load_settled(window, inputs, i, stayed, n_p, (i < W - 1) & (n_p >= 0), W, N),)
        past_v += (load_settled(window, inputs, w, stayed, n_v, inside_v, W, N),)
    weight = tl.load(norm + in_head)
    rate = tl.load(decay + heads)
    bias = tl.load(dt_bias + heads)
    # Threads may hold copies of one element: none stores before all have read what the last step left. The settled
    # state is this program's alone, and its stores would hold up the loads behind the wait.
    tl.debug_barrier()
    tl.store(state + nothing + columns + channels * V, s)

    wait_for_previous(PDL)
    new_p = ()
    for w in tl.static_range(W):
        n = o_t + w - (W - 1)
        inside = (n >= 0) & (o_t < T) & (n_p >= 0)
        if w < W - 1:
            new_p += (tl.load(projected + n * ROW + n_p, mask=inside, other=past_p[w]),)
        else:
            new_p += (tl.load(projected + n * ROW + n_p, mask=inside, other=0.0),)
    x_v, z, b_in, a_in = load_values(projected, 0, n_v, values, heads, H, N, V, ROW)

    for w in tl.static_range(W - 1):
        tl.store(window + w * N + n_v, past_v[w])
        if SHARED:
            tl.store(window + w * N + n_p, past_p[w], mask=(o_t < 1) & (n_p >= 0))
    pair = first_tap(new_p[0], taps_p[0])
    for w in tl.static_range(1, W):
        pair = add_tap(pair, new_p[w], taps_p[w])
    pair = silu(pair.to(tl.float32)).to(pair.dtype).to(tl.float32)
    pair = pair * (tl.rsqrt(tl.sum(pair * pair, 1) + 1e-6)[:, None] * tl.where(o_q % 2 == 0, SCALE, 1.0))
    if SHARED:
        tl.store(inputs + o_t * N + n_p, new_p[W - 1], mask=(o_t < T) & (n_p >= 0))
        at_k = k + o_t * (G * K) + group * K + o_k[None, :]
        tl.store(at_k, pair, mask=(o_t < T) & (o_q % 2 == 1) & (o_k[None, :] >= 0))
    xs_v = past_v + (x_v,)
    for t in tl.range(0, T, num_stages=1):
        x_v, z_next, b_next, a_next = load_values(projected, tl.minimum(t + 1, T - 1), n_v, values, heads, H, N, V, ROW)
        v = first_tap(xs_v[0], taps_v[0])
        for w in tl.static_range(1, W):
            v = add_tap(v, xs_v[w], taps_v[w])
        v = silu(v.to(tl.float32)).to(v.dtype).to(tl.float32)
        beta = (1.0 / (1.0 + tl.exp(-b_in)))[:, None]
        g_t = rate * softplus(a_in + bias)
        stays = tl.exp(g_t)[:, None]
        q_K, k_K = tl.reduce((tl.where(o_q == 2 * t, pair, 0.0), tl.where(o_q == 2 * t + 1, pair, 0.0)), 0, add_pair)
        qk = tl.sum(q_K * k_K, 0)
        q_s = tl.reshape(q_K, (I, A))[:, None, :, None]
        k_s = tl.reshape(k_K, (I, A))[:, None, :, None]
        # One pass: the new state answers q as the old one, and by what was written times k q.
        read_k, read_q = tl.reduce((s * k_s, s * q_s), 2, add_pair)
        read_k, read_q = tl.reduce((read_k, read_q), 0, add_pair)
        delta = (v - stays * read_k) * beta
        o = stays * read_q + qk * delta
        if t + 1 < T:
            s = s * stays[None, :, None, :] + k_s * delta[None, :, None, :]
        tl.store(inputs + t * N + n_v, xs_v[W - 1])
        tl.store(written + t * (H * V) + values, delta)
        tl.store(g + t * H + heads, g_t, mask=o_c % PER == 0)
        squares = tl.sum(tl.reshape(tl.sum(o * o, 1), (R, PER)), 1)
        inverse = tl.rsqrt(squares / V + EPS)
        m = o * tl.reshape(inverse[:, None] + tl.zeros((R, PER), tl.float32), (C,))[:, None]
        m = m.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
        m = m.to(weight.dtype).to(tl.float32) * silu(z.to(tl.float32))
        tl.store(y + t * (H * V) + values, m.to(y.dtype.element_ty))
        xs_v = move_on(xs_v, x_v, W)
        z, b_in, a_in = z_next, b_next, a_next
