"""GLM-4.7-Flash: DeepSeek-V3's layers, latent attention and all, with GLM's sizes and defaults.

The draft layer that ``num_nextn_predict_layers`` counts stands behind ``num_hidden_layers``, as in DeepSeek-V3.

Source: the published config.json of GLM-4.7-Flash; transformers' Glm4MoeLite.
"""

from itertools import takewhile
from reprlib import repr as brief

from fmoe.functional.moe import SharedExperts

from .deepseek_v2 import Config as Config
from .deepseek_v2 import build_params as build_params
from .deepseek_v2 import init_state as init_state
from .deepseek_v2 import latent_rope, make_config
from .deepseek_v2 import make_layers as make_layers
from .deepseek_v3 import DRAFT_KIND as DRAFT_KIND
from .deepseek_v3 import build_drafts as build_drafts
from .deepseek_v3 import draft_names as draft_names
from .mla import latent_config
from .routers import BIAS, read_sigmoid_router
from .settings import Raw, read_bool, read_int, read_layers, require, with_defaults

MODEL_TYPES: tuple[str, ...] = ("glm4_moe_lite",)
ARCHITECTURES: tuple[str, ...] = ("Glm4MoeLiteForCausalLM",)
DENSE, SPARSE = "dense", "sparse"
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
}


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json; values that are not implemented are refused by name."""
    require(raw, {"partial_rotary_factor": (1.0,)})
    raw = {"q_lora_rank": 768, **with_defaults(raw, DEFAULTS)}  # a rank of null is a value of its own
    rope = latent_rope(raw)
    return make_config(
        raw,
        rope,
        latent_config(raw, rope, interleaved=read_bool(raw, "rope_interleave", True)),
        read_sigmoid_router(raw),
        shared_experts=shared_experts,
        dense_layers=_read_dense_layers(raw),
        bias=BIAS,
        drafts=1,
    )


def _read_dense_layers(raw: Raw) -> int:
    """Count the dense layers in front: published files have ``first_k_dense_replace``, transformers a list of kinds."""
    first, kinds, layers = read_int(raw, "first_k_dense_replace", 1), raw.get("mlp_layer_types"), read_layers(raw)
    if kinds is None:
        return first
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (DENSE, SPARSE) for kind in kinds):
        raise ValueError(
            f"config.json: mlp_layer_types must list {DENSE!r} or {SPARSE!r} for num_hidden_layers={layers} layers, "
            f"got {brief(kinds)}"
        )
    count = sum(1 for _ in takewhile(lambda kind: kind == DENSE, kinds))
    if DENSE in kinds[count:]:
        raise NotImplementedError(
            f"config.json: mlp_layer_types={brief(kinds)} is not implemented; implemented: dense layers first"
        )
    if raw.get("first_k_dense_replace") is not None and first != count:
        raise ValueError(
            f"config.json: first_k_dense_replace={first} and mlp_layer_types with {count} dense layers must agree"
        )
    return count
