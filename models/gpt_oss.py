"""gpt-oss: attention sinks, biases everywhere, every second layer with a sliding window, clamped SwiGLU in the experts.

Files hold the experts transposed, with gate and up columns in turn, or as rows in MXFP4; here gate rows come first.

Source: arXiv:2508.10925, section 2; the published config.json of gpt-oss-20b and 120b; transformers' GptOss.

Letters: D hidden, E experts, F expert width, P = 2F (gate rows, then up rows).
"""

import torch
from torch import Tensor

from fmoe.functional.experts import ExpertBiases
from fmoe.functional.mlp import Activation
from fmoe.functional.moe import MoEParams, SharedExperts, plan_shared_experts
from fmoe.functional.quant import FP4_BLOCK
from fmoe.functional.rotary import RopeConfig
from fmoe.functional.routing import RouterConfig

from .decoder import LayerParams, Params, decoder_config, frame_params
from .gqa import AttentionConfig, attention_config, attention_params
from .gqa_decoder import FULL, SLIDING, Config, read_experts, read_window
from .gqa_decoder import init_state as init_state
from .gqa_decoder import make_layers as make_layers
from .settings import (
    SMALLEST,
    Raw,
    read_bool,
    read_eps,
    read_float,
    read_int,
    read_layer_types,
    read_layers,
    read_top_k,
    read_whole_rope,
    require,
)
from .weights import ExpertNames, Fill, Piece, plain, rows

MODEL_TYPES: tuple[str, ...] = ("gpt_oss",)
ARCHITECTURES: tuple[str, ...] = ("GptOssForCausalLM",)
HEADS = {"head_dim": 64, "num_key_value_heads": 8}  # where the keys are absent
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json; values that are not implemented are refused by name."""
    require(raw, {"hidden_act": ("silu",)})
    attention = attention_config({**HEADS, **raw}, eps=read_eps(raw, 1e-5))
    kinds, width = _layer_kinds(raw), read_int(raw, "intermediate_size", minimum=1)
    experts = read_experts(raw, "num_local_experts", minimum=1)
    return Config(
        decoder=decoder_config(raw, kinds, _read_rope(raw, attention), window=read_window(raw, 128), eps=1e-5),
        attention=attention,
        router=RouterConfig(experts, read_top_k(raw, experts), scoring="chosen_softmax", round_weights=True),
        sparse_layers=(True,) * len(kinds),
        intermediate_size=width,
        expert_size=width,
        shared=plan_shared_experts(0, None, width, requested=shared_experts),
        names=ExpertNames(),
        biased="qkvo" if read_bool(raw, "attention_bias", True) else "",
        activation=Activation(
            alpha=read_float(raw, "swiglu_alpha", 1.702, minimum=SMALLEST),
            limit=read_float(raw, "swiglu_limit", 7.0, minimum=SMALLEST),
            shift=1.0,
        ),
    )


def _layer_kinds(raw: Raw) -> tuple[str, ...]:
    """Sliding and full attention in turn, unless ``layer_types`` tells."""
    count = read_layers(raw)
    return read_layer_types(raw, count, (FULL, SLIDING)) or tuple((SLIDING, FULL)[i % 2] for i in range(count))


def _read_rope(raw: Raw, attention: AttentionConfig) -> RopeConfig:
    """Read the rotation, which is YaRN of 4096 tokens by 32 where the file has none."""
    if raw.get("rope_parameters") is None and raw.get("rope_scaling") in (None, {}):
        raw = {**raw, "rope_scaling": YARN}
    return read_whole_rope(raw, attention.head_size, theta=150000.0)


def build_params(fill: Fill, config: Config) -> Params:
    """Describe every parameter of the model and the checkpoint tensors that fill it."""
    layers = tuple(_layer_params(fill, f"model.layers.{i}", config) for i in range(len(config.decoder.layer_kinds)))
    return frame_params(fill, config.decoder, layers, _norm(fill, "model.norm", config))


def _norm(fill: Fill, name: str, config: Config) -> Tensor:
    """A weight that is multiplied with before the result is rounded to the model's dtype."""
    return plain(fill, f"{name}.weight", (config.decoder.hidden_size,), dtype=torch.float32)


def _layer_params(fill: Fill, prefix: str, config: Config) -> LayerParams:
    attention, name = config.attention, f"{prefix}.self_attn"
    mixer = attention_params(fill, name, attention, config.decoder.hidden_size, biased=config.biased)
    return LayerParams(
        _norm(fill, f"{prefix}.input_layernorm", config),
        mixer._replace(sinks_H=plain(fill, f"{name}.sinks", (attention.heads,))),
        _norm(fill, f"{prefix}.post_attention_layernorm", config),
        _moe_params(fill, f"{prefix}.mlp", config),
    )


def _moe_params(fill: Fill, prefix: str, config: Config) -> MoEParams:
    experts, width, hidden = config.router.num_experts, config.expert_size, config.decoder.hidden_size
    base = f"{prefix}.experts"
    read = _mxfp4_pieces if f"{base}.gate_up_proj_blocks" in fill.names else _plain_pieces
    gate_up, down = read(base, experts, width, hidden)
    gate_up_bias = Piece(f"{base}.gate_up_proj_bias", (experts, 2 * width), take=_gates_first)
    biases = ExpertBiases(
        bias_gate_up_EP=fill((experts, 2 * width), [gate_up_bias]),
        bias_down_ED=plain(fill, f"{base}.down_proj_bias", (experts, hidden)),
    )
    return MoEParams(
        w_router_ED=rows(fill, [Piece(f"{prefix}.router.weight", (experts, hidden))], hidden),
        w_gate_up_EPD=fill((experts, 2 * width, hidden), gate_up),
        w_down_EDF=fill((experts, hidden, width), down),
        bias_E=None,
        shared=None,
        bias_logits_E=plain(fill, f"{prefix}.router.bias", (experts,)),
        biases=biases,
    )


def _plain_pieces(base: str, experts: int, width: int, hidden: int) -> tuple[list[Piece], list[Piece]]:
    """Stacks [E, D, 2F] and [E, F, D]; each half is a view, since a copy of a stack may be larger than the file."""
    name, shape, every = f"{base}.gate_up_proj", (experts, hidden, 2 * width), slice(None)
    gate = Piece(name, shape, (every, slice(0, width)), lambda w: w[..., 0::2].transpose(1, 2), shares=True)
    up = Piece(name, shape, (every, slice(width, None)), lambda w: w[..., 1::2].transpose(1, 2), shares=True)
    down = Piece(f"{base}.down_proj", (experts, width, hidden), take=lambda w: w.transpose(1, 2))
    return [gate, up], [down]


def _mxfp4_pieces(base: str, experts: int, width: int, hidden: int) -> tuple[list[Piece], list[Piece]]:
    """Stacks [E, 2F, D] and [E, D, F] in blocks of 32 numbers, two of them in a byte."""

    def piece(name: str, count: int, columns: int) -> Piece:
        shape = (experts, count, columns // FP4_BLOCK, FP4_BLOCK // 2)
        return Piece(f"{base}.{name}_blocks", shape, exponents=f"{base}.{name}_scales")

    gate_up = piece("gate_up_proj", 2 * width, hidden)._replace(take=lambda w_PD: _gates_first(w_PD.T).T)
    return [gate_up], [piece("down_proj", hidden, width)]


def _gates_first(turns_P: Tensor) -> Tensor:
    """Put the even columns, which are gates, before the odd ones."""
    return torch.cat((turns_P[..., 0::2], turns_P[..., 1::2]), -1)
