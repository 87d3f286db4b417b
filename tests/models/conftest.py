"""Tiny random models of transformers, as checkpoints on disk."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .families_table import family_name


class Reference(NamedTuple):
    """A model of transformers and the folder that its save_pretrained wrote."""

    model: PreTrainedModel
    folder: Path

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Compute [T, V] in one pass without a cache."""
        with torch.no_grad():
            return self.model(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.fixture(autouse=True)
def _name_the_family(request, record_property):
    """Say in a report which family a test of parity has run; families_table.py reads it."""
    if {"reference", "model"} <= set(request.fixturenames):
        record_property("family", family_name(request.getfixturevalue("model").architecture))


def randomize_(model: PreTrainedModel, seed: int) -> None:
    """Draw matrices anew with std 0.3 and disturb vectors (norms, biases) by 0.2: defaults would hide faults."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            if name.endswith(".A_log"):
                # slow decay: far tokens matter, and a readout is a sum of several values, which seldom vanishes; the
                # norm behind it turns a vanishing one into rounding errors of any size
                parameter.copy_(noise - 2.0)
            elif parameter.dim() == 1:
                parameter += 0.2 * noise
            else:
                parameter.copy_(0.3 * noise)


@pytest.fixture(scope="session")
def make_reference(tmp_path_factory) -> Callable[..., Reference]:
    """Build, randomise and save the model of a transformers config; equal configs are built once."""
    made: dict[str, Reference] = {}

    def make(config: PreTrainedConfig, *, seed: int = 0, **saving: Any) -> Reference:
        key = f"{config.to_json_string(use_diff=False)} {seed} {saving}"
        if key not in made:
            torch.manual_seed(seed)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
                # per-expert loops: torch's grouped product refuses widths that are not multiples of 16 bytes
                model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").float().eval()
            randomize_(model, seed)
            folder = tmp_path_factory.mktemp(config.model_type)
            model.save_pretrained(folder, **saving)
            made[key] = Reference(model, folder)
        return made[key]

    return make
