"""Granite-MoE and Granite-MoE-Shared: four multipliers, experts stacked on disk, and in the second a shared MLP.

The multipliers cost nothing per layer. A norm forgets the scale of what it reads, so the residual stream is kept
divided by ``residual_multiplier`` r: branches are added as they are, the embedding is multiplied by
``embedding_multiplier / r``, and every norm of the stream adds ``eps / r^2``. cos and sin of queries and keys hold the
scale of the scores, and the weight of the final norm the divisor of the logits.

Source: the published config.json of granite-3.0-3b-a800m and moe-7b-1b-active-shared-experts; arXiv:2408.13359;
transformers' GraniteMoe and GraniteMoeShared.

Letters: D hidden, E experts, F expert width, W shared width.
"""

from dataclasses import replace
from operator import itemgetter

import torch

from fmoe.functional.mlp import MLPParams
from fmoe.functional.moe import MoEParams, SharedExperts, SharedParams, SharedPlan, keep_apart, plan_shared_experts
from fmoe.functional.quant import Weight
from fmoe.functional.rotary import RopeConfig
from fmoe.functional.routing import RouterConfig

from .decoder import LayerParams, Params, decoder_config, frame_params
from .gqa import AttentionConfig, attention_config, attention_params
from .gqa_decoder import FULL, Config, read_experts
from .gqa_decoder import init_state as init_state
from .gqa_decoder import make_layers as make_layers
from .settings import (
    MOST_SHARED,
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
from .weights import DIFFER, SCALE, ExpertNames, Fill, Piece, matrix, plain

MODEL_TYPES: tuple[str, ...] = ("granitemoe", "granitemoeshared")
ARCHITECTURES: tuple[str, ...] = ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
SMALLEST, LARGEST = 1e-6, 1e6  # of a multiplier, such that its square and quotients stay in float32


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json; values that are not implemented are refused by name."""
    require(raw, {"hidden_act": ("silu",)})
    attention = attention_config(raw, eps=read_eps(raw, 1e-6))
    kinds, rope = (FULL,) * read_layers(raw), _read_rope(raw, attention)
    decoder, residual = decoder_config(raw, kinds, rope), _read_multiplier(raw, "residual_multiplier")
    width, experts = read_int(raw, "intermediate_size", minimum=1), read_experts(raw, "num_local_experts", minimum=1)
    shared = read_int(raw, "shared_intermediate_size", 0, maximum=MOST_SHARED * width)
    return Config(
        decoder=replace(
            decoder,
            eps=decoder.eps / residual**2,
            embedding_scale=_read_multiplier(raw, "embedding_multiplier") / residual,
            logits_divisor=_read_multiplier(raw, "logits_scaling"),
        ),
        attention=attention,
        router=RouterConfig(experts, read_top_k(raw, experts), scoring="chosen_softmax", round_weights=True),
        sparse_layers=(True,) * len(kinds),
        intermediate_size=width,
        expert_size=width,
        shared=plan_shared_experts(None, shared, width, requested=shared_experts),
        names=ExpertNames(),
        biased="qkvo" if read_bool(raw, "attention_bias", False) else "",
    )


def _read_multiplier(raw: Raw, key: str) -> float:
    return read_float(raw, key, 1.0, minimum=SMALLEST, maximum=LARGEST)


def _read_rope(raw: Raw, attention: AttentionConfig) -> RopeConfig:
    """Scores are multiplied by ``attention_multiplier`` in place of C^-0.5: cos and sin by the root of their ratio."""
    rope = read_whole_rope(raw, attention.head_size, theta=10000.0)
    ratio = _read_multiplier(raw, "attention_multiplier") * attention.head_size**0.5
    return replace(rope, attention_factor=rope.attention_factor * ratio**0.5)


def build_params(fill: Fill, config: Config) -> Params:
    """Describe every parameter of the model and the checkpoint tensors that fill it."""
    hidden = config.decoder.hidden_size
    layers = []
    for i in range(len(config.decoder.layer_kinds)):
        prefix = f"model.layers.{i}"
        layers.append(
            LayerParams(
                plain(fill, f"{prefix}.input_layernorm.weight", (hidden,)),
                attention_params(fill, f"{prefix}.self_attn", config.attention, hidden, biased=config.biased),
                plain(fill, f"{prefix}.post_attention_layernorm.weight", (hidden,)),
                _moe_params(fill, prefix, config, hidden),
            )
        )
    divisor = config.decoder.logits_divisor
    norm = Piece("model.norm.weight", (hidden,), take=lambda w: w.float() / divisor)
    norm_D = fill((hidden,), [norm], dtype=None if divisor == 1.0 else torch.float32)
    return frame_params(fill, config.decoder, tuple(layers), norm_D)


def _moe_params(fill: Fill, prefix: str, config: Config, hidden: int) -> MoEParams:
    """One layer; files that transformers 5 wrote as it holds them have other names for router and experts."""
    moe, shared_mlp = f"{prefix}.block_sparse_moe", f"{prefix}.shared_mlp"
    router, gate_up, down = f"{moe}.router.layer.weight", f"{moe}.input_linear.weight", f"{moe}.output_linear.weight"
    if f"{moe}.experts.gate_up_proj" in fill.names:
        router, gate_up, down = f"{moe}.router.weight", f"{moe}.experts.gate_up_proj", f"{moe}.experts.down_proj"
    plan = config.shared
    if plan.width and (f"{down}{SCALE}" in fill.names) != (f"{shared_mlp}.output_linear.weight{SCALE}" in fill.names):
        plan = keep_apart(plan, DIFFER)
    experts, width = config.router.num_experts, config.expert_size
    stacks = _expert_stacks(fill, (gate_up, down, shared_mlp), plan, (experts, width, hidden))
    shared = None
    if plan.width and not plan.slots:
        w_gate_up_PD = matrix(fill, f"{shared_mlp}.input_linear.weight", (2 * plan.width, hidden))
        w_down_DF = matrix(fill, f"{shared_mlp}.output_linear.weight", (hidden, plan.width))
        shared = SharedParams(MLPParams(w_gate_up_PD, w_down_DF), None)
    return MoEParams(
        fill((experts, hidden), [Piece(router, (experts, hidden))], by_columns=True), *stacks, None, shared
    )


def _expert_stacks(
    fill: Fill, names: tuple[str, str, str], plan: SharedPlan, sizes: tuple[int, int, int]
) -> tuple[Weight, Weight]:
    """The stacks [E + S, 2F, D] and [E + S, D, F]: the file's own, and slots cut from the gate and up rows of W."""
    (gate_up, down, shared_mlp), (experts, width, hidden) = names, sizes
    rows = [Piece(gate_up, (experts, 2 * width, hidden), (slice(0, experts),))]
    columns = [Piece(down, (experts, hidden, width), (slice(0, experts),))]
    source_up, source_down = f"{shared_mlp}.input_linear.weight", f"{shared_mlp}.output_linear.weight"
    for slot in range(plan.slots):
        start = slot * width
        for into, first in ((0, start), (width, plan.width + start)):
            place = (experts + slot, slice(into, into + width))
            take_rows = itemgetter(slice(first, first + width))
            rows.append(Piece(source_up, (2 * plan.width, hidden), place, take_rows, shares=True))
        take_columns = itemgetter((slice(None), slice(start, start + width)))
        columns.append(Piece(source_down, (hidden, plan.width), (experts + slot,), take_columns, shares=True))
    total = experts + plan.slots
    return fill.weight((total, 2 * width, hidden), rows, parts=2), fill.weight((total, hidden, width), columns)
