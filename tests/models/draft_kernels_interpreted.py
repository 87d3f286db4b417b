"""Whole models that verify drafts through kernels in Triton's interpreter; test_draft_kernels.py runs this file."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import fmoe
from fmoe.compile.decode_choice import add_decode_kernels, choose_draft_kernels
from fmoe.compile.select import choose
from fmoe.compile.step import compile_draft_steps, compile_steps
from fmoe.drafting import bind_head
from fmoe.functional.quant import dequantize, quantize_blocks

from ..forced_drafts import force_drafts
from .decode_families import load_random

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [11, 12, 13, 14, 15, 16]]


@pytest.fixture(autouse=True)
def small_caches(monkeypatch):
    """Leave no room behind the tokens, and share them among few programs, for these take their time here."""
    monkeypatch.setattr("fmoe.decoding.ROOM", 1)
    monkeypatch.setattr("fmoe.compile.decode_settings.PROGRAMS", 8)


def decode_only(model, compiled):
    """The model with nothing but its decode kernels: those of the experts take most of the interpreter's time."""
    kernels = add_decode_kernels(choose(CPU, compiled=compiled), CPU, torch.float32, "triton")
    layers = model.architecture.make_layers(model.config, kernels)
    steps = replace(model.eager, layers=layers)
    if compiled:
        steps = compile_steps(
            layers, steps.logits, device=CPU, backend="aot_eager", start=steps.start, choose=steps.choose, masked=False
        )
    drafts = model.drafts.rebind(
        lambda params: bind_head(
            params, model.architecture, model.config, lambda compiled: choose_draft_kernels(kernels), CPU
        )
    )
    return replace(model, eager=steps, drafts=drafts)


# Attention, latents, and DeltaNet; forced drafts of the two rows are right up to different ones.
@pytest.mark.parametrize(
    ("name", "forced", "compiled"),
    [
        ("glm4_moe", True, False),
        ("glm4_moe_lite", True, False),
        ("qwen3_next", True, False),
        ("qwen3_next", False, False),
        ("qwen3_next", False, True),
    ],
)
def test_drafts_verified_by_kernels_give_what_the_references_give(name, forced, compiled, tmp_path, monkeypatch):
    monkeypatch.setattr("fmoe.drafting.compile_draft_steps", partial(compile_draft_steps, backend="aot_eager"))
    options = {"max_new_tokens": 5, "ignore_eos": True}
    expected = fmoe.generate(load_random(tmp_path, name, kernels="reference"), PROMPTS, **options)
    model = decode_only(load_random(tmp_path, name, kernels="triton"), compiled)
    assert not model.drafts.get().eager.masked
    if forced:  # logits choose them, and the tokens too
        model, _ = force_drafts(model, [row.token_ids for row in expected], lambda row, place, n: n < 1 + row)
        options["logprobs"] = 0

    found = fmoe.generate(model, PROMPTS, speculate=2, **options)

    assert [row.token_ids for row in found] == [row.token_ids for row in expected]
    assert all(row.drafted > 0 for row in found)
    if forced:
        assert [row.accepted for row in found] == [2, 2]


def test_a_rows_drafts_are_chosen_by_a_head_in_fp8_blocks_and_several_rows_by_the_models(tmp_path, monkeypatch):
    chosen = []

    def choose(x_1D, head_VD):
        logits_1V = x_1D @ dequantize(head_VD, x_1D.dtype).T
        chosen.append(logits_1V.argmax(-1))
        return chosen[-1], logits_1V.amax(-1)

    monkeypatch.setattr("fmoe.drafting.quantize_draft_head", lambda head_VD, requested: quantize_blocks(head_VD))
    monkeypatch.setattr("fmoe.compile.decode_choice.choose_token_quantized_op", choose)
    options = {"max_new_tokens": 5, "ignore_eos": True}
    expected = fmoe.generate(load_random(tmp_path, "glm4_moe", kernels="reference"), PROMPTS, **options)
    model = decode_only(load_random(tmp_path, "glm4_moe", kernels="triton"), False)

    assert model.drafts.get().params.head_VD is not None
    together = fmoe.generate(model, PROMPTS, speculate=1, **options)
    assert not chosen
    (alone,) = fmoe.generate(model, PROMPTS[:1], speculate=1, **options)

    assert len(chosen) >= alone.drafted > 0
    assert [row.token_ids for row in together] == [row.token_ids for row in expected]
    assert alone.token_ids == expected[0].token_ids
