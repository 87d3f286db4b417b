"""Which graph parameters get: by their structure, which is looked at once, so that a call checks the rest alone."""

import gc
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fmoe.compile.step import compile_steps, describe_structure

CPU = torch.device("cpu")


class Pair(NamedTuple):
    """Stands for a layer's parameters."""

    w: Tensor
    bias: Tensor | None


class Other(NamedTuple):
    """The same fields by another name."""

    w: Tensor
    bias: Tensor | None


def scale(x, params, offset):
    y = x * params.w + offset
    return y if params.bias is None else y + params.bias


def make_steps():
    return compile_steps({"kind": scale}, lambda x, w: x @ w, device=CPU, backend="aot_eager")


def vector(*shape, dtype=torch.float32):
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=dtype).view(shape)


@pytest.mark.parametrize(
    "other",
    [
        Pair(vector(4), vector(4)),
        Pair(vector(1), None),
        Pair(vector(4, dtype=torch.float64), None),
        Pair(vector(8)[::2], None),
        Pair(torch.nn.Parameter(vector(4)), None),
        Other(vector(4), None),
    ],
    ids=["a bias", "a shape", "a dtype", "a stride", "a gradient", "a type"],
)
def test_what_a_graph_depends_on_is_in_the_structure(other):
    params = Pair(vector(4), None)
    assert describe_structure(params) == describe_structure(Pair(vector(4) + 1, None))
    assert describe_structure(params) != describe_structure(other)


def test_a_tensor_that_stands_twice_is_another_structure():
    w = vector(4)
    assert describe_structure(Pair(w, w)) != describe_structure(Pair(vector(4), vector(4)))


def test_parameters_of_another_structure_never_run_a_graph_of_others():
    steps, x, offset = make_steps(), vector(2, 3, 4), torch.ones(1)
    w = vector(4)
    for params in (Pair(w, None), Pair(w, w), Pair(w, vector(4) * 2), Pair(w.double(), None), Pair(w[:1], None)) * 2:
        torch.testing.assert_close(steps.layers["kind"](x, params, offset), scale(x, params, offset))


def test_arguments_are_still_checked_by_each_call():
    steps, params = make_steps(), Pair(vector(4), None)
    for x in (vector(2, 3, 4), vector(5, 1, 4), vector(1, 1, 4), vector(2, 3, 8)[..., ::2]):
        for offset in (torch.ones(1), torch.ones(4, dtype=torch.float64)):
            torch.testing.assert_close(steps.layers["kind"](x, params, offset), scale(x, params, offset))


def test_parameters_are_let_go_when_they_are_to_be_forgotten():
    steps, params = make_steps(), Pair(vector(4), None)
    steps.layers["kind"](vector(2, 3, 4), params, torch.ones(1))
    alive = weakref.ref(params.w)
    del params
    gc.collect()
    assert alive() is not None  # nobody else may get its id meanwhile
    steps.forget()
    gc.collect()
    assert alive() is None
