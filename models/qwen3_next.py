"""Qwen3-Next: Gated DeltaNet layers with a gated full-attention layer every few, and a MoE block in each.

Source: the published config.json of Qwen3-Next-80B-A3B-Instruct; arXiv:2412.06464 for the linear layers. What
Qwen3.5-MoE shares is in ``gated_delta.py``.
"""

from collections.abc import Callable

from einops import rearrange
from torch import Tensor

from fmoe.functional.deltanet import DeltaConfig
from fmoe.functional.moe import SharedExperts, plan_shared_experts
from fmoe.functional.quant import Weight
from fmoe.functional.routing import RouterConfig

from .decoder import Params, decoder_config
from .gated_delta import FULL, Config, layer_params, read_delta, read_layer_kinds, stack_params
from .gated_delta import init_state as init_state
from .gated_delta import make_layers as make_layers
from .gqa import attention_config
from .mtp import DraftNames, DraftParams, draft_params
from .settings import (
    MOST_EXPERTS,
    MOST_SHARED,
    Raw,
    read_bool,
    read_eps,
    read_expert_size,
    read_int,
    read_partial_rope,
    read_shared_size,
    read_sparse_layers,
    read_top_k,
    require,
)
from .weights import Fill, Piece, matrix_rows, zero_centred_norm

MODEL_TYPES: tuple[str, ...] = ("qwen3_next",)
ARCHITECTURES: tuple[str, ...] = ("Qwen3NextForCausalLM",)
DRAFT_KIND = FULL


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json; values that are not implemented are refused by name."""
    require(raw, {"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)})
    kinds, experts = read_layer_kinds(raw), read_int(raw, "num_experts", maximum=MOST_EXPERTS)
    attention = attention_config(raw, eps=read_eps(raw, 1e-6), gated=True)
    sparse_layers, expert_size = read_sparse_layers(raw, len(kinds), experts), read_expert_size(raw, experts)
    has_count = raw.get("n_shared_experts") is not None
    count = read_int(raw, "n_shared_experts", maximum=MOST_SHARED) if has_count else None
    shared_size = read_shared_size(raw, expert_size, count)
    return Config(
        decoder=decoder_config(raw, kinds, read_partial_rope(raw, attention.head_size, part=0.25, theta=10000.0)),
        attention=attention,
        delta=read_delta(raw, attention.eps),
        router=RouterConfig(
            num_experts=max(experts, 1),
            top_k=read_top_k(raw, experts) if experts else 1,
            renormalize=read_bool(raw, "norm_topk_prob", True),
            round_weights=True,
        ),
        sparse_layers=sparse_layers,
        intermediate_size=read_int(raw, "intermediate_size", minimum=0 if all(sparse_layers) else 1),
        expert_size=expert_size,
        shared=plan_shared_experts(count, shared_size, expert_size, requested=shared_experts),
    )


def build_params(fill: Fill, config: Config) -> Params:
    """Describe every parameter of the model and the checkpoint tensors that fill it."""
    return stack_params(fill, config, project=_project)


def draft_names(config: Config, /) -> DraftNames:
    """Name the draft's tensors, the layer's aside."""
    ends = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    return DraftNames(*(f"mtp.{end}.weight" for end in ends))


def build_drafts(fill: Fill, config: Config) -> DraftParams:
    """Describe the draft layer, which is one of full attention, and what stands around it."""
    sparse = any(config.sparse_layers)
    layer = layer_params(fill, "mtp.layers.0", config, kind=DRAFT_KIND, sparse=sparse, project=_project)
    return draft_params(fill, draft_names(config), layer, config.decoder.hidden_size, norm=zero_centred_norm)


def _project(fill: Fill, prefix: str, config: DeltaConfig, hidden: int) -> Weight:
    """Reorder the projections, stored per key head as [q | k | v z of its value heads], into all q, all k, ..."""
    groups, ratio = config.key_heads, config.value_heads // config.key_heads
    keys, values, heads = groups * config.key_size, config.value_heads * config.value_size, config.value_heads
    sizes = [config.key_size, config.key_size, ratio * config.value_size, ratio * config.value_size]

    def take_part(which: int, split: list[int]) -> Callable[[Tensor], Tensor]:
        return lambda w: rearrange(
            rearrange(w, "(g n) d -> g n d", g=groups).split(split, 1)[which], "g n d -> (g n) d"
        )

    qkvz = Piece(f"{prefix}.in_proj_qkvz.weight", (2 * keys + 2 * values, hidden), shares=True)
    ba = Piece(f"{prefix}.in_proj_ba.weight", (2 * heads, hidden), shares=True)
    parts = [qkvz._replace(take=take_part(which, sizes)) for which in range(4)]
    parts += [ba._replace(take=take_part(which, [ratio, ratio])) for which in range(2)]
    return matrix_rows(fill, parts, hidden, counts=[keys, keys, values, values, heads, heads])
