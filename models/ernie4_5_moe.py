"""ERNIE-4.5-MoE, such as ERNIE-4.5-21B-A3B: softmax scores chosen with a bias, two shared experts beside 64.

Channel pairs (2j, 2j + 1) of q and k rotate in float32; their rows are loaded as (j, j + C/2), which gives the same
scores. The draft layer, ``model.mtp_*``, is not read.

Source: the published config.json of ERNIE-4.5-21B-A3B-PT; transformers' Ernie4_5_Moe.
"""

from dataclasses import replace
from reprlib import repr as brief

from fmoe.functional.moe import SharedExperts, plan_shared_experts
from fmoe.functional.routing import RouterConfig

from .decoder import Params, decoder_config
from .gqa import attention_config
from .gqa_decoder import FULL, Config
from .gqa_decoder import build_params as stack_params
from .gqa_decoder import init_state as init_state
from .gqa_decoder import make_layers as make_layers
from .settings import (
    MOST_EXPERTS,
    MOST_SHARED,
    Raw,
    read_eps,
    read_float,
    read_int,
    read_layers,
    read_whole_rope,
    require,
    with_defaults,
)
from .weights import ExpertNames, Fill

MODEL_TYPES: tuple[str, ...] = ("ernie4_5_moe",)
ARCHITECTURES: tuple[str, ...] = ("Ernie4_5_MoeForCausalLM",)
NAMES = ExpertNames(shared="shared_experts", bias="moe_statics.e_score_correction_bias", bias_is_row=True)
OTHER_BIAS = f"gate.{NAMES.bias}"  # in files that transformers 5 wrote as it holds them
DEFAULTS = {
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json; values that are not implemented are refused by name."""
    raw = with_defaults(raw, DEFAULTS)
    require(
        raw,
        {
            "hidden_act": ("silu",),
            "use_bias": (False,),
            "moe_gate_act": ("softmax",),
            "moe_use_aux_free": (True,),
            "moe_norm_gate_logits": (True,),
        },
    )
    kinds = (FULL,) * read_layers(raw)
    attention = replace(attention_config(raw, eps=read_eps(raw, 1e-5)), interleaved=True)
    rope = read_whole_rope(raw, attention.head_size, theta=500000.0)
    sparse_layers = _read_sparse_layers(raw, len(kinds))
    expert_size = read_int(raw, "moe_intermediate_size", minimum=1)
    count = read_int(raw, "moe_num_shared_experts", maximum=MOST_SHARED)
    return Config(
        decoder=decoder_config(raw, kinds, rope, tied=True, rotate_float32=True, eps=attention.eps),
        attention=attention,
        router=_read_router(raw),
        sparse_layers=sparse_layers,
        intermediate_size=read_int(raw, "intermediate_size", minimum=0 if all(sparse_layers) else 1),
        expert_size=expert_size,
        shared=plan_shared_experts(count, None, expert_size, requested=shared_experts),
        names=NAMES,
    )


def _read_sparse_layers(raw: Raw, layers: int) -> tuple[bool, ...]:
    """Tell which layers have experts: every ``moe_layer_interval``-th from one, between the start and the end index."""
    interval = read_int(raw, "moe_layer_interval", minimum=1)
    start, end = read_int(raw, "moe_layer_start_index"), read_int(raw, "moe_layer_end_index", -1, minimum=-1)
    end = layers - 1 if end == -1 else end
    return tuple((i + 1) % interval == 0 and start <= i <= end for i in range(layers))


def _read_router(raw: Raw) -> RouterConfig:
    """Softmax over all in float32, chosen with the bias, weighed without it."""
    experts = _read_either(raw, "moe_num_experts", "num_experts", maximum=MOST_EXPERTS)
    top_k = _read_either(raw, "moe_k", "num_experts_per_tok", maximum=MOST_EXPERTS)
    if top_k > experts:
        raise ValueError(f"config.json: moe_k={top_k} must be in 1..moe_num_experts={experts}")
    return RouterConfig(
        num_experts=experts,
        top_k=top_k,
        renormalize=True,
        sum_floor=read_float(raw, "moe_norm_min", maximum=1.0),
        float32_logits=True,
        round_weights=True,
    )


def _read_either(raw: Raw, key: str, other: str, *, maximum: int) -> int:
    """Read a positive integer that has two names."""
    mine, others = raw.get(key), raw.get(other)
    if mine is not None and others is not None and mine != others:
        raise ValueError(f"config.json: {key}={brief(mine)} and {other}={brief(others)} must be equal")
    return read_int(raw, other if mine is None and others is not None else key, minimum=1, maximum=maximum)


def build_params(fill: Fill, config: Config) -> Params:
    """Describe every parameter of the model and the checkpoint tensors that fill it."""
    if any(f"model.layers.{i}.mlp.{OTHER_BIAS}" in fill.names for i in range(len(config.sparse_layers))):
        config = replace(config, names=NAMES._replace(bias=OTHER_BIAS))
    return stack_params(fill, config)
