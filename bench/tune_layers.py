"""What the search reads of a model, for layers that were drawn."""

from typing import NamedTuple

import torch

from fmoe.functional.moe import MoEParams


class RandomLayer(NamedTuple):
    """What the search reads of a model's layer."""

    mlp: MoEParams | torch.Tensor


class RandomParams(NamedTuple):
    """What the search reads of a model's parameters."""

    layers: tuple[RandomLayer, ...]
