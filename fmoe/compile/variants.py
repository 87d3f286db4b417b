"""Experts that are not two matrices around SwiGLU: how an op is told, and how the key of a plan says so."""

from functools import lru_cache

from fmoe.functional.mlp import SWIGLU, Activation
from fmoe.functional.moe import MoEParams


def activation_to_numbers(activation: Activation, /) -> list[float]:
    """Write an activation as the argument ``activation`` of ``fmoe::experts``; nothing is SwiGLU."""
    if activation.is_plain:
        return []
    return [activation.alpha, activation.shift, *([] if activation.limit is None else [activation.limit])]


@lru_cache(maxsize=64)
def activation_from_numbers(numbers: tuple[float, ...], /) -> Activation:
    """Read what ``activation_to_numbers`` wrote."""
    if not numbers:
        return SWIGLU
    alpha, shift, *limit = numbers
    return Activation(alpha, limit[0] if limit else None, shift)


def describe_variant(params: MoEParams, activation: Activation, /) -> str:
    """Say in words for ``Key.variant`` what a layer's experts are that those of kernels are not."""
    biased = params.biases is not None or params.bias_logits_E is not None
    words = (("biased", biased), ("non-SwiGLU", not activation.is_plain))
    return " ".join(word for word, applies in words if applies)
