"""GLM-4.5 and 4.5-Air, and 4.6 and 4.7 of the same kind: grouped-query attention with DeepSeek-V3's mixture of experts.

The first half of each head's channels rotates, and q, k and v have biases. The draft layer that
``num_nextn_predict_layers`` counts stands behind ``num_hidden_layers``, as in DeepSeek-V3.

Source: the published config.json of GLM-4.5 and GLM-4.5-Air; arXiv:2508.06471, section 2.1. dots.llm1 shares the
reading of the keys that both have.
"""

from fmoe.functional.moe import SharedExperts, plan_shared_experts
from fmoe.functional.rotary import RopeConfig
from fmoe.functional.routing import RouterConfig

from .decoder import decoder_config
from .gqa import AttentionConfig, attention_config
from .gqa_decoder import FULL, SLIDING, Config, layer_params, read_window
from .gqa_decoder import build_params as build_params
from .gqa_decoder import init_state as init_state
from .gqa_decoder import make_layers as make_layers
from .mtp import DraftParams, draft_params
from .mtp import draft_names as draft_names
from .routers import BIAS, read_sigmoid_router
from .settings import (
    MOST_SHARED,
    Raw,
    read_bool,
    read_eps,
    read_int,
    read_layers,
    read_partial_rope,
    require,
    with_defaults,
)
from .weights import ExpertNames, Fill

MODEL_TYPES: tuple[str, ...] = ("glm4_moe",)
ARCHITECTURES: tuple[str, ...] = ("Glm4MoeForCausalLM",)
DRAFT_KIND = FULL
NAMES = ExpertNames(shared="shared_experts", bias=BIAS)
DEFAULTS = {
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json; values that are not implemented are refused by name."""
    raw = with_defaults(raw, DEFAULTS)
    attention = attention_config(raw, eps=read_eps(raw, 1e-5))
    return make_config(
        raw,
        (FULL,) * read_layers(raw),
        attention,
        read_partial_rope(raw, attention.head_size, part=0.5, theta=10000.0),
        read_sigmoid_router(raw),
        biased="qkv" if read_bool(raw, "attention_bias", False) else "",
        head_norms=read_bool(raw, "use_qk_norm", False),
        shared_experts=shared_experts,
        drafts=1,
    )


def make_config(
    raw: Raw,
    kinds: tuple[str, ...],
    attention: AttentionConfig,
    rope: RopeConfig,
    router: RouterConfig,
    /,
    *,
    biased: str,
    head_norms: bool,
    shared_experts: SharedExperts,
    drafts: int = 0,
) -> Config:
    """Read the keys that GLM-4.5 and dots.llm1 have in common.

    Args:
        raw: config.json with the family's defaults.
        kinds: full or sliding, layer by layer.
        attention: sizes.
        rope: rotation.
        router: routing rule.
        biased: attention projections with a bias.
        head_norms: q and k are normed per head.
        shared_experts: how to run them.
        drafts: default of ``num_nextn_predict_layers``.
    """
    require(raw, {"hidden_act": ("silu",), "mlp_bias": (False,), "moe_layer_freq": (1,)})
    window = read_window(raw, 4096) if SLIDING in kinds else None
    dense_layers = read_int(raw, "first_k_dense_replace")
    expert_size = read_int(raw, "moe_intermediate_size", minimum=1)
    count = read_int(raw, "n_shared_experts", maximum=MOST_SHARED)
    return Config(
        decoder=decoder_config(raw, kinds, rope, window=window, drafts=drafts, eps=attention.eps),
        attention=attention,
        router=router,
        sparse_layers=tuple(i >= dense_layers for i in range(len(kinds))),
        intermediate_size=read_int(raw, "intermediate_size", minimum=1 if dense_layers else 0),
        expert_size=expert_size,
        shared=plan_shared_experts(count, None, expert_size, requested=shared_experts),
        names=NAMES,
        biased=biased,
        head_norms=head_norms,
    )


def build_drafts(fill: Fill, config: Config) -> DraftParams:
    """Describe the draft layer, which is one more sparse layer, and what stands around it."""
    layer = layer_params(fill, f"model.layers.{len(config.decoder.layer_kinds)}", config, sparse=True)
    return draft_params(fill, draft_names(config), layer, config.decoder.hidden_size)
