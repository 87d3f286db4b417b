"""A model's draft (MTP) head: read when it is first asked for, and the functions that run with it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fmoe.compile.decode_choice import quantize_draft_head
from fmoe.compile.select import Decision
from fmoe.compile.step import DraftSteps, compile_draft_steps, finish_greedily
from fmoe.functional.kernels import Kernels

from .architectures import (
    Architecture,
    Drafting,
    DraftParams,
    FamilyConfig,
    Params,
    draft_greedily,
    join_hidden,
    norm_and_choose,
    norm_and_head,
    start_step,
    take_last_of_stream,
)
from .checkpoint import open_checkpoint
from .loading import load_params
from .pace import Pace
from .planning import prepare_layout
from .random_weights import Weights, load_random, open_config


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DraftHead:
    """The draft layer with its functions, plain and compiled, and what its steps took and gave so far."""

    params: DraftParams
    kind: str  # of layer
    eager: DraftSteps
    graphs: DraftSteps
    paces: dict[tuple[int, bool], Pace] = field(default_factory=dict)

    def find_pace(self, rows: int, compiled: bool, /) -> Pace:
        """Give the estimate for batches of so many rows."""
        return self.paces.setdefault((rows, compiled), Pace())


Read = Callable[[], DraftParams]
Bind = Callable[[DraftParams], DraftHead]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's draft head comes from."""

    folder: Path
    architecture: Architecture
    config: FamilyConfig
    dtype: torch.dtype
    device: torch.device
    weights: Weights
    seed: int
    decision: Decision
    progress: bool | None


def read_drafts(source: Source, embedding: Params, /) -> DraftParams:
    """Read a draft head, or draw it where the model is drawn, in the layout of the model's layers.

    Args:
        source: where from.
        embedding: the model's parameters.

    Raises:
        ValueError: the family has none that is run here, or the checkpoint lacks a tensor of it.
    """
    family = source.architecture
    if not isinstance(family, Drafting):
        raise ValueError(
            f"speculation needs a draft (MTP) layer, and models of type {family.MODEL_TYPES[0]} have none here; "
            "call without speculate"
        )
    build: Callable[[Any], DraftParams] = partial(_build, family, source.config)
    if source.weights == "random":
        config = open_config(source.folder).config
        params, _ = load_random(build, config, dtype=source.dtype, device=source.device, seed=source.seed)
    else:
        checkpoint = open_checkpoint(source.folder)
        name = family.draft_names(source.config).join
        if name not in checkpoint.tensors:
            raise ValueError(
                f"speculation needs the weights of a draft (MTP) layer, and {source.folder} has none (no {name}); "
                "call without speculate, or download the shards that hold it"
            )
        params = load_params(
            build,
            checkpoint,
            dtype=source.dtype,
            device=source.device,
            ignore=lambda name: True,
            progress=source.progress,
        )
    [layer] = prepare_layout([embedding._replace(layers=(params.layer,))], source.decision).layers
    return params._replace(layer=layer, head_VD=quantize_draft_head(embedding.head_VD, source.decision.requested))


def _build(family: Drafting, config: FamilyConfig, fill: Any) -> DraftParams:
    return family.build_drafts(fill, config)


def bind_head(
    params: DraftParams,
    architecture: Architecture,
    config: FamilyConfig,
    kernels: Callable[[bool], Kernels],
    device: torch.device,
    /,
) -> DraftHead:
    """Bind config and kernels, which differ where steps are compiled; nothing is compiled yet."""
    assert isinstance(architecture, Drafting)
    kind = architecture.DRAFT_KIND
    eager, graphs = (
        bind_steps(architecture, config, kernels(compiled), kind, compiled=compiled) for compiled in (False, True)
    )
    return DraftHead(params, kind, eager, compile_draft_steps(graphs, device=device))


def bind_steps(
    architecture: Architecture, config: FamilyConfig, kernels: Kernels, kind: str, /, *, compiled: bool
) -> DraftSteps:
    """Bind config and kernels; what is to be compiled comes in larger pieces."""
    decoder, layers = config.decoder, architecture.make_layers(config, kernels)
    frame: dict[str, Any] = {"config": decoder, "kernels": kernels}
    head = partial(norm_and_head, eps=decoder.eps, kernels=kernels)
    # what chooses from no logits consists of kernels, so that one graph would save nothing
    whole = compiled and kernels.choose_tokens is None
    return DraftSteps(
        layers=layers,
        join=partial(join_hidden, **frame),
        head=head,
        take=take_last_of_stream,
        start=partial(start_step, config=decoder, slots=None),
        choose=partial(norm_and_choose, eps=decoder.eps, kernels=kernels) if kernels.choose_tokens else None,
        finish=partial(finish_greedily, head=head) if whole else None,
        draft=partial(draft_greedily, layer=layers[kind], **frame) if whole else None,
        masked=kernels.attend_few_step is None or kernels.attend_few_lengths is None,
    )


class DraftShelf:
    """Holds a model's draft head from the first time that it is asked for.

    Args:
        read: gives its parameters; None where the model was not loaded from a folder.
        bind: gives their functions.
    """

    def __init__(self, read: Read | None = None, bind: Bind | None = None) -> None:
        self._read, self._bind = read, bind
        self._params: DraftParams | None = None
        self._head: DraftHead | None = None

    def get(self) -> DraftHead:
        """Give the head, and read it before where that was not done yet; the errors are ``read_drafts``'s."""
        if self._head is None:
            if self._read is None or self._bind is None:
                raise ValueError(
                    "speculation needs a draft (MTP) layer, and this model was made without; use fmoe.load"
                )
            self._params = self._params or self._read()
            self._head = self._bind(self._params)
        return self._head

    def rebind(self, bind: Bind, /) -> "DraftShelf":
        """Give one with the same weights, if they were read, and other functions."""
        shelf = DraftShelf(self._read, bind)
        shelf._params = self._params
        return shelf
