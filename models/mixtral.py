"""Mixtral 8x7B and 8x22B: grouped-query attention and a MoE block in every layer, nothing shared, nothing biased.

Source: the published config.json of Mixtral-8x7B-v0.1 and Mixtral-8x22B-v0.1; arXiv:2401.04088.
"""

from fmoe.functional.moe import SharedExperts, plan_shared_experts
from fmoe.functional.routing import RouterConfig

from . import gqa_decoder
from .decoder import Params, decoder_config
from .gqa import attention_config
from .gqa_decoder import FULL, SLIDING, Config, read_experts, read_window
from .gqa_decoder import init_state as init_state
from .gqa_decoder import make_layers as make_layers
from .settings import Raw, read_eps, read_int, read_layers, read_top_k, read_whole_rope, require
from .weights import ExpertNames, Fill

MODEL_TYPES: tuple[str, ...] = ("mixtral",)
ARCHITECTURES: tuple[str, ...] = ("MixtralForCausalLM",)
NAMES = ExpertNames(gate="w1", up="w3", down="w2")


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json; values that are not implemented are refused by name."""
    require(raw, {"hidden_act": ("silu",), "attention_bias": (False,)})
    attention = attention_config(raw, eps=read_eps(raw, 1e-5))
    window = None if raw.get("sliding_window") is None else read_window(raw)
    kinds = (FULL if window is None else SLIDING,) * read_layers(raw)
    rope = read_whole_rope(raw, attention.head_size, theta=1e6)
    width = read_int(raw, "intermediate_size", minimum=1)
    experts = read_experts(raw, "num_local_experts", minimum=1)
    return Config(
        decoder=decoder_config(raw, kinds, rope, window=window, eps=attention.eps),
        attention=attention,
        router=RouterConfig(num_experts=experts, top_k=read_top_k(raw, experts), renormalize=True),
        sparse_layers=(True,) * len(kinds),
        intermediate_size=width,
        expert_size=width,
        shared=plan_shared_experts(0, None, width, requested=shared_experts),
        names=NAMES,
    )


def build_params(fill: Fill, config: Config) -> Params:
    """Describe every parameter; files that transformers 5 wrote as it holds them call the MoE block ``mlp``."""
    renamed = "model.layers.0.mlp.gate.weight" in fill.names
    return gqa_decoder.build_params(fill, config, moe="mlp" if renamed else "block_sparse_moe")
