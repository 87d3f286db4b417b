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
from .routers import read_choice
from .settings import MOST_SHARED, SMALLEST, Raw, read_float, read_int, read_layers, read_rope, require
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
    experts, top_k, groups, kept = read_choice(raw, grouped=limited)
    return RouterConfig(
        num_experts=experts,
        top_k=top_k,
        scale=read_float(raw, "routed_scaling_factor", 1.0, minimum=SMALLEST),
        groups=groups,
        groups_kept=kept,
        float32_logits=True,
    )


def latent_rope(raw: Raw) -> RopeConfig:
    """Read the rotation of the key channels that all heads share; ``head_dim`` is not what it may look like."""
    size = read_int(raw, "qk_rope_head_dim", minimum=2)
    if size % 2:
        raise ValueError(f"config.json: qk_rope_head_dim must be even, got {size}")
    return read_rope(raw, size, theta=10000.0, apply_mscale=True)


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
    drafts: int = 0,
) -> Config:
    """Read the keys that V2 and V3 have in common; ``bias`` names the router's correction bias."""
    require(raw, {"hidden_act": ("silu",), "mlp_bias": (False,), "moe_layer_freq": (1,)})
    expert_size = read_int(raw, "moe_intermediate_size", minimum=1)
    count = read_int(raw, "n_shared_experts", 0, maximum=MOST_SHARED)
    kinds = (KIND,) * read_layers(raw)
    return Config(
        decoder=decoder_config(raw, kinds, rope, rotate_float32=rotate_float32, drafts=drafts),
        attention=attention,
        router=router,
        dense_layers=dense_layers,
        intermediate_size=read_int(raw, "intermediate_size", minimum=1 if dense_layers else 0),
        expert_size=expert_size,
        shared=plan_shared_experts(count, None, expert_size, requested=shared_experts),
        names=ExpertNames(shared="shared_experts", bias=bias),
    )


def build_params(fill: Fill, config: Config) -> Params:
    """Describe every parameter of the model and the checkpoint tensors that fill it."""
    layers = tuple(
        layer_params(fill, f"model.layers.{i}", config, sparse=i >= config.dense_layers)
        for i in range(len(config.decoder.layer_kinds))
    )
    return frame_params(fill, config.decoder, layers, plain(fill, "model.norm.weight", (config.decoder.hidden_size,)))


def layer_params(fill: Fill, prefix: str, config: Config, /, *, sparse: bool) -> LayerParams:
    """Describe one layer, such as ``model.layers.0``, its MLP a mixture of experts where ``sparse``."""
    hidden, mlp = config.decoder.hidden_size, f"{prefix}.mlp"
    return LayerParams(
        plain(fill, f"{prefix}.input_layernorm.weight", (hidden,)),
        latent_params(fill, f"{prefix}.self_attn", config.attention, hidden),
        plain(fill, f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        moe_params(fill, mlp, config.router, config.shared, config.expert_size, hidden, config.names)
        if sparse
        else gate_and_up(fill, mlp, config.intermediate_size, hidden),
    )


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
