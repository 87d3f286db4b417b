"""Qwen3-MoE, such as Qwen3-30B-A3B and 235B-A22B: q and k normed per head, many small experts, none shared.

Source: the published config.json of Qwen3-30B-A3B and Qwen3-235B-A22B; arXiv:2505.09388, section 2.
"""

from fmoe.functional.moe import SharedExperts

from .gqa_decoder import FULL, SLIDING, Config
from .gqa_decoder import build_params as build_params
from .gqa_decoder import init_state as init_state
from .gqa_decoder import make_layers as make_layers
from .qwen2_moe import make_config
from .settings import Raw, read_bool, read_layer_types, read_layers

MODEL_TYPES: tuple[str, ...] = ("qwen3_moe",)
ARCHITECTURES: tuple[str, ...] = ("Qwen3MoeForCausalLM",)


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json; values that are not implemented are refused by name."""
    biased = "qkvo" if read_bool(raw, "attention_bias", False) else ""
    return make_config(raw, _layer_kinds(raw), biased=biased, head_norms=True, shared_experts=shared_experts)


def _layer_kinds(raw: Raw) -> tuple[str, ...]:
    """All layers slide or none does; transformers reads neither ``layer_types`` nor ``max_window_layers`` here."""
    count = read_layers(raw)
    # "sliding_window": null switches the window off; only an absent key means the default width
    slides = read_bool(raw, "use_sliding_window", False) and raw.get("sliding_window", 0) is not None
    kinds = (SLIDING if slides else FULL,) * count
    if read_layer_types(raw, count, (FULL, SLIDING)) not in (None, kinds):
        raise NotImplementedError(
            f"config.json: layer_types={raw['layer_types']!r} is not implemented for qwen3_moe; implemented: "
            f"use_sliding_window true for {SLIDING} in every layer, false for {FULL} in every layer"
        )
    return kinds
