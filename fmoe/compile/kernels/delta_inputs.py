"""What stands around the chunk rule of Gated DeltaNet: one launch before it, one behind it, and all of it together.

The first convolves, norms queries and keys and makes the gates, and writes each once: the chunk rule's kernels find the
key head of a value head themselves. The last is the gated norm.

Letters: B sequences, T tokens (BT of a program), W convolution taps, N mixed channels (2 * G * K + H * V), G key heads,
H value heads, K key channels, V value channels, R rows (of V channels) of a program.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.deltanet import DeltaConfig

from ..chunk_settings import ChunkSettings, InputSettings
from .delta_decode import DTYPES, silu, softplus
from .delta_prefill import chunk_delta
from .launch import cdiv, next_power_of_2


@triton.jit
def convolve_rows(row, window, w_conv, o_t, o_n, inside_n, first, T, WIDTH: tl.constexpr, N: tl.constexpr,
                  W: tl.constexpr):  # fmt: skip
    """Sum the taps of tokens o_t at channels o_n, and apply silu; float32 [BT, channels]."""
    y = tl.zeros((o_t.shape[0], o_n.shape[0]), tl.float32)
    for w in tl.static_range(W):
        o_s = o_t + (w - (W - 1))
        inside = ((o_s >= 0) & (o_s < T))[:, None] & inside_n[None, :]
        x = tl.load(row + o_s.to(tl.int64)[:, None] * WIDTH + o_n[None, :], mask=inside, other=0.0).to(tl.float32)
        if first:
            past = (o_s < 0)[:, None] & inside_n[None, :]
            x += tl.load(window + (o_s + (W - 1))[:, None] * N + o_n[None, :], mask=past, other=0.0).to(tl.float32)
        y += x * tl.load(w_conv + w * N + o_n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    return silu(y)


@triton.jit(do_not_specialize=["T"])
def mix_inputs(
    projected, window, w_conv, decay, dt_bias, qk, v, g, beta, T, G: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """BT tokens of one head of q, k or v, or of all gates; grid (B * blocks * (2 * G + H + 1),)."""
    N: tl.constexpr = 2 * G * K + H * V
    WIDTH: tl.constexpr = N + H * V + 2 * H
    PARTS: tl.constexpr = 2 * G + H + 1
    part = tl.program_id(0) % PARTS
    block = tl.program_id(0) // PARTS
    blocks = tl.cdiv(T, BT)
    b = (block // blocks).to(tl.int64)
    first = block % blocks == 0
    o_t = (block % blocks) * BT + tl.arange(0, BT)
    inside_t = o_t < T
    row = projected + b * T * WIDTH
    window += b * ((W - 1) * N)
    tokens = b * T + o_t
    # Branches of one statement may not give a name two types.
    if part < 2 * G:
        o_k = tl.arange(0, KP)
        x = convolve_rows(row, window, w_conv, o_t, part * K + o_k, o_k < K, first, T, WIDTH, N, W)
        length = tl.rsqrt(tl.sum(x * x, 1) + 1e-6) * tl.where(part < G, SCALE, 1.0)
        at_k = (tokens * (2 * G) + part)[:, None] * K + o_k[None, :]
        inside_k = inside_t[:, None] & (o_k < K)[None, :]
        tl.store(qk + at_k, (x * length[:, None]).to(qk.dtype.element_ty), mask=inside_k)
    elif part < PARTS - 1:
        o_v = tl.arange(0, VP)
        h = part - 2 * G
        values = convolve_rows(row, window, w_conv, o_t, 2 * G * K + h * V + o_v, o_v < V, first, T, WIDTH, N, W)
        at_v = (tokens * H + h)[:, None] * V + o_v[None, :]
        tl.store(v + at_v, values.to(v.dtype.element_ty), mask=inside_t[:, None] & (o_v < V)[None, :])
    else:
        o_h = tl.arange(0, HP)
        inside_h = inside_t[:, None] & (o_h < H)[None, :]
        at_in = row + o_t.to(tl.int64)[:, None] * WIDTH + (N + H * V) + o_h[None, :]
        b_in = tl.load(at_in, mask=inside_h, other=0.0).to(tl.float32)
        a_in = tl.load(at_in + H, mask=inside_h, other=0.0).to(tl.float32)
        rate = tl.load(decay + o_h, mask=o_h < H, other=0.0)
        bias = tl.load(dt_bias + o_h, mask=o_h < H, other=0.0)
        at_h = tokens[:, None] * H + o_h[None, :]
        tl.store(beta + at_h, 1.0 / (1.0 + tl.exp(-b_in)), mask=inside_h)
        tl.store(g + at_h, rate[None, :] * softplus(a_in + bias[None, :]), mask=inside_h)


@triton.jit(do_not_specialize=["rows"])
def norm_outputs(
    o, projected, norm, y, rows, H: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """``rms_norm_gated`` of R rows of o [B T H, V], their gates standing in the projection."""
    WIDTH: tl.constexpr = N + H * V + 2 * H
    o_r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    o_v = tl.arange(0, VP)
    inside = (o_r < rows)[:, None] & (o_v < V)[None, :]
    at = o_r[:, None] * V + o_v[None, :]
    x = tl.load(o + at, mask=inside, other=0.0)
    gates = (o_r // H * WIDTH + N + o_r % H * V)[:, None] + o_v[None, :]
    z = tl.load(projected + gates, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(norm + o_v, mask=o_v < V, other=0.0)
    n = x * tl.rsqrt(tl.sum(x * x, 1) / V + EPS)[:, None]
    n = n.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]
    n = n.to(weight.dtype).to(tl.float32) * silu(z)
    tl.store(y + at, n.to(y.dtype.element_ty), mask=inside)


def check_mix(
    projected_BTN: Tensor, window_BWN: Tensor, state_BHKV: Tensor, w_conv_WN: Tensor, config: DeltaConfig, /
) -> None:
    """Refuse what the kernels would read or write wrongly.

    Raises:
        ValueError: shapes that do not fit, mixed dtypes, or a cache that is not contiguous.
        NotImplementedError: a dtype without a kernel.
    """
    batch, tokens = projected_BTN.shape[:2]
    taps, mixed = config.conv_size, config.split_sizes[0]
    expected = {
        "projected": (projected_BTN, (batch, tokens, sum(config.split_sizes))),
        "window": (window_BWN, (batch, taps - 1, mixed)),
        "state": (state_BHKV, (batch, config.value_heads, config.key_size, config.value_size)),
        "w_conv": (w_conv_WN, (taps, mixed)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}; check the layer's config")
    if projected_BTN.dtype not in DTYPES:
        raise NotImplementedError(f"no DeltaNet kernel reads {projected_BTN.dtype}; use bfloat16, float16 or float32")
    dtypes = [str(tensor.dtype) for tensor in (projected_BTN, window_BWN, w_conv_WN)]
    if len(set(dtypes)) > 1:
        raise ValueError(f"projected, window and w_conv must have one dtype, got {dtypes}")
    if not (window_BWN.is_contiguous() and state_BHKV.is_contiguous()):
        raise ValueError("window and state must be contiguous, for they are written in place")


def mix_chunk_inputs(
    projected_BTN: Tensor,
    window_BWN: Tensor,
    w_conv_WN: Tensor,
    decay_H: Tensor,
    dt_bias_H: Tensor,
    config: DeltaConfig,
    settings: InputSettings,
    /,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch what stands before the chunk rule: convolution, l2 norms, gates.

    Returns:
        q and k [B, T, G, K], float16 where the projection is in half precision; v [B, T, H, V] like the projection; g
        and beta, float32 [B, T, H].
    """
    batch, tokens = projected_BTN.shape[:2]
    groups, heads, key_size, value_size = config.key_heads, config.value_heads, config.key_size, config.value_size
    dtype = torch.float32 if projected_BTN.dtype == torch.float32 else torch.float16
    qk_BTHK = projected_BTN.new_empty(batch, tokens, 2 * groups, key_size, dtype=dtype)
    v_BTHV = projected_BTN.new_empty(batch, tokens, heads, value_size)
    g_BTH, beta_BTH = (projected_BTN.new_empty(batch, tokens, heads, dtype=torch.float32) for _ in range(2))
    mix_inputs[(batch * cdiv(tokens, settings.tokens) * (2 * groups + heads + 1),)](
        projected_BTN.contiguous(), window_BWN, w_conv_WN.contiguous(), decay_H.contiguous(), dt_bias_H.contiguous(),
        qk_BTHK, v_BTHV, g_BTH, beta_BTH, tokens, G=groups, H=heads, HP=next_power_of_2(heads), K=key_size,
        KP=next_power_of_2(key_size), V=value_size, VP=next_power_of_2(value_size), W=config.conv_size,
        BT=settings.tokens, SCALE=key_size**-0.5, num_warps=settings.warps,
    )  # fmt: skip
    q_BTHK, k_BTHK = qk_BTHK.split(groups, 2)
    return q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH


def norm_chunk_outputs(
    o_BTHV: Tensor, projected_BTN: Tensor, norm_V: Tensor, config: DeltaConfig, settings: InputSettings, /
) -> Tensor:
    """Launch the gated norm of what the chunk rule gives, float32 [B, T, H, V]: [B, T, H * V] like the projection."""
    batch, tokens, heads, value_size = o_BTHV.shape
    rows = batch * tokens * heads
    y_BTN = projected_BTN.new_empty(batch, tokens, heads * value_size)
    norm_outputs[(cdiv(rows, settings.rows),)](
        o_BTHV, projected_BTN.contiguous(), norm_V.contiguous(), y_BTN, rows, H=heads, V=value_size,
        VP=next_power_of_2(value_size), N=config.split_sizes[0], R=settings.rows, EPS=config.eps,
        num_warps=settings.norm_warps,
    )  # fmt: skip
    return y_BTN


def prefill_delta_(
    projected_BTN: Tensor,
    window_BWN: Tensor,
    state_BHKV: Tensor,
    w_conv_WN: Tensor,
    decay_H: Tensor,
    dt_bias_H: Tensor,
    norm_V: Tensor,
    config: DeltaConfig,
    rule: ChunkSettings,
    settings: InputSettings,
    /,
) -> Tensor:
    """Run ``delta_mix`` for many tokens of each sequence, in four launches and one that moves the window.

    Args:
        projected_BTN: T >= 0, B >= 0.
        window_BWN: read and written, the W - 1 inputs of the convolution, oldest first.
        state_BHKV: read and written, float32 or bfloat16.
        w_conv_WN: taps.
        decay_H: float32, -exp(A_log).
        dt_bias_H: float32.
        norm_V: weight of the gated norm.
        config: sizes.
        rule: settings of the chunk rule.
        settings: of what stands around it.

    Returns:
        [B, T, H * V], the dtype of the projection.
    """
    check_mix(projected_BTN, window_BWN, state_BHKV, w_conv_WN, config)
    batch, tokens = projected_BTN.shape[:2]
    if batch == 0 or tokens == 0:
        return projected_BTN.new_empty(batch, tokens, config.value_heads * config.value_size)
    projected_BTN, kept, mixed = projected_BTN.contiguous(), config.conv_size - 1, config.split_sizes[0]
    inputs = mix_chunk_inputs(projected_BTN, window_BWN, w_conv_WN, decay_H, dt_bias_H, config, settings)
    newest_BWN = projected_BTN[:, max(tokens - kept, 0) :, :mixed]
    if tokens < kept:
        newest_BWN = torch.cat((window_BWN[:, tokens:], newest_BWN), 1)
    window_BWN.copy_(newest_BWN)
    working_BHKV = state_BHKV.float()  # itself where it is float32
    o_BTHV, _ = chunk_delta(*inputs, working_BHKV, rule, into_BHKV=working_BHKV)
    if working_BHKV is not state_BHKV:
        state_BHKV.copy_(working_BHKV)
    return norm_chunk_outputs(o_BTHV, projected_BTN, norm_V, config, settings)
