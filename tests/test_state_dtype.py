"""Recurrent states in bfloat16: kept so, computed in float32, at an error that is small and stated."""

import logging
from dataclasses import replace

import pytest
import torch

import fmoe
from fmoe import model as loading
from fmoe.compile.select import choose
from fmoe.compile.step import compile_steps
from fmoe.decoding import new_state, run
from fmoe.functional.cache import DeltaCache
from fmoe.functional.deltanet import delta_mix
from fmoe.placing import resolve_state_dtype

TEXT = "And it came to pass in those days, that there went out a decree from Caesar Augustus, that all the world"


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", device="cpu", compile=False)


@pytest.fixture(scope="module")
def rounded():
    return fmoe.load("demo", device="cpu", compile=False, state_dtype="bfloat16")


def dtypes_of(model):
    caches = new_state(model, 1, 4).caches
    return {cache.state_BHKV.dtype for cache in caches if isinstance(cache, DeltaCache)}


def test_states_are_float32_unless_asked_for(demo, rounded):
    half = fmoe.load("demo", device="cpu", compile=False, dtype="bfloat16")
    assert dtypes_of(demo) == dtypes_of(half) == {torch.float32}
    assert dtypes_of(rounded) == {torch.bfloat16}
    assert fmoe.prefill(rounded, TEXT).caches[0].state_BHKV.dtype == torch.bfloat16
    assert fmoe.prefill(rounded, TEXT).caches[3].k_BJMC.dtype == torch.float32


def step_by_step(model, ids):
    """Run a text by single tokens, so that the state is rounded behind each; log-probabilities [T, V]."""
    with torch.inference_mode():
        state, outputs = new_state(model, 1, len(ids)), []
        for i, token in enumerate(ids, 1):
            x_11D, state = run(model, model.eager, torch.tensor([[token]]), state, visible=i)
            outputs.append(fmoe.decoding.compute_head(model, model.eager, x_11D[:, 0]))
        return torch.cat(outputs).log_softmax(-1)


def test_the_error_is_that_of_rounding_the_state(demo, rounded):
    """docs/performance.md states it over a longer text: 0.5 % of the logits, 1.4e-4 nats."""
    ids = fmoe.encode(demo, TEXT) * 4
    exact_TV, rounded_TV = step_by_step(demo, ids), step_by_step(rounded, ids)
    divergence = (exact_TV.exp() * (exact_TV - rounded_TV)).sum(-1).mean()
    assert 1e-8 < divergence < 2e-3
    assert (exact_TV.argmax(-1) == rounded_TV.argmax(-1)).float().mean() > 0.9


def test_one_prompt_is_rounded_once(demo, rounded):
    """Within a chunk the state is float32: the logits behind the first one are the same."""
    ids = fmoe.encode(demo, TEXT)
    assert torch.equal(fmoe.logits(demo, [ids]), fmoe.logits(rounded, [ids]))
    exact, kept = fmoe.prefill(demo, ids), fmoe.prefill(rounded, ids)
    assert torch.equal(kept.caches[0].state_BHKV, exact.caches[0].state_BHKV.bfloat16())


def test_compiled_graphs_keep_it_too(rounded):
    kernels = choose(rounded.device, compiled=True, plans=rounded.plans)
    layers = rounded.architecture.make_layers(rounded.config, kernels)
    graphs = compile_steps(layers, rounded.eager.logits, device=rounded.device, backend="aot_eager")
    compiled = replace(rounded, graphs=graphs, compile=True, announce_graphs=lambda: None)
    options = {"max_new_tokens": 5, "logprobs": 0}
    [found], [expected] = (fmoe.generate(model, [7], **options) for model in (compiled, rounded))
    assert found.token_ids == expected.token_ids


def test_the_kernel_that_reads_float32_is_left_out(rounded, demo, caplog):
    def kernel(*arguments):
        raise AssertionError("never called")

    kernels = replace(fmoe.functional.Kernels(), delta_decode=kernel)
    with caplog.at_level(logging.INFO, logger="fmoe"):
        assert loading._keep_delta_reference(kernels, rounded.config).delta_decode is delta_mix
        assert loading._keep_delta_reference(kernels, demo.config).delta_decode is kernel
    assert caplog.messages == [
        "delta_decode: reference (the kernel reads states in float32, these are in torch.bfloat16)"
    ]


@pytest.mark.parametrize("requested", ["float16", "half", 7, torch.float16, None], ids=str)
def test_other_dtypes_are_refused(requested):
    with pytest.raises(ValueError, match=r"state_dtype='.*' must be auto, float32 or bfloat16"):
        fmoe.load("demo", device="cpu", state_dtype=requested)


def test_dtypes_are_read_as_names_and_values():
    assert resolve_state_dtype("auto", recurrent=False) == torch.float32
    assert resolve_state_dtype(torch.bfloat16, recurrent=True) == torch.bfloat16
    with pytest.raises(ValueError, match="is for recurrent states, and this model has none; drop it"):
        resolve_state_dtype("bfloat16", recurrent=False)
