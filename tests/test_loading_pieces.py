"""fmoe/loading.py: what one parameter may be made of, and what is refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import fmoe.loading
from fmoe.architectures import Fill, Piece
from fmoe.checkpoint import open_checkpoint
from fmoe.loading import check_params, load_params


def nothing(name: str) -> bool:
    return False


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return folder


def check(folder: Path, build: Callable[[Fill], "One"]) -> None:
    check_params(build, open_checkpoint(folder), dtype=torch.float32, ignore=nothing)


def load(folder: Path, build: Callable[[Fill], "One"]) -> "One":
    cpu = torch.device("cpu")
    return load_params(build, open_checkpoint(folder), dtype=torch.float32, device=cpu, ignore=nothing)


class One(NamedTuple):
    w: Tensor


def build_one(fill: Fill, *, shape: tuple[int, ...], pieces: list[Piece]) -> One:
    return One(fill(shape, pieces))


W = Piece("w", (4, 6))
TILINGS = {
    "hole": (
        (8, 6),
        [W._replace(into=(slice(4),))],
        r"w of shape \[8, 6\] has 24 elements unfilled and 0 ",
    ),
    "overlap": ((6,), [Piece("v", (4,), (slice(4),)), Piece("u", (4,), (slice(2, 6),))], "2 filled twice by v, u"),
    "no-pieces": ((3,), [], "has 3 elements unfilled and 0 filled twice by nothing"),
    "broadcast": ((4, 6), [Piece("v", (1, 6))], r"w has a place of shape \[4, 6\] for v, which comes with \[1, 6\]"),
    "take": ((4, 6), [W._replace(take=torch.t)], r"place of shape \[4, 6\] for w, which comes with \[6, 4\]"),
    "outside": ((4, 6), [Piece("v", (6,), (4,))], r"has no place \(4,\) for v \(index 4 for a dimension of 4\)"),
}


def write_pieces(folder: Path, pieces: list[Piece]) -> Path:
    return write(folder, {piece.name: torch.ones(piece.shape) for piece in pieces})


@pytest.mark.parametrize("on_meta", [False, True], ids=["small", "large"])
@pytest.mark.parametrize(("shape", "pieces", "message"), TILINGS.values(), ids=TILINGS)
def test_tiling_errors(tmp_path, monkeypatch, shape, pieces, message, on_meta):
    monkeypatch.setattr(fmoe.loading, "STAND_IN_ELEMENTS", 0 if on_meta else 100)
    folder = write_pieces(tmp_path, pieces)
    with pytest.raises(ValueError, match=rf"parameters not filled exactly once \(1\): .*{message}"):
        check(folder, partial(build_one, shape=shape, pieces=pieces))


GOOD_TILINGS = {
    "transposed": ((6, 4), [W._replace(take=torch.t)]),
    "interleaved": ((5,), [Piece("v", (3,), (slice(0, None, 2),)), Piece("u", (2,), (slice(1, None, 2),))]),
    "scalar": ((), [Piece("v", ())]),
    "empty": ((0, 3), []),
}


@pytest.mark.parametrize(("shape", "pieces"), GOOD_TILINGS.values(), ids=GOOD_TILINGS)
def test_tilings(tmp_path, shape, pieces):
    build = partial(build_one, shape=shape, pieces=pieces)
    folder = write_pieces(tmp_path, pieces)

    (w,) = load(folder, build)

    assert torch.equal(w, torch.ones(shape))


def test_tensor_used_twice(tmp_path):
    halves = [Piece("w", (4,), (0,)), Piece("w", (4,), (1,))]
    folder = write(tmp_path, {"w": torch.arange(4.0)})
    with pytest.raises(ValueError, match=r"tensors used twice \(1\): w"):
        check(folder, partial(build_one, shape=(2, 4), pieces=halves))
    with pytest.raises(ValueError, match=r"tensors used twice \(1\): w"):
        check(folder, partial(build_one, shape=(2, 4), pieces=[halves[0]._replace(shares=True), halves[1]]))


def test_shared_tensor(tmp_path):
    pieces = [
        Piece("w", (4,), (slice(1),), lambda w: w[3:], shares=True),
        Piece("w", (4,), (slice(1, None),), lambda w: w[:3], shares=True),
    ]
    build = partial(build_one, shape=(4,), pieces=pieces)
    folder = write(tmp_path, {"w": torch.arange(4.0)})

    params = load(folder, build)

    assert params.w.tolist() == [3, 0, 1, 2]


def test_shared_tensor_used_in_part(tmp_path):
    piece = Piece("w", (4,), (), lambda w: w[1:], shares=True)
    folder = write(tmp_path, {"w": torch.arange(4.0)})
    with pytest.raises(ValueError, match=r"shared tensors used in part \(1\): w"):
        check(folder, partial(build_one, shape=(3,), pieces=[piece]))
