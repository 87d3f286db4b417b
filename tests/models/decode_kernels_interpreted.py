"""Whole models through the decode kernels in Triton's interpreter; test_decode_kernels.py runs this file.

The interpreter is chosen when Triton is imported, for the whole process, hence a process of its own.
"""

from dataclasses import replace

import pytest
import torch

import fmoe
from fmoe.compile import normed_ops
from fmoe.compile.decode_choice import add_decode_kernels, choose_tokens_any
from fmoe.compile.linear_settings import LinearSettings, linear_to_ints
from fmoe.compile.plan import Row
from fmoe.compile.select import choose
from fmoe.compile.step import compile_steps
from fmoe.model import replan

from .decode_families import FAMILIES, load_random

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [11, 12, 13, 14, 15, 16]]
# Log-probabilities, which take the logits in place of the head's kernel, of a family of each kind of cache.
CASES = [(name, False, None) for name in FAMILIES]
CASES += [("qwen3_next", True, None), ("qwen3_next", False, 1), ("deepseek_v2", False, 1)]


@pytest.fixture(autouse=True)
def small_caches(monkeypatch):
    """Leave no room behind the tokens: each block of slots is a program, and those take their time here."""
    monkeypatch.setattr("fmoe.decoding.ROOM", 1)


def decode_only(model, *, compiled=False):
    """The model with nothing but its decode kernels: those of the experts take most of the interpreter's time."""
    kernels = add_decode_kernels(choose(CPU, compiled=compiled), CPU, torch.float32, "triton")
    assert kernels.choose_tokens is model.eager.choose.keywords["kernels"].choose_tokens is choose_tokens_any
    layers = model.architecture.make_layers(model.config, kernels)
    steps = replace(model.eager, layers=layers)
    if compiled:
        steps = compile_steps(
            layers, steps.logits, device=CPU, backend="aot_eager", start=steps.start, choose=steps.choose, masked=False
        )
    return replace(model, eager=steps)


@pytest.mark.parametrize(("name", "compiled", "logprobs"), CASES, ids=str)
def test_a_family_gives_what_the_references_give(name, compiled, logprobs, tmp_path):
    """Greedy tokens come from the head's kernel, log-probabilities from logits."""
    options = {"max_new_tokens": 4, "ignore_eos": True, "logprobs": logprobs}
    expected = fmoe.generate(load_random(tmp_path, name, kernels="reference"), PROMPTS, **options)
    model = load_random(tmp_path, name, kernels="triton")
    assert not model.eager.masked and not model.graphs.masked

    found = fmoe.generate(decode_only(model, compiled=compiled), PROMPTS, **options)

    assert [row.token_ids for row in found] == [row.token_ids for row in expected]
    for mine, other in zip(found, expected, strict=True):
        for step, other_step in zip(mine.logprobs or (), other.logprobs or (), strict=True):
            assert step.logprob == pytest.approx(other_step.logprob, abs=1e-5)


def plan_projections(model):
    """The model with kernels for its projections of one token, which a CPU leaves to torch."""
    settings = LinearSettings(4, 128, 4, 1, 1, dot=False, pdl=False, programs=3)
    row = Row(1, "triton", tuple(linear_to_ints(settings)), "")
    plans = (replace(p, rows=(row, *p.rows[1:])) if p.key.operator == "linear" else p for p in model.plans)
    return replan(model, tuple(plans))


def test_all_kernels_together(tmp_path, monkeypatch):
    prompts, folded = [[5, 6]], []
    for name in ("run_linear_normed", "run_moe_layer_normed"):
        run = getattr(normed_ops, name)
        monkeypatch.setattr(normed_ops, name, lambda *a, name=name, run=run, **k: folded.append(name) or run(*a, **k))
    expected = fmoe.generate(
        load_random(tmp_path, "qwen3_next", kernels="reference"), prompts, max_new_tokens=3, ignore_eos=True
    )
    assert folded == []

    found = fmoe.generate(
        plan_projections(load_random(tmp_path, "qwen3_next", kernels="triton")),
        prompts,
        max_new_tokens=3,
        ignore_eos=True,
    )

    assert [row.token_ids for row in found] == [row.token_ids for row in expected]
    assert set(folded) == {"run_linear_normed", "run_moe_layer_normed"}
