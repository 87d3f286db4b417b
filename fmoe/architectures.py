"""The one door to models/: which family runs a config.json."""

import logging
import re
from collections.abc import Callable, Mapping
from reprlib import repr as brief
from typing import Any, Protocol, runtime_checkable

import torch

from fmoe.functional import Kernels, RouterConfig
from fmoe.models import (
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5_moe,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granitemoe,
    hunyuan_v1_moe,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from fmoe.models.decoder import DecoderConfig as DecoderConfig
from fmoe.models.decoder import Layers as Layers
from fmoe.models.decoder import Params as Params
from fmoe.models.decoder import State as State
from fmoe.models.decoder import Stream as Stream
from fmoe.models.decoder import choose_tokens as choose_tokens
from fmoe.models.decoder import compute_logits as compute_logits
from fmoe.models.decoder import forward as forward
from fmoe.models.decoder import place_step as place_step
from fmoe.models.decoder import run_layers as run_layers
from fmoe.models.decoder import start_step as start_step
from fmoe.models.decoder import state_row as state_row
from fmoe.models.mtp import DraftNames as DraftNames
from fmoe.models.mtp import DraftParams as DraftParams
from fmoe.models.mtp import Following as Following
from fmoe.models.mtp import draft_greedily as draft_greedily
from fmoe.models.mtp import join_hidden as join_hidden
from fmoe.models.mtp import norm_and_choose as norm_and_choose
from fmoe.models.mtp import norm_and_head as norm_and_head
from fmoe.models.mtp import take_last_of_stream as take_last_of_stream
from fmoe.models.weights import DIFFER as DIFFER
from fmoe.models.weights import SCALE as SCALE
from fmoe.models.weights import Fill as Fill
from fmoe.models.weights import Piece as Piece

logger = logging.getLogger("fmoe")


class FamilyConfig(Protocol):
    """What every family's Config has; the rest is the family's own."""

    @property
    def decoder(self) -> DecoderConfig:
        """The frame."""
        ...

    @property
    def router(self) -> RouterConfig:
        """The routing rule of its mixture-of-experts layers."""
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


@runtime_checkable
class Drafting(Protocol):
    """What a module of models/ provides besides where its checkpoints have a draft (MTP) layer."""

    DRAFT_KIND: str  # of layer

    def draft_names(self, config: Any, /) -> DraftNames:
        """Name the tensors around the draft layer."""
        ...

    def build_drafts(self, fill: Fill, config: Any) -> DraftParams:
        """Describe every parameter of the draft layer and what stands around it."""
        ...


KNOWN: tuple[Architecture, ...] = (
    mixtral,
    qwen2_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_5_moe,
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    glm4_moe_lite,
    dots1,
    granitemoe,
    hunyuan_v1_moe,
    ernie4_5_moe,
    olmoe,
    gpt_oss,
)
_LLAMA4 = "a weight multiplies the input of an expert instead of its output, and attention is chunked; neither is built"
REFUSED: Mapping[str, str] = {  # model_type and architectures of families that are known, and why they do not run
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "Llama4ForCausalLM": _LLAMA4,
}


def find_architecture(raw: Mapping[str, Any], /) -> Architecture:
    """Find the family by ``architectures`` first, then by ``model_type``.

    Raises:
        ValueError: neither is known, the message lists what is; or ``architectures`` is no list of names.
        NotImplementedError: the family is one of ``REFUSED``.
    """
    declared = [] if raw.get("architectures") is None else raw["architectures"]
    if not isinstance(declared, list) or not all(isinstance(name, str) for name in declared):
        raise ValueError(f"config.json: architectures must be a list of names, got {brief(declared)}")
    model_type = raw.get("model_type")
    for family in KNOWN:
        if any(name in family.ARCHITECTURES for name in declared):
            return family
    for family in KNOWN:
        if model_type in family.MODEL_TYPES:
            return family
    for name in (*declared, model_type):
        if isinstance(name, str) and name in REFUSED:
            raise NotImplementedError(f"config.json: {name} is not implemented: {REFUSED[name]}")
    known = ", ".join(sorted(name for family in KNOWN for name in family.MODEL_TYPES))
    raise ValueError(
        f"config.json: model_type {brief(model_type)} with architectures {brief(declared)} is unknown; "
        f"known model types: {known}"
    )


def ignored_tensors(config: DecoderConfig, /) -> Callable[[str], bool]:
    """Tell which checkpoint tensors may stay unread: draft layers, recomputed buffers, a tied head, a vision model.

    Layers behind the draft layers that config.json counts may stay unread too, but the first one met is logged: a
    ``num_hidden_layers`` that is too small would otherwise drop trained layers unseen.
    """
    layers = len(config.layer_kinds)
    behind = layers + config.draft_layers
    met: list[str] = []
    seen: list[str] = []

    def ignored(name: str) -> bool:
        if name.startswith(("mtp.", "model.mtp_")) or name.endswith("rotary_emb.inv_freq"):
            return True
        if name.startswith("model.visual."):
            if not seen:
                seen.append(name)
                logger.info("the vision model is not read (the checkpoint has %s): text alone goes in", name)
            return True
        numbered = re.match(r"model\.(?:language_model\.)?layers\.(\d+)\.", name)
        if numbered and int(numbered[1]) >= layers:
            if int(numbered[1]) >= behind and not met:
                met.append(name)
                logger.warning(
                    "layers from model.layers.%d on are not read (the checkpoint has %s): config.json says "
                    "num_hidden_layers=%d and %d draft layers; correct num_hidden_layers if they belong to the model",
                    behind,
                    name,
                    layers,
                    config.draft_layers,
                )
            return True
        return config.tied and name == "lm_head.weight"

    return ignored
