"""The one door to models/: which family runs a config.json."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from fmoe.functional import Kernels
from fmoe.models import deepseek_v2, deepseek_v3, mixtral, qwen2_moe, qwen3_moe, qwen3_next
from fmoe.models.decoder import DecoderConfig as DecoderConfig
from fmoe.models.decoder import Layers as Layers
from fmoe.models.decoder import Params as Params
from fmoe.models.decoder import State as State
from fmoe.models.decoder import compute_logits as compute_logits
from fmoe.models.decoder import forward as forward
from fmoe.models.decoder import state_row as state_row
from fmoe.models.weights import Fill as Fill
from fmoe.models.weights import Piece as Piece


class FamilyConfig(Protocol):
    """What every family's Config has; the rest is the family's own."""

    @property
    def decoder(self) -> DecoderConfig:
        """The frame."""
        ...


class Architecture(Protocol):
    """What a module of models/ provides."""

    MODEL_TYPES: tuple[str, ...]
    ARCHITECTURES: tuple[str, ...]

    def parse_config(self, raw: Mapping[str, Any], *, shared_experts: Any = "auto") -> Any:
        """Read config.json."""
        ...

    def build_params(self, fill: Fill, config: Any) -> Params:
        """Describe every parameter."""
        ...

    def make_layers(self, config: Any, kernels: Kernels) -> Layers:
        """Give one function per layer kind."""
        ...

    def init_state(self, config: Any, batch: int, slots: int, /, *, dtype: torch.dtype, device: torch.device) -> State:
        """Make an empty state."""
        ...


KNOWN: tuple[Architecture, ...] = (
    mixtral,
    qwen2_moe,
    qwen3_moe,
    qwen3_next,
    deepseek_v2,
    deepseek_v3,
)


def find_architecture(raw: Mapping[str, Any], /) -> Architecture:
    """Find the family by ``architectures`` first, then by ``model_type``.

    Raises:
        ValueError: neither is known; the message lists what is.
    """
    declared = raw.get("architectures") or []
    model_type = raw.get("model_type")
    for family in KNOWN:
        if any(name in family.ARCHITECTURES for name in declared):
            return family
    for family in KNOWN:
        if model_type in family.MODEL_TYPES:
            return family
    known = ", ".join(sorted(name for family in KNOWN for name in family.MODEL_TYPES))
    raise ValueError(
        f"config.json: model_type {model_type!r} with architectures {declared!r} is unknown; known model types: {known}"
    )


def ignored_tensors(config: DecoderConfig, /) -> Callable[[str], bool]:
    """Tell which checkpoint tensors may stay unread: draft layers, recomputed buffers, a tied head."""
    layers = len(config.layer_kinds)

    def ignored(name: str) -> bool:
        if name.startswith("mtp.") or name.endswith("rotary_emb.inv_freq"):
            return True
        numbered = re.match(r"model\.layers\.(\d+)\.", name)
        if numbered and int(numbered[1]) >= layers:
            return True
        return config.tied and name == "lm_head.weight"

    return ignored
