"""fmoe/ambient.py: what is no model, forked processes, and torch contexts of the caller's around a call."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import fmoe
from fmoe.ambient import undisturbed

IDS = [[5, 6, 7] * 30]
FUNCTIONS = {
    "generate": partial(
        fmoe.generate, max_new_tokens=3, temperature=0.7, top_p=0.9, repetition_penalty=1.1, logprobs=2
    ),
    "stream": lambda model, prompt: list(fmoe.stream(model, prompt, max_new_tokens=3)),
    "stream_tokens": lambda model, prompt: list(fmoe.stream_tokens(model, prompt, max_new_tokens=3)),
    "score": fmoe.score,
    "logits": lambda model, prompt: fmoe.logits(model, IDS).tolist(),
    "encode": fmoe.encode,
    "decode": lambda model, prompt: fmoe.decode(model, IDS[0]),
}
FORK = """
import os, signal, sys, torch, fmoe
torch.set_num_threads(2)
model = fmoe.load("demo", device="cpu", compile=False)
tokens = fmoe.stream_tokens(model, "In the")
fmoe.generate(model, [list(range(5, 400))], max_new_tokens=2)
if os.fork() == 0:
    signal.alarm(60)
    for call in (lambda: fmoe.generate(model, "In the"), lambda: next(tokens)):
        try:
            call()
        except RuntimeError as error:
            print(error)
    torch.set_num_threads(1)
    print(len(fmoe.generate(fmoe.load("demo", compile=False), "In the", max_new_tokens=2)), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", device="cpu", compile=False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_model(name):
    """At the call, of streams too, before anything is asked for."""
    for model, kind in (("demo", "str"), (Path("demo"), "PosixPath"), (None, "NoneType"), (torch.nn.Linear(1, 1), "L")):
        with pytest.raises(
            ValueError,
            match=rf"model must come from fmoe.load, got {kind}.*; write fmoe.{name}\(fmoe.load\('demo'\), \.\.\.\)",
        ):
            getattr(fmoe, name)(model, "In the beginning")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "context",
    [lambda: torch.device("meta"), lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad],
    ids=["default-device", "autocast", "grad"],
)
def test_the_callers_contexts_change_nothing(demo, name, context):
    expected = FUNCTIONS[name](demo, "In the beginning")
    with context():
        assert FUNCTIONS[name](demo, "In the beginning") == expected


def test_loading_under_a_default_device(demo):
    with torch.device("meta"):
        model = fmoe.load("demo", device="cpu", compile=False)
    assert fmoe.score(model, "In the beginning") == fmoe.score(demo, "In the beginning")


def test_the_callers_contexts_come_back(demo):
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in fmoe.stream_tokens(demo, "In the", max_new_tokens=2):  # between two tokens, too
            assert torch.zeros(1).device.type == "meta"
            assert torch.is_autocast_enabled("cpu") and not torch.is_inference_mode_enabled()


def test_another_process(demo):
    forked = replace(demo, process=demo.process + 1)
    message = "this process was forked after fmoe was loaded; start workers with 'spawn' and load the model in each"
    for call in FUNCTIONS.values():
        with pytest.raises(RuntimeError, match=message):
            call(forked, "In the")
    with pytest.raises(RuntimeError, match=message), undisturbed(forked):
        raise AssertionError("ran")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_raises_and_does_not_hang():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True, timeout=120)
    first, second, count = done.stdout.splitlines()
    assert first == second
    assert first.startswith("this process was forked after fmoe was loaded")
    assert count == "1"
    assert "start workers with 'spawn'" not in done.stderr  # one thread cannot hang
