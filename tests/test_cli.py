"""The command line: what comes on which stream, the exit status, and errors of one line."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import fmoe
from fmoe import cli

PROMPT = "In the beginning"
SHORT = ("--max-new-tokens", "5", "--temperature", "0")
GENERATE = ("generate", "--model", "demo", *SHORT)


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli.main, [*arguments], input=stdin)


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start the real command; Ctrl-C is not ignored, as it may be where the tests run in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", "fmoe", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )


def say(text: str, finish_reason: str | None = None) -> fmoe.StreamedToken:
    return fmoe.StreamedToken(7, text, finish_reason, None)


@pytest.fixture(scope="module")
def model() -> fmoe.Model:
    return fmoe.load("demo")


@pytest.fixture
def loaded(model: fmoe.Model, monkeypatch: pytest.MonkeyPatch) -> fmoe.Model:
    """Let the command take the demo model that is loaded already."""
    monkeypatch.setattr(cli, "load", lambda path, **options: model)
    return model


def test_one_prompt_prints_its_text_alone_on_standard_output() -> None:
    result = run(*GENERATE, PROMPT)
    [expected] = fmoe.generate(fmoe.load("demo"), PROMPT, max_new_tokens=5, temperature=0)
    assert result.exit_code == 0
    assert result.stdout == f"{expected.text}\n"
    loaded_line, timing = result.stderr.splitlines()
    assert loaded_line.startswith("loaded demo in ")
    assert timing.startswith("5 tokens, ")
    assert "tokens/s, first token after " in timing
    assert timing.endswith(" s, cut at --max-new-tokens")


@pytest.mark.parametrize(
    ("reason", "ending"),
    [("length", "cut at --max-new-tokens"), ("stop", "ended by a stop string"), ("eos", "ended by the model")],
)
def test_the_timing_counts_tokens_not_pieces(
    loaded: fmoe.Model, monkeypatch: pytest.MonkeyPatch, reason: str, ending: str
) -> None:
    reply = [say(""), say("a"), say(""), say("", reason)]
    monkeypatch.setattr(cli, "stream_tokens", lambda *arguments, **options: iter(reply))
    result = run(*GENERATE, PROMPT)
    assert result.stdout == "a\n"
    timing = result.stderr.splitlines()[-1]
    assert timing.startswith("4 tokens, ")
    assert timing.endswith(f" s, {ending}")
    reply[:] = [say("b", reason)]
    assert run(*GENERATE, PROMPT).stderr.splitlines()[-1].startswith("1 token, first token after ")


def test_quiet_leaves_standard_error_empty(loaded: fmoe.Model) -> None:
    for arguments in (["-q", *GENERATE, PROMPT], [*GENERATE, PROMPT, "-q"]):
        result = run(*arguments)
        assert result.exit_code == 0
        assert result.stderr == ""


def test_a_dash_reads_the_prompt_from_standard_input(loaded: fmoe.Model) -> None:
    assert run(*GENERATE, "-", stdin=f"{PROMPT}\n").stdout == run(*GENERATE, PROMPT).stdout


def test_json_is_one_object_on_one_line(loaded: fmoe.Model) -> None:
    result = run(*GENERATE, PROMPT, "--json", "--logprobs", "2")
    [expected] = fmoe.generate(loaded, PROMPT, max_new_tokens=5, temperature=0, logprobs=2)
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout)
    keys = ["text", "token_ids", "finish_reason", "prompt_token_ids", "logprobs", "drafted", "accepted"]
    assert list(found) == keys and found["drafted"] == found["accepted"] == 0
    assert found["text"] == expected.text
    assert found["token_ids"] == [*expected.token_ids]
    assert found["finish_reason"] == "length"
    assert found["prompt_token_ids"] == [*expected.prompt_token_ids]
    assert expected.logprobs is not None
    assert [entry["logprob"] for entry in found["logprobs"]] == pytest.approx([e.logprob for e in expected.logprobs])
    assert [len(entry["top"]) for entry in found["logprobs"]] == [2] * 5


def test_json_without_logprobs_has_null(loaded: fmoe.Model) -> None:
    assert json.loads(run(*GENERATE, PROMPT, "--json").stdout)["logprobs"] is None


def test_drafts_change_no_text_and_are_counted(loaded: fmoe.Model) -> None:
    plain = json.loads(run(*GENERATE, PROMPT, "--json").stdout)
    for drafts in ("2", "auto"):
        found = json.loads(run(*GENERATE, PROMPT, "--json", "--speculate", drafts).stdout)
        assert found["token_ids"] == plain["token_ids"]
        assert drafts == "auto" or 0 <= found["accepted"] <= found["drafted"] > 0
    assert run(*GENERATE, PROMPT, "--speculate", "1").stdout == run(*GENERATE, PROMPT).stdout
    assert "'many' must be a whole number or auto" in run(*GENERATE, PROMPT, "--speculate", "many").stderr
    assert "speculate=9 must be 'auto' or an int in 0..8" in run(*GENERATE, PROMPT, "--speculate", "9").stderr


def test_a_prompts_file_gives_one_object_per_line_in_order(loaded: fmoe.Model, tmp_path: Path) -> None:
    prompts = [PROMPT, "And the king said unto", "Blessed"]
    file = tmp_path / "prompts.txt"
    file.write_text("\r\n".join(prompts) + "\n\n", newline="")
    expected = fmoe.generate(loaded, prompts, max_new_tokens=5, temperature=0)
    result = run(*GENERATE, "--prompts-file", str(file), "--json", "--batch-size", "2")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [entry["text"] for entry in found] == [completion.text for completion in expected]
    assert [entry["prompt_token_ids"] for entry in found] == [[*c.prompt_token_ids] for c in expected]
    assert "15 tokens of 3 prompts" in result.stderr


def test_a_prompts_file_prints_its_texts_apart(loaded: fmoe.Model) -> None:
    result = run(*GENERATE, "--prompts-file", "-", stdin=f"{PROMPT}\nBlessed\n")
    texts = [c.text for c in fmoe.generate(loaded, [PROMPT, "Blessed"], max_new_tokens=5, temperature=0)]
    assert result.stdout == f"--- 1 of 2: 'In the beginning'\n{texts[0]}\n\n--- 2 of 2: 'Blessed'\n{texts[1]}\n\n"


def test_one_is_singular(loaded: fmoe.Model) -> None:
    result = run("generate", "--model", "demo", "--max-new-tokens", "1", "--prompts-file", "-", stdin="a\n")
    assert result.stderr.startswith("1 token of 1 prompt, ") or "\n1 token of 1 prompt, " in result.stderr


def test_threads_reach_torch(loaded: fmoe.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", seen.append)
    assert run(*GENERATE, PROMPT).exit_code == 0
    assert seen == []
    assert run(*GENERATE, PROMPT, "--threads", "3").exit_code == 0
    run("chat", "--model", "demo", "--threads", "2")
    assert seen == [3, 2]
    for name in ("generate", "chat"):
        assert "on a busy machine" in " ".join(run(name, "--help").stdout.split())


def test_every_option_reaches_generate(loaded: fmoe.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(cli, "generate", lambda model, prompts, **options: calls.append(options) or [])
    monkeypatch.setattr(cli, "load", lambda path, **options: calls.append(options) or loaded)
    flags = "--max-new-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1 --repetition-penalty 1.2 --seed 4"
    flags += " --stop x --stop yz --ignore-eos --logprobs 1 --batch-size 3 --speculate 2 --json -q"
    flags += " --device cpu --dtype bfloat16 --shared-experts separate --compile off"
    flags += " --kernels reference --tune off --weights random --state-dtype bfloat16"
    assert run("generate", "--model", "demo", "a", *flags.split()).exit_code == 0
    assert calls == [
        {
            "device": "cpu",
            "dtype": "bfloat16",
            "state_dtype": "bfloat16",
            "shared_experts": "separate",
            "compile": False,
            "kernels": "reference",
            "tune": "off",
            "weights": "random",
            "progress": False,
        },
        {
            "max_new_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "seed": 4,
            "speculate": 2,
            "stop": ("x", "yz"),
            "ignore_eos": True,
            "logprobs": 1,
            "batch_size": 3,
            "progress": False,
        },
    ]


@pytest.mark.parametrize(("word", "value"), [("auto", "auto"), ("on", True), ("off", False)])
def test_compile_words(loaded: fmoe.Model, monkeypatch: pytest.MonkeyPatch, word: str, value: object) -> None:
    seen: list[object] = []
    monkeypatch.setattr(cli, "load", lambda path, compile, **options: seen.append(compile) or loaded)
    assert run(*GENERATE, PROMPT, "--compile", word).exit_code == 0
    assert seen == [value]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*GENERATE], "give one of PROMPT and --prompts-file; a PROMPT of - is read from standard input"),
        ([*GENERATE, "a", "--threads", "0"], "0 is not in the range x>=1"),
        (["info", "--model", "demo", "--threads", "1"], "No such option"),
        ([*GENERATE, "a", "--prompts-file", "b"], "give one of PROMPT and --prompts-file"),
        ([*GENERATE, "a", "--logprobs", "2"], "--logprobs needs --json"),
        (["generate", "a"], "Missing option '--model'"),
        ([*GENERATE, "a", "--compile", "maybe"], "'maybe' is not one of 'auto', 'on', 'off'"),
        ([*GENERATE, "a", "--batch-size", "0"], "0 is not in the range x>=1"),
        ([*GENERATE, "a", "--top-k", "many"], "'many' is not a valid integer"),
        (["sing"], "No such command 'sing'"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*GENERATE, ""], "the prompt is empty"),
        ([*GENERATE, "a", "--temperature", "-1"], "temperature=-1.0"),
        ([*GENERATE, "a", "--temperature", "nan"], "temperature=nan"),
        ([*GENERATE, "a", "--top-p", "0"], "top_p=0.0"),
        ([*GENERATE, "a", "--max-new-tokens", "0"], "max_new_tokens=0 must be an int >= 1"),
        ([*GENERATE, "a", "--max-new-tokens", "4096"], "context of 4096 tokens"),
        ([*GENERATE, "a", "--json", "--logprobs", "5000"], r"logprobs=5000 must be None or an int in 0..4096"),
        ([*GENERATE, "a", "--stop", ""], "stop="),
        ([*GENERATE, "--prompts-file", "absent.txt"], "absent.txt"),
        (["generate", "--model", "nowhere", "a"], "no folder nowhere"),
        (["generate", "--model", "org/name", "a"], "fmoe does not download"),
        (["info", "--model", "org/name"], "fmoe does not download"),
        (["chat", "--model", "org/name"], "fmoe does not download"),
        ([*GENERATE, "a\udcff"], "the prompt is not UTF-8 at character 1; convert it"),
        ([*GENERATE, "a", "--stop", "\udcff"], "--stop is not UTF-8 at character 0; convert it"),
        (["chat", "--model", "demo", "--system", "\udcff"], "--system is not UTF-8 at character 0; convert it"),
        (["info", "--model", "nowhere"], "no folder nowhere"),
        (["chat", "--model", "nowhere"], "no folder nowhere"),
        ([*GENERATE, "a", "--device", "tpu"], "unknown device 'tpu'"),
        ([*GENERATE, "a", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["info", "--model", "demo", "--dtype", "int3"], "unknown dtype 'int3'"),
    ],
)
def test_an_error_is_one_line_and_exits_with_1(arguments: list[str], message: str) -> None:
    result = run("-q", *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert message in line


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b"one\n\nthree\n", "line 2 of standard input is empty"),
        (b"one\n  \nthree\n", "line 2 of standard input is empty"),
        (b"\n\n", "standard input holds no prompt"),
        (b"", "standard input holds no prompt"),
        (b"ab\xff", "standard input is not UTF-8 at byte 2"),
    ],
)
def test_bad_prompt_lines(stdin: bytes, message: str) -> None:
    result = run(*GENERATE, "--prompts-file", "-", stdin=stdin)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {message}")


def test_bad_options_stop_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "load", lambda *a, **k: pytest.fail("loaded"))
    assert "top_p" in run(*GENERATE, "a", "--top-p", "2").stderr
    assert "line 2" in run(*GENERATE, "--prompts-file", "-", stdin="a\n\nb").stderr
    assert "the prompt is empty; write the beginning of a text" in run(*GENERATE, "").stderr
    assert "the prompt is empty" in run(*GENERATE, "-", stdin="\n").stderr
    assert "not UTF-8" in run(*GENERATE, "\udcff").stderr


@pytest.mark.parametrize(
    "error", [ValueError("v"), NotImplementedError("n"), FileNotFoundError("f"), RuntimeError("r"), MemoryError()]
)
def test_errors_of_the_library(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, **options: Any) -> None:
        raise error

    monkeypatch.setattr(cli, "load", fail)
    result = run(*GENERATE, "a")
    assert result.exit_code == 1
    assert result.stderr == f"Error: {str(error) or 'MemoryError'}\n"
    for arguments in (["--debug", *GENERATE, "a"], [*GENERATE, "a", "--debug"]):
        assert run(*arguments).exception is error


def test_an_error_in_the_middle_ends_the_line(loaded: fmoe.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(*arguments: Any, **options: Any) -> Iterator[fmoe.StreamedToken]:
        yield say("half a")
        raise RuntimeError("the logits hold NaN")

    monkeypatch.setattr(cli, "stream_tokens", tokens)
    result = run("-q", *GENERATE, "a")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "half a\n", "Error: the logits hold NaN\n")


def test_interrupt_exits_with_130(loaded: fmoe.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(*arguments: Any, **options: Any) -> Iterator[fmoe.StreamedToken]:
        yield say("half a")
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "stream_tokens", tokens)
    result = run("-q", *GENERATE, "a")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "half a\n", "Interrupted\n")


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("fmoe, version ")
    for name in ("generate", "chat", "info"):
        assert name in run("--help").stdout
        assert "--model" in run(name, "--help").stdout


def test_info_prints_text_or_json() -> None:
    text, found = run("info", "--model", "demo").stdout, json.loads(run("info", "--model", "demo", "--json").stdout)
    assert "10.96 M" in text
    assert "fused into 1 slot" in text
    assert found["family"] == "qwen3_next"
    assert found["params"] == sum(part["params"] for part in found["parts"])


def test_the_text_streams_and_a_closed_pipe_ends_it() -> None:
    with start("generate", "--model", "demo", PROMPT, "--max-new-tokens", "3000", "--ignore-eos") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4) == " of "  # of 3,000 tokens: they come one by one
        assert process.poll() is None
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 1
    assert errors.splitlines()[1:] == ["Error: standard output was closed before the end"]


def test_an_interrupt_ends_the_real_command() -> None:
    with start("generate", "--model", "demo", PROMPT, "--max-new-tokens", "3000", "--ignore-eos") as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0]
        process.send_signal(signal.SIGINT)
        text, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert text.startswith(" of")
    assert text.endswith("\n")
    assert errors.splitlines()[1:] == ["Interrupted"]


def test_an_uncompiled_generation_imports_no_compiler() -> None:
    code = (
        "import sys\nfrom fmoe.cli import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "slow = ['torch._dynamo', 'torch._inductor', 'transformers', 'sympy', 'scipy', 'matplotlib']\n"
        "print([name for name in slow if name in sys.modules])"
    )
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *GENERATE, PROMPT, "-q"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[1:] == ["[]"], f"in {time.perf_counter() - begin:.1f} s"


def test_the_command_is_named_alike_in_both_ways() -> None:
    assert isinstance(cli.main, click.Group)
    done = subprocess.run([sys.executable, "-m", "fmoe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == run("--version").stdout
