"""What a model asks for, what is decided for it, and the layout that its weights get."""

import logging
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch

import fmoe
from fmoe.compile.aiter_selftest import run_selftest
from fmoe.compile.capabilities import AiterRecord
from fmoe.compile.plan import linear_key, moe_key
from fmoe.compile.select import Decision
from fmoe.functional.quant import Fp8
from fmoe.planning import (
    check_tune,
    decide_kernels,
    format_plans,
    list_keys,
    plan_layers,
    prepare_layout,
    show_selftest,
)

from .contract.checkpoints import TINY, write_checkpoint

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
AITER = Decision("aiter", "aiter", "aiter", AiterRecord(present=True), gate_rows=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen2_moe")


def load(folder, **options):
    return fmoe.load(folder, device="cpu", compile=False, kernels="reference", tune="off", **options)


def test_the_keys_of_a_model_are_its_layers_each_once(folder):
    model = load(folder)
    keys = list_keys(model.params, model.config)
    assert {key.operator for key in keys} == {"moe", "linear"}
    assert [key for key in keys if key.operator == "moe"] == [moe_key(16, 4, 4, 1, 64, 24, torch.float32)]
    assert len(keys) == len(set(keys))
    apart = load(folder, shared_experts="separate")
    (key,) = [key for key in list_keys(apart.params, apart.config) if key.operator == "moe"]
    assert key == moe_key(16, 4, 0, 0, 64, 24, torch.float32)


def test_a_projection_in_fp8_blocks_is_a_key_with_the_rows_behind_it(folder):
    params, config = (model := load(folder)).params, model.config
    layer = params.layers[0]
    weights = Fp8(torch.empty(128, 64, dtype=torch.float8_e4m3fn), torch.ones(1, 1), torch.empty(32, 64))
    mixer = layer.mixer._replace(w_in_ND=weights)

    keys = list_keys(params._replace(layers=(layer._replace(mixer=mixer),)), config)

    assert linear_key(160, 64, torch.float8_e4m3fn) in keys


def test_plans_by_rule_say_so(folder):
    model = load(folder)
    plans = plan_layers(list_keys(model.params, model.config), CPU, requested="reference", tune="off")
    assert {row.source for plan in plans for row in plan.rows} == {"rule"}
    assert format_plans(plans).splitlines()[0] == "moe E16 K4 S4 G1 D64 F24 float32"


def test_an_unknown_tune_names_the_known_ones():
    with pytest.raises(ValueError, match="tune='yes' must be one of cached, search, off"):
        check_tune("yes")


@pytest.mark.parametrize("family", TINY)
def test_every_family_is_decided(family, tmp_path, caplog):
    with caplog.at_level(logging.DEBUG, "fmoe"):
        model = fmoe.load(write_checkpoint(tmp_path, family), device="cpu", compile=False)
    said = [line for line in caplog.messages if line.startswith(("experts: ", "routing: "))]
    assert len(said) == 2
    assert said[0].startswith("experts: reference (aiter needs an AMD GPU; ")
    assert said[1] == "routing: reference, as the experts"
    assert model.decision == Decision(lines=tuple(said))


def test_what_is_asked_for_by_name_is_refused_before_weights_are_read(folder, monkeypatch):
    def read(*arguments, **options):
        raise AssertionError("weights were read")

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(fmoe.model, "load_params", read)
    for kernels, reason in (("aiter", "aiter needs an AMD GPU"), ("triton", "triton")):
        with pytest.raises(RuntimeError, match=f"kernels='{kernels}' cannot run here: {reason}"):
            fmoe.load(folder, device="cpu", kernels=kernels)


@pytest.mark.parametrize("requested", ["reference", "auto"])
def test_on_a_cpu_nothing_of_aiter_is_imported_and_no_process_started(requested, folder):
    code = f"""
        import subprocess, sys
        import fmoe

        def refuse(*arguments, **options):
            raise AssertionError(arguments)

        subprocess.Popen = refuse
        fmoe.load({str(folder)!r}, device="cpu", kernels={requested!r})
        assert not any(name.split(".")[0] == "aiter" for name in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_no_log_lines_for_what_was_asked_for_by_name(folder, caplog):
    model = load(folder)
    with caplog.at_level(logging.DEBUG, "fmoe"):
        decide_kernels(model.params, config=model.config, device=CPU, requested="reference")
    assert caplog.messages == []


def test_the_layout_of_the_reference_is_the_checkpoints(folder):
    params = load(folder).params
    assert prepare_layout([params], Decision()) is params


def test_layers_are_freed_one_after_the_other(folder, monkeypatch):
    """While a layer is prepared, the one before it is only there in its new form."""
    loaded, living = [load(folder, dtype="bfloat16").params], []
    old = [weakref.ref(layer.mlp.w_down_EDF) for layer in loaded[0].layers]
    prepare = fmoe.planning.prepare_experts

    def count(*stacks):
        living.append(sum(weight() is not None for weight in old))
        return prepare(*stacks)

    monkeypatch.setattr(fmoe.planning, "prepare_experts", count)
    params = prepare_layout(loaded, AITER)

    assert loaded == []
    assert living == [2, 1]
    assert [layer.mlp.w_router_ED.shape[0] for layer in params.layers] == [20, 20]
    assert all(isinstance(layer.mlp.w_down_EDF, torch.nn.Parameter) for layer in params.layers)


def test_a_bar_shows_the_self_test_on_request(monkeypatch, capsys):
    assert show_selftest(False) is run_selftest
    assert show_selftest(None) is run_selftest  # standard error is no terminal here

    def run(record, device, *, progress):
        progress(35.0, "building module_moe_asm")
        return "outcome"

    monkeypatch.setattr(fmoe.planning, "run_selftest", run)
    assert show_selftest(True)(AiterRecord(present=False), "cpu") == "outcome"
    assert "trying AITER out, once: 35 s  building module_moe_asm" in capsys.readouterr().err
