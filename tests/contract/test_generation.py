"""Whole models through AITER, the stand-in installed as ``aiter`` and the machine assumed an MI300X, token by token."""

import importlib
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

import fmoe
from fmoe.architectures import compute_logits
from fmoe.compile import aiter_ops
from fmoe.compile.select import choose, import_aiter
from fmoe.compile.step import compile_steps
from fmoe.functional.moe import MoEParams
from fmoe.loading import named_tensors

from .checkpoints import write_checkpoint
from .standin.build import make_standin

NEW, OLD = "v0.1.20", "v0.1.11"  # with topk_softmax of seven arguments, and of five
PROMPTS = [[3, 5, 7], [1, 2, 3, 4, 5, 6, 7, 8]]
MODELS = ("demo", "qwen2_moe", "deepseek_v2_lite", "deepseek_v3", "mixtral")
# What routes each model with fused shared experts in the new release: the kernel with shared columns takes a gate.
ROUTERS = {
    "demo": "topk_softmax7",
    "qwen2_moe": "topk_softmax7",
    "deepseek_v2_lite": "topk_softmax5",
    "deepseek_v3": "biased_grouped_topk_hip",
    "mixtral": "topk_softmax5",
}


def forget_aiter():
    for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
        del sys.modules[name]
    import_aiter.cache_clear()
    aiter_ops.unregister()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Write checkpoints and stand-ins, each once; the probe's outcomes are kept for the session too."""
    root = tmp_path_factory.mktemp("generation")

    def get(name):
        folder = root / name
        if name == "demo":
            return "demo"
        if name != "cache" and not folder.exists():
            make_standin(folder, version=name) if name.startswith("v0") else write_checkpoint(folder, name)
        return folder

    return get


@pytest.fixture
def install(folders, monkeypatch):
    """Put the stand-in of a release where an installation would be, for one test."""

    def put(version):
        monkeypatch.syspath_prepend(str(folders(version)))
        monkeypatch.setenv("FMOE_ASSUME_ARCH", "gfx942")
        monkeypatch.setenv("FMOE_CACHE_DIR", str(folders("cache")))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        forget_aiter()

    yield put
    forget_aiter()


@pytest.fixture
def load(folders):
    def load(name, **options):
        dtype = "bfloat16" if name == "demo" else "float16"
        return fmoe.load(folders(name), device="cpu", dtype=dtype, compile=False, **options)

    return load


def machine():
    return importlib.import_module("aiter.jit.core").MACHINE


def generate(model, tokens=8):
    done = fmoe.generate(model, PROMPTS, max_new_tokens=tokens, temperature=0, ignore_eos=True)
    return [completion.token_ids for completion in done]


def compile_with_record(model):
    """Give the model with graphs, and the names of the ops that enter them."""
    targets = set()

    def record(graph, inputs):
        targets.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return aot_eager(graph, inputs)

    kernels = choose(model.device, compiled=True, plans=model.plans, decision=model.decision)
    layers = model.architecture.make_layers(model.config, kernels)
    head = partial(compute_logits, eps=model.config.decoder.eps)
    steps = compile_steps(layers, head, device=model.device, backend=record)
    return replace(model, graphs=steps, compile=True), targets


@pytest.mark.parametrize("shared", ["auto", "separate"])
@pytest.mark.parametrize("version", [NEW, OLD])
@pytest.mark.parametrize("name", MODELS)
def test_tokens(name, version, shared, install, load):
    expected = generate(load(name, kernels="reference", shared_experts=shared))
    assert "aiter" not in sys.modules
    install(version)

    model = load(name, kernels="aiter", shared_experts=shared)
    assert generate(model) == expected

    called = set(machine().calls)
    router = ROUTERS[name] if version == NEW and shared == "auto" else ROUTERS[name].replace("7", "5")
    assert called == {"fused_moe", router}


@pytest.mark.parametrize("defect", ["wrong_ids", "wrong_output"])
def test_a_wrong_kernel_does_not_pass_unseen(defect, install, load):
    """What the tests above compare can differ."""
    expected = generate(load("mixtral", kernels="reference"))
    install(NEW)
    model = load("mixtral")
    machine().defects |= {defect}
    if defect == "wrong_ids":
        assert generate(model) != expected
    else:
        with pytest.raises(RuntimeError, match=r"fused_moe must return torch\.float16 .*, got torch\.float32"):
            generate(model)


@pytest.mark.parametrize(("name", "version"), [*((name, NEW) for name in MODELS), ("qwen2_moe", OLD)])
def test_compiled_graphs_hold_aiters_ops(name, version, install, load):
    expected = generate(load(name, kernels="reference"), tokens=4)
    install(version)

    model, targets = compile_with_record(load(name, kernels="aiter"))
    assert generate(model, tokens=4) == expected

    used = {target for target in targets if "aiter" in target}
    router = "fmoe.aiter_grouped_topk" if name == "deepseek_v3" else "fmoe.aiter_topk"
    assert used == {"fmoe.aiter_experts", router}


def test_without_aiter_no_graph_holds_its_ops(load):
    model, targets = compile_with_record(load("qwen2_moe"))
    generate(model, tokens=3)
    assert any("fmoe" in target for target in targets)
    assert not any("aiter" in target for target in targets)


def test_auto_takes_aiter_and_says_so(install, load, caplog):
    install(NEW)
    with caplog.at_level("INFO", "fmoe"):
        model = load("qwen2_moe")
    lines = [line for line in caplog.messages if line.startswith(("experts: ", "routing: "))]
    assert lines == [
        "experts: aiter 0.1.20",
        "routing: aiter (topk_softmax, fused: routed and shared columns in one kernel)",
    ]
    assert (model.kernels, model.decision.experts) == ("aiter", "aiter")
    (plan,) = [plan for plan in model.plans if plan.key.operator == "moe"]
    assert {row.implementation for row in plan.rows} == {"aiter"}
    assert fmoe.tune(model, budget_s=1.0, progress=False) is model


def test_weights_are_parameters_in_aiters_layout(install, load):
    plain = load("qwen2_moe", kernels="reference")
    install(NEW)
    model = load("qwen2_moe", kernels="aiter")
    assert all(isinstance(tensor, torch.nn.Parameter) for _, tensor in named_tensors(model.params))
    for layer, before in zip(model.params.layers, plain.params.layers, strict=True):
        assert isinstance(layer.mlp, MoEParams)
        assert layer.mlp.w_gate_up_EPD.shape == (16 + 4, 2 * 64, 64)  # from a width of 24
        assert layer.mlp.w_down_EDF.shape == (16 + 4, 64, 64)
        assert layer.mlp.w_router_ED.shape == (16 + 4, 64)  # the one gate for each of four slots
        assert torch.equal(layer.mlp.w_router_ED[:17], before.mlp.w_router_ED)
        assert torch.equal(layer.mlp.w_router_ED[16:], before.mlp.w_router_ED[16:].expand(4, -1))


def test_a_dtype_that_aiter_does_not_take(install, folders):
    install(NEW)
    with pytest.raises(RuntimeError, match=r"kernels='aiter' cannot run here: .*not torch.float32; use"):
        fmoe.load(folders("mixtral"), device="cpu", dtype="float32", kernels="aiter")
    model = fmoe.load(folders("mixtral"), device="cpu", dtype="float32")
    assert model.decision.experts == "reference"
    assert "aiter" not in sys.modules


@pytest.mark.parametrize("defect", ["kernel_raises", "kernel_exits"])
def test_a_kernel_that_fails_later_names_the_way_out(defect, install, load):
    install(NEW)
    model = load("mixtral")
    machine().defects |= {defect}
    with pytest.raises(RuntimeError, match=r"aiter\.topk_softmax failed .*kernels='reference' \(--kernels reference\)"):
        generate(model)
    assert machine().calls == ["topk_softmax"]  # it was not tried again


def test_a_routing_without_the_shared_columns_is_an_error(install, load, monkeypatch):
    install(OLD)
    model = load("qwen2_moe")
    monkeypatch.setattr(aiter_ops, "inject_shared_experts", lambda routing, *rest, **options: routing)
    with pytest.raises(RuntimeError, match=r"must have K \+ S = 8 columns, AITER's has \{4\}; load with kernels='refe"):
        generate(model)


def test_an_import_that_fails_after_the_self_test(install, load, folders, tmp_path, monkeypatch, caplog):
    expected = generate(load("mixtral", kernels="reference"))
    install(NEW)
    load("mixtral")  # the self-test passes, and is kept
    forget_aiter()

    def refuse(name):
        raise SystemExit("[aiter] build failed")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with caplog.at_level("INFO", "fmoe"):
        model = load("mixtral")
    monkeypatch.undo()
    said = [line for line in caplog.messages if "its import raised SystemExit: [aiter] build failed" in line]
    assert len(said) == 1
    assert said[0].startswith("experts: reference (aiter passed its self-test, but")
    assert generate(model) == expected
