"""A stack of grouped-query attention layers with dense or sparse MLPs: what Mixtral, Qwen2-MoE and Qwen3-MoE share.

Attention sees everything, or a sliding window, by the kind of the layer. Norms are the standard ones.

Letters: B sequences, T tokens, D hidden, E experts.
"""

from dataclasses import dataclass, replace
from functools import partial
from reprlib import repr as brief

import torch

from fmoe.functional.kernels import Kernels
from fmoe.functional.mlp import SWIGLU, Activation
from fmoe.functional.moe import SharedPlan
from fmoe.functional.routing import RouterConfig

from .decoder import DecoderConfig, LayerParams, Layers, Params, State, frame_params, make_state, residual_layer
from .gqa import AttentionConfig, attention_cache, attention_mixer, attention_params
from .settings import MOST_EXPERTS, Raw, read_int
from .weights import ExpertNames, Fill, gate_and_up, moe_params, plain

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Config:
    """One model, all values."""

    decoder: DecoderConfig
    attention: AttentionConfig
    router: RouterConfig
    sparse_layers: tuple[bool, ...]
    intermediate_size: int  # of the dense layers
    expert_size: int
    shared: SharedPlan
    names: ExpertNames
    biased: str = ""  # attention projections with a bias: none, qkv or qkvo
    head_norms: bool = False  # q and k are normed per head
    norm_names: tuple[str, str] = ("q_norm", "k_norm")  # of those norms in the checkpoint
    activation: Activation = SWIGLU  # of the experts


def read_experts(raw: Raw, key: str = "num_experts", *, minimum: int = 0) -> int:
    """Read the number of experts from ``num_experts`` or ``num_local_experts``; an error names the family's ``key``.

    Published Qwen3-MoE files have the first, those that transformers 5 writes the second.

    Raises:
        ValueError: neither is there, or both are and differ.
    """
    old, new = raw.get("num_experts"), raw.get("num_local_experts")
    if old is not None and new is not None and old != new:
        raise ValueError(f"config.json: num_experts={brief(old)} and num_local_experts={brief(new)} must be equal")
    if old is not None or new is not None:
        key = "num_experts" if new is None else "num_local_experts"
    return read_int(raw, key, minimum=minimum, maximum=MOST_EXPERTS)


def read_window(raw: Raw, default: int | None = None) -> int:
    """Read the tokens that a sliding layer sees, the token itself included."""
    return read_int(raw, "sliding_window", default, minimum=1)


def build_params(fill: Fill, config: Config, *, moe: str = "mlp") -> Params:
    """Describe every parameter of the model and the checkpoint tensors that fill it.

    Args:
        fill: makes parameters.
        config: the model.
        moe: name of a layer's MoE block in the checkpoint.
    """
    layers = tuple(
        layer_params(fill, f"model.layers.{i}", config, sparse=sparse, moe=moe)
        for i, sparse in enumerate(config.sparse_layers)
    )
    return frame_params(fill, config.decoder, layers, plain(fill, "model.norm.weight", (config.decoder.hidden_size,)))


def layer_params(fill: Fill, prefix: str, config: Config, /, *, sparse: bool, moe: str = "mlp") -> LayerParams:
    """Describe one layer, such as ``model.layers.0``; where ``sparse``, its MLP is the mixture of experts ``moe``."""
    hidden = config.decoder.hidden_size
    return LayerParams(
        plain(fill, f"{prefix}.input_layernorm.weight", (hidden,)),
        attention_params(
            fill,
            f"{prefix}.self_attn",
            config.attention,
            hidden,
            biased=config.biased,
            norm="standard" if config.head_norms else None,
            norm_names=config.norm_names,
        ),
        plain(fill, f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        moe_params(fill, f"{prefix}.{moe}", config.router, config.shared, config.expert_size, hidden, config.names)
        if sparse
        else gate_and_up(fill, f"{prefix}.mlp", config.intermediate_size, hidden),
    )


def make_layers(config: Config, kernels: Kernels) -> Layers:
    """Give the function of each layer kind, config and kernels bound: ``(x, params, cache, placement) -> x``."""
    layers = {}
    for kind in sorted(set(config.decoder.layer_kinds)):
        attention = replace(config.attention, window=config.decoder.window if kind == SLIDING else None)
        mixer = partial(attention_mixer, config=attention, kernels=kernels)
        layers[kind] = partial(
            residual_layer,
            mixer=mixer,
            router=config.router,
            eps=config.decoder.eps,
            kernels=kernels,
            activation=config.activation,
        )
    return layers


def init_state(config: Config, batch: int, slots: int, /, *, dtype: torch.dtype, device: torch.device) -> State:
    """Make the empty state of ``batch`` sequences of up to ``slots`` tokens."""
    caches = tuple(
        attention_cache(config.attention, batch, slots, dtype=dtype, device=device) for _ in config.decoder.layer_kinds
    )
    return make_state(caches, batch, config.decoder.rope, device=device)
