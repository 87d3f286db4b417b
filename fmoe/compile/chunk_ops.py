"""The chunk rule of Gated DeltaNet as an op: its loop over chunks would give one graph per chunk count. And all that
stands between the projections as one, in kernels for the sizes that they take, which a graph of any length must not
look at.

Letters: as in fmoe/functional/deltanet.py.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from fmoe.functional.cache import DeltaCache
from fmoe.functional.deltanet import DeltaConfig, DeltaParams, delta_chunked, delta_mix

from .chunk_settings import LEAST_TOKENS, default_chunk_settings, default_input_settings, fits_kernels
from .device import target_of

if find_spec("triton"):
    from .kernels.delta_inputs import prefill_delta_

LIBRARY = torch.library.Library("fmoe", "FRAGMENT")
LIBRARY.define("delta_chunked(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state) -> (Tensor, Tensor)")
LIBRARY.define(
    "delta_prefill_(Tensor projected, Tensor(a!) window, Tensor(b!) state, Tensor w_conv, Tensor decay, "
    "Tensor dt_bias, Tensor norm, int key_heads, float eps) -> Tensor"
)


def _delta_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    o, new_state = delta_chunked(q, k, v, g, beta, state)
    return o.contiguous(), new_state.clone() if new_state is state else new_state


def _delta_chunked_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    return state.new_empty(v.shape), state.new_empty(state.shape)


def _delta_prefill_(
    projected: Tensor,
    window: Tensor,
    state: Tensor,
    w_conv: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    key_heads: int,
    eps: float,
) -> Tensor:
    _, heads, key_size, value_size = state.shape
    config = DeltaConfig(key_heads, heads, key_size, value_size, w_conv.shape[0], eps)
    target, dtype = target_of(projected.device), torch.float16 if projected.dtype != torch.float32 else torch.float32
    # the op launches what the reference is made of one by one, so that on a GPU kernels are as good for a few tokens
    tokens = LEAST_TOKENS if projected.is_cuda else projected.shape[1]
    if fits_kernels(tokens, key_size, dtype, target=target):
        rule = default_chunk_settings(key_size, value_size, dtype, target=target)
        return prefill_delta_(
            projected, window, state, w_conv, decay, dt_bias, norm, config, rule, default_input_settings(value_size)
        )
    params = DeltaParams(w_conv, w_conv, decay, dt_bias, norm, w_conv)  # the projections are not read
    return delta_mix(projected, DeltaCache(window, state), params, config)


def _delta_prefill_fake(projected: Tensor, window: Tensor, state: Tensor, *_: object) -> Tensor:
    return projected.new_empty(*projected.shape[:2], state.shape[1] * state.shape[3])


LIBRARY.impl("delta_prefill_", _delta_prefill_, "CompositeExplicitAutograd")
torch.library.register_fake("fmoe::delta_prefill_", _delta_prefill_fake, lib=LIBRARY)
LIBRARY.impl("delta_chunked", _delta_chunked, "CompositeExplicitAutograd")
torch.library.register_fake("fmoe::delta_chunked", _delta_chunked_fake, lib=LIBRARY)


def delta_chunked_op(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    /,
) -> tuple[Tensor, Tensor]:
    """``delta_chunked`` behind ``fmoe::delta_chunked``."""
    o_BTHV, new_BHKV = torch.ops.fmoe.delta_chunked(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV)
    return o_BTHV, new_BHKV


def delta_prefill_op(projected_BTN: Tensor, cache: DeltaCache, params: DeltaParams, config: DeltaConfig, /) -> Tensor:
    """``delta_mix`` with its chunk loop behind an op."""
    return delta_mix(projected_BTN, cache, params, config, chunk_rule=delta_chunked_op)


def delta_prefill_kernels(
    projected_BTN: Tensor, cache: DeltaCache, params: DeltaParams, config: DeltaConfig, /
) -> Tensor:
    """``delta_mix`` in kernels that write the cache; a model in half precision gets products of float16 operands.

    These err by 5e-4 of the norm of the readout, and by 2e-3 where keys are nearly parallel: about as much as the
    rounding of the result to the model's dtype. Those of bfloat16 would err eight times as much.
    """
    y_BTN: Tensor = torch.ops.fmoe.delta_prefill_(
        projected_BTN,
        *cache,
        params.w_conv_WN,
        params.decay_H,
        params.dt_bias_H,
        params.norm_V,
        config.key_heads,
        config.eps,
    )
    return y_BTN
