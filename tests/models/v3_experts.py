"""What families with DeepSeek-V3's mixture of experts must pass beside parity.py: a bias that chooses, shared experts.

A test file gives the fixtures ``reference``, made by ``build_reference``, and ``model``, and imports the tests.
"""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

import fmoe
from fmoe.functional.moe import MoEParams
from fmoe.functional.routing import route, router_logits
from fmoe.loading import named_tensors

from .parity import V, assert_equal_logits, draw_ids, one_pass, rewrite_config, to_hub_keys

BIAS = "gate.e_score_correction_bias"
EXPERTS = {
    "n_routed_experts": 15,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 14,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
}
GRID = [(15, 3, 2, 4), (12, 6, 2, 3), (10, 1, 1, 10), (24, 4, 1, 6), (9, 3, 1, 1)]


def build_reference(make_reference, config):
    """Build, randomise and save a model; the biases are buffers, which ``make_reference`` leaves at zero."""
    reference = make_reference(config)
    rng = torch.Generator().manual_seed(1)
    for name, buffer in reference.model.named_buffers():
        if name.endswith(BIAS):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=rng))
    reference.model.save_pretrained(reference.folder)
    return reference


def rewrite_tensors(folder, change):
    """Change the tensors of a checkpoint in place."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def test_fused_and_separate_give_the_same_logits(reference, model):
    separate = fmoe.load(reference.folder, shared_experts="separate", compile=False)
    count = reference.model.config.n_shared_experts
    assert (model.config.shared.slots, separate.config.shared.slots) == (count, 0)
    assert model.config.shared.width == separate.config.shared.width == 14 * count
    ids = draw_ids(65)
    assert_equal_logits(one_pass(separate, ids), reference.logits(ids))
    assert_equal_logits(one_pass(separate, ids), one_pass(model, ids), within=3e-5)


def test_experts_are_what_the_checkpoint_holds(reference, model):
    """Sparse layers have a bias, and the shared expert's numbers in slots E.., byte for byte."""
    stored = load_file(reference.folder / "model.safetensors")
    kinds = [f"model.layers.{i}.mlp.{BIAS}" in stored for i in range(len(model.params.layers))]
    assert any(kinds)
    assert [isinstance(layer.mlp, MoEParams) for layer in model.params.layers] == kinds
    for i, layer in enumerate(model.params.layers):
        if not kinds[i]:
            continue
        prefix = f"model.layers.{i}.mlp"
        assert torch.equal(layer.mlp.bias_E, stored[f"{prefix}.{BIAS}"]) and layer.mlp.bias_E.abs().max() > 0.1
        for s in range(model.config.shared.slots):
            part, base = slice(14 * s, 14 * (s + 1)), f"{prefix}.shared_experts"
            gate_up = [stored[f"{base}.{name}_proj.weight"][part] for name in ("gate", "up")]
            expert = model.config.router.num_experts + s
            assert torch.equal(layer.mlp.w_gate_up_EPD[expert], torch.cat(gate_up))
            assert torch.equal(layer.mlp.w_down_EDF[expert], stored[f"{base}.down_proj.weight"][:, part])


def test_bfloat16_follows_the_reference(reference):
    """Means, as a near tie of two experts may go either way; routers and biases stay in float32."""
    model = fmoe.load(reference.folder, dtype="bfloat16", compile=False)
    for name, tensor in named_tensors(model.params):
        assert tensor.dtype == (torch.float32 if name.endswith(("w_router_ED", "bias_E")) else torch.bfloat16), name
    ids = draw_ids(65)
    found, expected = one_pass(model, ids), reference.logits(ids)
    assert (found - expected).abs().mean() < 0.1 * expected.std()


def test_draft_layers_are_ignored(reference, model, tmp_path, caplog):
    """The layer behind the last is not read, its embedding and head neither, and nobody hears of it."""
    last = len(model.params.layers) - 1

    def add_layer(stored):
        old, new = f"layers.{last}.", f"layers.{last + 1}."
        draft = {name.replace(old, new): tensor + 1 for name, tensor in stored.items() if old in name}
        shapes = {"eh_proj": (36, 72), "shared_head.head": (V, 36), "embed_tokens": (V, 36)}
        shapes |= dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (36,))
        return stored | draft | {f"model.{new}{name}.weight": torch.ones(shape) for name, shape in shapes.items()}

    folder = rewrite_config(reference, tmp_path / "draft", lambda raw: raw | {"num_nextn_predict_layers": 1})
    drafted = fmoe.load(rewrite_tensors(folder, add_layer), compile=False)
    assert drafted.config.decoder.draft_layers == 1
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    ids = draw_ids(17)
    assert torch.equal(one_pass(drafted, ids), one_pass(model, ids))


def test_a_missing_bias_is_an_error(reference, model, tmp_path):
    last = f"model.layers.{len(model.params.layers) - 1}.mlp.{BIAS}"
    folder = rewrite_config(reference, tmp_path / "unbiased", lambda raw: raw)
    rewrite_tensors(folder, lambda stored: {name: tensor for name, tensor in stored.items() if name != last})
    with pytest.raises(ValueError, match=rf"missing tensors \(1\): {last}"):
        fmoe.load(folder)


def check_hub_config(reference, model, folder, changes):
    """Load the checkpoint with its keys as published files have them."""
    old = fmoe.load(rewrite_config(reference, folder, lambda raw: changes(to_hub_keys(raw))), compile=False)
    assert old.architecture is model.architecture and old.config == model.config
    ids = draw_ids(65)
    assert_equal_logits(one_pass(old, ids), reference.logits(ids))


def check_biased_router(router, rule, rng):
    """Hold a rule to a router of transformers for bfloat16 rows, as dense [T, E] weights; the bias moves the choice."""
    experts = rule.num_experts
    router.weight.data = 0.3 * torch.randn(experts, 36, generator=rng)
    router.e_score_correction_bias.copy_(torch.randn(experts, generator=rng))
    x_TD = torch.randn(33, 36, generator=rng).bfloat16()
    with torch.no_grad():
        _, weights, ids = router(x_TD)
    logits_TE = router_logits(x_TD, router.weight.data, float32=rule.float32_logits)
    found = route(logits_TE, router.e_score_correction_bias, rule)

    def to_dense(ids, weights):
        return torch.zeros(33, experts).scatter(1, ids.long(), weights)

    torch.testing.assert_close(to_dense(found.experts_TK, found.weights_TK), to_dense(ids, weights))
    assert weights.dtype == torch.float32 and not rule.round_weights
    if rule.top_k < experts:
        unbiased = route(logits_TE, None, rule)
        assert not torch.equal(unbiased.experts_TK.sort().values, found.experts_TK.sort().values)


class CountStored:
    """A ``Fill`` that counts the elements of the checkpoint tensors that it is given, each tensor once."""

    names: tuple[str, ...] = ()

    def __init__(self):
        self.sizes = {}

    def __call__(self, shape, pieces, **_):
        self.sizes |= {piece.name: torch.Size(piece.shape).numel() for piece in pieces}
        return torch.empty(shape, device="meta")

    weight = __call__


def count_stored(architecture, layer_params, raw):
    """Count the parameters of a published checkpoint, its draft layer built as one of the others."""
    fill, config = CountStored(), architecture.parse_config(raw)
    architecture.build_params(fill, config)
    for i in range(len(config.decoder.layer_kinds), len(config.decoder.layer_kinds) + config.decoder.draft_layers):
        layer_params(fill, f"model.layers.{i}", config, sparse=True)
        hidden = config.decoder.hidden_size
        joined = {"eh_proj": 2 * hidden**2, "norms": 3 * hidden, "embed, head": 2 * hidden * config.decoder.vocab_size}
        fill.sizes |= {f"{i} {name}": size for name, size in joined.items()}
    return sum(fill.sizes.values())
