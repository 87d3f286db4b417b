"""Qwen2-MoE, such as Qwen1.5-MoE-A2.7B: biased attention, and a wide shared expert behind a sigmoid gate.

Source: the published config.json of Qwen1.5-MoE-A2.7B; arXiv:2407.10671, section 2.2.2. Qwen3-MoE shares the
reading of the keys that both have.
"""

from fmoe.functional.moe import SharedExperts, plan_shared_experts
from fmoe.functional.routing import RouterConfig

from .decoder import decoder_config
from .gqa import attention_config
from .gqa_decoder import FULL, SLIDING, Config, read_experts, read_window
from .gqa_decoder import build_params as build_params
from .gqa_decoder import init_state as init_state
from .gqa_decoder import make_layers as make_layers
from .settings import (
    Raw,
    read_bool,
    read_eps,
    read_expert_size,
    read_int,
    read_layer_types,
    read_layers,
    read_shared_size,
    read_sparse_layers,
    read_top_k,
    read_whole_rope,
    require,
)
from .weights import ExpertNames

MODEL_TYPES: tuple[str, ...] = ("qwen2_moe",)
ARCHITECTURES: tuple[str, ...] = ("Qwen2MoeForCausalLM",)
NAMES = ExpertNames(shared_gate="shared_expert_gate.weight")


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json; values that are not implemented are refused by name."""
    require(raw, {"attention_bias": (False,)})
    return make_config(
        raw,
        read_layer_kinds(raw),
        biased="qkv" if read_bool(raw, "qkv_bias", True) else "",
        shared=True,
        shared_experts=shared_experts,
    )


def read_layer_kinds(raw: Raw) -> tuple[str, ...]:
    """Take ``layer_types`` where the file has it; else every second layer below ``max_window_layers`` slides.

    Source: the rule is that of transformers' Qwen2MoeConfig, and the first layer slides.
    """
    count, slides = read_layers(raw), read_bool(raw, "use_sliding_window", False)
    kinds = read_layer_types(raw, count, (FULL, SLIDING))
    if kinds is None:
        end = read_int(raw, "max_window_layers", 28)
        return tuple(SLIDING if slides and i % 2 == 0 and i < end else FULL for i in range(count))
    if SLIDING in kinds and not slides:
        raise ValueError(f"config.json: layer_types has {SLIDING}, but use_sliding_window is not true; make them agree")
    return kinds


def make_config(
    raw: Raw,
    kinds: tuple[str, ...],
    /,
    *,
    biased: str,
    head_norms: bool = False,
    shared: bool = False,
    shared_experts: SharedExperts,
) -> Config:
    """Read the keys that Qwen2-MoE and Qwen3-MoE have in common.

    Args:
        raw: config.json.
        kinds: full or sliding, layer by layer.
        biased: attention projections with a bias.
        head_norms: q and k are normed per head.
        shared: the family has a shared expert.
        shared_experts: how to run it.
    """
    require(raw, {"hidden_act": ("silu",)})
    attention = attention_config(raw, eps=read_eps(raw, 1e-6))
    experts = read_experts(raw)
    expert_size, sparse_layers = read_expert_size(raw, experts), read_sparse_layers(raw, len(kinds), experts)
    shared_size = read_shared_size(raw, expert_size) if shared else 0
    return Config(
        decoder=decoder_config(
            raw,
            kinds,
            read_whole_rope(raw, attention.head_size, theta=10000.0),
            window=read_window(raw, 4096) if SLIDING in kinds else None,
        ),
        attention=attention,
        router=_read_router(raw, experts),
        sparse_layers=sparse_layers,
        intermediate_size=read_int(raw, "intermediate_size", minimum=0 if all(sparse_layers) else 1),
        expert_size=expert_size,
        shared=plan_shared_experts(None, shared_size, expert_size, requested=shared_experts),
        names=NAMES,
        biased=biased,
        head_norms=head_norms,
    )


def _read_router(raw: Raw, experts: int) -> RouterConfig:
    """Softmax over all, the best weighed in the model's dtype; without experts, a rule that no layer uses."""
    return RouterConfig(
        num_experts=max(experts, 1),
        top_k=read_top_k(raw, experts) if experts else 1,
        renormalize=read_bool(raw, "norm_topk_prob", False),
        round_weights=True,
    )
