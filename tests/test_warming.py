"""fmoe warm: which runs it makes, what it reports, what it refuses. Compiling itself is left to other tests."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import fmoe
from fmoe import cli, cli_warm, warming
from fmoe.compile.plan import Row
from fmoe.warming import Warmed, format_warmed, warm


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", device="cpu")


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Note the generations instead of running them, and let torch have compiled something."""
    monkeypatch.setenv("FMOE_CACHE_DIR", str(tmp_path))
    noted = []

    def note(model, prompts, *, temperature, max_new_tokens, batch_size, **options):
        assert model.compile is True
        assert max_new_tokens == 2 and batch_size == len(prompts)
        noted.append((len(prompts), len(prompts[0]), temperature))

    monkeypatch.setattr(warming, "generate", note)
    monkeypatch.setattr(
        torch.compiler, "save_cache_artifacts", lambda: (b"graphs", SimpleNamespace(inductor_artifacts=["a", "b"]))
    )
    return noted


def test_prompts_and_batches_are_run_and_what_compiled_is_written(demo, runs):
    warmed = warm(demo, batch_sizes=[8, 1, 8], prompt_tokens=(16, 4, 10**9), progress=False)
    assert runs == [(1, 4, 0.0), (1, 16, 0.0), (1, 4094, 0.0), *((n, 4, t) for n in (1, 8) for t in (0.0, 1.0))]
    assert (warmed.graphs, warmed.kernels) == (2, 0)
    assert warmed.file.is_file() and warmed.bytes == warmed.file.stat().st_size
    assert demo.compile == "auto"
    given = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "load_cache_artifacts", lambda content: given.append(content) or {})
        fmoe.model.choose_steps(fmoe.load("demo", device="cpu", compile=True), 1)
    assert given == [b"graphs"]


def test_plans_are_counted_by_their_source(demo, runs):
    plan = demo.plans[0]

    def with_sources(*sources):
        return replace(plan, rows=tuple(Row(-1, "library", (), source) for source in sources))

    plans = (with_sources("tuned at 4", "rule"), with_sources("shipped"), with_sources("rule"), with_sources("tuned"))
    warmed = warm(replace(demo, plans=plans), batch_sizes=[1], prompt_tokens=[4], progress=False)
    assert (warmed.tuned, warmed.shipped, warmed.by_rule) == (2, 1, 1)


def test_what_does_not_fit_is_left_out(demo, runs, monkeypatch, caplog):
    monkeypatch.setattr("fmoe.cache_size.available_bytes", lambda: 10 * 2**20)
    with caplog.at_level(logging.WARNING, logger="fmoe"):
        warm(demo, batch_sizes=[1, 4096], prompt_tokens=[4], progress=False)
    assert {rows for rows, _, _ in runs} == {1}
    assert caplog.messages == [
        "left out 4096 x 4 tokens, whose caches do not fit into memory",
        "left out 4096 x 4 tokens, sampled, whose caches do not fit into memory",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": []}, r"batch_sizes=\[\] must be ints >= 1, such as \[1, 8\]"),
        ({"batch_sizes": "18"}, "batch_sizes='18' must be ints"),
        ({"batch_sizes": 8}, "batch_sizes=8 must be ints"),
        ({"prompt_tokens": [0]}, r"prompt_tokens=\[0\] must be ints"),
        ({"prompt_tokens": [True]}, r"prompt_tokens=\[True\] must be ints"),
        ({"progress": "x"}, "progress='x' must be True, False or None"),
    ],
    ids=str,
)
def test_bad_sizes(demo, options, message):
    with pytest.raises(ValueError, match=message):
        warm(demo, **options)
    with pytest.raises(ValueError, match=r"model must come from fmoe.load"):
        warm("demo")


def test_a_bar_shows_the_runs(demo, runs, capsys):
    warm(demo, batch_sizes=[1], prompt_tokens=[4], progress=True)
    shown = capsys.readouterr().err
    assert "warming" in shown and "3/3" in shown


def test_the_report():
    warmed = Warmed(Path("a.graphs"), 12, 0, 3 * 2**20, 61.6, 1, 0, 0)
    assert format_warmed(warmed) == (
        "12 graphs in a.graphs (3.0 MiB), 62 s\nplans: 1 tuned here, 0 of the table of fmoe's, 0 by rule"
    )
    assert format_warmed(replace(warmed, kernels=7, by_rule=2)) == (
        "12 graphs and 7 kernels in a.graphs (3.0 MiB), 62 s\n"
        "plans: 1 tuned here, 0 of the table of fmoe's, 2 by rule; fmoe tune measures them"
    )


def test_the_command(demo, runs, monkeypatch):
    monkeypatch.setattr(cli_warm, "load", lambda path, **options: demo)
    command = ["-q", "warm", "--model", "demo", "--batch-sizes", "1", "--prompt-tokens", "4"]
    result = CliRunner().invoke(cli.main, command)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("2 graphs in ")
    assert result.stderr == ""
    found = json.loads(CliRunner().invoke(cli.main, [*command, "--json"]).stdout)
    assert found["graphs"] == 2 and Path(found["file"]).is_file()
    assert len(runs) == 6
    refused = CliRunner().invoke(cli.main, ["warm", "--model", "demo", "--batch-sizes", "1;8"])
    assert "'1;8' must be whole numbers with commas between, such as 1,8" in refused.stderr
