"""A stack of Gated DeltaNet and gated full-attention layers with MoE blocks: what Qwen3-Next and Qwen3.5-MoE share.

Letters: B sequences, T tokens, D hidden, N projected columns, H value heads, V value channels. Source: the published
config.json of both; arXiv:2412.06464 for the linear layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fmoe.functional.attention import Placement
from fmoe.functional.cache import Cache, DeltaCache, PendingDelta
from fmoe.functional.deltanet import DeltaConfig, DeltaParams
from fmoe.functional.kernels import Kernels
from fmoe.functional.moe import SharedPlan
from fmoe.functional.quant import Weight
from fmoe.functional.routing import RouterConfig

from .decoder import DecoderConfig, LayerParams, Layers, Params, State, frame_params, make_state, residual_layer
from .gqa import AttentionConfig, AttentionParams, attention_cache, attention_mixer, attention_params
from .settings import Raw, read_int, read_layer_types, read_layers
from .weights import ExpertNames, Fill, Piece, gate_and_up, matrix, moe_params, plain, zero_centred_norm

LINEAR, FULL = "linear_attention", "full_attention"
NAMES = ExpertNames(shared_gate="shared_expert_gate.weight")
MOST_TAPS = 1024

Project = Callable[[Fill, str, DeltaConfig, int], Weight]  # (fill, prefix, sizes, D) -> w_in of DeltaParams


@dataclass(frozen=True, slots=True)
class Config:
    """One model, all values."""

    decoder: DecoderConfig
    attention: AttentionConfig
    delta: DeltaConfig
    router: RouterConfig
    sparse_layers: tuple[bool, ...]
    intermediate_size: int  # of the dense layers
    expert_size: int
    shared: SharedPlan


def read_delta(raw: Raw, eps: float) -> DeltaConfig:
    """Read the sizes of the linear layers."""
    return DeltaConfig(
        key_heads=read_int(raw, "linear_num_key_heads", minimum=1),
        value_heads=read_int(raw, "linear_num_value_heads", minimum=1),
        key_size=read_int(raw, "linear_key_head_dim", minimum=1),
        value_size=read_int(raw, "linear_value_head_dim", minimum=1),
        conv_size=read_int(raw, "linear_conv_kernel_dim", 4, minimum=1, maximum=MOST_TAPS),
        eps=eps,
    )


def read_layer_kinds(raw: Raw) -> tuple[str, ...]:
    """Take ``layer_types`` where the file has it; else every ``full_attention_interval``-th layer attends."""
    layers = read_layers(raw)
    interval = read_int(raw, "full_attention_interval", 4, minimum=1)
    return read_layer_types(raw, layers, (LINEAR, FULL)) or tuple(
        FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)
    )


def stack_params(fill: Fill, config: Config, /, *, project: Project, prefix: str = "model") -> Params:
    """Describe every parameter of the model and the checkpoint tensors that fill it.

    Args:
        fill: makes parameters.
        config: the model.
        project: describes the projections into a linear layer.
        prefix: of all names but the head's.
    """
    layers = tuple(
        layer_params(fill, f"{prefix}.layers.{i}", config, kind=kind, sparse=sparse, project=project)
        for i, (kind, sparse) in enumerate(zip(config.decoder.layer_kinds, config.sparse_layers, strict=True))
    )
    norm_D = zero_centred_norm(fill, f"{prefix}.norm.weight", config.decoder.hidden_size)
    return frame_params(fill, config.decoder, layers, norm_D, prefix=prefix)


def layer_params(
    fill: Fill, prefix: str, config: Config, /, *, kind: str, sparse: bool, project: Project
) -> LayerParams:
    """Describe one layer, such as ``model.layers.0``."""
    hidden, mlp = config.decoder.hidden_size, f"{prefix}.mlp"
    mixer: DeltaParams | AttentionParams
    if kind == LINEAR:
        mixer = delta_params(fill, f"{prefix}.linear_attn", config.delta, hidden, project=project)
    else:
        mixer = attention_params(fill, f"{prefix}.self_attn", config.attention, hidden, norm="centred")
    return LayerParams(
        zero_centred_norm(fill, f"{prefix}.input_layernorm.weight", hidden),
        mixer,
        zero_centred_norm(fill, f"{prefix}.post_attention_layernorm.weight", hidden),
        moe_params(fill, mlp, config.router, config.shared, config.expert_size, hidden, NAMES)
        if sparse
        else gate_and_up(fill, mlp, config.intermediate_size, hidden),
    )


def delta_params(fill: Fill, prefix: str, config: DeltaConfig, hidden: int, /, *, project: Project) -> DeltaParams:
    """Describe one linear layer's mixer, such as ``model.layers.0.linear_attn``."""
    heads, values, taps = config.value_heads, config.value_heads * config.value_size, config.conv_size
    channels = config.split_sizes[0]
    w_in_ND = project(fill, prefix, config, hidden)
    conv = Piece(f"{prefix}.conv1d.weight", (channels, 1, taps), take=lambda w: w.squeeze(1).T)
    decay = Piece(f"{prefix}.A_log", (heads,), take=lambda w: -w.float().exp())
    return DeltaParams(
        w_in_ND=w_in_ND,
        w_conv_WN=fill((taps, channels), [conv]),
        decay_H=fill((heads,), [decay], dtype=torch.float32),
        dt_bias_H=plain(fill, f"{prefix}.dt_bias", (heads,), dtype=torch.float32),
        norm_V=plain(fill, f"{prefix}.norm.weight", (config.value_size,)),
        w_out_DN=matrix(fill, f"{prefix}.out_proj.weight", (hidden, values)),
    )


def delta_mixer(
    projected_BTN: Tensor,
    params: DeltaParams,
    cache: DeltaCache | PendingDelta,
    placement: Placement,
    /,
    *,
    config: DeltaConfig,
    kernels: Kernels,
) -> Tensor:
    """Convolve and recur, project back.

    Returns:
        [B, T, D].
    """
    if placement.kept_B is not None:
        mixed_BTN = kernels.delta_verify(projected_BTN, cache, params, config, placement.kept_B)
    else:
        mix = kernels.delta_decode if projected_BTN.shape[1] == 1 else kernels.delta_prefill
        mixed_BTN = mix(projected_BTN, cache, params, config)
    return kernels.linear(mixed_BTN, params.w_out_DN)


def make_layers(config: Config, kernels: Kernels) -> Layers:
    """Give the function of each layer kind, config and kernels bound: ``(x, params, cache, placement) -> x``."""
    mixers = {
        LINEAR: partial(delta_mixer, config=config.delta, kernels=kernels),
        FULL: partial(attention_mixer, config=config.attention, kernels=kernels),
    }
    return {
        kind: partial(residual_layer, mixer=mixer, router=config.router, eps=config.decoder.eps, kernels=kernels)
        for kind, mixer in mixers.items()
    }


def init_state(config: Config, batch: int, slots: int, /, *, dtype: torch.dtype, device: torch.device) -> State:
    """Make the empty state of ``batch`` sequences of up to ``slots`` tokens."""
    delta = config.delta

    def empty(kind: str) -> Cache:
        if kind == FULL:
            return attention_cache(config.attention, batch, slots, dtype=dtype, device=device)
        window = torch.zeros(batch, delta.conv_size - 1, delta.split_sizes[0], dtype=dtype, device=device)
        shape = (batch, delta.value_heads, delta.key_size, delta.value_size)
        return DeltaCache(window, torch.zeros(shape, dtype=delta.state_dtype, device=device))

    caches = tuple(empty(kind) for kind in config.decoder.layer_kinds)
    return make_state(caches, batch, config.decoder.rope, device=device)
