"""Gated DeltaNet over a step's drafts, of which only the first ones may turn out right.

A state cannot be rolled back. So it stays at the last token that is known to be right; what a step's tokens would write
is kept beside it, a key and a value per token and head, and the next step writes that of the tokens that stayed.

Letters: B sequences, T tokens of a step, W convolution taps, N mixed channels, G key heads, H value heads (R of each
key head), K key channels, V value channels.
"""

import torch
from torch import Tensor

from .cache import DeltaCache, PendingDelta, write_delta_
from .deltanet import DeltaConfig, DeltaParams, causal_conv, delta_gates, l2_normalize
from .norm import rms_norm_gated


def pend_delta(cache: DeltaCache, config: DeltaConfig, tokens: int, /) -> PendingDelta:
    """Put room for the last step's tokens beside a cache, which stays the same memory.

    Args:
        cache: of one layer.
        config: sizes.
        tokens: T, of the longest step.
    """
    batch, _, channels = cache.window_BWN.shape
    zeros = torch.zeros
    device = cache.state_BHKV.device
    return PendingDelta(
        *cache,
        inputs_BTN=zeros(batch, tokens, channels, dtype=cache.window_BWN.dtype, device=device),
        k_BTGK=zeros(batch, tokens, config.key_heads, config.key_size, dtype=torch.float32, device=device),
        written_BTHV=zeros(batch, tokens, config.value_heads, config.value_size, dtype=torch.float32, device=device),
        g_BTH=zeros(batch, tokens, config.value_heads, dtype=torch.float32, device=device),
    )


def select_pending(cache: PendingDelta, tokens: int, /) -> PendingDelta:
    """View the room of the first ``tokens`` tokens of a step; the window and the state stay."""
    return PendingDelta(*cache[:2], *(part[:, :tokens] for part in cache[2:]))


def settle_delta_(cache: PendingDelta, kept_B: Tensor, /) -> DeltaCache:
    """Write the last step's first ``kept`` tokens to window and state, in place, and forget the others.

    ``S <- S exp(g_t) + k_t written_t^T`` for t < kept; the window ends with the input of the last of them.

    Args:
        cache: window and state are written; what was pending is not, and must not be settled again.
        kept_B: int64, 0 <= kept <= T.

    Returns:
        Its window and state, as a cache.
    """
    tokens, groups = cache.k_BTGK.shape[1:3]
    before = cache.window_BWN.shape[1]
    slots = torch.arange(max(before, tokens), device=kept_B.device)
    index_BW = kept_B[:, None] + slots[:before]
    inputs_BWN = torch.cat((cache.window_BWN, cache.inputs_BTN), 1)
    window_BWN = inputs_BWN.gather(1, index_BW[..., None].expand(-1, -1, inputs_BWN.shape[-1]))
    stays_BT11 = (slots[:tokens] < kept_B[:, None])[..., None, None]
    # not by a product with zero: a token that does not stay may have given infinity
    k_BTGK, written_BTHV = (torch.where(stays_BT11, part, 0.0) for part in (cache.k_BTGK, cache.written_BTHV))
    decay_BTH = torch.where(stays_BT11[..., 0], cache.g_BTH, 0.0).exp()
    state_BGRKV = _by_groups(cache.state_BHKV.float(), 1, groups)
    written_BTGRV, decay_BTGR = (_by_groups(part, 2, groups) for part in (written_BTHV, decay_BTH))
    for t in range(tokens):
        k_BG1K1 = k_BTGK[:, t, :, None, :, None]
        state_BGRKV = torch.addcmul(
            state_BGRKV * decay_BTGR[:, t, ..., None, None], k_BG1K1, written_BTGRV[:, t, ..., None, :]
        )
    return write_delta_(DeltaCache(*cache[:2]), window_BWN, state_BGRKV.flatten(1, 2))


def _by_groups(part: Tensor, dim: int, groups: int) -> Tensor:
    """Split the dimension of value heads by their key heads."""
    shape = part.shape
    return part.view(*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])


def delta_verify(
    projected_BTN: Tensor, cache: PendingDelta, params: DeltaParams, config: DeltaConfig, kept_B: Tensor, /
) -> Tensor:
    """``delta_mix`` for T tokens that may not all stay, behind the ones of the last step that did.

    Settles the last step's tokens, then runs these from there; the state is left before them, and what they would
    write becomes pending.

    Args:
        projected_BTN: ``w_in x``, columns as in ``DeltaConfig.split_sizes``.
        cache: of as many tokens, read and written.
        params: weights of the layer.
        config: sizes.
        kept_B: int64, how many of the last step's tokens stay.

    Returns:
        [B, T, H * V], the dtype of the projection.
    """
    window_BWN, state_BHKV = settle_delta_(cache, kept_B)
    inputs_BTN, z_BTN, b_BTH, a_BTH = projected_BTN.split_with_sizes(config.split_sizes, -1)
    mixed_BTN, _ = causal_conv(inputs_BTN, window_BWN, params.w_conv_WN)
    keys, groups, step = config.key_heads * config.key_size, config.key_heads, projected_BTN.shape[:2]
    qk_BTN, v_BTN = mixed_BTN.split_with_sizes([2 * keys, mixed_BTN.shape[-1] - 2 * keys], -1)
    qk_BTHK = l2_normalize(qk_BTN.view(*step, 2 * groups, config.key_size))
    q_BTGK, k_BTGK = qk_BTHK.split(groups, 2)
    beta_BTH, g_BTH = delta_gates(b_BTH, a_BTH, params.decay_H, params.dt_bias_H)
    v_BTGRV = v_BTN.view(*step, groups, config.value_heads // groups, config.value_size).float()
    o_BTGRV, written_BTGRV = _run_steps(
        q_BTGK * config.key_size**-0.5,
        k_BTGK,
        v_BTGRV,
        _by_groups(g_BTH.exp(), 2, groups),
        _by_groups(beta_BTH, 2, groups),
        _by_groups(state_BHKV.float(), 1, groups),
    )
    for part, value in zip(cache[2:], (inputs_BTN, k_BTGK, written_BTGRV.flatten(2, 3), g_BTH), strict=True):
        part.copy_(value)
    z_BTHV = z_BTN.view(*step, config.value_heads, config.value_size)
    y_BTHV = rms_norm_gated(o_BTGRV.flatten(2, 3), z_BTHV, params.norm_V, eps=config.eps)
    y_BTN: Tensor = y_BTHV.to(projected_BTN.dtype).flatten(-2)
    return y_BTN


def _run_steps(
    q_BTGK: Tensor, k_BTGK: Tensor, v_BTGRV: Tensor, decay_BTGR: Tensor, beta_BTGR: Tensor, state_BGRKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Run ``delta_step`` token by token; the readouts, and what each token writes beside its key."""
    outputs, writes = [], []
    for t in range(q_BTGK.shape[1]):
        q_BG1K1, k_BG1K1 = q_BTGK[:, t, :, None, :, None], k_BTGK[:, t, :, None, :, None]
        state_BGRKV = state_BGRKV * decay_BTGR[:, t, ..., None, None]
        written_BGRV = (v_BTGRV[:, t] - (state_BGRKV * k_BG1K1).sum(-2)) * beta_BTGR[:, t, ..., None]
        state_BGRKV = torch.addcmul(state_BGRKV, k_BG1K1, written_BGRV.unsqueeze(-2))
        outputs.append((state_BGRKV * q_BG1K1).sum(-2))
        writes.append(written_BGRV)
    return torch.stack(outputs, 1), torch.stack(writes, 1)
