"""DeepSeek-V2 and V2-Lite: latent attention, a few dense layers, then shared and routed experts in each.

Letters: B sequences, T tokens, D hidden. Source: the published config.json of DeepSeek-V2 and DeepSeek-V2-Lite;
arXiv:2405.04434. DeepSeek-V3 shares all but the router and its own keys.
"""

from dataclasses import dataclass
from functools import partial

import torch

from fmoe.functional.kernels import Kernels
from fmoe.functional.moe import SharedExperts, SharedPlan, plan_shared_experts
from fmoe.functional.rotary import RopeConfig
from fmoe.functional.routing import RouterConfig

from .decoder import (
    DecoderConfig,
    LayerParams,
    Layers,
    Params,
    State,
    decoder_config,
    frame_params,
    make_state,
    residual_layer,
)
from .mla import LatentConfig, latent_cache, latent_config, latent_mixer, latent_params
from .settings import Raw, read_float, read_int, read_rope, require
from .weights import ExpertNames, Fill, gate_and_up, moe_params, plain

MODEL_TYPES: tuple[str, ...] = ("deepseek_v2",)
ARCHITECTURES: tuple[str, ...] = ("DeepseekV2ForCausalLM",)
KIND = "latent_attention"
GREEDY, GROUP_LIMITED = "greedy", "group_limited_greedy"


@dataclass(frozen=True, slots=True)
class Config:
    """One model, all values."""

    decoder: DecoderConfig
    attention: LatentConfig
    router: RouterConfig
    dense_layers: int  # the first ones; the others are sparse
    intermediate_size: int
    expert_size: int
    shared: SharedPlan
    names: ExpertNames


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json; values that are not implemented are refused by name."""
    rope = latent_rope(raw)
    return make_config(
        raw,
        rope,
        latent_config(raw, rope),
        read_router(raw),
        shared_experts=shared_experts,
        dense_layers=read_int(raw, "first_k_dense_replace", 0),
        rotate_float32=True,
    )


def read_router(raw: Raw) -> RouterConfig:
    """Read V2's rule: softmax over all, the best experts or those of the best groups, never renormalised."""
    # The released code renormalises where norm_topk_prob is true, and then does not scale; others ignore the key.
    require(raw, {"scoring_func": ("softmax",), "topk_method": (GREEDY, GROUP_LIMITED), "norm_topk_prob": (False,)})
    limited = raw.get("topk_method") == GROUP_LIMITED
    return RouterConfig(
        num_experts=read_int(raw, "n_routed_experts"),
        top_k=read_int(raw, "num_experts_per_tok"),
        scale=read_float(raw, "routed_scaling_factor", 1.0),
        groups=read_int(raw, "n_group") if limited else 1,
        groups_kept=read_int(raw, "topk_group") if limited else 1,
        float32_logits=True,
    )


def latent_rope(raw: Raw) -> RopeConfig:
    """Read the rotation of the key channels that all heads share; ``head_dim`` is not what it may look like."""
    return read_rope(raw, read_int(raw, "qk_rope_head_dim"), theta=10000.0, apply_mscale=True)


def make_config(
    raw: Raw,
    rope: RopeConfig,
    attention: LatentConfig,
    router: RouterConfig,
    /,
    *,
    shared_experts: SharedExperts,
    dense_layers: int,
    rotate_float32: bool = False,
    bias: str | None = None,
) -> Config:
    """Read the keys that V2 and V3 have in common; ``bias`` is the name of the router's correction bias."""
    require(raw, {"hidden_act": ("silu",), "mlp_bias": (False,), "moe_layer_freq": (1,)})
    expert_size = read_int(raw, "moe_intermediate_size")
    count = read_int(raw, "n_shared_experts", 0)
    kinds = (KIND,) * read_int(raw, "num_hidden_layers")
    return Config(
        decoder=decoder_config(raw, kinds, rope, rotate_float32=rotate_float32),
        attention=attention,
        router=router,
        dense_layers=dense_layers,
        intermediate_size=read_int(raw, "intermediate_size"),
        expert_size=expert_size,
        shared=plan_shared_experts(count, None, expert_size, requested=shared_experts),
        names=ExpertNames(shared="shared_experts", bias=bias),
    )


def build_params(fill: Fill, config: Config) -> Params:
    """Describe every parameter of the model and the checkpoint tensors that fill it."""
    hidden = config.decoder.hidden_size
    layers = []
    for i in range(len(config.decoder.layer_kinds)):
        prefix = f"model.layers.{i}"
        layers.append(
            LayerParams(
                plain(fill, f"{prefix}.input_layernorm.weight", (hidden,)),
                latent_params(fill, f"{prefix}.self_attn", config.attention, hidden),
                plain(fill, f"{prefix}.post_attention_layernorm.weight", (hidden,)),
                gate_and_up(fill, f"{prefix}.mlp", config.intermediate_size, hidden)
                if i < config.dense_layers
                else moe_params(
                    fill, f"{prefix}.mlp", config.router, config.shared, config.expert_size, hidden, config.names
                ),
            )
        )
    return frame_params(fill, config.decoder, tuple(layers), plain(fill, "model.norm.weight", (hidden,)))


def make_layers(config: Config, kernels: Kernels) -> Layers:
    """Give the function of the one layer kind, config and kernels bound: ``(x, params, cache, placement) -> x``."""
    mixer = partial(latent_mixer, config=config.attention, kernels=kernels)
    return {KIND: partial(residual_layer, mixer=mixer, router=config.router, eps=config.decoder.eps, kernels=kernels)}


def init_state(config: Config, batch: int, slots: int, /, *, dtype: torch.dtype, device: torch.device) -> State:
    """Make the empty state of ``batch`` sequences of up to ``slots`` tokens."""
    caches = tuple(
        latent_cache(config.attention, batch, slots, dtype=dtype, device=device) for _ in config.decoder.layer_kinds
    )
    return make_state(caches, batch, config.decoder.rope, device=device)
