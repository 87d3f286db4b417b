"""dots.llm1: attention with q and k normed per head, DeepSeek-V3's router, two shared experts beside 128.

Layers from ``max_window_layers`` on slide where there is a window; published models have none.

Source: the published config.json of dots.llm1.inst; arXiv:2506.05767, section 2.
"""

from fmoe.functional.moe import SharedExperts

from .glm4_moe import make_config
from .gqa import attention_config
from .gqa_decoder import FULL, SLIDING, Config
from .gqa_decoder import build_params as build_params
from .gqa_decoder import init_state as init_state
from .gqa_decoder import make_layers as make_layers
from .routers import read_sigmoid_router
from .settings import Raw, read_bool, read_eps, read_int, read_layer_types, read_layers, read_whole_rope, with_defaults

MODEL_TYPES: tuple[str, ...] = ("dots1",)
ARCHITECTURES: tuple[str, ...] = ("Dots1ForCausalLM",)
DEFAULTS = {
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json; values that are not implemented are refused by name."""
    raw, kinds = with_defaults(raw, DEFAULTS), _layer_kinds(raw)
    attention = attention_config(raw, eps=read_eps(raw, 1e-6))
    return make_config(
        raw,
        kinds,
        attention,
        read_whole_rope(raw, attention.head_size, theta=10000.0),
        # published files call the rule by the name of its choice
        read_sigmoid_router(raw, scoring=("sigmoid", "noaux_tc")),
        biased="qkvo" if read_bool(raw, "attention_bias", False) else "",
        head_norms=True,
        shared_experts=shared_experts,
    )


def _layer_kinds(raw: Raw) -> tuple[str, ...]:
    """Take ``layer_types`` where the file has it; else layers from ``max_window_layers`` on slide.

    ``"sliding_window": null`` switches the window off; only an absent key means the default width. transformers reads
    no ``use_sliding_window`` here.
    """
    count, windowed = read_layers(raw), raw.get("sliding_window", 0) is not None
    kinds = read_layer_types(raw, count, (FULL, SLIDING))
    if kinds is None:
        start = read_int(raw, "max_window_layers", 62)
        return tuple(SLIDING if windowed and i >= start else FULL for i in range(count))
    if SLIDING in kinds and not windowed:
        raise ValueError(f"config.json: layer_types has {SLIDING}, but sliding_window is null; make them agree")
    return kinds
