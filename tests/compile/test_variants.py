"""How an op is told of an activation, and how a key names experts that no kernel computes."""

import pytest
import torch

from fmoe.compile.variants import activation_from_numbers, activation_to_numbers, describe_variant
from fmoe.functional import SWIGLU, Activation, ExpertBiases, MoEParams

ACTIVATIONS = [SWIGLU, Activation(1.702, 7.0, 1.0), Activation(alpha=0.5), Activation(limit=3.0), Activation(shift=1.0)]
PLAIN = MoEParams(torch.ones(3, 4), torch.ones(3, 4, 4), torch.ones(3, 4, 2), torch.zeros(3), None)
BIASES = ExpertBiases(torch.ones(3, 4), torch.ones(3, 4))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_an_activation_comes_back_from_its_numbers(activation):
    numbers = activation_to_numbers(activation)
    assert all(isinstance(number, float) for number in numbers)
    assert activation_from_numbers(tuple(numbers)) == activation


def test_the_usual_one_is_no_numbers():
    assert activation_to_numbers(SWIGLU) == []


@pytest.mark.parametrize(
    ("params", "activation", "words"),
    [
        (PLAIN, SWIGLU, ""),
        (PLAIN._replace(biases=BIASES), SWIGLU, "biased"),
        (PLAIN._replace(bias_logits_E=torch.ones(3)), SWIGLU, "biased"),
        (PLAIN, ACTIVATIONS[1], "non-SwiGLU"),
        (PLAIN._replace(biases=BIASES), ACTIVATIONS[2], "biased non-SwiGLU"),
    ],
)
def test_variants(params, activation, words):
    assert describe_variant(params, activation) == words
