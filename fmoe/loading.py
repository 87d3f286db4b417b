"""Checkpoint tensors -> parameter tuples: first every name, shape and dtype is checked, then each tensor is read once.

A family's ``build_params`` runs twice. The first run gets meta tensors, and what it asked for is compared with
the headers; nothing is allocated until that agrees. The second run gets the real parameters, still empty, which
are then filled in place shard by shard, so that no more than the parameters and one mapped shard is in memory.
"""

import logging
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from fmoe.functional.quant import FP4_BLOCK, FP8, Fp8, Weight

from .architectures import SCALE, Fill, Piece
from .checkpoint import (
    Checkpoint,
    TensorInfo,
    check_quantization,
    list_names,
    stored_dtype,
)
from .filling import copy_blocks_, copy_mxfp4_, copy_piece_
from .fp8_blocks import ScalePiece, find_factor_faults, gather_scale_, plan_blocks
from .placing import why_not_fp8
from .tiling import box_shape, count_uncovered, select_box

PROGRESS_DELAY_S = 2.0
GIB = 2**30
LISTED = 20  # names in one message
STAND_IN_ELEMENTS = 1 << 20  # up to here the check runs a piece's map on the CPU, beyond it on the meta device

logger = logging.getLogger("fmoe")

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
    mxfp4: bool = False  # some of those that are read are in MXFP4


class _Request(NamedTuple):
    param: Tensor
    pieces: tuple[Piece, ...]


class _Recorder:
    """A Fill that returns empty parameters and keeps what each of them is to be made of."""

    def __init__(
        self, names: Container[str], *, dtype: torch.dtype, device: torch.device, keep_fp8: bool = True
    ) -> None:
        self.names = names
        self.dtype = dtype
        self.device = device
        self.keep_fp8 = keep_fp8
        self.requests: list[_Request] = []
        self.scales: list[tuple[Tensor, tuple[ScalePiece, ...]]] = []
        self.torn: dict[str, list[str]] = {}  # why blocks cannot be kept -> a tensor of each parameter

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
        param = self._allocate(stored, dtype or self.dtype, transposed=transposed)
        self.requests.append(_Request(param, tuple(pieces)))
        return param

    def weight(
        self, shape: Sequence[int], pieces: Sequence[Piece], /, *, parts: int = 1, by_columns: bool = False
    ) -> Weight:
        """Return an uninitialised parameter, in FP8 blocks where they are to be kept and can be."""
        if not self.keep_fp8 or not any(f"{piece.name}{SCALE}" in self.names for piece in pieces):
            return self(shape, pieces, by_columns=by_columns)
        plan = plan_blocks(shape, pieces, self.names, parts=parts)
        if isinstance(plan, str):
            self.torn.setdefault(plan, []).append(pieces[0].name)
            return self(shape, pieces, by_columns=by_columns)
        w, scale = self(plan.shape, plan.pieces, dtype=FP8), self._allocate(plan.scale_shape, torch.float32)
        self.scales.append((scale, plan.scales))
        rest_shape = (shape[0] - plan.shape[0], *plan.shape[1:])
        return Fp8(w, scale, self(rest_shape, plan.rest) if plan.rest else None)

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype, *, transposed: bool = False) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        # a Parameter: only then do CUDA graphs treat it as static instead of copying it each step
        return nn.Parameter(tensor.T if transposed else tensor, requires_grad=False)


def load_params(
    build: Build[Params],
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ignore: Callable[[str], bool],
    progress: bool | None = None,
    keep_fp8: bool | None = None,
) -> Params:
    """Check everything as ``check_params`` does, then read the parameters.

    Args:
        build: calls its argument once per parameter and returns the tuple of them.
        dtype: of the parameters that name none themselves.
        ignore: true for a checkpoint tensor that may stay unread.
        progress: show a bar on standard error from the third second on; None does so on a terminal only.
        keep_fp8: keep weights in FP8 blocks as they are; None does so where the device computes with them. Others
            become plain numbers of their parameter's dtype.
    """
    report = check_params(build, checkpoint, dtype=dtype, ignore=ignore)
    if report.mxfp4:
        sizes = report.param_bytes / GIB, report.read_bytes / GIB
        text = "weights in MXFP4 become %s (no kernel reads MXFP4): the model takes %.1f GiB, its files have %.1f GiB"
        logger.info(text, str(dtype).removeprefix("torch."), *sizes)
    why_not = why_not_fp8(device) if keep_fp8 is None else "" if keep_fp8 else "as asked for"
    if why_not and any(info.dtype == FP8 for info in checkpoint.tensors.values()):
        size = count_params(make_meta_params(build, dtype=dtype, names=checkpoint.tensors, keep_fp8=False))[1]
        logger.info("weights in FP8 become %s (%s): %.1f GiB", str(dtype).removeprefix("torch."), why_not, size / GIB)
    fill = _Recorder(checkpoint.tensors, dtype=dtype, device=device, keep_fp8=not why_not)
    params = build(fill)
    for reason, torn in fill.torn.items():
        dtype_name = str(dtype).removeprefix("torch.")
        logger.info("weights in FP8 become %s, for %s: %s", dtype_name, reason, list_names(torn, limit=3))
    factors = _read_factors(checkpoint, fill.requests)
    for scale, scales in fill.scales:
        gather_scale_(scale, scales, factors)
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
            _read_shard(file, by_file[file], factors, checkpoint.tensors, bar.update)
    return params


def check_params(
    build: Build[Any], checkpoint: Checkpoint, *, dtype: torch.dtype, ignore: Callable[[str], bool]
) -> LoadReport:
    """Compare what ``build`` asks for with the checkpoint's headers; all disagreements make one ValueError."""
    check_quantization(checkpoint.config)
    fill = _Recorder(checkpoint.tensors, dtype=dtype, device=torch.device("meta"))
    params = build(fill)
    tensors, faults = checkpoint.tensors, list(find_factor_faults(checkpoint.tensors))
    paths = {id(tensor): path for path, tensor in named_tensors(params)}
    pieces = [piece for request in fill.requests for piece in request.pieces]
    used = {piece.name for piece in pieces}
    used |= {f"{name}{SCALE}" for name in used if f"{name}{SCALE}" in tensors}
    exponents = {piece.exponents for piece in pieces if piece.exponents is not None}
    used |= exponents
    unread = [name for name in tensors if name not in used]
    found = _check_pieces(pieces, checkpoint)
    for kind, name, message in faults:
        if not ignore(name):
            found.setdefault(kind, []).append(message)
    faulty = {name for _, name, _ in faults}
    found["unknown tensors"] = [name for name in unread if not ignore(name) and name not in faulty]
    found["parameters not filled exactly once"] = [
        f"{paths.get(id(request.param), 'a parameter')} {problem}"
        for request in fill.requests
        if (problem := _check_tiling(request))
    ]
    if any(found.values()):
        raise ValueError(_describe(found, checkpoint))
    num_params, param_bytes = count_params(params)
    read_bytes = sum(tensors[name].nbytes for name in used)
    return LoadReport(num_params, param_bytes, len(used), read_bytes, tuple(unread), mxfp4=bool(exponents))


def make_meta_params(
    build: Build[Params], *, dtype: torch.dtype, names: Container[str] = frozenset(), keep_fp8: bool = True
) -> Params:
    """Run ``build`` without a checkpoint and return its parameters on the meta device.

    ``names`` are the tensors to believe in; with none, a family takes its layout of one tensor per expert, and no
    weight is in FP8 blocks.
    """
    return make_empty_params(build, dtype=dtype, device=torch.device("meta"), names=names, keep_fp8=keep_fp8)


def make_empty_params(
    build: Build[Params],
    *,
    dtype: torch.dtype,
    device: torch.device,
    names: Container[str] = frozenset(),
    keep_fp8: bool = True,
) -> Params:
    """Allocate the parameters where and as a load would leave them, and read nothing; as ``make_meta_params``."""
    return build(_Recorder(names, dtype=dtype, device=device, keep_fp8=keep_fp8))


def count_params(params: Any) -> tuple[int, int]:
    """Return the number of elements and the bytes of all tensors in ``params``, each tensor once.

    The factors of FP8 blocks are bytes, but no elements.
    """
    tensors = {id(tensor): (path, tensor) for path, tensor in named_tensors(params)}.values()
    return sum(count_elements(path, tensor) for path, tensor in tensors), sum(tensor.nbytes for _, tensor in tensors)


def count_elements(path: str, tensor: Tensor, /) -> int:
    """Return how many of a model's parameters a tensor holds; ``path`` is that of ``named_tensors``."""
    return 0 if path.rpartition(".")[2] == "scale" else tensor.numel()


def named_tensors(params: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of nested tuples and lists, the path such as ``layers.0.moe.w_router``."""
    if isinstance(params, Tensor):
        yield path, params
    elif isinstance(params, tuple | list):
        keys = getattr(params, "_fields", range(len(params)))
        for key, value in zip(keys, params, strict=True):
            yield from named_tensors(value, f"{path}.{key}" if path else str(key))


def _read_factors(checkpoint: Checkpoint, requests: Iterable[_Request]) -> dict[str, Tensor]:
    """Read the factors of all tensors in FP8 blocks: one number for 16,384, and often in another shard."""
    names = {piece.name for request in requests for piece in request.pieces}
    by_file: dict[Path, list[str]] = {}
    for name in names:
        if checkpoint.tensors[name].dtype == FP8:
            by_file.setdefault(checkpoint.tensors[f"{name}{SCALE}"].file, []).append(f"{name}{SCALE}")
    factors: dict[str, Tensor] = {}
    for file, wanted in by_file.items():
        with _open_shard(file) as shard:
            factors |= {name: shard.get_tensor(name).float() for name in wanted}
    return factors


def _read_shard(
    file: Path,
    reads: Sequence[tuple[TensorInfo, Piece, Tensor]],
    factors: Mapping[str, Tensor],
    tensors: Mapping[str, TensorInfo],
    advance: Callable[[int], object],
) -> None:
    """Copy one file's tensors to their places, in the order of their bytes; its mapping ends with this call."""
    with _open_shard(file) as shard:
        for info, piece, param in sorted(reads, key=lambda read: read[0].offset):
            source = shard.get_tensor(piece.name)
            if piece.exponents is not None:
                with _open_shard(tensors[piece.exponents].file) as other:
                    infinite = copy_mxfp4_(piece, source, other.get_tensor(piece.exponents), param)
            elif source.dtype == FP8 and param.dtype != FP8:
                infinite = copy_blocks_(piece, source, factors[f"{piece.name}{SCALE}"], param)
            else:
                infinite = copy_piece_(piece, source, param)
            if infinite:
                raise ValueError(
                    f"{piece.name} in {file} has {infinite} values beyond {torch.finfo(torch.float16).max:g}, the "
                    "largest of float16; load with dtype bfloat16 or float32"
                )
            advance(info.nbytes)


@contextmanager
def _open_shard(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read ({error}); download it again") from error


def _check_pieces(pieces: Collection[Piece], checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return, by kind, what is wrong with the tensors that the pieces name."""
    stored = stored_dtype(checkpoint)
    found: dict[str, list[str]] = {"missing tensors": [], "wrong shapes": [], "wrong dtypes": []}
    users: dict[str, list[Piece]] = {}
    exponents = [Piece(piece.exponents, piece.shape[:-1]) for piece in pieces if piece.exponents is not None]
    mxfp4 = {piece.name for piece in (*exponents, *(piece for piece in pieces if piece.exponents is not None))}
    for piece in (*pieces, *exponents):
        users.setdefault(piece.name, []).append(piece)
    for name, used_by in users.items():
        info = checkpoint.tensors.get(name)
        if info is None:
            found["missing tensors"].append(name)
            continue
        for shape in {tuple(piece.shape) for piece in used_by} - {info.shape}:
            found["wrong shapes"].append(f"{name} (expected {list(shape)}, got {list(info.shape)})")
        if problem := _check_dtype(name, info.dtype, torch.uint8 if name in mxfp4 else stored, checkpoint.tensors):
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
    if stored == torch.uint8:
        return None if dtype == stored else f"{name} (expected uint8, got {short})"
    if dtype in (stored, torch.float32):
        return None
    if dtype == FP8:
        return None if f"{name}{SCALE}" in names else f"{name} ({short} without its factors, {name}{SCALE})"
    if short.startswith("float8"):
        return f"{name} ({short}: an unsupported quantisation; of FP8, float8_e4m3fn is read)"
    if not dtype.is_floating_point:
        return f"{name} ({short}: an unsupported quantisation; take the unquantised checkpoint)"
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
    """Return the shape in which a piece reaches its parameter; one in MXFP4 is taken matrix by matrix."""
    outer, shape = piece.shape[:0], piece.shape
    if piece.exponents is not None:
        outer, shape = shape[:1], (*shape[1:-2], shape[-2] * FP4_BLOCK)
    if piece.take is None:
        return *outer, *shape
    # arithmetic on meta tensors imports torch's decompositions, a second of start-up; one element is enough memory
    small = prod(shape) <= STAND_IN_ELEMENTS
    stand_in = torch.zeros(()).expand(shape) if small else torch.empty(shape, device="meta")
    return *outer, *piece.take(stand_in).shape


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
