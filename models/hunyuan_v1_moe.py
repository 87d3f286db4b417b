"""Hunyuan-MoE-V1, such as Hunyuan-A13B: q and k normed after the rotation, 64 experts and one shared in every layer.

A config.json of this family writes some values once per layer. Lists whose entries are all equal are read; layers that
differ from one another are not built.

Source: the published config.json of Hunyuan-A13B-Instruct; transformers' HunYuanMoEV1.
"""

from dataclasses import replace
from reprlib import repr as brief
from typing import Any

from fmoe.functional.moe import SharedExperts, plan_shared_experts
from fmoe.functional.rotary import RopeConfig
from fmoe.functional.routing import RouterConfig

from .decoder import decoder_config
from .gqa import attention_config
from .gqa_decoder import FULL, Config, read_experts
from .gqa_decoder import build_params as build_params
from .gqa_decoder import init_state as init_state
from .gqa_decoder import make_layers as make_layers
from .settings import (
    SMALLEST,
    Raw,
    read_bool,
    read_eps,
    read_float,
    read_int,
    read_layers,
    read_rope,
    read_whole_rope,
    require,
    rope_keys,
)
from .weights import ExpertNames

MODEL_TYPES: tuple[str, ...] = ("hunyuan_v1_moe",)
ARCHITECTURES: tuple[str, ...] = ("HunYuanMoEV1ForCausalLM",)
NAMES = ExpertNames(router="gate.wg.weight", shared="shared_mlp")
PER_LAYER = ("num_experts", "moe_topk", "num_experts_per_tok", "num_shared_expert", "moe_intermediate_size")
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_qk_norm": (True,),
    "use_mixed_mlp_moe": (True,),
    "norm_topk_prob": (True,),
    "use_cla": (False,),
    "use_mla": (False,),
    "mlp_bias": (False,),
    "group_limited_greedy": (False,),
    "moe_layer_num_skipped": (0,),
    "num_shared_expert": (1,),
    "routed_scaling_factor": (1.0,),
}


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json; values that are not implemented are refused by name."""
    layers = read_layers(raw)
    raw = {key: _read_same(key, value, layers) if key in PER_LAYER else value for key, value in raw.items()}
    width = read_int(raw, "intermediate_size", minimum=1)
    require(raw, FIXED | {"moe_intermediate_size": (width,)})
    attention = replace(attention_config(raw, eps=read_eps(raw, 1e-5)), rotates_first=True)
    require(raw, {"attention_head_dim": (attention.head_size,)})
    return Config(
        decoder=decoder_config(raw, (FULL,) * layers, _read_rope(raw, attention.head_size), eps=attention.eps),
        attention=attention,
        router=_read_router(raw),
        sparse_layers=(True,) * layers,
        intermediate_size=width,
        expert_size=width,
        shared=plan_shared_experts(1, None, width, requested=shared_experts),
        names=NAMES,
        biased="qkvo" if read_bool(raw, "attention_bias", False) else "",
        head_norms=True,
        norm_names=("query_layernorm", "key_layernorm"),
    )


def _read_same(key: str, value: Any, layers: int) -> Any:
    """Give the one value of a list with an entry per layer; what is no list is given back."""
    if not isinstance(value, list):
        return value
    if len(value) != layers:
        raise ValueError(f"config.json: {key} must list num_hidden_layers={layers} values, got {brief(value)}")
    if any(type(other) is not type(value[0]) or other != value[0] for other in value):
        raise NotImplementedError(
            f"config.json: {key}={brief(value)} is not implemented; implemented: the same value for every layer"
        )
    return value[0]


def _read_router(raw: Raw) -> RouterConfig:
    """Softmax over all in float32, the best renormalised; ``num_experts_per_tok`` is another name of ``moe_topk``."""
    experts, mine, other = read_experts(raw, minimum=1), raw.get("moe_topk"), raw.get("num_experts_per_tok")
    if mine is not None and other is not None and mine != other:
        raise ValueError(f"config.json: moe_topk={brief(mine)} and num_experts_per_tok={brief(other)} must be equal")
    key = "moe_topk" if other is None else "num_experts_per_tok"
    top_k = read_int(raw, key, 1, minimum=1)
    if top_k > experts:
        raise ValueError(f"config.json: {key}={top_k} must be in 1..num_experts={experts}")
    return RouterConfig(experts, top_k, renormalize=True, float32_logits=True)


def _read_rope(raw: Raw, size: int) -> RopeConfig:
    """Read the rotation; a ``dynamic`` one with ``alpha`` has the base ``theta * alpha^(C / (C - 2))`` at any length.

    Source: transformers' HunYuanMoEV1RotaryEmbedding.
    """
    rope = rope_keys(raw)
    kind = next((rope[key] for key in ("rope_type", "type") if rope.get(key) is not None), "default")
    if kind != "dynamic" or not rope.get("alpha"):
        return read_whole_rope(raw, size, theta=10000.0)
    for keys in (raw, rope):
        require(keys, {"partial_rotary_factor": (1.0,)})
    if size < 3:
        raise ValueError(f"config.json: head_dim={size} must be above 2 with alpha in the rope parameters")
    alpha = read_float(rope, "alpha", minimum=SMALLEST)
    base = {"rope_scaling": None, "rope_parameters": {"rope_theta": rope.get("rope_theta")}}
    plain = read_rope({**raw, **base}, size, theta=10000.0)
    return replace(plain, theta=plain.theta * alpha ** (size / (size - 2)))
