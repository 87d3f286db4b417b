"""fmoe bench --sweep: what it measures, what it leaves out, and that placed caches decode as prefilled ones do."""

import json
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import fmoe
from fmoe import cli
from fmoe.benchmark import Settings, run_benchmark
from fmoe.benchmark_plot import main as plot_main
from fmoe.benchmark_report import format_benchmark, make_record
from fmoe.benchmark_sweep import Sweep, SweepSettings, decode_placed, fill_caches_, run_sweep
from fmoe.byte_limit import Rates, count_work
from fmoe.decoding import new_state

RATES = Rates(copy_gbps=10.0, read_gbps=None, tflops=0.5)
SMALL = SweepSettings(tokens=(1, 9), contexts=(5, 33), batches=(1, 3), context=7, new_tokens=2, repetitions=2)
needs_matplotlib = pytest.mark.skipif(not find_spec("matplotlib"), reason="matplotlib is not installed")


@pytest.fixture(scope="module")
def model() -> fmoe.Model:
    return fmoe.load("demo", device="cpu", compile=False)


@pytest.fixture(scope="module")
def sweep(model: fmoe.Model) -> Sweep:
    return run_sweep(model, SMALL, RATES)


def run(*arguments: str) -> Result:
    options = ("--new-tokens", "2", "--repetitions", "1", "--context", "6", "-q", *arguments)
    return CliRunner().invoke(cli.main, ["bench", "--model", "demo", "--device", "cpu", *options])


@pytest.mark.parametrize("rows", [1, 3])
def test_placed_caches_decode_as_prefilled_ones_do(
    model: fmoe.Model, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    state = fmoe.prefill(model, [3, 1, 4, 1, 5, 9, 2])
    expected = fmoe.generate(
        model, [""] * rows, state=state, max_new_tokens=6, temperature=0.0, repetition_penalty=1.0, ignore_eos=True
    )

    def copy(placed: Any, generator: torch.Generator) -> None:
        for cache, source in zip(placed.caches, state.caches, strict=True):
            for name, part in cache._asdict().items():
                kept = getattr(source, name)
                slots = 7 if name.endswith("BJMC") else part.shape[2]
                part[:, :, :slots] = kept[:, :, :slots]

    monkeypatch.setattr("fmoe.benchmark_sweep.fill_caches_", copy)
    monkeypatch.setattr("fmoe.benchmark_sweep.torch.randn", lambda *_, **__: state.logits_V.expand(rows, -1))
    with torch.inference_mode():
        turns = list(decode_placed(model, model.eager, rows, 7, 6, 0))
    assert [list(row) for row in zip(*turns, strict=True)] == [list(done.token_ids) for done in expected]


def test_caches_are_finite_and_differ_by_row(model: fmoe.Model) -> None:
    with torch.inference_mode():
        state = new_state(model, 2, 5)
        for cache in state.caches:
            for part in cache:
                part.fill_(torch.nan)
        fill_caches_(state, torch.Generator().manual_seed(1))
        parts = [part for cache in state.caches for part in cache]
        assert all(part.isfinite().all() and not part[0].equal(part[1]) for part in parts)
        again = new_state(model, 2, 5)
        fill_caches_(again, torch.Generator().manual_seed(1))
        assert all(a.equal(b) for a, b in zip(parts, (p for cache in again.caches for p in cache), strict=True))


def test_every_size_is_a_point_beside_its_limit(sweep: Sweep) -> None:
    assert [(p.axis, p.size, p.batch, p.context) for p in (*sweep.tokens, *sweep.contexts, *sweep.batches)] == [
        ("tokens", 1, 1, 0),
        ("tokens", 9, 1, 0),
        ("context", 5, 1, 5),
        ("context", 33, 1, 33),
        ("batch", 1, 1, 7),
        ("batch", 3, 3, 7),
    ]
    for point in (*sweep.tokens, *sweep.contexts, *sweep.batches):
        assert len(point.samples_ms) == 2
        assert min(point.samples_ms) <= point.ms <= max(point.samples_ms)
        assert point.bytes_ms == pytest.approx(point.bytes / 10e9 * 1e3)
        assert point.flops_ms == pytest.approx(point.flops / 0.5e12 * 1e3)
        assert point.limit_ms == max(point.bytes_ms, point.flops_ms)
        assert point.ratio == pytest.approx(point.ms / point.limit_ms)
        tokens = point.size if point.axis == "tokens" else point.batch
        assert point.tokens_per_s == pytest.approx(tokens / point.ms * 1e3)
        assert not point.compiled
    assert sweep.left_out == ()
    assert sweep.contexts[0].experts == 4.0
    assert 4.0 <= sweep.batches[1].experts <= 12.0


def test_the_limit_is_that_of_the_middle_step(model: fmoe.Model, sweep: Sweep) -> None:
    state = model.architecture.init_state(model.config, 1, 64, dtype=model.dtype, device=torch.device("meta"))
    # the first token and four steps that warm up, then half of two samples of two
    work = count_work(model.params, model.config, state.caches, batch=1, context=33 + 1 + 4 + 2)
    assert (sweep.contexts[1].bytes, sweep.contexts[1].flops) == (work.total_bytes, work.total_flops)


def test_what_the_model_cannot_hold_is_left_out_and_said(model: fmoe.Model) -> None:
    settings = replace(SMALL, tokens=(4097, 2), contexts=(4096, 5000), batches=(2,), context=4090)
    sweep = run_sweep(model, settings, RATES)
    assert [point.size for point in sweep.tokens] == [2]
    # steps that would leave the context end with it
    assert [(point.size, point.context) for point in sweep.contexts] == [(4096, 4096 - settings.decode_tokens)]
    assert [(point.size, point.context) for point in sweep.batches] == [(2, 4096 - settings.decode_tokens)]
    reason = "the model's context is 4096 tokens"
    assert [asdict(left) for left in sweep.left_out] == [
        {"axis": "tokens", "size": 4097, "reason": reason},
        {"axis": "context", "size": 5000, "reason": reason},
    ]
    many = replace(SMALL, tokens=(), batches=(), contexts=(9,), new_tokens=4096)
    [left] = run_sweep(model, many, RATES).left_out
    assert left.reason == "the steps take 8199 tokens of the model's context of 4096; take fewer new_tokens"


def test_what_does_not_fit_into_memory_is_left_out(model: fmoe.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmoe.cache_size.available_bytes", lambda: 20 * 2**20)
    sweep = run_sweep(model, replace(SMALL, tokens=(), contexts=(), batches=(1, 4096)), RATES)
    assert [point.size for point in sweep.batches] == [1]
    [left] = sweep.left_out
    assert (left.axis, left.size) == ("batch", 4096)
    assert "the caches of 4096 sequences of 18 tokens" in left.reason
    assert "would fit" in left.reason

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore of it")

    monkeypatch.setattr("fmoe.benchmark_sweep.check_room", fail)
    [left] = run_sweep(model, replace(SMALL, tokens=(3,), contexts=(), batches=()), RATES).left_out
    assert (left.axis, left.size, left.reason) == ("tokens", 3, "CUDA out of memory.")


def test_a_kept_batch_gives_its_memory_back(model: fmoe.Model) -> None:
    model.shelf.put(object())
    run_sweep(model, replace(SMALL, tokens=(), contexts=(9,), batches=()), RATES)
    assert model.shelf.peek() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": (0,)}, r"the sweep's tokens=\(0,\) must be integers >= 1, such as \(1, 8\)"),
        ({"contexts": 512}, "the sweep's contexts=512 must be integers"),
        ({"batches": (1.0,)}, r"the sweep's batches=\(1\.0,\) must be integers"),
        ({"context": 0}, "context=0 must be an int >= 1"),
        ({"new_tokens": 0}, "new_tokens=0 must be an int >= 1"),
        ({"repetitions": 0}, "repetitions=0 must be an int >= 1"),
        ({"seed": -1}, r"seed=-1 must be an int in 0\.\."),
    ],
    ids=str,
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SweepSettings(**options)
    with pytest.raises(ValueError, match=r"model must come from fmoe\.load, got str"):
        run_sweep("demo", SMALL, RATES)  # type: ignore[arg-type]


def test_the_sizes_are_those_of_the_plot() -> None:
    usual = SweepSettings()
    assert (usual.tokens[0], usual.tokens[-1], len(usual.tokens)) == (1, 16_384, 15)
    assert (usual.contexts[0], usual.contexts[-1], len(usual.contexts)) == (512, 262_144, 10)
    assert usual.batches == (1, 2, 4, 8, 16, 32, 64)
    assert usual.decode_tokens == 1 + 4 + 5 * 32 + 2


def test_the_command_sweeps_instead() -> None:
    sizes = ("--sweep-tokens", "3,5000", "--sweep-contexts", "", "--sweep-batches", "2")
    result = run("--sweep", *sizes, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["decode"], record["prefill"]) == ([], [])
    found = record["sweep"]
    assert [point["size"] for point in found["tokens"]] == [3]
    assert found["contexts"] == []
    assert [(point["size"], point["context"], len(point["samples_ms"])) for point in found["batches"]] == [(2, 6, 1)]
    assert [(left["axis"], left["size"]) for left in found["left_out"]] == [("tokens", 5000)]
    assert "nothing was prefilled" in found["caches"]


def test_the_command_refuses_what_a_sweep_does_not_do() -> None:
    result = run("--sweep-tokens", "3")
    assert result.exit_code == 1
    assert "--sweep-batches need --sweep; add it or leave them out" in result.output
    result = run("--sweep", "--speculate", "1")
    assert "--sweep measures steps without drafts; leave out --speculate" in result.output
    assert "'1;2' must be whole numbers" in run("--sweep", "--sweep-batches", "1;2").output


def test_the_text_has_every_size(model: fmoe.Model, sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmoe.benchmark_machine.CPU_BYTES", 1 << 16)
    done = run_benchmark(model, run_settings())
    settings = replace(SMALL, tokens=(5000, 6000), contexts=(), batches=())
    left = run_sweep(model, settings, RATES).left_out
    text = format_benchmark(done, replace(sweep, left_out=left))
    for point in (*sweep.tokens, *sweep.contexts, *sweep.batches):
        assert f"{point.ms:.3f}" in text
    assert "left out tokens 5000, 6000: the model's context is 4096 tokens" in text
    assert sweep.caches in text
    assert "caches" not in format_benchmark(done, Sweep((), (), (), left))
    assert make_record(done)["sweep"] is None


def run_settings() -> Settings:
    """Measure no case."""
    return Settings((), 5, (), 1, 1)


@needs_matplotlib
def test_a_plot_has_three_panels(sweep: Sweep, tmp_path: Path) -> None:
    source, target = tmp_path / "result.json", tmp_path / "plot.png"
    head = {"model": "demo", "weights": "stored", "device": "cpu", "torch": "2", "decode": [], "prefill": []}
    left = [{"axis": "context", "size": 9999, "reason": "too long"}]
    for changed in ({}, {"left_out": left}, {"contexts": []}):
        source.write_text(json.dumps(head | {"sweep": asdict(sweep) | changed}))
        target.unlink(missing_ok=True)
        assert plot_main([str(source), str(target)]) == 0
        content = target.read_bytes()
        width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
        assert (width, height) == (1920, 624)
        assert len(content) > 5000
