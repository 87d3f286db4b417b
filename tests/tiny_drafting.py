"""Tiny random models that draft, without a checkpoint."""

from functools import partial
from pathlib import Path

import torch

from fmoe.architectures import compute_logits
from fmoe.compile.select import choose
from fmoe.compile.step import Steps, compile_draft_steps, compile_steps
from fmoe.drafting import DraftHead, DraftShelf, bind_steps
from fmoe.model import Model
from fmoe.models import deepseek_v3, qwen3_next
from fmoe.options import Defaults

CPU = torch.device("cpu")
QWEN = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 12, "partial_rotary_factor": 0.5, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 6, "num_experts": 5,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
    "max_position_embeddings": 8192,
}  # fmt: skip
DEEPSEEK = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "q_lora_rank": None, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 8, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 8192,
}  # fmt: skip
FAMILIES = {"qwen3_next": (qwen3_next, QWEN), "deepseek_v3": (deepseek_v3, DEEPSEEK)}


class RandomFill:
    """Draws every parameter; large enough that tokens depend on those before them."""

    names: frozenset[str] = frozenset()

    def __init__(self, seed=0):
        self.rng = torch.Generator().manual_seed(seed)

    def __call__(self, shape, pieces, /, *, dtype=None, by_columns=False):
        return torch.nn.Parameter(torch.randn(tuple(shape), generator=self.rng) * 0.4, requires_grad=False)

    def weight(self, shape, pieces, /, *, parts=1, by_columns=False):
        return self(shape, pieces)


def make_drafting_model(family="qwen3_next", *, backend="aot_eager", **changes):
    """Make a model whose graphs are compiled by a backend that is quick to compile."""
    architecture, raw = FAMILIES[family]
    config = architecture.parse_config(raw | changes)
    head = partial(compute_logits, eps=config.decoder.eps)
    kernels = {compiled: choose(CPU, compiled=compiled) for compiled in (False, True)}
    layers = {compiled: architecture.make_layers(config, kernels[compiled]) for compiled in (False, True)}

    eager, plain = (
        bind_steps(architecture, config, kernels[compiled], architecture.DRAFT_KIND, compiled=compiled)
        for compiled in (False, True)
    )
    graphs = compile_draft_steps(plain, device=CPU, backend=backend)
    drafts = DraftHead(architecture.build_drafts(RandomFill(1), config), architecture.DRAFT_KIND, eager, graphs)
    return Model(
        folder=Path("random"),
        architecture=architecture,
        config=config,
        params=architecture.build_params(RandomFill(), config),
        dtype=torch.float32,
        device=CPU,
        eager=Steps(layers[False], head, compiled=False),
        graphs=compile_steps(layers[True], head, device=CPU, backend=backend),
        compile=True,
        text=None,
        defaults=Defaults(),
        drafts=DraftShelf(lambda: drafts.params, lambda params: drafts),
    )
