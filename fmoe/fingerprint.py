"""What tells one loaded model from another: its frame, its dtype, and a sample of its weights."""

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .architectures import FamilyConfig, Params
from .loading import named_tensors

SAMPLE = 64  # elements of each tensor


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Equal for two loaded models where what one remembers means the same to the other."""

    frame: str  # hash of layers, rotation and vocabulary
    dtype: str
    state_dtype: str  # of recurrent states
    weights: str  # hash of a sample of every tensor


class WeightsHash:
    """Hashes a sample of a model's weights, once for the parameters that it was asked about last."""

    def __init__(self) -> None:
        self._params: Params | None = None
        self._hash = ""

    def of(self, params: Params, /) -> str:
        """Give the hash of these parameters."""
        if self._params is not params:
            self._params, self._hash = params, hash_weights(params)
        return self._hash


def hash_weights(params: Params, /) -> str:
    """Hash the beginning of each tensor; training that changes a tensor changes nearly all of its elements.

    Shared experts are left out and of stacks only the first is read, so that fused and separate ones hash alike.
    """
    named = [(path, tensor) for path, tensor in named_tensors(params) if ".shared." not in path]
    samples = [_sample(tensor) for _, tensor in named]
    digest = hashlib.sha256(
        " ".join(f"{path} {len(part)}" for (path, _), part in zip(named, samples, strict=True)).encode()
    )
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def hash_frame(config: FamilyConfig, /) -> str:
    """Hash what all families have of a config, but for what changes nothing of what is remembered."""
    frame = replace(config.decoder, max_context=0, draft_layers=0)
    return hashlib.sha256(repr((type(config).__module__, frame)).encode()).hexdigest()[:16]


def _sample(tensor: Tensor) -> Tensor:
    """Give bytes of the first row's beginning; whatever the strides, nothing large is copied."""
    row = tensor.detach()
    while row.dim() > 1:
        row = row[0]
    return row[:SAMPLE].contiguous().view(torch.uint8)
