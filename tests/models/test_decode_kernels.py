"""A model's one token per sequence through ``attend_step``, ``attend_lengths`` and ``choose_tokens``: whole families.

The references stand in for the kernels; decode_kernels_interpreted.py has the kernels themselves.
"""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import fmoe
from fmoe.architectures import choose_tokens, start_step
from fmoe.functional import Kernels, append_kv_, apply_rotary, attend, rms_norm

from .decode_families import FAMILIES, load_random

FILE = Path(__file__).with_name("decode_kernels_interpreted.py")
PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16]]


def attend_step(projected_BTN, norm_HC, cache, placement, /, *, heads, eps, window=None):
    """Norm, rotate, write and attend by the references; the mask is made from the positions alone."""
    B, kv_heads, M, size = cache.k_BJMC.shape
    assert placement.mask_BTM is None and placement.window_mask_BTM is None
    qk, v, gate = projected_BTN.split(
        [(heads + kv_heads) * size, kv_heads * size, projected_BTN.shape[-1] - (heads + 2 * kv_heads) * size], -1
    )
    qk = qk.view(B, 1, heads + kv_heads, size)
    qk = qk if norm_HC is None else rms_norm(qk, norm_HC, eps=eps)
    qk = apply_rotary(qk, placement.cos_BTR, placement.sin_BTR)
    append_kv_(cache, qk[:, :, heads:], v.view(B, 1, kv_heads, size), placement.positions_BT)
    slots, positions = torch.arange(M), placement.positions_BT[..., None]
    mask = (slots <= positions) & (slots > positions - (window or M))
    out = attend(qk[:, :, :heads], *cache, mask).flatten(-2)
    return out * gate.sigmoid() if gate.shape[-1] else out


def attend_lengths(q_BTHC, k_BJMC, v_BJMC, lengths_B, /, *, scale):
    mask = torch.arange(k_BJMC.shape[2]) < lengths_B[:, None, None]
    return attend(q_BTHC, k_BJMC, v_BJMC, mask, scale=scale)


def choose(x_BD, head_VD, /):
    best_B, tokens_B = (x_BD @ head_VD.T).max(-1)
    return tokens_B, best_B


def with_stand_ins(model):
    """The model, its eager steps through stand-ins for the decode kernels."""
    kernels = Kernels(attend_step=attend_step, attend_lengths=attend_lengths, choose_tokens=choose)
    layers = model.architecture.make_layers(model.config, kernels)
    steps = replace(
        model.eager,
        layers=layers,
        start=partial(start_step, config=model.config.decoder, slots=None),
        choose=partial(choose_tokens, eps=model.config.decoder.eps, kernels=kernels),
        masked=False,
    )
    return replace(model, eager=steps)


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_tokens_of_the_references(name, logprobs, tmp_path):
    model = load_random(tmp_path, name, kernels="reference")
    options = {"max_new_tokens": 9, "ignore_eos": True, "logprobs": logprobs}

    found = fmoe.generate(with_stand_ins(model), PROMPTS, **options)
    expected = fmoe.generate(model, PROMPTS, **options)

    assert [row.token_ids for row in found] == [row.token_ids for row in expected]
    for mine, other in zip(found, expected, strict=True):
        for step, other_step in zip(mine.logprobs or (), other.logprobs or (), strict=True):
            assert step.logprob == pytest.approx(other_step.logprob, abs=1e-5)


def test_the_stand_ins_are_what_runs(tmp_path):
    """A choice that always is token 3 shows that the logits are not asked."""
    model = with_stand_ins(load_random(tmp_path, "qwen3_moe", kernels="reference"))

    def three(stream, norm_D, head_VD):
        return torch.full((stream.total_BTD.shape[0],), 3), torch.zeros(stream.total_BTD.shape[0])

    model = replace(model, eager=replace(model.eager, choose=three))
    assert fmoe.generate(model, [[5]], max_new_tokens=4, ignore_eos=True)[0].token_ids[1:] == (3, 3, 3)
    sampled = fmoe.generate(model, [[5]], max_new_tokens=9, ignore_eos=True, temperature=3.0)
    assert set(sampled[0].token_ids[1:]) != {3}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; it is what runs the kernels")
def test_the_kernels_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FILE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
