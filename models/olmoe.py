"""OLMoE: 64 small experts in every layer, none shared; q and k are normed over all heads at once.

Source: the published config.json of OLMoE-1B-7B-0924; arXiv:2409.02060, section 2.
"""

from dataclasses import replace

from fmoe.functional.moe import SharedExperts, plan_shared_experts
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
    read_top_k,
    read_whole_rope,
    require,
)
from .weights import ExpertNames

MODEL_TYPES: tuple[str, ...] = ("olmoe",)
ARCHITECTURES: tuple[str, ...] = ("OlmoeForCausalLM",)


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json; values that are not implemented are refused by name."""
    require(raw, {"hidden_act": ("silu",), "sliding_window": (None,)})
    kinds = (FULL,) * read_layers(raw)
    clip = None if raw.get("clip_qkv") is None else read_float(raw, "clip_qkv", minimum=SMALLEST)
    attention = replace(attention_config(raw, eps=read_eps(raw, 1e-5)), norms_whole=True, clip=clip)
    experts, width = read_experts(raw, minimum=1), read_int(raw, "intermediate_size", minimum=1)
    return Config(
        decoder=decoder_config(raw, kinds, read_whole_rope(raw, attention.head_size, theta=10000.0), eps=attention.eps),
        attention=attention,
        router=RouterConfig(
            num_experts=experts,
            top_k=read_top_k(raw, experts),
            renormalize=read_bool(raw, "norm_topk_prob", False),
            round_weights=True,
        ),
        sparse_layers=(True,) * len(kinds),
        intermediate_size=width,
        expert_size=width,
        shared=plan_shared_experts(None, None, width, requested=shared_experts),
        names=ExpertNames(),
        biased="qkvo" if read_bool(raw, "attention_bias", False) else "",
        head_norms=True,
    )
