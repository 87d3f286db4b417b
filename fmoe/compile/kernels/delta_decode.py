"""One token of Gated DeltaNet in one launch: convolution, l2 norm, gates, state, gated norm; ``delta_mix`` at T = 1.

Letters: B sequences, W taps, N mixed channels (2 * G * K + H * V), G key heads, H value heads (RATIO of a key head),
R value heads of a program, K key channels, V value channels, BV of them at a time.

Who moves the window: the value channels of a head are read by one program alone, which moves them. Those of a key head
are read by all programs that share it, so either there is one (R = RATIO), or the programs count who comes last. Nobody
waits, and the last one leaves the count at zero for the next launch.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"
# ruff: noqa: SIM102, SIM108

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.deltanet import DeltaConfig

from ..delta_settings import LEAST_COLUMNS, DeltaSettings, why_not_lanes
from .delta_lanes import delta_token_lanes
from .delta_parts import add_pair, add_triple
from .delta_parts import silu as silu
from .delta_parts import softplus as softplus
from .launch import launch_options, next_power_of_2, wait_for_previous

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def convolve(x, w):
    """Sum the taps along the first dimension, and apply silu; each step rounded as in the model's dtype."""
    product = (x.to(tl.float32) * w.to(tl.float32)).to(x.dtype).to(tl.float32)
    y = tl.sum(product, 0).to(x.dtype).to(tl.float32)
    return silu(y).to(x.dtype).to(tl.float32)


@triton.jit
def move_window(window, o_n, o_w, x, inside, W: tl.constexpr, N: tl.constexpr):
    """Drop the oldest of the W inputs; a barrier must stand between all reads of these channels and this."""
    tl.store(window + (o_w - 1) * N + o_n, x, mask=inside & (o_w > 0) & (o_w < W))


@triton.jit
def load_state(at, inside, EVEN: tl.constexpr):
    """Load a tile of the state; 0 outside."""
    if EVEN:
        s = tl.load(at)
    else:
        s = tl.load(at, mask=inside, other=0.0)
    return s


@triton.jit
def advance_tile(at, s, q, k, v, qk, beta, kept, inside, EVEN: tl.constexpr):
    """``delta_step`` on [R, K, BV] of the state, which is written; returns the readout [R, BV].

    One pass reads for key and query: the new state's answer to q is that of the old one, and what was written times
    k q.
    """
    read_k, read_q = tl.reduce((s * k, s * q), 1, add_pair)
    delta = (v - kept * read_k) * beta
    # Threads may hold copies of one element: none stores before all have read.
    tl.debug_barrier()
    s = s * kept[:, :, None] + k * delta[:, None, :]
    if EVEN:
        tl.store(at, s)
    else:
        tl.store(at, s, mask=inside)
    return kept * read_q + qk * delta


@triton.jit
def delta_token(
    projected, window, state, w_conv, decay, dt_bias, norm, y, arrivals, G: tl.constexpr, RATIO: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    BV: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, LANES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """R value heads of one key head of one sequence; grid (B * G * RATIO / R,)."""
    H: tl.constexpr = G * RATIO
    N: tl.constexpr = 2 * G * K + H * V
    SHARES: tl.constexpr = RATIO // R
    BLOCKS: tl.constexpr = VP // BV
    EVEN: tl.constexpr = (R == RP) and (K == KP) and (V == VP)
    group = tl.program_id(0) // SHARES
    b = (group // G).to(tl.int64)
    g = group % G
    o_r = tl.arange(0, RP)
    o_k = tl.arange(0, KP)
    o_v = tl.arange(0, VP)
    o_w = tl.arange(0, WP)
    o_c = tl.arange(0, BV)
    h = g * RATIO + tl.program_id(0) % SHARES * R + o_r
    row = projected + b * (N + H * V + 2 * H)
    window += b * ((W - 1) * N)
    inside_r = o_r < R
    inside_v = inside_r[:, None] & (o_v < V)[None, :]
    inside_rk = inside_r[:, None, None] & (o_k < K)[None, :, None]
    values = h[:, None] * V + o_v[None, :]
    at = state + (b * H + h)[:, None, None] * (K * V) + o_k[None, :, None] * V + o_c[None, None, :]
    w_q = o_w[:, None]
    n_q = g * K + o_k[None, :]
    inside_q = (o_k < K)[None, :] & (w_q < W)
    w_v = o_w[:, None, None]
    n_v = 2 * G * K + values[None, :, :]
    inside_x = inside_v[None, :, :] & (w_v < W)

    # What the launch in front does not write is asked for first.
    if BLOCKS == 1:
        s = load_state(at, inside_rk & (o_c < V)[None, None, :], EVEN)
    taps_q = tl.load(w_conv + w_q * N + n_q, mask=inside_q, other=0.0)
    taps_k = tl.load(w_conv + w_q * N + G * K + n_q, mask=inside_q, other=0.0)
    taps_v = tl.load(w_conv + w_v * N + n_v, mask=inside_x, other=0.0)
    weight = tl.load(norm + o_v, mask=o_v < V, other=0.0)
    rate = tl.load(decay + h, mask=inside_r, other=0.0)
    bias = tl.load(dt_bias + h, mask=inside_r, other=0.0)
    # Past inputs and the token's own, as one tile: vectors shorter than the program's threads would be loaded by each
    # thread that needs a part.
    past_q = tl.load(window + w_q * N + n_q, mask=inside_q & (w_q < W - 1), other=0.0)
    past_k = tl.load(window + w_q * N + G * K + n_q, mask=inside_q & (w_q < W - 1), other=0.0)
    past_v = tl.load(window + w_v * N + n_v, mask=inside_x & (w_v < W - 1), other=0.0)
    wait_for_previous(PDL)
    x_q = tl.load(row + 0 * w_q + n_q, mask=inside_q & (w_q == W - 1), other=past_q)
    x_k = tl.load(row + 0 * w_q + G * K + n_q, mask=inside_q & (w_q == W - 1), other=past_k)
    x_v = tl.load(row + 0 * w_v + n_v, mask=inside_x & (w_v == W - 1), other=past_v)
    z = tl.load(row + N + values, mask=inside_v, other=0.0).to(tl.float32)
    b_in = tl.load(row + N + H * V + h, mask=inside_r, other=0.0).to(tl.float32)
    a_in = tl.load(row + N + H * V + H + h, mask=inside_r, other=0.0).to(tl.float32)

    beta = (1.0 / (1.0 + tl.exp(-b_in)))[:, None]
    kept = tl.exp(rate * softplus(a_in + bias))[:, None]
    q = convolve(x_q, taps_q)
    k = convolve(x_k, taps_k)
    v = convolve(x_v, taps_v)
    qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, add_triple)
    by_q = tl.rsqrt(qq + 1e-6) * SCALE
    by_k = tl.rsqrt(kk + 1e-6)
    qk = qk * by_q * by_k
    q = (q * by_q)[None, :, None]
    k = (k * by_k)[None, :, None]

    # All of the program has read its part of the window. Each channel is moved by the program that owns it.
    tl.debug_barrier()
    o_lane = tl.arange(0, LANES)
    if SHARES > 1:
        # One lane counts. Its answer is asked for at the end, so that it is under way behind the state.
        count = tl.atomic_add(arrivals + group + 0 * o_lane, 1, mask=o_lane == 0, sem="acq_rel")
    else:
        move_window(window, n_q, w_q, x_q, inside_q, W, N)
        move_window(window, G * K + n_q, w_q, x_k, inside_q, W, N)
    move_window(window, n_v, w_v, x_v, inside_x, W, N)

    if BLOCKS == 1:
        o = advance_tile(at, s, q, k, v, qk, beta, kept, inside_rk & (o_c < V)[None, None, :], EVEN)
    else:
        o_i = tl.arange(0, BLOCKS)[None, :, None]
        blocks = tl.zeros((RP, BLOCKS, BV), tl.float32)
        v_blocks = tl.reshape(v, (RP, BLOCKS, BV))
        # One stage: the compiler's prefetch of such tiles gave wrong sums (sm_90, two value heads, 32 columns).
        for i in tl.range(0, (V + BV - 1) // BV, num_stages=1):
            inside = inside_rk & (i * BV + o_c < V)[None, None, :]
            s = load_state(at + i * BV, inside, EVEN)
            v_block = tl.sum(tl.where(o_i == i, v_blocks, 0.0), 1)
            o = advance_tile(at + i * BV, s, q, k, v_block, qk, beta, kept, inside, EVEN)
            blocks = tl.where(o_i == i, o[:, None, :], blocks)
        o = tl.reshape(blocks, (RP, VP))

    n = o * tl.rsqrt(tl.sum(o * o, 1) / V + EPS)[:, None]
    n = n.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]
    n = n.to(weight.dtype).to(tl.float32) * silu(z)
    tl.store(y + b * (H * V) + values, n.to(y.dtype.element_ty), mask=inside_v)
    if SHARES > 1:
        if tl.sum(tl.where(o_lane == 0, count, 0), 0) == SHARES - 1:
            move_window(window, n_q, w_q, x_q, inside_q, W, N)
            move_window(window, G * K + n_q, w_q, x_k, inside_q, W, N)
            tl.store(arrivals + group, 0)


def check_delta(
    projected_BTN: Tensor, window_BWN: Tensor, state_BHKV: Tensor, w_conv_WN: Tensor, config: DeltaConfig, /
) -> None:
    """Refuse what the kernel would read or write wrongly.

    Raises:
        ValueError: shapes that do not fit, mixed dtypes, or a cache that is not contiguous.
        NotImplementedError: a dtype without a kernel.
    """
    batch, taps, mixed = projected_BTN.shape[0], config.conv_size, config.split_sizes[0]
    expected = {
        "projected": (batch, 1, sum(config.split_sizes)),
        "window": (batch, taps - 1, mixed),
        "state": (batch, config.value_heads, config.key_size, config.value_size),
        "w_conv": (taps, mixed),
    }
    tensors = dict(zip(expected, (projected_BTN, window_BWN, state_BHKV, w_conv_WN), strict=True))
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(tensors[name].shape)}; the kernel takes one token")
    if projected_BTN.dtype not in DTYPES:
        raise NotImplementedError(f"no DeltaNet kernel reads {projected_BTN.dtype}; use bfloat16, float16 or float32")
    dtypes = [tensors[name].dtype for name in ("projected", "window", "w_conv")]
    if len(set(dtypes)) > 1 or state_BHKV.dtype != torch.float32:
        raise ValueError(
            f"projected, window and w_conv must have one dtype and the state float32, got "
            f"{[str(dtype) for dtype in (*dtypes, state_BHKV.dtype)]}"
        )
    if not (window_BWN.is_contiguous() and state_BHKV.is_contiguous()):
        raise ValueError("window and state must be contiguous, for they are written in place")


def check_shares(
    config: DeltaConfig, settings: DeltaSettings, arrivals_BG: Tensor | None, batch: int, /, *, on_cuda: bool
) -> int:
    """Refuse settings that the layer does not allow; return the value heads of one program."""
    ratio = config.value_heads // config.key_heads
    heads = settings.heads or ratio
    if ratio % heads:
        raise ValueError(f"heads={heads} must divide the {ratio} value heads of one key head")
    if settings.key_lanes:
        if reason := why_not_lanes(config, heads, settings):
            raise ValueError(f"{reason}; use key_lanes=0")
    elif on_cuda and settings.columns < min(next_power_of_2(config.value_size), LEAST_COLUMNS):
        raise ValueError(f"columns={settings.columns} must be at least {LEAST_COLUMNS}: fewer gave wrong sums on sm_90")
    if heads < ratio and (
        arrivals_BG is None
        or arrivals_BG.shape != (batch, config.key_heads)
        or arrivals_BG.dtype != torch.int32
        or not arrivals_BG.is_contiguous()
    ):
        raise ValueError(
            f"heads={heads} of {ratio} need arrivals, zeros of int32 [{batch}, {config.key_heads}] that outlive the "
            "launch; pass them, or use heads=0"
        )
    return heads


def decode_delta_(
    projected_BTN: Tensor,
    window_BWN: Tensor,
    state_BHKV: Tensor,
    w_conv_WN: Tensor,
    decay_H: Tensor,
    dt_bias_H: Tensor,
    norm_V: Tensor,
    config: DeltaConfig,
    settings: DeltaSettings,
    /,
    *,
    arrivals_BG: Tensor | None = None,
) -> Tensor:
    """Run ``delta_mix`` for one token of each sequence, in one launch.

    Args:
        projected_BTN: T = 1, B >= 0.
        window_BWN: read and written, the W - 1 inputs of the convolution, oldest first.
        state_BHKV: read and written, float32.
        w_conv_WN: taps.
        decay_H: float32, -exp(A_log).
        dt_bias_H: float32.
        norm_V: weight of the gated norm.
        config: sizes.
        settings: value heads and columns of a program.
        arrivals_BG: int32 zeros, zeros again afterwards; needed where ``settings.heads`` are not all of a key head.

    Returns:
        [B, 1, H * V], the dtype of the projection.
    """
    check_delta(projected_BTN, window_BWN, state_BHKV, w_conv_WN, config)
    batch, ratio = projected_BTN.shape[0], config.value_heads // config.key_heads
    on_cuda = projected_BTN.is_cuda and not torch.version.hip
    heads = check_shares(config, settings, arrivals_BG, batch, on_cuda=on_cuda)
    y_BTN = projected_BTN.new_empty(batch, 1, config.value_heads * config.value_size)
    if batch == 0:
        return y_BTN
    grid = (batch * config.key_heads * (ratio // heads),)
    if settings.key_lanes:
        threads = (64 if torch.version.hip else 32) * settings.warps
        delta_token_lanes[grid](
            projected_BTN.contiguous(), window_BWN, state_BHKV, w_conv_WN.contiguous(), decay_H.contiguous(),
            dt_bias_H.contiguous(), norm_V.contiguous(), y_BTN, arrivals_BG if heads < ratio else None,
            G=config.key_heads, RATIO=ratio, R=heads, K=config.key_size, V=config.value_size, W=config.conv_size,
            I=settings.key_lanes, D=settings.columns, PAIRS=max(2, threads // config.key_size), EPS=config.eps,
            SCALE=config.key_size**-0.5, THREADS=threads, PDL=settings.pdl, num_warps=settings.warps,
            **launch_options(settings.pdl),
        )  # fmt: skip
        return y_BTN
    delta_token[grid](
        projected_BTN.contiguous(), window_BWN, state_BHKV, w_conv_WN.contiguous(), decay_H.contiguous(),
        dt_bias_H.contiguous(), norm_V.contiguous(), y_BTN, arrivals_BG if heads < ratio else None,
        G=config.key_heads, RATIO=ratio, R=heads, RP=next_power_of_2(heads), K=config.key_size,
        KP=next_power_of_2(config.key_size), V=config.value_size,
        VP=next_power_of_2(config.value_size),
        BV=min(settings.columns, next_power_of_2(config.value_size)), W=config.conv_size,
        WP=next_power_of_2(config.conv_size), EPS=config.eps, SCALE=config.key_size**-0.5,
        LANES=32 * settings.warps, PDL=settings.pdl, num_warps=settings.warps, **launch_options(settings.pdl),
    )  # fmt: skip
    return y_BTN
