"""Checkpoint tensors -> parameter tuples: first every name, shape and dtype is checked, then each tensor is read once.

A family's ``build_params`` runs twice. The first run gets meta tensors, and what it asked for is compared with
the headers; nothing is allocated until that agrees. The second run gets the real parameters, still empty, which
are then filled in place shard by shard, so that no more than the parameters and one mapped shard is in memory.
"""

import sys
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from .architectures import Fill, Piece
from .checkpoint import (
    Checkpoint,
    TensorInfo,
    check_quantization,
    list_names,
    stored_dtype,
)
from .tiling import box_shape, count_uncovered, select_box

PROGRESS_DELAY_S = 2.0
LISTED = 20  # names in one message
STAND_IN_ELEMENTS = 1 << 20  # up to here the check runs a piece's map on the CPU, beyond it on the meta device

Params = TypeVar("Params")
Build = Callable[[Fill], Params]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load is going to do."""

    num_params: int
    param_bytes: int
    read: int  # checkpoint tensors that are read
    read_bytes: int
    ignored: tuple[str, ...]  # checkpoint tensors that are left alone


class _Request(NamedTuple):
    param: Tensor
    pieces: tuple[Piece, ...]


class _Recorder:
    """A Fill that returns empty parameters and keeps what each of them is to be made of."""

    def __init__(self, names: Container[str], *, dtype: torch.dtype, device: torch.device) -> None:
        self.names = names
        self.dtype = dtype
        self.device = device
        self.requests: list[_Request] = []

    def __call__(
        self,
        shape: Sequence[int],
        pieces: Sequence[Piece],
        /,
        *,
        dtype: torch.dtype | None = None,
        by_columns: bool = False,
    ) -> Tensor:
        """Return an uninitialised parameter."""
        # On a CPU, one row times a matrix of 4096 x 256 took 161 us by columns and 473 us by rows (float32, MKL).
        transposed = by_columns and self.device.type == "cpu"
        stored = tuple(reversed(shape)) if transposed else tuple(shape)
        tensor = torch.empty(stored, dtype=dtype or self.dtype, device=self.device)
        tensor = tensor.T if transposed else tensor
        # a Parameter: only then do CUDA graphs treat it as static instead of copying it each step
        param = nn.Parameter(tensor, requires_grad=False)
        self.requests.append(_Request(param, tuple(pieces)))
        return param


def load_params(
    build: Build[Params],
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ignore: Callable[[str], bool],
    progress: bool | None = None,
) -> Params:
    """Check everything as ``check_params`` does, then read the parameters.

    Args:
        build: calls its argument once per parameter and returns the tuple of them.
        dtype: of the parameters that name none themselves.
        ignore: true for a checkpoint tensor that may stay unread.
        progress: show a bar on standard error from the third second on; None does so on a terminal only.
    """
    check_params(build, checkpoint, dtype=dtype, ignore=ignore)
    fill = _Recorder(checkpoint.tensors, dtype=dtype, device=device)
    params = build(fill)
    by_file: dict[Path, list[tuple[TensorInfo, Piece, Tensor]]] = {}
    for param, pieces in fill.requests:
        for piece in pieces:
            info = checkpoint.tensors[piece.name]
            by_file.setdefault(info.file, []).append((info, piece, param))
    with tqdm(
        total=sum(info.nbytes for info, _, _ in chain.from_iterable(by_file.values())),
        desc="loading",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        delay=PROGRESS_DELAY_S,
        file=sys.stderr,
        disable=None if progress is None else not progress,
    ) as bar:
        for file in sorted(by_file):
            _read_shard(file, by_file[file], bar.update)
    return params


def check_params(
    build: Build[Any], checkpoint: Checkpoint, *, dtype: torch.dtype, ignore: Callable[[str], bool]
) -> LoadReport:
    """Compare what ``build`` asks for with the checkpoint's headers; all disagreements make one ValueError."""
    check_quantization(checkpoint.config)
    fill = _Recorder(checkpoint.tensors, dtype=dtype, device=torch.device("meta"))
    params = build(fill)
    paths = {id(tensor): path for path, tensor in named_tensors(params)}
    pieces = [piece for request in fill.requests for piece in request.pieces]
    used = {piece.name for piece in pieces}
    unread = [name for name in checkpoint.tensors if name not in used]
    found = _check_pieces(pieces, checkpoint)
    found["unknown tensors"] = [name for name in unread if not ignore(name)]
    found["parameters not filled exactly once"] = [
        f"{paths.get(id(request.param), 'a parameter')} {problem}"
        for request in fill.requests
        if (problem := _check_tiling(request))
    ]
    if any(found.values()):
        raise ValueError(_describe(found, checkpoint))
    num_params, param_bytes = count_params([request.param for request in fill.requests])
    read_bytes = sum(checkpoint.tensors[name].nbytes for name in used)
    return LoadReport(num_params, param_bytes, len(used), read_bytes, tuple(unread))


def make_meta_params(build: Build[Params], *, dtype: torch.dtype, names: Container[str] = frozenset()) -> Params:
    """Run ``build`` without a checkpoint and return its parameters on the meta device.

    ``names`` are the tensors to believe in; with none, a family takes its layout of one tensor per expert.
    """
    return make_empty_params(build, dtype=dtype, device=torch.device("meta"), names=names)


def make_empty_params(
    build: Build[Params], *, dtype: torch.dtype, device: torch.device, names: Container[str] = frozenset()
) -> Params:
    """Allocate the parameters where and as a load would leave them, and read nothing; as ``make_meta_params``."""
    return build(_Recorder(names, dtype=dtype, device=device))


def count_params(params: Any) -> tuple[int, int]:
    """Return the number of elements and the bytes of all tensors in ``params``, each tensor once."""
    tensors = {id(tensor): tensor for _, tensor in named_tensors(params)}.values()
    return sum(tensor.numel() for tensor in tensors), sum(tensor.nbytes for tensor in tensors)


def named_tensors(params: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of nested tuples and lists, the path such as ``layers.0.moe.w_router``."""
    if isinstance(params, Tensor):
        yield path, params
    elif isinstance(params, tuple | list):
        keys = getattr(params, "_fields", range(len(params)))
        for key, value in zip(keys, params, strict=True):
            yield from named_tensors(value, f"{path}.{key}" if path else str(key))


def _read_shard(
    file: Path, reads: Sequence[tuple[TensorInfo, Piece, Tensor]], advance: Callable[[int], object]
) -> None:
    """Copy one file's tensors to their places, in the order of their bytes; its mapping ends with this call."""
    try:
        with safe_open(file, framework="pt") as shard:
            for info, piece, param in sorted(reads, key=lambda read: read[0].offset):
                source = shard.get_tensor(piece.name)
                _copy_piece(piece, source, param, file)
                advance(info.nbytes)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read ({error}); download it again") from error


def _copy_piece(piece: Piece, source: Tensor, param: Tensor, file: Path) -> None:
    """Write a checkpoint tensor to its place; a finite value must not become infinite."""
    values = source if piece.take is None else piece.take(source)
    place = param[piece.into]
    place.copy_(values)
    if param.dtype != torch.float16 or values.dtype == torch.float16:
        return
    if infinite := int(place.isinf().sum()) - int(values.isinf().sum()):
        raise ValueError(
            f"{piece.name} in {file} has {infinite} values beyond "
            f"{torch.finfo(torch.float16).max:g}, the largest of float16; load with dtype bfloat16 or float32"
        )


def _check_pieces(pieces: Collection[Piece], checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return, by kind, what is wrong with the tensors that the pieces name."""
    stored = stored_dtype(checkpoint)
    found: dict[str, list[str]] = {"missing tensors": [], "wrong shapes": [], "wrong dtypes": []}
    users: dict[str, list[Piece]] = {}
    for piece in pieces:
        users.setdefault(piece.name, []).append(piece)
    for name, used_by in users.items():
        info = checkpoint.tensors.get(name)
        if info is None:
            found["missing tensors"].append(name)
            continue
        for shape in {tuple(piece.shape) for piece in used_by} - {info.shape}:
            found["wrong shapes"].append(f"{name} (expected {list(shape)}, got {list(info.shape)})")
        if problem := _check_dtype(name, info.dtype, stored, checkpoint.tensors):
            found["wrong dtypes"].append(problem)
    found["tensors used twice"] = [
        name for name, used_by in users.items() if len(used_by) > 1 and not all(piece.shares for piece in used_by)
    ]
    found["shared tensors used in part"] = [
        name
        for name, used_by in users.items()
        if used_by[0].shares and sum(prod(_taken_shape(piece)) for piece in used_by) < prod(used_by[0].shape)
    ]
    return found


def _check_dtype(name: str, dtype: torch.dtype, stored: torch.dtype, names: Container[str]) -> str | None:
    short = str(dtype).removeprefix("torch.")
    if dtype in (stored, torch.float32):
        return None
    if short.startswith("float8"):
        scaled = f"{name}_scale_inv" in names
        return f"{name} ({short}: {'fp8 is not implemented yet' if scaled else 'a float8 tensor without scale'})"
    if not dtype.is_floating_point:
        return f"{name} ({short}: an unsupported quantisation)"
    expected = " or ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in (stored, torch.float32)))
    return f"{name} (expected {expected}, got {short})"


def _check_tiling(request: _Request) -> str | None:
    """Say how the pieces fail to cover their parameter exactly once, or how one's shape differs from its place."""
    shape = tuple(request.param.shape)
    boxes = []
    for piece in request.pieces:
        try:
            box = select_box(shape, piece.into)
        except IndexError as error:
            return f"of shape {list(shape)} has no place {piece.into} for {piece.name} ({error})"
        place, got = box_shape(box, piece.into), _taken_shape(piece)
        if got != place:
            return f"has a place of shape {list(place)} for {piece.name}, which comes with {list(got)}"
        boxes.append(box)
    empty, double = count_uncovered(shape, boxes)
    if empty or double:
        filled_by = list_names([piece.name for piece in request.pieces], limit=3) or "nothing"
        return f"of shape {list(shape)} has {empty} elements unfilled and {double} filled twice by {filled_by}"
    return None


def _taken_shape(piece: Piece) -> tuple[int, ...]:
    """Return the shape in which a piece reaches its parameter."""
    if piece.take is None:
        return tuple(piece.shape)
    # arithmetic on meta tensors imports torch's decompositions, a second of start-up; one element is enough memory
    small = prod(piece.shape) <= STAND_IN_ELEMENTS
    stand_in = torch.zeros(()).expand(piece.shape) if small else torch.empty(piece.shape, device="meta")
    return tuple(piece.take(stand_in).shape)


def _describe(found: Mapping[str, list[str]], checkpoint: Checkpoint) -> str:
    """Lay out the problems by kind, about LISTED names in all."""
    kinds = {kind: names for kind, names in found.items() if names}
    share = LISTED // len(kinds)
    lines = [f"  {kind} ({len(names)}): {list_names(names, limit=share)}" for kind, names in kinds.items()]
    return "\n".join(
        [
            f"the tensors in {checkpoint.folder} are not those that its config.json asks for:",
            *lines,
            "use a config.json and weights that belong together; nothing was loaded",
        ]
    )
