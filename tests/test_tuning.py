"""fmoe.tune from the outside: it runs for real on a CPU, keeps what it finds, and gives a model that runs by it."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from click.testing import CliRunner

import fmoe
from fmoe import plan_search
from fmoe.cli_machine import tune_command
from fmoe.compile import plan_tables
from fmoe.compile.device import describe_device
from fmoe.compile.plan import Entry, linear_key, moe_key
from fmoe.compile.plan_tables import format_table, read_tables, tuned_file, write_entries
from fmoe.functional import Kernels, moe_layer
from fmoe.plan_search import Search, find_weights, list_buckets, make_run, search_plans
from fmoe.tuning import check_export, export_tuned, tune

FUNCTIONS = {"per_slot", "loop", "dense", "grouped"}
CPU = torch.device("cpu")
QUICK = {"batch_sizes": (1, 3), "max_tokens": 40, "key_budget_s": 0.2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FMOE_CACHE_DIR", str(tmp_path / "cache"))
    plan_tables._log_once.cache_clear()
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", compile=False, tune="off")


def moe_plan(model):
    (plan,) = [plan for plan in model.plans if plan.key.operator == "moe"]
    return plan


def test_the_tuner_runs_on_a_cpu(demo, cache):
    tuned = tune(demo, **QUICK)
    plan = moe_plan(tuned)
    entries = read_tables(describe_device(CPU)).tuned
    assert set(entries) == {str(plan.key)}  # a projection has one implementation here, and nothing to choose
    assert set(entries[str(plan.key)]) == {1, 4, 32}  # three rows run as four do
    for tokens, entry in entries[str(plan.key)].items():
        assert entry.implementation in FUNCTIONS
        assert {name for name, _ in entry.timings} <= FUNCTIONS
        assert isinstance(dict(entry.timings)[entry.implementation], float), tokens
        (row,) = [row for row in plan.rows if row.source == "tuned" and row.implementation == entry.implementation][:1]
        assert row
    assert [row.source for row in plan.rows][:3] == ["tuned", "tuned at 1", "tuned"]
    assert {row.source for row in moe_plan(demo).rows} == {"rule"}  # the model given is unchanged
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(fmoe.logits(tuned, ids), fmoe.logits(demo, ids), rtol=1e-4, atol=1e-4)


def test_what_was_measured_is_final(demo, monkeypatch):
    key = moe_plan(demo).key
    write_entries(describe_device(CPU), key, {tokens: Entry("per_slot", (), 1.0) for tokens in (1, 4, 32)})

    def measure(*arguments, **options):
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(plan_search, "make_measure", measure)
        tuned = tune(demo, **QUICK)
    assert {row.implementation for row in moe_plan(tuned).rows[:4]} == {"per_slot"}
    assert tune(tuned, **QUICK) is tuned
    tune(demo, force=True, **QUICK)
    again = read_tables(describe_device(CPU)).tuned[str(key)]
    assert all(entry.timings for entry in again.values())


def test_no_time_changes_nothing(demo, cache, caplog):
    assert [plan.rows for plan in tune(demo, budget_s=0.0).plans] == [plan.rows for plan in demo.plans]
    assert not cache.exists()
    assert "tuning stopped after its budget" in caplog.text


def test_a_corrupt_file_is_measured_anew(demo, cache, caplog):
    path = tuned_file(describe_device(CPU))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    tune(demo, **QUICK)
    assert "holds no JSON object" in caplog.text
    assert len(read_tables(describe_device(CPU)).tuned) == 1


def test_a_folder_that_cannot_be_written_still_tunes(demo, cache, caplog):
    cache.write_text("")
    tuned = tune(demo, **QUICK)
    assert moe_plan(tuned).rows[0].source == "tuned"
    assert "could not keep results" in caplog.text


def test_a_bar_is_shown_on_request(demo, capsys):
    tune(demo, progress=True, **QUICK)
    assert "tuning: 100%" in capsys.readouterr().err
    tune(demo, progress=False, force=True, **QUICK)
    assert capsys.readouterr().err == ""


def test_export(demo, tmp_path):
    with pytest.raises(ValueError, match=r"nothing was measured on .*; tune first"):
        export_tuned(demo, tmp_path / "table.json")
    tune(demo, **QUICK)
    export_tuned(demo, tmp_path / "table.json")
    store = json.loads((tmp_path / "table.json").read_text())
    assert list(store["entries"]) == [str(moe_plan(demo).key)]
    assert list(store["entries"][str(moe_plan(demo).key)]) == ["1", "4", "32"]


@pytest.mark.parametrize("text", [
    "a letter", "[]", "3", "[" * 99999,
    '{"entries": 3}', '{"entries": {"moe": 3}}', '{"entries": {"moe": {"one": {}}}}',
], ids=lambda text: text[:40])  # fmt: skip
def test_an_export_leaves_other_files_alone(demo, tmp_path, text):
    path = tmp_path / "letter.json"
    path.write_text(text)
    write_entries(describe_device(CPU), moe_plan(demo).key, {1: Entry("loop", (), 1.0)})
    with pytest.raises(ValueError, match=r"letter\.json holds something else than a table of fmoe's, and is left"):
        export_tuned(demo, path)
    assert path.read_text() == text


def test_an_export_keeps_the_tables_of_devices_apart(demo, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(text := format_table("NVIDIA H200", "torch 2.13.0", {}))
    write_entries(describe_device(CPU), moe_plan(demo).key, {1: Entry("loop", (), 1.0)})
    with pytest.raises(ValueError, match=r"table\.json is a table of NVIDIA H200, and this device is .*; name another"):
        export_tuned(demo, path)
    assert path.read_text() == text


def test_an_export_adds_to_a_table(demo, tmp_path):
    path, device = tmp_path / "table.json", describe_device(CPU)
    path.write_text(format_table(device.name, device.versions, {"other": {"1": {}}}))
    write_entries(device, moe_plan(demo).key, {1: Entry("loop", (), 1.0)})
    export_tuned(demo, path)
    assert set(json.loads(path.read_text())["entries"]) == {"other", str(moe_plan(demo).key)}


def test_an_export_says_why_nothing_was_kept(demo, cache, tmp_path):
    cache.write_text("")
    tuned = tune(demo, **QUICK)
    with pytest.raises(RuntimeError, match=r"could not be kept in .*cache.*; set FMOE_CACHE_DIR to a folder"):
        export_tuned(tuned, tmp_path / "table.json")
    assert not (tmp_path / "table.json").exists()


def test_places_of_tables_are_checked(demo, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*absent for the table; make it first"):
        check_export(tmp_path / "absent" / "table.json")
    with pytest.raises(ValueError, match=r"the table's place .* is a folder; name a file in it, such as .*table\.json"):
        check_export(tmp_path)
    for path in (None, 3, b"table.json"):
        with pytest.raises(ValueError, match=rf"path={path!r} must name the file of a table"):
            export_tuned(demo, path)
    with pytest.raises(ValueError, match=r"model must come from fmoe.load, got NoneType"):
        export_tuned(None, tmp_path / "table.json")
    assert check_export(tmp_path / "table.json") == {}


@pytest.mark.parametrize(("arguments", "message"), [
    (("--out", "absent/table.json"), "absent for the table; make it first"),
    (("--budget", "nan"), "budget_s=nan must be a number of seconds"),
    (("--max-tokens", "0"), "max_tokens=0 must be an int >= 1"),
    (("--batch-sizes", "-1"), "batch_sizes=(-1,) must be integers >= 1"),
], ids=str)  # fmt: skip
def test_the_command_refuses_before_it_loads(arguments, message, tmp_path, monkeypatch):
    def load(*arguments, **options):
        raise AssertionError("loaded")

    monkeypatch.setattr("fmoe.cli_machine.load", load)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(tune_command, ("--model", "demo", *arguments))
    assert message in done.output
    assert done.exit_code == 1


def test_shipped_entries_are_used_and_tried(demo, monkeypatch, tmp_path):
    monkeypatch.setattr(plan_tables, "TABLES", tmp_path)
    key, device = moe_plan(demo).key, describe_device(CPU)
    write_entries(device, key, {2048: Entry("grouped", (), 1.0), 8: Entry("per_slot", (), 1.0)})
    plan_tables.export_table(device, plan_tables.shipped_file(device))
    tuned_file(device).unlink()
    tuned = tune(demo, budget_s=0.0)
    assert [row.source for row in moe_plan(tuned).rows[:4]] == ["rule", "shipped at 8", "shipped at 8", "shipped"]


def test_a_model_is_needed():
    with pytest.raises(ValueError, match=r"model must come from fmoe.load, got str; write fmoe.tune\("):
        tune("demo")


@pytest.mark.parametrize(("options", "message"), [
    ({"batch_sizes": (0,)}, r"batch_sizes=\(0,\) must be integers >= 1, such as \(1, 8\)"),
    ({"batch_sizes": (1.5,)}, r"batch_sizes=\(1\.5,\) must be integers"),
    ({"batch_sizes": 4}, r"batch_sizes=4 must be integers"),
    ({"batch_sizes": None}, r"batch_sizes=None must be integers"),
    ({"max_tokens": 0}, r"max_tokens=0 must be an int >= 1"),
    ({"max_tokens": True}, r"max_tokens=True must be an int >= 1"),
    ({"max_tokens": "8"}, r"max_tokens='8' must be an int >= 1"),
], ids=str)  # fmt: skip
def test_sizes_are_checked(demo, options, message):
    with pytest.raises(ValueError, match=message):
        tune(demo, **options)


def test_sizes_of_numpy_are_sizes(demo):
    sizes = numpy.array([1, 3])
    assert tune(demo, batch_sizes=sizes, max_tokens=numpy.int64(40), budget_s=0.0).plans == demo.plans


@pytest.mark.parametrize("name", ["budget_s", "key_budget_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), "1", True], ids=repr)
def test_budgets_are_checked(demo, name, value):
    with pytest.raises(ValueError, match=rf"{name}=.* must be a number of seconds, 0 or more"):
        tune(demo, **{name: value})
    with pytest.raises(ValueError, match="progress=3 must be"):
        tune(demo, progress=3)


def test_nothing_is_tuned_while_tracing(demo, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"inside a captured or compiled region; call fmoe.tune before it"):
        tune(demo)


def test_token_counts_to_measure():
    moe, linear = moe_key(8, 2, 0, 0, 16, 24, torch.float32), linear_key(8, 16, torch.float32)
    assert list_buckets(moe, Search((16, 1, 3), 300)) == [1, 4, 16, 64, 32, 256, 128]
    assert list_buckets(moe, Search((1, 40000), 1)) == [1, 16384]
    assert list_buckets(linear, Search((16, 1, 3, 8), 300)) == [1, 4, 8]
    assert len(list_buckets(moe, Search())) == 15


def test_weights_are_found_by_their_key(demo):
    keys = [plan.key for plan in demo.plans]
    weights = find_weights(demo.params, demo.config.router, keys)
    assert set(weights) == set(keys)
    assert [id(w) for w in weights[moe_plan(demo).key]] == [id(layer.mlp) for layer in demo.params.layers]
    for key, found in weights.items():
        if key.operator == "linear":
            assert {tuple(w.shape) for w in found} == {key.sizes}
    assert find_weights(demo.params, None, [moe_plan(demo).key]) == {}


@pytest.mark.parametrize("implementation", ["grouped", "loop", "dense", "per_slot"])
def test_candidates_run_through_the_models_ops(demo, implementation):
    params = demo.params.layers[0].mlp
    x = torch.randn(3, 256)
    run = make_run(demo.config.router)
    torch.testing.assert_close(
        run(implementation, (), x, params), moe_layer(x, params, demo.config.router, kernels=Kernels()),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip
    w = torch.randn(5, 256)
    torch.testing.assert_close(run("library", (), x, w), x @ w.T)


def test_experts_that_no_kernel_computes_are_not_tuned_and_that_is_said(demo, caplog):
    caplog.set_level(logging.INFO, logger="fmoe")
    key = replace(moe_plan(demo).key, variant="biased")
    (plan,) = search_plans(demo.params, demo.config.router, [key], CPU, requested="auto", search=Search())
    assert (plan.key, {row.source for row in plan.rows}) == (key, {"rule"})
    assert f"not tuned: {key} (functions alone run it, by rule)" in caplog.messages


def test_the_levels_are_logged_once(demo, caplog):
    caplog.set_level(logging.DEBUG, logger="fmoe")
    for _ in range(2):
        search_plans(
            demo.params, demo.config.router, [moe_plan(demo).key], CPU, requested="auto", search=Search(budget_s=0.0)
        )
    assert len([r for r in caplog.records if r.message.startswith("plans for ")]) == 1
