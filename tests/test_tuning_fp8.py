"""Tuning weights in FP8 blocks: found with what belongs to them, measured, planned, and run by the plan."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fmoe
from bench import tune_shapes
from bench.moe_shapes import Shape
from bench.tune_layers import draw_experts, draw_fp8, draw_matrix
from bench.tune_shapes import Job, list_jobs, make_job, tune_jobs
from fmoe import plan_search
from fmoe.compile import plan_tables
from fmoe.compile.candidates import Inputs
from fmoe.compile.device import describe_device
from fmoe.compile.plan import Device, linear_key, moe_key
from fmoe.compile.plan_tables import export_table, format_table, read_tables
from fmoe.functional import MoEParams, RouterConfig
from fmoe.functional.quant import FP8, Fp8
from fmoe.plan_search import Search, find_weights, make_run, search_plans
from fmoe.planning import list_keys
from fmoe.tuning import tune

from .fp8_checkpoints import dequantize_blocks, quantize_blocks

FILE = Path(__file__).with_name("tuning_fp8_interpreted.py")
CPU = torch.device("cpu")
FUNCTIONS = {"per_slot", "loop", "dense", "grouped"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FMOE_CACHE_DIR", str(tmp_path / "cache"))
    plan_tables._log_once.cache_clear()


def quantise(w: torch.Tensor, *, parts: int = 1) -> Fp8:
    """Put a matrix or stack in FP8 blocks, each part's rows by themselves."""
    pieces = [quantize_blocks(piece) for piece in w.detach().chunk(parts, -2)]
    return Fp8(*(torch.cat(column, -2) for column in zip(*pieces, strict=True)))


def multiply_out(w: Fp8, *, parts: int = 1) -> torch.Tensor:
    pairs = zip(w.w.chunk(parts, -2), w.scale.chunk(parts, -2), strict=True)
    return torch.cat([dequantize_blocks(*pair) for pair in pairs], -2)


@pytest.fixture(scope="module")
def models():
    """The demo with its experts in FP8 blocks, and the same weights multiplied out."""
    demo = fmoe.load("demo", compile=False, tune="off")

    def change(layer, keep):
        gate_up, down = quantise(layer.mlp.w_gate_up_EPD, parts=2), quantise(layer.mlp.w_down_EDF)
        stacks = (gate_up, down) if keep else (multiply_out(gate_up, parts=2), multiply_out(down))
        return layer._replace(mlp=layer.mlp._replace(w_gate_up_EPD=stacks[0], w_down_EDF=stacks[1]))

    def build(keep):
        return demo.params._replace(layers=tuple(change(layer, keep) for layer in demo.params.layers))

    (plan,) = [plan for plan in demo.plans if plan.key.operator == "moe"]
    keys = {keep: replace(plan.key, dtype="float8_e4m3fn" if keep else "float32") for keep in (True, False)}
    return [replace(demo, params=build(keep), plans=(replace(plan, key=keys[keep]),)) for keep in (True, False)]


def test_a_model_in_fp8_blocks_is_tuned_and_runs_by_its_plan(models):
    model, plain = models
    (key,) = [key for key in list_keys(model.params, model.config) if key.operator == "moe"]
    assert key.dtype == "float8_e4m3fn"
    tuned = tune(model, batch_sizes=(1, 3), max_tokens=40, key_budget_s=0.3)
    entries = read_tables(describe_device(CPU)).tuned
    assert set(entries) == {str(key)}
    assert set(entries[str(key)]) == {1, 4, 32}
    for entry in entries[str(key)].values():
        assert entry.implementation in FUNCTIONS
        timings = dict(entry.timings)
        # All came near enough to the experts multiplied out to be timed, where there was time.
        assert all(isinstance(value, float) or value.startswith("not measured") for value in timings.values()), timings
    assert [row.source for row in tuned.plans[0].rows][:1] == ["tuned"]
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(fmoe.logits(tuned, ids), fmoe.logits(plain, ids), rtol=1e-4, atol=1e-4)


class Values(NamedTuple):
    """What stands for a layer's or a model's parameters."""

    layers: tuple
    others: tuple = ()


class Layer(NamedTuple):
    mlp: object
    other: object = None


ROUTER = RouterConfig(5, 2, renormalize=True)
KEY = moe_key(5, 2, 1, 1, 160, 136, FP8)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * shape[-1] ** -0.5


def make_layer() -> MoEParams:
    return MoEParams(draw(6, 160), quantise(draw(6, 272, 160), parts=2), quantise(draw(6, 160, 136)), None, None)


def with_rest(rows: int, rest: int, columns: int) -> Fp8:
    return quantise(draw(rows, columns))._replace(rest_MD=draw(rest, columns) if rest else None)


def test_weights_are_found_with_what_belongs_to_them():
    first, second, behind, alone = make_layer(), make_layer(), with_rest(150, 3, 130), with_rest(153, 0, 130)
    plain = draw(3, 130)
    params = Values((Layer(first, behind), Layer(draw(160, 160), (alone, plain)), Layer(second)), (draw(2, 2),))
    keys = [KEY, linear_key(153, 130, FP8), linear_key(3, 130, torch.float32), linear_key(2, 2, torch.float32)]
    found = find_weights(params, ROUTER, keys)
    assert [w is layer for w, layer in zip(found[KEY], (first, second), strict=True)] == [True, True]
    assert [w is matrix for w, matrix in zip(found[keys[1]], (behind, alone), strict=True)] == [True, True]
    assert [w is plain for w in found[keys[2]]] == [True]  # and not the rows behind, which are of another matrix
    assert len(found[keys[3]]) == 1  # and no factors, though there are some of this shape
    assert second.w_down_EDF.scale.shape[1:] == behind.scale.shape == (2, 2)


@pytest.mark.parametrize("implementation", ["grouped", "loop", "dense", "per_slot"])
def test_layers_run_in_the_way_that_is_asked_for(implementation, monkeypatch):
    from fmoe.compile import ops

    called, function = [], ops.FUNCTIONS[implementation]
    monkeypatch.setitem(ops.FUNCTIONS, implementation, lambda *args: called.append(1) or function(*args))
    layer, x = make_layer(), torch.randn(3, 160)
    y = make_run(ROUTER)(implementation, (), x, layer)
    plain = layer._replace(
        w_gate_up_EPD=multiply_out(layer.w_gate_up_EPD, parts=2), w_down_EDF=multiply_out(layer.w_down_EDF)
    )
    torch.testing.assert_close(y, make_run(ROUTER)("per_slot", (), x, plain), rtol=1e-4, atol=1e-5)
    assert called


def test_projections_run_with_the_rows_behind_them():
    w, x = with_rest(150, 3, 130), torch.randn(3, 130)
    y = make_run(None)("library", (), x, w)
    torch.testing.assert_close(y, x @ torch.cat((multiply_out(w), w.rest_MD)).T, rtol=1e-5, atol=1e-5)


def test_kernels_are_compiled_for_what_the_weights_are(monkeypatch):
    """On a GPU the candidates are compiled first, for x in the model's dtype and the rows behind."""
    seen = {}

    def keep_compiling(tasks, device, inputs, *, budget_s):
        seen.update(inputs)
        return []

    device = Device("cuda", "NVIDIA H200", "sm_90", 132, "v")
    monkeypatch.setattr(plan_search, "describe_device", lambda _: device)
    monkeypatch.setattr(
        plan_search, "list_allowed", lambda key, *a, **k: ("triton",) if key == KEY else ("library", "triton")
    )
    monkeypatch.setattr(plan_search, "keep_compiling", keep_compiling)
    projection = linear_key(153, 130, FP8)
    behind = with_rest(150, 3, 130)
    behind = behind._replace(rest_MD=behind.rest_MD.half())
    params = Values((Layer(make_layer(), behind),))
    search_plans(params, ROUTER, [KEY, projection], CPU, requested="auto", search=Search())
    assert seen == {
        KEY: Inputs(ROUTER, torch.float32, 0),
        projection: Inputs(None, torch.float16, 3),
    }


def test_a_search_has_so_many_candidates(monkeypatch):
    counts = []
    monkeypatch.setattr(plan_search, "keep_compiling", lambda tasks, *a, **k: counts.extend(tasks) or [])
    params = Values((Layer(make_layer()),))
    search_plans(params, ROUTER, [KEY], CPU, requested="auto", search=Search((1,), 1, candidates=3))
    assert [len(task.candidates) for task in counts] == [3]
    with pytest.raises(ValueError, match="candidates=0 must be an int >= 1"):
        Search(candidates=0)


TINY = Shape(5, 2, 1, 160, 136, 1, True)


def test_a_table_is_written_of_layers_and_projections_in_fp8_blocks(tmp_path):
    jobs = [make_job(TINY, CPU, dtype=FP8), Job(linear_key(153, 130, FP8), lambda: Values((Layer(draw(2, 2)),)))]
    plans = []
    search = Search((1,), 32, budget_s=20.0, key_budget_s=0.2, force=True)
    tune_jobs(jobs, CPU, search, keep=plans.append)
    assert [plan.key for plan in plans] == [KEY, linear_key(153, 130, FP8)]
    export_table(describe_device(CPU), tmp_path / "table.json", timings=False)
    assert f'"{KEY}"' in (tmp_path / "table.json").read_text()
    assert "float8_e4m3fn" in str(KEY)


def test_the_command_writes_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune_shapes, "SHAPES", {"qwen3next": TINY})
    monkeypatch.setattr(tune_shapes, "FP8_PROJECTIONS", {"qwen3next": ((153, 3, 130),)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    table, timings = tmp_path / "table.json", tmp_path / "timings.json"
    table.write_text(format_table("before", "v", {"moe other": {"1": {}}}))
    arguments = f"--fp8 --max-tokens 1 --seconds 30 --key-budget 0.1 --out {table} --timings {timings}"
    monkeypatch.setattr(sys, "argv", ["tune_shapes", *arguments.split()])
    tune_shapes.main()
    assert capsys.readouterr().out.count(f"{KEY}\n") == 2  # rounds
    found = json.loads(table.read_text())["entries"]
    assert set(found) == {"moe other", str(KEY)}  # a projection has nothing to choose on a CPU
    assert set(found[str(KEY)]) == {"1", "2", "4", "8", "16"}
    assert not any("timings" in entry for entry in found[str(KEY)].values())
    assert all(entry["timings"] for entry in json.loads(timings.read_text())["entries"][str(KEY)].values())


def test_time_is_shared_by_token_counts(monkeypatch):
    now, budgets = [0.0], []

    def search_plans(params, router, keys, device, *, search, **options):
        budgets.append(search.budget_s)
        now[0] += 10.0
        return (None,)

    monkeypatch.setattr(tune_shapes, "search_plans", search_plans)
    empty = Values(())
    jobs = [Job(linear_key(8, 8, FP8), lambda: empty), Job(KEY, lambda: empty, ROUTER)] * 2
    tune_jobs(jobs, CPU, Search((1,), 16384, budget_s=44.0), clock=lambda: now[0])
    # One token count of the projection and eleven of the layer; what one leaves goes to the next ones.
    assert budgets == pytest.approx([44 * 1 / 24, 34 * 11 / 23, 24 * 1 / 12, 14.0])
    tune_jobs(jobs, CPU, Search((1,), 1, budget_s=15.0), clock=lambda: now[0])
    assert len(budgets) == 6  # two of four were begun in that time


def test_published_shapes_by_name():
    narrow = list_jobs(["qwen3next"], ["qwen3next"], CPU, dtype=FP8)
    assert [str(job.key) for job in narrow] == [
        "linear N12352 D2048 float8_e4m3fn",
        "linear N9216 D2048 float8_e4m3fn",
        "linear N2048 D4096 float8_e4m3fn",
        "moe E512 K10 S1 G1 D2048 F512 float8_e4m3fn",
    ]
    wide = list_jobs(["mixtral"], ["mixtral"], CPU, dtype=torch.bfloat16)
    assert {job.key.dtype for job in wide} == {"bfloat16"}
    assert len(wide) == 5
    with pytest.raises(ValueError, match=r"unknown mixtrl; there are qwen3next, .* with weights in torch.bfloat16"):
        list_jobs(["mixtrl"], [], CPU, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"unknown mixtral; there are qwen3next with weights in torch.float8_e4m3fn"):
        list_jobs([], ["mixtral"], CPU, dtype=FP8)


def test_drawn_weights():
    rng = torch.Generator().manual_seed(0)
    w = draw_fp8(3, 272, 160, rng=rng, parts=2)
    assert w.scale.shape == (3, 4, 2)
    assert multiply_out(w, parts=2).std() == pytest.approx(160**-0.5, rel=0.2)
    layer = draw_experts(TINY, 1, dtype=FP8, device=CPU)
    assert layer.w_router_ED.dtype == torch.bfloat16
    assert layer.w_router_ED.shape == (6, 160)
    assert not torch.equal(layer.w_router_ED, draw_experts(TINY, 2, dtype=FP8, device=CPU).w_router_ED)
    matrix = draw_matrix(153, 130, 1, dtype=FP8, device=CPU, rest=3)
    assert (matrix.w.shape, matrix.rest_MD.shape, matrix.rest_MD.dtype) == ((150, 130), (3, 130), torch.bfloat16)
    assert draw_matrix(153, 130, 1, dtype=FP8, device=CPU).rest_MD is None
    assert draw_matrix(5, 4, 1, dtype=torch.bfloat16, device=CPU).dtype == torch.bfloat16


def test_kernels_are_searched_in_the_interpreter():
    pytest.importorskip("triton", reason="triton is not installed; it is what runs the kernels")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FILE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
