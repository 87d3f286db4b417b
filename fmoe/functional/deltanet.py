"""Gated DeltaNet: a causal convolution, then a linear recurrence with decay and the delta rule.

Letters: B sequences, T tokens, W convolution taps, N mixed channels (2 * G * K + H * V), G key heads, H value heads
(r = H / G of them share a key head), K key channels, V value channels, C tokens of a chunk.

Source: arXiv:2412.06464.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from .cache import DeltaCache, write_delta_
from .norm import rms_norm_gated
from .quant import Weight

ChunkRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Sizes of a Gated DeltaNet layer."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv_size: int
    eps: float  # of the gated output norm
    state_dtype: torch.dtype = torch.float32  # in which the cache keeps the state; it is computed in float32

    def __post_init__(self) -> None:
        if min(self.key_heads, self.value_heads, self.key_size, self.value_size, self.conv_size) < 1:
            raise ValueError(
                f"head counts, head sizes and taps must be at least 1, got {self}; "
                "check the linear_* keys of config.json"
            )
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"linear_num_value_heads={self.value_heads} must be a multiple of "
                f"linear_num_key_heads={self.key_heads}; check config.json"
            )

    @property
    def split_sizes(self) -> list[int]:
        """Columns of the input projection: mixed channels, z, b, a."""
        values = self.value_heads * self.value_size
        return [2 * self.key_heads * self.key_size + values, values, self.value_heads, self.value_heads]


class DeltaParams(NamedTuple):
    """One layer; ``w_in`` rows are q, k, v (the mixed channels), then the gate z, then b, then a."""

    w_in_ND: Weight
    w_conv_WN: Tensor  # the last tap multiplies the current token
    decay_H: Tensor  # float32, -exp(A_log)
    dt_bias_H: Tensor  # float32
    norm_V: Tensor
    w_out_DN: Weight


def causal_conv(x_BTN: Tensor, window_BWN: Tensor, weight_WN: Tensor, /) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its W taps over the present and the W - 1 inputs before it, then apply silu.

    ``y_t = silu(sum_w weight_w * x_{t - (W-1) + w})``. Written out tap by tap: F.conv1d guards on the batch size.

    Args:
        x_BTN: inputs, T >= 0.
        window_BWN: the W - 1 inputs before the first, oldest first.
        weight_WN: taps.

    Returns:
        (y like x, the last W - 1 inputs).
    """
    taps, tokens = weight_WN.shape[0], x_BTN.shape[1]
    padded_BTN = torch.cat((window_BWN, x_BTN), 1)
    if tokens == 1:
        y_BTN = (padded_BTN * weight_WN).sum(1, keepdim=True)
    else:
        y_BTN = padded_BTN[:, :tokens] * weight_WN[0]
        for tap in range(1, taps):
            y_BTN = torch.addcmul(y_BTN, padded_BTN[:, tap : tap + tokens], weight_WN[tap])
    return F.silu(y_BTN), padded_BTN[:, tokens:]


def l2_normalize(x_K: Tensor, /, *, eps: float = 1e-6) -> Tensor:
    """Divide by the root of the sum (not the mean) of squares over the last dimension, in float32.

    Returns:
        float32, the shape of x.
    """
    x_K = x_K.float()
    return x_K * torch.rsqrt(x_K.square().sum(-1, keepdim=True) + eps)


def delta_gates(b_BTH: Tensor, a_BTH: Tensor, decay_H: Tensor, dt_bias_H: Tensor, /) -> tuple[Tensor, Tensor]:
    """Compute the write strength and the log decay of each head.

    ``beta = sigmoid(b)``, ``g = decay * softplus(a + dt_bias)`` with decay = -exp(A_log), so g <= 0.

    Returns:
        (beta, g), float32 [B, T, H].
    """
    return b_BTH.float().sigmoid(), decay_H * F.softplus(a_BTH.float() + dt_bias_H)


def delta_step(
    q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, g_BH: Tensor, beta_BH: Tensor, state_BHKV: Tensor, /
) -> tuple[Tensor, Tensor]:
    """Advance the recurrence by one token: decay first, then read, then write.

    ``S <- S exp(g); S <- S + k (beta (v - S^T k))^T; o = S^T q``, all in float32. Heads may be several dimensions,
    and keys and queries of size 1 in one of them serve all values along it.

    Args:
        q_BHK: normalised query, already scaled by K^-0.5.
        k_BHK: normalised key.
        v_BHV: value.
        g_BH: log decay.
        beta_BH: write strength.
        state_BHKV: S.

    Returns:
        (o_BHV, the new state), float32.

    Source: arXiv:2412.06464, eq. 10.
    """
    # Sums of products and not bmm: they fuse under a compiler, and on a CPU a bmm this small mostly wakes threads.
    q_BHK1, k_BHK1 = q_BHK.unsqueeze(-1), k_BHK.unsqueeze(-1)
    state_BHKV = state_BHKV * g_BH.exp()[..., None, None]
    delta_BHV = (v_BHV - (state_BHKV * k_BHK1).sum(-2)) * beta_BH.unsqueeze(-1)
    state_BHKV = torch.addcmul(state_BHKV, k_BHK1, delta_BHV.unsqueeze(-2))
    return (state_BHKV * q_BHK1).sum(-2), state_BHKV


def delta_recurrent(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor, state_BHKV: Tensor, /
) -> tuple[Tensor, Tensor]:
    """Apply ``delta_step`` token by token; the readable reference of ``delta_chunked``.

    Returns:
        (o_BTHV, the state after the last token), float32.
    """
    outputs = []
    for t in range(q_BTHK.shape[1]):
        o_BHV, state_BHKV = delta_step(
            q_BTHK[:, t], k_BTHK[:, t], v_BTHV[:, t], g_BTH[:, t], beta_BTH[:, t], state_BHKV
        )
        outputs.append(o_BHV)
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v_BTHV), state_BHKV


def delta_chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    /,
    *,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Advance the recurrence by T tokens, ``chunk`` of them at a time with matrix products.

    Inside a chunk the writes satisfy ``(I + A) U = beta (V - decayed S^T K)`` with A strictly lower triangular, so
    one triangular solve gives them all. Decays enter as ``exp(g_i - g_j)`` with i >= j, never as a quotient of
    exponentials, so that strong decay underflows to zero and nothing overflows.

    Args:
        q_BTHK: as in ``delta_recurrent``, float32.
        k_BTHK: float32.
        v_BTHV: float32.
        g_BTH: float32.
        beta_BTH: float32.
        state_BHKV: state before the first token.
        chunk: C, at most.

    Returns:
        (o_BTHV, the state after the last token), float32, equal to ``delta_recurrent`` up to rounding.

    Source: arXiv:2412.06464, section 3.3 (the WY form).
    """
    tokens = q_BTHK.shape[1]
    if tokens == 0:
        return torch.zeros_like(v_BTHV), state_BHKV
    chunk = -(-tokens // -(-tokens // chunk))  # as many chunks as asked for, of equal size
    padding = -tokens % chunk  # rows with k = v = beta = g = 0 leave the state alone

    def split(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
        return rearrange(padded, "b (n c) h ... -> n (b h) c ...", c=chunk)

    q, k, v = split(q_BTHK), split(k_BTHK), split(v_BTHV)
    # float64: after one strong decay the float32 sum is too coarse for the differences of the weak ones behind it
    beta, g = split(beta_BTH)[..., None], split(g_BTH).cumsum(-1, dtype=torch.float64)
    ratio = (g[..., :, None] - g[..., None, :]).to(g_BTH.dtype).exp_().tril_()  # infinite above the diagonal alone
    decay = g.to(g_BTH.dtype).exp()[..., None]
    a = (k * beta) @ k.transpose(-1, -2) * ratio  # the solve reads its strictly lower part alone
    writes, reads = torch.linalg.solve_triangular(
        a, torch.cat((v * beta, k * (beta * decay)), -1), upper=False, unitriangular=True
    ).split([v.shape[-1], k.shape[-1]], -1)
    scores, decayed_q = q @ k.transpose(-1, -2) * ratio, q * decay
    kept_k, last = k * (g[..., -1:] - g).to(g_BTH.dtype).exp()[..., None], decay[:, :, -1:]
    state = state_BHKV.flatten(0, 1)
    outputs = []
    for n in range(q.shape[0]):
        u = torch.baddbmm(writes[n], reads[n], state, alpha=-1)
        outputs.append(torch.baddbmm(torch.bmm(scores[n], u), decayed_q[n], state))
        state = torch.baddbmm(state * last[n], kept_k[n].transpose(1, 2), u)
    o_BTHV = rearrange(torch.stack(outputs), "n (b h) c v -> b (n c) h v", b=q_BTHK.shape[0])[:, :tokens]
    return o_BTHV, state.view_as(state_BHKV)


def delta_mix(
    projected_BTN: Tensor,
    cache: DeltaCache,
    params: DeltaParams,
    config: DeltaConfig,
    /,
    *,
    chunk_rule: ChunkRule = delta_chunked,
) -> Tensor:
    """Run everything between the two projections: convolution, gates, recurrence, gated norm.

    One token takes ``delta_step``, several take ``chunk_rule``; both start from the cache and write it.

    Args:
        projected_BTN: ``w_in x``, columns as in ``DeltaConfig.split_sizes``.
        cache: read and written.
        params: weights of the layer.
        config: sizes.
        chunk_rule: implementation with the signature of ``delta_chunked``.

    Returns:
        [B, T, H * V], the dtype of the projection.
    """
    mixed_BTN, z_BTN, b_BTH, a_BTH = projected_BTN.split_with_sizes(config.split_sizes, -1)
    mixed_BTN, window_BWN = causal_conv(mixed_BTN, cache.window_BWN, params.w_conv_WN)
    keys = config.key_heads * config.key_size
    qk_BTN, v_BTN = mixed_BTN.split_with_sizes([2 * keys, mixed_BTN.shape[-1] - 2 * keys], -1)
    heads = projected_BTN.shape[:2]  # view is half the price of unflatten, and a decode step is made of such calls
    qk_BTHK = l2_normalize(qk_BTN.view(*heads, 2 * config.key_heads, config.key_size))
    beta_BTH, g_BTH = delta_gates(b_BTH, a_BTH, params.decay_H, params.dt_bias_H)
    v_BTHV = v_BTN.view(*heads, config.value_heads, config.value_size).float()
    state_BHKV = cache.state_BHKV.float()
    if projected_BTN.shape[1] == 1:
        o_BTHV, state_BHKV = _step_by_groups(qk_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV, config)
    else:
        qk_BTHK = qk_BTHK.repeat_interleave(config.value_heads // config.key_heads, 2)
        q_BTHK, k_BTHK = qk_BTHK.split(config.value_heads, 2)
        q_BTHK = q_BTHK * config.key_size**-0.5
        o_BTHV, state_BHKV = chunk_rule(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV)
    write_delta_(cache, window_BWN, state_BHKV)
    z_BTHV = z_BTN.view(*heads, config.value_heads, config.value_size)
    # the readout stays float32 up to here: a large state overflows float16 before the norm could shrink it
    y_BTHV = rms_norm_gated(o_BTHV, z_BTHV, params.norm_V, eps=config.eps)
    return y_BTHV.to(projected_BTN.dtype).flatten(-2)


def _step_by_groups(
    qk_BTHK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor, state_BHKV: Tensor, config: DeltaConfig
) -> tuple[Tensor, Tensor]:
    """Take one step with the value heads of a key head as a dimension of their own, so that no key is repeated."""
    batch, groups = qk_BTHK.shape[0], config.key_heads
    q_BG1K, k_BG1K = qk_BTHK.view(batch, 2, groups, 1, config.key_size).unbind(1)
    grouped = (batch, groups, config.value_heads // groups)
    o_BGRV, state_BGRKV = delta_step(
        q_BG1K * config.key_size**-0.5,
        k_BG1K,
        v_BTHV.reshape(*grouped, config.value_size),
        g_BTH.reshape(grouped),
        beta_BTH.reshape(grouped),
        state_BHKV.reshape(*grouped, config.key_size, config.value_size),
    )
    return o_BGRV.view_as(v_BTHV), state_BGRKV.view_as(state_BHKV)
