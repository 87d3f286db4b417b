"""Installations of AITER that fail: each ends in the reference, the right tokens and one line that says why."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

import fmoe

from ..compile.fake_aiter import (
    FIVE,
    HANGS,
    IMPORTS,
    WRONG_IDS,
    WRONG_WEIGHTS,
    build,
    build_impostor,
    build_without_ops,
)
from .checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]
PROMPTS = [[3, 5, 7], [1, 2, 3, 4, 5, 6, 7, 8]]
LIMIT_S = 25.0  # until the first token

INSTALLATIONS = {
    "impostor": (build_impostor, {}, "aiter not AMD's"),
    "without ops": (build_without_ops, {}, "imports without aiter.topk_softmax, which its files define"),
    "wrong ids": (build, {"kernel": WRONG_IDS}, "computes wrong numbers: topk_softmax at 8 experts"),
    "wrong weights": (build, {"kernel": WRONG_WEIGHTS}, "weights differ by"),
    "hangs": (build, {}, "hung: it used no processor time for 10 s; it last said: waiting for baton"),
    "no experts": (build, {"version": "0.1.9", "parameters": FIVE}, "AITER 0.1.9 has no fused_moe"),
    **{f"import: {kind}": (build, {"init": code}, reason) for kind, (code, reason) in IMPORTS.items()},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("mixtral"), "mixtral")


@pytest.fixture(scope="module")
def expected(checkpoint):
    return generate(checkpoint, kernels="reference")


def generate(checkpoint, **options):
    model = fmoe.load(checkpoint, device="cpu", dtype="float16", compile=False, **options)
    assert model.decision.experts == "reference"
    done = fmoe.generate(model, PROMPTS, max_new_tokens=8, temperature=0, ignore_eos=True)
    return [completion.token_ids for completion in done]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Build an installation and assume an MI300X."""

    def put(kind):
        builder, options, reason = INSTALLATIONS[kind]
        if kind == "hangs":
            options = {"init": HANGS.format(file=str(tmp_path / "pid"))}
        root = builder(tmp_path / "site", **options)
        for name, value in (
            ("FMOE_ASSUME_ARCH", "gfx942"),
            ("FMOE_CACHE_DIR", str(tmp_path / "cache")),
            ("OMP_NUM_THREADS", "1"),
        ):
            monkeypatch.setenv(name, value)
        monkeypatch.syspath_prepend(str(root))
        return root, reason

    return put


@pytest.mark.parametrize("kind", INSTALLATIONS)
def test_a_failing_installation_ends_in_the_reference(kind, checkpoint, expected, install, caplog):
    _, reason = install(kind)
    begin = time.monotonic()
    with caplog.at_level("INFO", "fmoe"):
        assert generate(checkpoint) == expected
    assert time.monotonic() - begin < LIMIT_S

    said = [line for line in caplog.messages if reason in line]
    assert len(said) == 1, caplog.messages
    assert said[0].startswith("experts: reference (")
    assert "\n" not in said[0]
    assert "aiter" not in sys.modules


def test_asked_for_by_name_a_failing_installation_is_an_error_with_the_reason(checkpoint, install):
    install("impostor")
    with pytest.raises(RuntimeError, match="kernels='aiter' cannot run here: aiter not AMD's"):
        generate(checkpoint, kernels="aiter")


@pytest.mark.parametrize("kind", ["impostor", "import: SystemExit"])
def test_from_the_command_line(kind, install, tmp_path):
    root, reason = install(kind)
    command = ["generate", "--model", "demo", "--dtype", "bfloat16", "--max-new-tokens", "6", "In the beginning"]
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import fmoe.cli; fmoe.cli.main({command!r}, 'fmoe')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    model = fmoe.load("demo", device="cpu", dtype="bfloat16", kernels="reference")
    (completion,) = fmoe.generate(model, "In the beginning", max_new_tokens=6)
    assert done.stdout == completion.text + "\n"
    assert len([line for line in done.stderr.splitlines() if reason in line]) == 1
