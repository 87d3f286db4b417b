"""Qwen3.5-MoE, the language model: Qwen3-Next with its projections stored one by one and experts in every layer.

A checkpoint may hold a vision model besides, whose tensors are not read. Rotations of three axes are, for text, the
ordinary one: a token has the same position on all of them.

Source: the published config.json of Qwen3.5-35B-A3B, 122B-A10B and 397B-A17B; arXiv:2412.06464 for the linear layers.
"""

from fmoe.functional.deltanet import DeltaConfig
from fmoe.functional.moe import SharedExperts, plan_shared_experts
from fmoe.functional.quant import Weight
from fmoe.functional.routing import RouterConfig

from .decoder import Params, decoder_config
from .gated_delta import Config, read_delta, read_layer_kinds, stack_params
from .gated_delta import init_state as init_state
from .gated_delta import make_layers as make_layers
from .gqa import attention_config
from .gqa_decoder import read_experts
from .settings import (
    Raw,
    read_eps,
    read_expert_size,
    read_partial_rope,
    read_shared_size,
    read_top_k,
    require,
    with_defaults,
)
from .weights import Fill, Piece, matrix_rows

MODEL_TYPES: tuple[str, ...] = ("qwen3_5_moe_text", "qwen3_5_moe")
ARCHITECTURES: tuple[str, ...] = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
NESTED = "model.language_model"  # the prefix where there is, or was, a vision model
DEFAULTS = {"head_dim": 256, "num_key_value_heads": 2, "shared_expert_intermediate_size": 512}
FIXED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),  # of the linear layers
    "mamba_ssm_dtype": ("float32",),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "use_sliding_window": (False,),
}


def parse_config(raw: Raw, *, shared_experts: SharedExperts = "auto") -> Config:
    """Read config.json, of a nested one its ``text_config``; values that are not implemented are refused by name."""
    require(raw, FIXED)
    raw, kinds = with_defaults(raw, DEFAULTS), read_layer_kinds(raw)
    attention = attention_config(raw, eps=read_eps(raw, 1e-6), gated=True)
    experts = read_experts(raw, minimum=1)
    expert_size = read_expert_size(raw, experts)
    return Config(
        decoder=decoder_config(raw, kinds, read_partial_rope(raw, attention.head_size, part=0.25, theta=10000.0)),
        attention=attention,
        delta=read_delta(raw, attention.eps),
        router=RouterConfig(experts, read_top_k(raw, experts), renormalize=True, round_weights=True),
        sparse_layers=(True,) * len(kinds),
        intermediate_size=0,
        expert_size=expert_size,
        shared=plan_shared_experts(None, read_shared_size(raw, expert_size), expert_size, requested=shared_experts),
    )


def build_params(fill: Fill, config: Config) -> Params:
    """Describe every parameter of the model and the checkpoint tensors that fill it."""
    prefix = NESTED if f"{NESTED}.embed_tokens.weight" in fill.names else "model"
    return stack_params(fill, config, project=_project, prefix=prefix)


def _project(fill: Fill, prefix: str, config: DeltaConfig, hidden: int) -> Weight:
    """Stack q, k and v, which are one tensor already, z, b and a."""
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    parts = [Piece(f"{prefix}.{name}.weight", (n, hidden)) for name, n in zip(names, config.split_sizes, strict=True)]
    return matrix_rows(fill, parts, hidden)
