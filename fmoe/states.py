"""What a model remembers of a text, as a value: kept, continued several times, written to a file and read again."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fmoe.compile.atomic import replacing
from fmoe.compile.step import cache_slots
from fmoe.functional.cache import Cache, KVCache, LatentCache, copy_row_, select_slots
from fmoe.functional.deltanet import DeltaConfig

from .ambient import check_model, undisturbed
from .architectures import State as RowState
from .fingerprint import Fingerprint, hash_frame
from .model import Model
from .prompts import check_ids

FORMAT = "fmoe state 1"
NO_STATE = "it is no file of fmoe.save_state, or was damaged; make the state anew with fmoe.prefill"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class State:
    """What a model remembers of a text, from ``fmoe.prefill``; nothing that takes a state changes it.

    token_ids: the text.
    caches: one per layer, of one sequence; slots behind the text hold nothing.
    logits_V: float32, of the token behind the text.
    fingerprint: of the model.
    """

    token_ids: tuple[int, ...]
    caches: tuple[Cache, ...]
    logits_V: Tensor
    fingerprint: Fingerprint

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self.logits_V.nbytes + sum(part.nbytes for cache in self.caches for part in cache)

    def __len__(self) -> int:
        """Count the tokens of the text."""
        return len(self.token_ids)

    def __repr__(self) -> str:
        """Say how much it holds in one line; its tensors would fill screens."""
        return f"State({len(self)} tokens, {self.nbytes} bytes, {self.fingerprint.dtype} on {self.logits_V.device})"


def fingerprint_of(model: Model, /) -> Fingerprint:
    """Give what tells this model's states from those of others."""
    delta = getattr(model.config, "delta", None)
    state_dtype = delta.state_dtype if isinstance(delta, DeltaConfig) else torch.float32
    dtype, kept = (str(dtype).removeprefix("torch.") for dtype in (model.dtype, state_dtype))
    return Fingerprint(hash_frame(model.config), dtype, kept, model.weights_hash.of(model.params))


def check_state(model: Model, state: object, /, *, name: str = "state") -> None:
    """Refuse what is no state of this model.

    Raises:
        ValueError: the message says what differs.
    """
    if not isinstance(state, State):
        raise ValueError(f"{name} must come from fmoe.prefill or fmoe.load_state, got {type(state).__name__}")
    _check_fingerprint(model, state.fingerprint, name)
    if state.logits_V.device != model.device:
        raise ValueError(
            f"{name} lies on {state.logits_V.device} and the model on {model.device}; "
            "fmoe.save_state and fmoe.load_state move a state"
        )


def copy_state_(state: State, rows: RowState, /) -> RowState:
    """Begin each of the rows, which have room, with a state.

    Returns:
        The rows, their caches written and their lengths those of the state.
    """
    for cache, source in zip(rows.caches, state.caches, strict=True):
        copy_row_(cache, source, len(state))
    return rows._replace(lengths_B=torch.full_like(rows.lengths_B, len(state)))


def keep_row(rows: RowState, row: int, token_ids: Sequence[int], logits_V: Tensor, model: Model, /) -> State:
    """Copy what one row has seen, as a state."""
    caches = tuple(
        type(cache)(*(part[row : row + 1].clone() for part in select_slots(cache, cache_slots(len(token_ids)))))
        for cache in rows.caches
    )
    return State(tuple(token_ids), caches, logits_V.clone(), fingerprint_of(model))


def share_slots(state: State, longer: State, /) -> State:
    """Let a state take its slots from a longer one that continues it, so that they are in memory once."""
    caches = tuple(
        select_slots(theirs, cache_slots(len(state))) if isinstance(own, KVCache | LatentCache) else own
        for own, theirs in zip(state.caches, longer.caches, strict=True)
    )
    return State(state.token_ids, caches, state.logits_V, state.fingerprint)


def save_state(state: State, path: str | os.PathLike[str], /) -> None:
    """Write a state to a file (safetensors), which is there whole or not at all.

    Raises:
        ValueError: no state, or no path of a file.
        FileNotFoundError: the folder of the file is not there.
    """
    if not isinstance(state, State):
        raise ValueError(f"state must come from fmoe.prefill, got {type(state).__name__}")
    file = _as_file(path)
    if file.is_dir():
        raise ValueError(
            f"the state's place {file} is a folder; name a file in it, such as {file / 'state.safetensors'}"
        )
    if not file.absolute().parent.is_dir():
        raise FileNotFoundError(f"no folder {file.absolute().parent} for the state; make it first")
    tensors = {
        "token_ids": torch.tensor(state.token_ids, dtype=torch.int64, device="cpu"),
        "logits": state.logits_V.cpu().contiguous(),
    }
    for i, cache in enumerate(state.caches):
        parts = select_slots(cache, len(state))
        for field, part in zip(cache._fields, parts, strict=True):
            tensors[f"layers.{i}.{field}"] = part.cpu().contiguous()
    metadata = {"format": FORMAT, "fingerprint": json.dumps(asdict(state.fingerprint))}
    with replacing(file) as part_file:
        save_file(tensors, part_file, metadata=metadata)


def load_state(model: Model, path: str | os.PathLike[str], /) -> State:
    """Read a state that ``save_state`` wrote, onto the model's device.

    Raises:
        ValueError: the file holds no state, or one of a model of other weights, another dtype or another config.
        FileNotFoundError: there is no such file.
    """
    check_model(model, "load_state")
    file = _as_file(path)
    if not file.is_file():
        raise FileNotFoundError(f"no file {file} with a state; fmoe.save_state writes one")
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            metadata = opened.metadata() or {}
            found = _read_fingerprint(metadata, file)
            _check_fingerprint(model, found, f"the state in {file}")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read ({error}): {NO_STATE}") from error
    with undisturbed(model):
        return _build(model, found, tensors, file)


def _as_file(path: object) -> Path:
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise ValueError(f"path={path!r:.80} must name the file of a state, such as 'state.safetensors'")
    return Path(path).expanduser()


def _read_fingerprint(metadata: Mapping[str, str], file: Path) -> Fingerprint:
    version = metadata.get("format", "none")
    if version != FORMAT:
        raise ValueError(f"{file} has the format {version!r:.80}, expected {FORMAT!r}: {NO_STATE}")
    try:
        return Fingerprint(**json.loads(metadata["fingerprint"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} has no fingerprint of a model ({error}): {NO_STATE}") from error


def _check_fingerprint(model: Model, found: Fingerprint, name: str) -> None:
    own = fingerprint_of(model)
    if found == own:
        return
    if found.frame != own.frame:
        reason = "a model of another config"
    elif found.dtype != own.dtype:
        reason = f"a model in {found.dtype}, and this one is in {own.dtype}"
    elif found.state_dtype != own.state_dtype:
        reason = f"a model whose recurrent states are in {found.state_dtype}, and this one's are in {own.state_dtype}"
    else:
        reason = "a model of other weights, or with kernels that lay them out in another way"
    raise ValueError(f"{name} is of {reason}; load that model, or make the state anew with fmoe.prefill")


def _build(model: Model, fingerprint: Fingerprint, tensors: Mapping[str, Tensor], file: Path) -> State:
    try:
        token_ids = tensors["token_ids"].tolist()
        logits_V = tensors["logits"].to(model.device)
        check_ids(token_ids, model.config.decoder.vocab_size, str(file))
        empty = model.architecture.init_state(
            model.config, 1, cache_slots(len(token_ids)), dtype=model.dtype, device=model.device
        )
        caches = tuple(
            copy_row_(cache, type(cache)(*(tensors[f"layers.{i}.{field}"] for field in cache._fields)), len(token_ids))
            for i, cache in enumerate(empty.caches)
        )
    except (KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"{file} lacks a part of a state or has one of another size ({error}): {NO_STATE}") from error
    return State(tuple(token_ids), caches, logits_V, fingerprint)
