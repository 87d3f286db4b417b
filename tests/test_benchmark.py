"""The measuring: arithmetic on hand-made samples, and one run from the command line to the picture."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import fmoe
from fmoe import cli
from fmoe.benchmark import Settings, draw_prompts, list_parts, measure_decode, measure_prefill, run_benchmark
from fmoe.benchmark_machine import measure_rates, process_age_s, read_peak_bytes, reset_peak
from fmoe.benchmark_parts import Profile, profile_kernels, read_trace
from fmoe.benchmark_plot import main as plot_main
from fmoe.benchmark_report import check_plot, format_benchmark, make_record
from fmoe.byte_limit import PARTS, Rates, Work

CPU = torch.device("cpu")
RATES = Rates(copy_gbps=10.0, read_gbps=None, tflops=0.5)
SMALL = Settings(batch_sizes=(2,), context=9, prefill_tokens=(17,), new_tokens=3, repetitions=3)
needs_matplotlib = pytest.mark.skipif(not find_spec("matplotlib"), reason="matplotlib is not installed")

DECODE_KEYS = {
    "batch", "context", "new_tokens", "samples_ms", "ms_per_step", "tokens_per_s", "bytes_per_step", "flops_per_step",
    "gbps", "limit_ms", "ratio", "experts_expected", "experts_counted", "compiled", "kernels_per_step",
    "copies_per_step", "parts", "gaps_ms", "parts_of", "prompts_ms", "peak_bytes",
}  # fmt: skip
PREFILL_KEYS = {
    "tokens", "samples_ms", "ms", "tokens_per_s", "bytes", "flops", "tflops", "limit_ms", "ratio", "peak_bytes",
}  # fmt: skip
KEYS = {
    "model", "family", "weights", "dtypes", "params", "param_bytes", "device", "torch", "threads", "kernels",
    "shared_slots", "load_s", "first_token_s", "peak_bytes", "rates", "decode", "drafts", "prefill", "sweep",
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> fmoe.Model:
    return fmoe.load("demo", device="cpu", compile=False)


@pytest.fixture(scope="module")
def record(model: fmoe.Model) -> dict[str, Any]:
    """Measure once, as JSON writes and reads it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fmoe.benchmark_machine.CPU_BYTES", 1 << 16)
        done = run_benchmark(model, SMALL, weights="random", load_s=1.5)
    result: dict[str, Any] = json.loads(json.dumps(make_record(done)))
    return result


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["bench", "--model", "demo", "--device", "cpu", *arguments])


def test_decode_is_the_median_sample_beside_the_limit(model: fmoe.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    # each reading of the clock is one tick later; a sample of three steps spans one tick
    ticks = itertools.count()
    lengths = [0.0, 1.0, 5.0, 2.0]  # prompts, then samples, in seconds
    times = list(itertools.accumulate(itertools.chain.from_iterable((0.5, s) for s in [*lengths, 1.0])))
    monkeypatch.setattr("fmoe.benchmark.time.perf_counter", lambda: times[next(ticks)])
    monkeypatch.setattr("fmoe.benchmark._watch", lambda *_: (FixedWatch(), 1.0))
    case = measure_decode(model, 2, SMALL, RATES)
    assert case.samples_ms == pytest.approx((1e3 / 3, 5e3 / 3, 2e3 / 3))
    assert case.ms_per_step == pytest.approx(2e3 / 3)
    assert case.tokens_per_s == pytest.approx(3.0)
    assert case.gbps == pytest.approx(case.bytes_per_step / (2 / 3) / 1e9)
    assert case.limit_ms == pytest.approx(case.bytes_per_step / 10e9 * 1e3)
    assert case.ratio == pytest.approx(case.ms_per_step / case.limit_ms)
    assert case.experts_expected == pytest.approx(16 * (1 - (1 - 4 / 16) ** 2))
    assert case.experts_counted == 6.0
    expert = 4 * 3 * 256 * 64
    monkeypatch.undo()
    other = measure_bytes(model, distinct=5.0)
    assert case.bytes_per_step - other == pytest.approx(8 * expert)
    assert (case.kernels_per_step, case.copies_per_step, case.gaps_ms) == (None, None, 0.0)
    assert {part.name: part.ms for part in case.parts} == pytest.approx(
        {"MoE": 100.0, "DeltaNet": 50.0, "attention": 25.0, "head": 25.0, "rest": 800.0}
    )


class FixedWatch:
    """What a watch of four steps found."""

    def __init__(self, distinct: float = 6.0) -> None:
        self.seconds = {"MoE": 0.4, "DeltaNet": 0.2, "attention": 0.1, "head": 0.1, "rest": 0.0}
        self.distinct = distinct

    def distinct_per_layer(self, layers: int, /) -> list[float]:
        """Give every layer as many experts."""
        return [self.distinct] * layers


def measure_bytes(model: fmoe.Model, *, distinct: float) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fmoe.benchmark._watch", lambda *_: (FixedWatch(distinct), 1.0))
        return measure_decode(model, 2, SMALL, RATES).bytes_per_step


def test_what_no_kernel_took_are_gaps(model: fmoe.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = {"MoE": 2.0, "DeltaNet": 1.0, "attention": 0.5, "head": 0.25, "rest": 0.25}
    profile = Profile(kernels=430.0, copies=1.0, parts_ms=busy, parts_kernels=dict.fromkeys(busy, 86.0))
    monkeypatch.setattr("fmoe.benchmark._time_steps", lambda *_: ([6.0, 5.0, 9.0], profile))
    monkeypatch.setattr("fmoe.benchmark._watch", lambda *_: (FixedWatch(), 1.0))
    case = measure_decode(model, 1, SMALL, RATES)
    assert case.gaps_ms == pytest.approx(2.0)
    assert (case.kernels_per_step, case.copies_per_step, case.parts_of) == (430.0, 1.0, "traced steps")
    assert {part.name: part.ms for part in case.parts} == busy
    monkeypatch.setattr("fmoe.benchmark._time_steps", lambda *_: ([3.0], profile))
    assert measure_decode(model, 1, SMALL, RATES).gaps_ms == 0.0  # tracing made kernels slower than the step


def test_prefill_is_the_median_prompt(model: fmoe.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 10.0, 10.5, 20.0, 22.0])  # the first one, which compiles, reads the clock once
    monkeypatch.setattr("fmoe.benchmark.time.perf_counter", lambda: next(times))
    case = measure_prefill(model, 17, SMALL, RATES)
    assert case.samples_ms == pytest.approx((2e3, 0.5e3, 2e3))
    assert case.ms == pytest.approx(2e3)
    assert case.tokens_per_s == pytest.approx(17 / 2)
    assert case.tflops == pytest.approx(case.flops / 2 / 1e12)
    assert case.limit_ms == pytest.approx(max(case.bytes / 10e9, case.flops / 0.5e12) * 1e3)


def test_a_gpu_is_measured_by_what_its_trace_holds() -> None:
    work = Work({part: 1e9 * (i + 1) for i, part in enumerate(PARTS)}, dict.fromkeys(PARTS, 0.0), 0.0)
    events = [{"ph": "X", "cat": "kernel", "name": "delta_token", "ts": 0.0, "dur": 2000.0}]
    profile = profile_kernels(read_trace({"traceEvents": events}), 2)
    parts = {part.name: part for part in list_parts(work, RATES, profile, {})}
    assert parts["DeltaNet"].ms == 1.0
    assert parts["DeltaNet"].kernels == 0.5
    assert parts["MoE"].ms == 0.0
    assert [part.limit_ms for part in parts.values()] == pytest.approx([100.0, 200.0, 300.0, 400.0, 500.0])


def test_the_record_holds_everything(record: dict[str, Any], model: fmoe.Model) -> None:
    assert set(record) == KEYS
    assert [set(case) for case in record["decode"]] == [DECODE_KEYS]
    assert [set(case) for case in record["prefill"]] == [PREFILL_KEYS]
    assert set(record["rates"]) == {"copy_gbps", "read_gbps", "tflops", "gbps"}
    assert record["rates"]["gbps"] == record["rates"]["copy_gbps"] > 0
    decode, prefill = record["decode"][0], record["prefill"][0]
    assert [part["name"] for part in decode["parts"]] == list(PARTS)
    assert all(part["ms"] > 0 and part["limit_ms"] > 0 for part in decode["parts"])
    assert len(decode["samples_ms"]) == len(prefill["samples_ms"]) == 3
    assert decode["tokens_per_s"] == pytest.approx(2e3 / decode["ms_per_step"])
    assert 4.0 <= decode["experts_counted"] <= 8.0
    assert record["params"] == 10_956_064
    assert record["param_bytes"] == 4 * record["params"]
    assert (record["dtypes"], record["family"], record["weights"]) == (["float32"], "qwen3_next", "random")
    assert (record["load_s"], record["shared_slots"], record["device"]) == (1.5, 1, "cpu")


def test_the_text_names_every_case(record: dict[str, Any], model: fmoe.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmoe.benchmark_machine.CPU_BYTES", 1 << 16)
    done = run_benchmark(model, replace(SMALL, batch_sizes=(1, 3)))
    text = format_benchmark(done)
    for case in done.decode:
        assert f"{case.ms_per_step:.3f}" in text
        assert f"{case.ratio:.2f}" in text
    assert f"{done.prefill[0].ms:.2f}" in text
    assert text.count("uncompiled steps") == 2
    assert "gaps" not in text  # nobody traced
    assert "loaded in an unknown time" in text
    traced = replace(done.decode[0], kernels_per_step=433.0, gaps_ms=1.234)
    text = format_benchmark(replace(done, decode=(traced,), prefill=(), peak_bytes=None))
    assert "433" in text
    assert "gaps    1.234" in text
    assert "unknown at the most" in text
    assert "prefill" not in text


def test_the_command_measures_the_demo() -> None:
    result = run("--new-tokens", "8", "--repetitions", "2", "--context", "20", "--prefill-tokens", "", "--json", "-q")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == KEYS
    assert [case["batch"] for case in found["decode"]] == [1, 8]
    assert found["prefill"] == []
    assert found["weights"] == "stored"
    assert found["first_token_s"] > 0
    assert result.stderr == ""


def test_the_command_measures_a_config_alone() -> None:
    result = run(
        "--weights", "random", "--batch-sizes", "1", "--context", "8", "--new-tokens", "2", "--repetitions", "1"
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "random weights in float32" in result.stdout
    assert "decode, batch 1" in result.stderr
    assert "first token" in result.stderr


@needs_matplotlib
def test_a_plot_is_a_png(record: dict[str, Any], tmp_path: Path) -> None:
    source, target = tmp_path / "result.json", tmp_path / "plot.png"
    source.write_text(json.dumps(record))
    assert plot_main([str(source), str(target)]) == 0
    content = target.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (1560, 624)
    # without decode and without prefill, too
    for part in ("decode", "prefill"):
        source.write_text(json.dumps(record | {part: []}))
        target.unlink()
        assert plot_main([str(source), str(target)]) == 0
        assert target.stat().st_size > 5000


@needs_matplotlib
def test_the_command_draws(tmp_path: Path) -> None:
    target = tmp_path / "plot.png"
    options = ("--batch-sizes", "1", "--context", "8", "--new-tokens", "2", "--repetitions", "1", "--plot", str(target))
    result = run(*options, "--prefill-tokens", "8")
    assert result.exit_code == 0, result.output
    assert target.read_bytes().startswith(b"\x89PNG")


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmoe.benchmark_report.find_spec", lambda name: None)
    result = run("--plot", "plot.png")
    assert result.exit_code == 1
    assert "install it with: pip install 'fmoe[plot]'" in result.output


def test_a_plot_that_cannot_be_written_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmoe.benchmark_report.find_spec", lambda name: object())
    with pytest.raises(ValueError, match=r"the plot is a PNG, but .*plot\.pdf' ends otherwise"):
        check_plot(tmp_path / "plot.pdf")
    with pytest.raises(FileNotFoundError, match=r"no folder .*absent for the plot"):
        check_plot(tmp_path / "absent" / "plot.png")
    check_plot(tmp_path / "plot.png")


def test_drawing_needs_two_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_main(["result.json"]) == 2
    assert "usage: python -m fmoe.benchmark_plot" in capsys.readouterr().err


def test_no_command_waits_for_matplotlib() -> None:
    code = "import sys, fmoe.cli; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": (1, 0)}, r"batch_sizes=\(1, 0\) must be integers >= 1"),
        ({"prefill_tokens": (2.0,)}, r"prefill_tokens=\(2\.0,\) must be integers >= 1"),
        ({"context": 0}, "context=0 must be an int >= 1"),
        ({"new_tokens": True}, "new_tokens=True must be an int >= 1"),
        ({"repetitions": -1}, "repetitions=-1 must be an int >= 1"),
        ({"batch_sizes": 4}, r"batch_sizes=4 must be integers >= 1, such as \(1, 8\)"),
        ({"prefill_tokens": None}, "prefill_tokens=None must be integers >= 1"),
        ({"seed": "x"}, r"seed='x' must be an int in 0\.\."),
        ({"seed": -1}, r"seed=-1 must be an int in 0\.\."),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**options)


def test_what_does_not_fit_the_context_is_refused(model: fmoe.Model) -> None:
    assert Settings(new_tokens=10, repetitions=3).decode_tokens == 1 + 4 + 30 + 4 + 2
    with pytest.raises(
        ValueError, match="context=4000 and 171 tokens behind it need 4171 positions, the model has 4096"
    ):
        run_benchmark(model, Settings(context=4000))
    with pytest.raises(ValueError, match="prefill_tokens=4097 must be at most the model's context of 4096"):
        run_benchmark(model, Settings(prefill_tokens=(1, 4097)))


def test_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model must come from fmoe\.load, got str"):
        run_benchmark("demo", Settings())  # type: ignore[arg-type]


def test_prompts_differ_by_row_and_seed(model: fmoe.Model) -> None:
    prompts = draw_prompts(model, 3, 40, 7)
    assert [len(row) for row in prompts] == [40] * 3
    assert prompts[0] != prompts[1]
    assert prompts == draw_prompts(model, 3, 40, 7)
    assert prompts != draw_prompts(model, 3, 40, 8)
    assert all(0 <= token < 4096 for row in prompts for token in row)


def test_rates_count_both_sides_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmoe.benchmark_machine._median_s", lambda call, device: 1e-3)
    rates = measure_rates(CPU, torch.float32, nbytes=4000)
    assert rates.copy_gbps == pytest.approx(2 * 4000 / 1e6)
    assert rates.read_gbps is None
    assert rates.tflops == pytest.approx(2 * 512**3 / 1e9)


def test_the_age_of_a_process_grows() -> None:
    age = process_age_s()
    if age is None:
        pytest.skip("this system does not tell when a process started")
    assert 0 < age < 1e6
    code = "from fmoe.benchmark_machine import process_age_s; import time; time.sleep(0.3); print(process_age_s())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.3 < float(done.stdout) < 60


def test_peak_memory_is_at_least_what_was_touched() -> None:
    before = read_peak_bytes(CPU)
    if before is None:
        pytest.skip("this system does not tell")
    reset_peak(CPU)
    held = torch.ones(50_000_000)
    grown = read_peak_bytes(CPU)
    assert grown is not None
    assert grown >= held.nbytes
    del held
