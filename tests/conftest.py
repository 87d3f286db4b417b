"""Fixtures that every test may use."""

import sys
from collections.abc import Iterator

import pytest
import torch

# The tests' tensors are tiny: more threads only wait for one another, and sums change their order.
torch.set_num_threads(1)


@pytest.fixture
def rng() -> torch.Generator:
    """Give random numbers that are the same in each run."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def forget_compiled_graphs() -> Iterator[None]:
    """Drop compiled graphs after each test; else the ninth compiled shape of a function hits the limit."""
    yield
    # Importing the compiler takes seconds, so a test that never compiled does not get it imported here.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
