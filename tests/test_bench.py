"""The arithmetic of the benchmark; nothing here is timed."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import fmoe
from bench import startup, states
from bench.__main__ import SCRIPTS
from bench.decode import OURS, Case, Result, all_cases, select_cases
from bench.measure import (
    add_samples,
    fastest,
    find_difference,
    median_ratio,
    rate,
    rows_of,
    run_interleaved,
    spread_of_ratio,
    time_calls,
)
from bench.whole_model import OURS as WHOLE_OURS
from bench.whole_model import cut_config, main, summarise


def test_a_ratio_is_the_median_over_pairs_and_not_the_ratio_of_medians() -> None:
    ours, theirs = [1.0, 2.0, 8.0], [4.0, 2.0, 16.0]
    assert median_ratio(ours, theirs) == 2.0  # of 4, 1, 2; the medians' own ratio is 4 / 2 = 2 only by its order
    assert median_ratio([1.0, 10.0, 2.0], [3.0, 10.0, 10.0]) == 3.0  # the medians' own ratio would be 5


def test_a_ratio_needs_as_many_samples_of_both() -> None:
    with pytest.raises(ValueError, match="shorter"):
        median_ratio([1.0, 2.0], [1.0])


def test_quartiles_of_a_ratio() -> None:
    assert spread_of_ratio([1.0] * 5, [5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 4.0)
    assert spread_of_ratio([2.0], [3.0]) == (1.5, 1.5)


def test_rate_counts_all_rows_at_the_median_step() -> None:
    assert rate([0.5, 0.1, 0.2], 8) == pytest.approx(40.0)


def test_the_fastest_has_the_least_median() -> None:
    samples = {"a": [1.0, 9.0, 9.0], "b": [5.0, 5.0, 5.0], "ours": [0.1, 0.1, 0.1]}
    assert fastest(samples, ["a", "b"]) == "b"


def test_samples_add_up_by_contender() -> None:
    total = {"a": [1.0]}
    add_samples(total, {"a": [2.0, 3.0], "b": [4.0]})
    assert total == {"a": [1.0, 2.0, 3.0], "b": [4.0]}


def test_tokens_by_step_become_tokens_by_row() -> None:
    assert rows_of([[1, 2], [3, 4], [5, 6]]) == [[1, 3, 5], [2, 4, 6]]


def test_contenders_take_turns_and_only_the_turns_are_timed() -> None:
    log: list[str] = []
    ticks = itertools.count()

    def start(name: str, first: int):
        for token in itertools.count(first):
            log.append(name)
            yield [token, -token]

    def clock() -> float:
        log.append("|")
        return float(next(ticks)) ** 2  # so that every interval is another one

    starts = {"a": lambda: start("a", 10), "b": lambda: start("b", 20)}
    samples, rows = run_interleaved(starts, skip=1, turns=2, turn_steps=3, clock=clock)

    assert "".join(log) == "aabb" + "|aaa|" + "|bbb|" + "|bbb|" + "|aaa|"
    assert samples == {"a": [1 / 3, 13 / 3], "b": [5 / 3, 9 / 3]}
    assert rows["a"] == [list(range(10, 18)), [-n for n in range(10, 18)]]
    assert rows["b"][0] == list(range(20, 28))


def test_calls_are_timed_in_turns() -> None:
    log: list[str] = []
    ticks = itertools.count()
    calls = {"a": lambda: log.append("a"), "b": lambda: log.append("b")}
    samples = time_calls(calls, rounds=3, clock=lambda: float(next(ticks)))
    assert "".join(log) == "abbaab"
    assert samples == {"a": [1.0] * 3, "b": [1.0] * 3}


GAPS = [[1.0, 0.5, 0.0005, 2.0]]


@pytest.mark.parametrize(
    ("got", "found"),
    [
        pytest.param([[1, 2, 3, 4]], None, id="equal"),
        pytest.param([[1, 2, 9, 8]], None, id="after-a-tie-anything"),
        pytest.param([[1, 9, 3, 4]], "row 0, step 1: token 9, expected 2 by 0.5000", id="different"),
        pytest.param([[1, 9, 9, 4]], "row 0, step 1", id="different-before-the-tie"),
        pytest.param([[1, 2, 3]], "row 0 has 3 tokens, expected 4", id="short"),
    ],
)
def test_tokens_may_differ_only_from_a_tie_on(got: list[list[int]], found: str | None) -> None:
    difference = find_difference([[1, 2, 3, 4]], GAPS, got)
    assert difference is None if found is None else found in (difference or "")


def test_a_missing_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        find_difference([[1], [2]], [[1.0], [1.0]], [[1]])


def test_cases_are_those_of_the_targets() -> None:
    cases = all_cases()
    assert [case.name for case in cases if case.model == "demo"] == [
        "decode-demo-uncompiled-1",
        "decode-demo-uncompiled-8",
        "decode-demo-compiled-1",
        "decode-demo-compiled-8",
        "prefill-demo-uncompiled-2",
    ]
    assert [case.target for case in cases if case.model == "tiny"] == [2.0, 1.5, 1.5, 1.1, 1.0]
    assert len({case.name for case in cases}) == len(cases) == 10


def test_only_selects_by_whole_words() -> None:
    names = [case.name for case in select_cases(all_cases(), ["compiled-demo", "prefill-tiny"])]
    assert names == ["decode-demo-compiled-1", "decode-demo-compiled-8", "prefill-tiny-uncompiled-2"]
    assert select_cases(all_cases(), []) == all_cases()
    assert select_cases(all_cases(), ["nothing"]) == []


def test_a_result_counts_tokens_of_all_rows_and_compares_with_its_peer() -> None:
    samples = {OURS: [0.1, 0.2], "slow": [0.9, 0.9], "quick": [0.2, 0.2]}
    decode = Result(Case("decode", "tiny", "compiled", 8), samples, "quick")
    assert decode.ratio == 1.5
    assert decode.rate(OURS) == pytest.approx(8 / 0.15)
    prefill = Result(Case("prefill", "tiny", "uncompiled", 2), samples, "slow")
    assert prefill.rate("slow") == pytest.approx(400 / 0.9)


def test_a_config_is_cut_to_its_first_layers() -> None:
    raw = {
        "num_hidden_layers": 6,
        "layer_types": list("abcdef"),
        "mlp_only_layers": [0, 4],
        "quantization_config": {"quant_method": "fp8"},
        "hidden_size": 8,
    }
    assert cut_config(raw, 2) == {
        "num_hidden_layers": 2,
        "layer_types": ["a", "b"],
        "mlp_only_layers": [0],
        "hidden_size": 8,
    }
    for layers in (0, 7):
        with pytest.raises(ValueError, match=rf"--layers {layers} must be in 1\.\.6"):
            cut_config(raw, layers)


def test_a_row_of_the_whole_model_compares_with_ours() -> None:
    ours, theirs = summarise({WHOLE_OURS: [1e-3, 3e-3, 2e-3], "peer": [4e-3, 3e-3, 6e-3]}, 8)
    assert (ours["ms_per_step"], ours["ratio"]) == (pytest.approx(2.0), 1.0)
    assert ours["tokens_per_s"] == pytest.approx(4000.0)
    assert theirs["ratio"] == pytest.approx(3.0)  # of 4, 1, 3
    assert theirs["samples_ms"] == pytest.approx([4.0, 3.0, 6.0])


def test_the_whole_model_is_measured_beside_its_peer(tmp_path: Path) -> None:
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 101,
        "max_position_embeddings": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 16,
        "rope_theta": 1e4,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = tmp_path / "found.json"
    sizes = ("--layers", "2", "--batch-sizes", "2", "--context", "7", "--new-tokens", "2", "--repetitions", "3")
    peers = ("--peers", "uncompiled grouped_mm")
    assert main(["--model", str(tmp_path), "--device", "cpu", *sizes, *peers, "--json", str(found)]) == 0
    record = json.loads(found.read_text())
    assert [row["contender"] for row in record["results"]] == [WHOLE_OURS, "uncompiled grouped_mm"]
    assert record["failed"] == {}
    assert (record["layers"], record["dtype"]) == (2, "float32")
    assert all(len(row["samples_ms"]) == 3 and row["ratio"] > 0 for row in record["results"])


def test_every_script_is_there() -> None:
    folder = Path(__file__).parents[1]
    assert all((folder / f"{script.replace('.', '/')}.py").is_file() for script in SCRIPTS.values())
    assert {"startup", "states"} <= set(SCRIPTS)


def test_the_three_ways_of_a_second_turn_give_one_token() -> None:
    model = fmoe.load("demo", device="cpu", compile=False)
    first, message = [3, 1, 4, 1, 5, 9], [2, 6, 5]
    state = fmoe.prefill(model, first)
    kept = states.answer_first(model, state, message)
    [called] = fmoe.generate(model, message, state=state, max_new_tokens=1, **states.GREEDY)
    assert kept == states.answer_whole(model, [*first, *message]) == called.token_ids[0]


def test_states_are_timed_from_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "states.json"
    sizes = ("--conversation", "9", "--message", "3", "--prompt", "8", "--continuations", "3", "--new-tokens", "2")
    assert states.main(["--device", "cpu", "--no-compile", *sizes, "--repetitions", "2", "--json", str(found)]) == 0
    record = json.loads(found.read_text())
    assert [(case["name"], len(case["samples_s"])) for case in record["cases"]] == [
        ("second turn, 3 behind 9 tokens: kept", 2),
        ("second turn, 3 behind 9 tokens: one call", 2),
        ("second turn, 3 behind 9 tokens: without", 1),
        ("prompt of 8 tokens", 2),
        ("1 x 2 tokens behind its state", 2),
        ("prompt and 1 x 2 tokens", 2),
        ("3 x 2 tokens behind its state", 2),
        ("prompt and 3 x 2 tokens", 2),
    ]
    assert all(min(case["samples_s"]) <= case["median_s"] <= max(case["samples_s"]) for case in record["cases"])
    shown = capsys.readouterr().out
    assert all(case["name"] in shown for case in record["cases"])


def test_work_runs_once_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    ticks = itertools.chain([0.0, 4.0, 10.0, 11.0, 20.0, 22.0])

    def clock() -> float:
        log.append("|")
        return next(ticks)

    model = fmoe.load("demo", device="cpu", compile=False)
    monkeypatch.setattr("bench.states.time.perf_counter", clock)
    case = states.time_case(model, "x", lambda: log.append("w"), 3)
    assert "".join(log) == "w" + "|w|" * 3
    assert case.samples_s == (4.0, 1.0, 2.0)
    assert case.median_s == 2.0


START = startup.Start(1.0, 2.0, 3.0, graphs_compiled=5, graphs_found=0, kernels_compiled=7)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Note the environments of processes instead of starting them."""
    noted: list[dict[str, str]] = []

    def note(options: Any, environment: dict[str, str]) -> startup.Start:
        noted.append({name: environment[name] for name in startup.FOLDERS})
        return START

    def note_warm(options: Any, environment: dict[str, str]) -> float:
        noted.append({"warm": environment["FMOE_CACHE_DIR"]})
        return 1.0

    monkeypatch.setattr(startup, "run_start", note)
    monkeypatch.setattr(startup, "run_warm", note_warm)
    return noted


def test_only_the_cached_start_shares_folders_and_the_warmed_one_only_fmoes(starts: list[dict[str, str]]) -> None:
    assert startup.main(["--repetitions", "2"]) == 1  # each of them said that it had compiled
    empty, cached, second, second_cached, warm, *warmed = starts
    assert empty == cached != second == second_cached
    assert set(empty.values()).isdisjoint(second.values())
    assert all(start["FMOE_CACHE_DIR"] == warm["warm"] for start in warmed)
    theirs = [{name: place for name, place in start.items() if name != "FMOE_CACHE_DIR"} for start in warmed]
    assert set(theirs[0].values()).isdisjoint([*theirs[1].values(), *empty.values(), warm["warm"]])
    assert not any(Path(place).parent.exists() for place in empty.values())  # all of it is gone


def test_a_compiling_start_is_wrong_only_where_graphs_were_kept(starts: list[dict[str, str]]) -> None:
    assert startup.main(["--cases", "empty"]) == 0
    assert len(starts) == 1
    found = startup.Start(1.0, 2.0, 3.0, graphs_compiled=0, graphs_found=5, kernels_compiled=0)
    assert startup.find_compiling({"empty": [START], "cached": [found, START], "warmed": [found]}) == ["cached"]


def test_a_process_says_when_its_tokens_came(tmp_path: Path) -> None:
    found = tmp_path / "startup.json"
    words = ("--device", "cpu", "--no-compile", "--context", "4", "--new-tokens", "2", "--cases", "empty")
    assert startup.main([*words, "--json", str(found)]) == 0
    [start] = json.loads(found.read_text())["cases"]["empty"]
    assert 0 < start["loaded_s"] <= start["first_token_s"] <= start["last_token_s"] < 600
    assert (start["graphs_compiled"], start["graphs_found"], start["kernels_compiled"]) == (0, 0, 0)


def test_a_failed_start_says_why() -> None:
    with pytest.raises(
        RuntimeError, match=r"-m bench\.startup --child ended with status 1: FileNotFoundError: .*absent"
    ):
        startup.main(["--model", "absent", "--device", "cpu", "--cases", "empty"])


def test_unknown_cases_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        startup.main(["--cases", "empty,warm"])
    assert "unknown cases ['warm']; there are empty, cached, warmed" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        startup.main(["--new-tokens", "0"])
    assert "--context, --new-tokens and --repetitions must be at least 1" in capsys.readouterr().err
