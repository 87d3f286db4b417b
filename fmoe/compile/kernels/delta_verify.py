"""A few tokens of Gated DeltaNet that may not all stay: ``delta_verify``, the last step settled first, in one launch.

Letters: B sequences, T tokens of a step, W taps, N mixed channels (2 * G * K + H * V), G key heads, H value heads
(RATIO of a key head), R value heads of a program, K key channels, V value channels.

The state is read once, takes what the kept tokens of the last step wrote, is written once, and goes on in registers.
What a key head has is read by all programs of its value heads and so may be written by one that runs when the others
are over: a single program serves all value heads (R = RATIO), or those of the last part have a launch of their own.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc, assignment"
# ruff: noqa: RUF005

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.cache import PendingDelta
from fmoe.functional.deltanet import DeltaConfig

from ..delta_settings import VerifySettings, why_not_lanes, why_not_verify
from .delta_decode import DTYPES, load_state
from .delta_parts import add_pair, load_rows, move_on, silu, softplus
from .delta_verify_lanes import delta_tokens_lanes
from .launch import launch_options, next_power_of_2, wait_for_previous


@triton.jit
def load_past(window, inputs, stayed, at, inside, W: tl.constexpr, N: tl.constexpr):
    """Load the settled window at the channels ``at``, a tuple: W - 1 inputs, ``stayed`` behind those of the window."""
    past = ()
    for j in tl.static_range(W - 1):
        i = stayed + j
        is_old = i < W - 1
        old = tl.load(window + i * N + at, mask=inside & is_old, other=0.0)
        new = tl.load(inputs + (i - (W - 1)) * N + at, mask=inside & (i >= W - 1), other=0.0)
        past += (tl.where(is_old, old, new),)
    return past


@triton.jit
def store_past(window, past, at, inside, W: tl.constexpr, N: tl.constexpr):
    """Store the settled window."""
    for j in tl.static_range(W - 1):
        tl.store(window + j * N + at, past[j], mask=inside)


@triton.jit
def convolve_inputs(xs, taps, W: tl.constexpr):
    """Convolve W inputs, tap by tap, and apply silu; each step rounded as in the model's dtype."""
    y = (xs[0].to(tl.float32) * taps[0].to(tl.float32)).to(xs[0].dtype)
    for w in tl.static_range(1, W):
        y = (y.to(tl.float32) + xs[w].to(tl.float32) * taps[w].to(tl.float32)).to(y.dtype)
    return silu(y.to(tl.float32)).to(y.dtype).to(tl.float32)


@triton.jit
def spread(xs, o_r, R: tl.constexpr):
    """Give R scalars as a vector. A vector would be computed anew for each layout that it is needed in."""
    x = tl.where(o_r == 0, xs[0], 0.0)
    for r in tl.static_range(1, R):
        x = tl.where(o_r == r, xs[r], x)
    return x


@triton.jit
def load_heads(p, mask, R: tl.constexpr):
    """Load R numbers, a tuple."""
    xs = ()
    for r in tl.static_range(R):
        xs += (tl.load(p + r, mask=mask, other=0.0).to(tl.float32),)
    return xs


@triton.jit
def load_written(
    k, written, g, t, stayed, o_p, n_k, values, first, inside_k, inside_v, R: tl.constexpr, G: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Load of token t its key, with nothing as a pair, what it writes, and its log decays; zeros if it is dropped."""
    stays = t < stayed
    inside_pair = inside_k[None, :] & (o_p[:, None] == 0) & stays
    pair = tl.load(k + t * (G * K) + 0 * o_p[:, None] + n_k[None, :], mask=inside_pair, other=0.0)
    written_t = tl.load(written + t * (H * V) + values, mask=inside_v & stays, other=0.0)
    return pair, written_t, load_heads(g + t * H + first, stays, R)


@triton.jit
def load_token(
    projected, t, n_p, n_v, values, first, inside_p, inside_v, here, R: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Load of token t the inputs of query and key, those of the values, z, b and a."""
    row = projected + t * (N + H * V + 2 * H)
    x_p = tl.load(row + n_p, mask=inside_p & here, other=0.0)
    x_v = tl.load(row + n_v, mask=inside_v & here, other=0.0)
    z = tl.load(row + N + values, mask=inside_v & here, other=0.0)
    bs = load_heads(row + N + H * V + first, here, R)
    return x_p, x_v, z, bs, load_heads(row + N + H * V + H + first, here, R)


@triton.jit
def normalize_pair(x, o_p, SCALE: tl.constexpr):
    """Give query, key [K] and their product, of a pair [2, K].

    The sums over the pair hold the compiler back from convolving anew in every thread that needs an element.
    """
    x = x * (tl.rsqrt(tl.sum(x * x, 1) + 1e-6) * tl.where(o_p == 0, SCALE, 1.0))[:, None]
    q, k = tl.reduce((tl.where(o_p[:, None] == 0, x, 0.0), tl.where(o_p[:, None] == 1, x, 0.0)), 0, add_pair)
    return q, k, tl.sum(q * k, 0)


@triton.jit
def delta_tokens(
    projected, window, state, inputs, k, written, g, stride_inputs, stride_k, stride_written, stride_g, w_conv, decay,
    dt_bias, norm, kept, y, START: tl.constexpr, PARTS: tl.constexpr, SHARED: tl.constexpr, T: tl.constexpr,
    G: tl.constexpr, RATIO: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    V: tl.constexpr, VP: tl.constexpr, W: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R value heads of one key head of one sequence, grid (B * G * PARTS,); with SHARED, what the key head has, too."""
    H: tl.constexpr = G * RATIO
    N: tl.constexpr = 2 * G * K + H * V
    EVEN: tl.constexpr = (R == RP) and (K == KP) and (V == VP)
    group = tl.program_id(0) // PARTS % G
    b = (tl.program_id(0) // (PARTS * G)).to(tl.int64)
    first = group * RATIO + (START + tl.program_id(0) % PARTS) * R
    o_p = tl.arange(0, 2)
    o_r = tl.arange(0, RP)
    o_k = tl.arange(0, KP)
    o_v = tl.arange(0, VP)
    h = first + o_r
    values = h[:, None] * V + o_v[None, :]
    inside_k = o_k < K
    inside_p = inside_k[None, :] & (o_p[:, None] < 2)
    inside_v = (o_r < R)[:, None] & (o_v < V)[None, :]
    in_state = o_k[None, :, None] * V + o_v[None, None, :]
    inside_s = (o_r < R)[:, None, None] & inside_k[None, :, None] & (o_v < V)[None, None, :]
    projected += b * (T * (N + H * V + 2 * H))
    window += b * ((W - 1) * N)
    inputs += b * stride_inputs
    k += b * stride_k
    written += b * stride_written
    g += b * stride_g
    y += b * (T * H * V)
    n_k = group * K + o_k
    n_p = o_p[:, None] * (G * K) + n_k[None, :]
    n_v = 2 * G * K + values

    # What the launch in front does not write is read before the wait: all that the last step left, and weights.
    stayed = tl.load(kept + b).to(tl.int32)
    # Unknown to the compiler, which would keep the addresses of the loads for the stores: as many registers as keys.
    nothing = tl.minimum(stayed, 0) * 1024
    past_p = load_past(window, inputs, stayed, n_p, inside_p, W, N)
    taps_p = load_rows(w_conv, n_p, inside_p, W, N)
    weight = tl.load(norm + o_v, mask=o_v < V, other=0.0)
    pair, written_t, gs = load_written(
        k, written, g, 0, stayed, o_p, n_k, values, first, inside_k, inside_v, R, G, H, K, V
    )
    s = load_state(state + (b * H + h)[:, None, None] * (K * V) + in_state, inside_s, EVEN)
    past_v = load_past(window, inputs, stayed, n_v, inside_v, W, N)
    taps_v = load_rows(w_conv, n_v, inside_v, W, N)
    rates = load_heads(decay + first, True, R)
    biases = load_heads(dt_bias + first, True, R)
    for t in tl.range(0, stayed, num_stages=1):
        decays = ()
        for r in tl.static_range(R):
            decays += (tl.exp(gs[r]),)
        s = s * spread(decays, o_r, R)[:, None, None] + tl.sum(pair, 0)[None, :, None] * written_t[:, None, :]
        pair, written_t, gs = load_written(
            k, written, g, t + 1, stayed, o_p, n_k, values, first, inside_k, inside_v, R, G, H, K, V
        )

    # Threads may hold copies of one element: none stores before all have read what the last step left. The settled
    # state is this program's alone, and its stores would hold up the loads behind the wait.
    tl.debug_barrier()
    at = state + nothing + (b * H + h)[:, None, None] * (K * V) + in_state
    if EVEN:
        tl.store(at, s)
    else:
        tl.store(at, s, mask=inside_s)

    wait_for_previous(PDL)
    x_p, x_v, z, bs, as_ = load_token(projected, 0, n_p, n_v, values, first, inside_p, inside_v, True, R, H, V, N)
    store_past(window, past_v, n_v, inside_v, W, N)
    if SHARED:
        store_past(window, past_p, n_p, inside_p, W, N)
    xs_p = past_p + (x_p,)
    xs_v = past_v + (x_v,)
    for t in tl.range(0, T, num_stages=1):
        x_p, x_v, z_next, bs_next, as_next = load_token(
            projected, t + 1, n_p, n_v, values, first, inside_p, inside_v, t + 1 < T, R, H, V, N
        )
        betas, gs, decays = (), (), ()
        for r in tl.static_range(R):
            betas += (1.0 / (1.0 + tl.exp(-bs[r])),)
            gs += (rates[r] * softplus(as_[r] + biases[r]),)
            decays += (tl.exp(gs[r]),)
        beta = spread(betas, o_r, R)[:, None]
        stays = spread(decays, o_r, R)[:, None]
        q_K, k_K, qk = normalize_pair(convolve_inputs(xs_p, taps_p, W), o_p, SCALE)
        v = convolve_inputs(xs_v, taps_v, W)
        # One pass: the new state answers q as the old one, and by what was written times k q.
        read_k, read_q = tl.reduce((s * k_K[None, :, None], s * q_K[None, :, None]), 1, add_pair)
        delta = (v - stays * read_k) * beta
        o = stays * read_q + qk * delta
        if t + 1 < T:
            s = s * stays[:, :, None] + k_K[None, :, None] * delta[:, None, :]
        if SHARED:
            tl.store(inputs + t * N + n_p, xs_p[W - 1], mask=inside_p)
            tl.store(k + t * (G * K) + n_k, k_K, mask=inside_k)
        tl.store(inputs + t * N + n_v, xs_v[W - 1], mask=inside_v)
        tl.store(written + t * (H * V) + values, delta, mask=inside_v)
        tl.store(g + t * H + h, spread(gs, o_r, R), mask=o_r < R)
        m = o * tl.rsqrt(tl.sum(o * o, 1) / V + EPS)[:, None]
        m = m.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]
        m = m.to(weight.dtype).to(tl.float32) * silu(z.to(tl.float32))
        tl.store(y + t * (H * V) + values, m.to(y.dtype.element_ty), mask=inside_v)
        xs_p = move_on(xs_p, x_p, W)
        xs_v = move_on(xs_v, x_v, W)
        z, bs, as_ = z_next, bs_next, as_next


def check_verify(
    projected_BTN: Tensor, cache: PendingDelta, w_conv_WN: Tensor, kept_B: Tensor, config: DeltaConfig, /
) -> None:
    """Refuse what the kernel would read or write wrongly.

    Raises:
        ValueError: shapes that do not fit, mixed dtypes, or a cache that is not contiguous within a sequence.
        NotImplementedError: a dtype, a number of tokens or sizes without a kernel.
    """
    (batch, tokens), (mixed, *_) = projected_BTN.shape[:2], config.split_sizes
    keys, values = (config.key_heads, config.key_size), (config.value_heads, config.value_size)
    if projected_BTN.dtype not in DTYPES:
        raise NotImplementedError(f"no DeltaNet kernel reads {projected_BTN.dtype}; use bfloat16, float16 or float32")
    if reason := why_not_verify(config, tokens):
        raise NotImplementedError(f"{reason}, so the kernel over drafts does not take it; use the reference")
    expected = {
        "projected": (projected_BTN, (batch, tokens, sum(config.split_sizes)), projected_BTN.dtype),
        "window": (cache.window_BWN, (batch, config.conv_size - 1, mixed), projected_BTN.dtype),
        "state": (cache.state_BHKV, (batch, config.value_heads, config.key_size, config.value_size), torch.float32),
        "inputs": (cache.inputs_BTN, (batch, tokens, mixed), projected_BTN.dtype),
        "k": (cache.k_BTGK, (batch, tokens, *keys), torch.float32),
        "written": (cache.written_BTHV, (batch, tokens, *values), torch.float32),
        "g": (cache.g_BTH, (batch, tokens, config.value_heads), torch.float32),
        "w_conv": (w_conv_WN, (config.conv_size, mixed), projected_BTN.dtype),
        "kept": (kept_B, (batch,), torch.int64),
    }
    for name, (tensor, shape, dtype) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
    if not (cache.window_BWN.is_contiguous() and cache.state_BHKV.is_contiguous()):
        raise ValueError("window and state must be contiguous, for they are written in place")
    if batch and not all(part[0].is_contiguous() for part in cache[2:]):
        raise ValueError("each sequence of what is pending must be contiguous, for it is written in place")


def verify_delta_(
    projected_BTN: Tensor,
    cache: PendingDelta,
    w_conv_WN: Tensor,
    decay_H: Tensor,
    dt_bias_H: Tensor,
    norm_V: Tensor,
    kept_B: Tensor,
    config: DeltaConfig,
    settings: VerifySettings,
    /,
) -> Tensor:
    """Run ``delta_verify`` in one launch.

    Args:
        projected_BTN: B >= 0, T as ``why_not_verify`` has it.
        cache: read and written, the state float32; the room for the tokens may be part of a larger one.
        w_conv_WN: taps.
        decay_H: float32, -exp(A_log).
        dt_bias_H: float32.
        norm_V: weight of the gated norm.
        kept_B: int64, how many of the last step's tokens stay.
        config: sizes.
        settings: value heads that a program holds at a time.

    Returns:
        [B, T, H * V], the dtype of the projection.
    """
    check_verify(projected_BTN, cache, w_conv_WN, kept_B, config)
    (batch, tokens), ratio = projected_BTN.shape[:2], config.value_heads // config.key_heads
    heads = settings.heads or ratio
    if ratio % heads:
        raise ValueError(f"heads={heads} must divide the {ratio} value heads of one key head")
    if settings.key_lanes and (reason := why_not_lanes(config, heads, settings)):
        raise ValueError(f"{reason}; use key_lanes=0")
    y_BTN = projected_BTN.new_empty(batch, tokens, config.value_heads * config.value_size)
    if batch == 0:
        return y_BTN
    parts, (key_size, value_size) = ratio // heads, (config.key_size, config.value_size)
    for start, count in ((0, parts - 1), (parts - 1, 1)):
        if not count:
            continue
        values = (
            projected_BTN.contiguous(), *cache, *(part.stride(0) for part in cache[2:]), w_conv_WN.contiguous(),
            decay_H.contiguous(), dt_bias_H.contiguous(), norm_V.contiguous(), kept_B.contiguous(), y_BTN, start, count,
            start + count == parts, tokens, config.key_heads, ratio, heads,
        )  # fmt: skip
        sizes = {"W": config.conv_size, "EPS": config.eps, "SCALE": key_size**-0.5, "PDL": settings.pdl}
        options = {"num_warps": settings.warps, **launch_options(settings.pdl)}
        grid = (batch * config.key_heads * count,)
        if settings.key_lanes:
            threads = (64 if torch.version.hip else 32) * settings.warps
            rows = max(next_power_of_2(2 * tokens), threads // key_size)
            delta_tokens_lanes[grid](
                *values, K=key_size, V=value_size, I=settings.key_lanes, D=settings.columns, Q=rows, **sizes, **options
            )
        else:
            delta_tokens[grid](
                *values, RP=next_power_of_2(heads), K=key_size, KP=next_power_of_2(key_size),
                V=value_size, VP=next_power_of_2(value_size), **sizes, **options,
            )  # fmt: skip
    return y_BTN
