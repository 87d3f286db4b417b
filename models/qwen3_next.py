"""Qwen3-Next: Gated DeltaNet layers with a gated full-attention layer every few, and a MoE block in each.

Letters: B sequences, T tokens, D hidden, E experts. Source: the published config.json of
Qwen3-Next-80B-A3B-Instruct; arXiv:2412.06464 for the linear layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from fmoe.functional.attention import Placement
from fmoe.functional.cache import Cache, DeltaCache, PendingDelta
from fmoe.functional.deltanet import DeltaConfig, DeltaParams
from fmoe.functional.kernels import Kernels
from fmoe.functional.moe import SharedExperts, SharedPlan, plan_shared_experts
from fmoe.functional.routing import RouterConfig

from .decoder import (
    DecoderConfig,
    LayerParams,
    Layers,
    Params,
    State,
    decoder_config,
    frame_params,
    make_state,
    residual_layer,
)
from .gqa import AttentionConfig, AttentionParams, attention_cache, attention_config, attention_mixer, attention_params
from .mtp import DraftNames, DraftParams, draft_params
from .settings import (
    MOST_EXPERTS,
    MOST_SHARED,
    Raw,
    read_bool,
    read_eps,
    read_expert_size,
    read_int,
    read_layer_types,
    read_layers,
    read_partial_rope,
    read_shared_size,
    read_sparse_layers,
    read_top_k,
    require,
)
from .weights import ExpertNames, Fill, Piece, gate_and_up, matrix, matrix_rows, moe_params, plain, zero_centred_norm

MODEL_TYPES: tuple[str, ...] = ("qwen3_next",)
ARCHITECTURES: tuple[str, ...] = ("Qwen3NextForCausalLM",)
NAMES = ExpertNames(shared_gate="shared_expert_gate.weight")
LINEAR, FULL = "linear_attention", "full_attention"
DRAFT_KIND = FULL
MOST_TAPS = 1024


@dataclass(frozen=True, slots=True)
class Config:
    """One model, all values."""

    decoder: DecoderConfig
    attention: AttentionConfig
    delta: DeltaConfig
    router: RouterConfig
    sparse_layers: tuple[bool, ...]
    intermediate_size: int
    expert_size: int
    shared: SharedPlan


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json; values that are not implemented are refused by name."""
    require(raw, {"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)})
    kinds, experts = _layer_kinds(raw), read_int(raw, "num_experts", maximum=MOST_EXPERTS)
    attention = attention_config(raw, eps=read_eps(raw, 1e-6), gated=True)
    sparse_layers, expert_size = read_sparse_layers(raw, len(kinds), experts), read_expert_size(raw, experts)
    has_count = raw.get("n_shared_experts") is not None
    count = read_int(raw, "n_shared_experts", maximum=MOST_SHARED) if has_count else None
    shared_size = read_shared_size(raw, expert_size, count)
    return Config(
        decoder=decoder_config(raw, kinds, read_partial_rope(raw, attention.head_size, part=0.25, theta=10000.0)),
        attention=attention,
        delta=_read_delta(raw, attention.eps),
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


def _read_delta(raw: Raw, eps: float) -> DeltaConfig:
    return DeltaConfig(
        key_heads=read_int(raw, "linear_num_key_heads", minimum=1),
        value_heads=read_int(raw, "linear_num_value_heads", minimum=1),
        key_size=read_int(raw, "linear_key_head_dim", minimum=1),
        value_size=read_int(raw, "linear_value_head_dim", minimum=1),
        conv_size=read_int(raw, "linear_conv_kernel_dim", 4, minimum=1, maximum=MOST_TAPS),
        eps=eps,
    )


def _layer_kinds(raw: Raw) -> tuple[str, ...]:
    layers = read_layers(raw)
    interval = read_int(raw, "full_attention_interval", 4, minimum=1)
    return read_layer_types(raw, layers, (LINEAR, FULL)) or tuple(
        FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)
    )


def build_params(fill: Fill, config: Config) -> Params:
    """Describe every parameter of the model and the checkpoint tensors that fill it."""
    layers = tuple(
        layer_params(fill, f"model.layers.{i}", config, kind=kind, sparse=sparse)
        for i, (kind, sparse) in enumerate(zip(config.decoder.layer_kinds, config.sparse_layers, strict=True))
    )
    norm_D = zero_centred_norm(fill, "model.norm.weight", config.decoder.hidden_size)
    return frame_params(fill, config.decoder, layers, norm_D)


def layer_params(fill: Fill, prefix: str, config: Config, /, *, kind: str, sparse: bool) -> LayerParams:
    """Describe one layer, such as ``model.layers.0``."""
    hidden, mlp = config.decoder.hidden_size, f"{prefix}.mlp"
    mixer: DeltaParams | AttentionParams
    if kind == LINEAR:
        mixer = _delta_params(fill, f"{prefix}.linear_attn", config.delta, hidden)
    else:
        mixer = attention_params(fill, f"{prefix}.self_attn", config.attention, hidden, norm="centred")
    return LayerParams(
        zero_centred_norm(fill, f"{prefix}.input_layernorm.weight", hidden),
        mixer,
        zero_centred_norm(fill, f"{prefix}.post_attention_layernorm.weight", hidden),
        moe_params(fill, mlp, config.router, config.shared, config.expert_size, hidden, NAMES)
        if sparse
        else gate_and_up(fill, mlp, config.intermediate_size, hidden),
    )


def draft_names(config: Config, /) -> DraftNames:
    """Name the draft's tensors, the layer's aside."""
    ends = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    return DraftNames(*(f"mtp.{end}.weight" for end in ends))


def build_drafts(fill: Fill, config: Config) -> DraftParams:
    """Describe the draft layer, which is one of full attention, and what stands around it."""
    sparse = any(config.sparse_layers)
    layer = layer_params(fill, "mtp.layers.0", config, kind=DRAFT_KIND, sparse=sparse)
    return draft_params(fill, draft_names(config), layer, config.decoder.hidden_size, norm=zero_centred_norm)


def _delta_params(fill: Fill, prefix: str, config: DeltaConfig, hidden: int) -> DeltaParams:
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
    channels, taps = 2 * keys + values, config.conv_size
    conv = Piece(f"{prefix}.conv1d.weight", (channels, 1, taps), take=lambda w: w.squeeze(1).T)
    decay = Piece(f"{prefix}.A_log", (heads,), take=lambda w: -w.float().exp())
    return DeltaParams(
        w_in_ND=matrix_rows(fill, parts, hidden, counts=[keys, keys, values, values, heads, heads]),
        w_conv_WN=fill((taps, channels), [conv]),
        decay_H=fill((heads,), [decay], dtype=torch.float32),
        dt_bias_H=plain(fill, f"{prefix}.dt_bias", (heads,), dtype=torch.float32),
        norm_V=plain(fill, f"{prefix}.norm.weight", (config.value_size,)),
        w_out_DN=matrix(fill, f"{prefix}.out_proj.weight", (hidden, values)),
    )


def delta_mixer(
    x_BTD: Tensor,
    params: DeltaParams,
    cache: DeltaCache | PendingDelta,
    placement: Placement,
    /,
    *,
    config: DeltaConfig,
    kernels: Kernels,
) -> Tensor:
    """Project, convolve and recur, project back.

    Returns:
        A tensor like x.
    """
    projected_BTN = kernels.linear(x_BTD, params.w_in_ND)
    if placement.kept_B is not None:
        mixed_BTN = kernels.delta_verify(projected_BTN, cache, params, config, placement.kept_B)
    else:
        mix = kernels.delta_decode if x_BTD.shape[1] == 1 else kernels.delta_prefill
        mixed_BTN = mix(projected_BTN, cache, params, config)
    return kernels.linear(mixed_BTN, params.w_out_DN)


def make_layers(config: Config, kernels: Kernels) -> Layers:
    """Give the function of each layer kind, config and kernels bound: ``(x, params, cache, placement) -> x``."""
    mixers = {
        LINEAR: partial(delta_mixer, config=config.delta, kernels=kernels),
        FULL: partial(attention_mixer, config=config.attention, kernels=kernels),
    }
    return {
        kind: partial(residual_layer, mixer=mixer, router=config.router, eps=config.decoder.eps, kernels=kernels)
        for kind, mixer in mixers.items()
    }


def init_state(config: Config, batch: int, slots: int, /, *, dtype: torch.dtype, device: torch.device) -> State:
    """Make the empty state of ``batch`` sequences of up to ``slots`` tokens."""
    delta = config.delta

    def empty(kind: str) -> Cache:
        if kind == FULL:
            return attention_cache(config.attention, batch, slots, dtype=dtype, device=device)
        window = torch.zeros(batch, delta.conv_size - 1, delta.split_sizes[0], dtype=dtype, device=device)
        shape = (batch, delta.value_heads, delta.key_size, delta.value_size)
        return DeltaCache(window, torch.zeros(shape, dtype=delta.state_dtype, device=device))

    caches = tuple(empty(kind) for kind in config.decoder.layer_kinds)
    return make_state(caches, batch, config.decoder.rope, device=device)
