"""Measure the memory that loading takes, on a synthetic mixture-of-experts checkpoint of several shards.

The limit is 1.10 x the parameters plus one mapped shard, counted from the moment before the load. Linux only:
the numbers come from /proc/self/status.

    python -m bench.load_memory --gigabytes 1.5
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from fmoe.architectures import Fill, Piece
from fmoe.checkpoint import INDEX, open_checkpoint
from fmoe.loading import count_params, load_params, named_tensors

E, D, F = 64, 1024, 512
GROWTH = 1.10
LAYER_BYTES = 2 * 3 * E * D * F


class Layer(NamedTuple):
    """Expert weights with gate rows first, and one [D, D] projection that is stored transposed."""

    w_in_EPD: Tensor
    w_out_EDF: Tensor
    mixer_DD: Tensor


def build_layers(fill: Fill, layers: int) -> tuple[Layer, ...]:
    """Describe the layers as a family's build_params does."""
    return tuple(_build_layer(fill, f"layers.{i}") for i in range(layers))


def _build_layer(fill: Fill, prefix: str) -> Layer:
    experts = [f"{prefix}.experts.{e}" for e in range(E)]
    gate = [Piece(f"{name}.gate", (F, D), (e, slice(F))) for e, name in enumerate(experts)]
    up = [Piece(f"{name}.up", (F, D), (e, slice(F, 2 * F))) for e, name in enumerate(experts)]
    down = [Piece(f"{name}.down", (D, F), (e,)) for e, name in enumerate(experts)]
    mixer = Piece(f"{prefix}.mixer", (D, D), take=_transpose)
    return Layer(fill((E, 2 * F, D), gate + up), fill((E, D, F), down), fill((D, D), [mixer]))


def _transpose(w: Tensor) -> Tensor:
    return w.t()


def write_checkpoint(folder: Path, *, layers: int, shards: int) -> None:
    """Write random bfloat16 tensors; the shards' borders fall inside layers and experts."""
    (folder / "config.json").write_text('{"dtype": "bfloat16"}')
    shapes = dict(chain.from_iterable(_layer_shapes(f"layers.{i}") for i in range(layers)))
    names = list(shapes)
    placed: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        # one draw for all tensors of a shape, turned a little for each: drawing gigabytes takes minutes
        save_file({name: _draw(shapes[name], shift=_shift_of(name)) for name in part}, folder / file)
        placed |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))


def _layer_shapes(prefix: str) -> Iterator[tuple[str, tuple[int, int]]]:
    for e in range(E):
        yield from ((f"{prefix}.experts.{e}.{part}", (F, D)) for part in ("gate", "up"))
        yield f"{prefix}.experts.{e}.down", (D, F)
    yield f"{prefix}.mixer", (D, D)


def _shift_of(name: str) -> int:
    """Return a number of the name that is the same in every process."""
    return sum(i * ord(letter) for i, letter in enumerate(name, 1))


def _draw(shape: tuple[int, int], *, shift: int) -> Tensor:
    rng = torch.Generator().manual_seed(shape[0])
    return torch.randn(shape, generator=rng).bfloat16().roll(shift)


def read_memory() -> dict[str, int]:
    """Return this process's memory in bytes by kind: VmRSS, VmHWM (the most so far), RssAnon, RssFile."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}


def sample_peaks(work: Callable[[], object], *, interval_s: float = 0.002) -> tuple[object, dict[str, int]]:
    """Run ``work`` and return its result and the most of each kind of memory seen meanwhile."""
    peaks = read_memory()
    done = threading.Event()

    def sample() -> None:
        while not done.wait(interval_s):
            for kind, size in read_memory().items():
                peaks[kind] = max(peaks.get(kind, 0), size)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        result = work()
    finally:
        done.set()
        sampler.join()
    return result, peaks | {"VmHWM": read_memory()["VmHWM"]}


def load_and_measure(folder: Path, *, layers: int, dtype: torch.dtype) -> dict[str, float]:
    """Load in this process, which should be a fresh one."""
    checkpoint = open_checkpoint(folder)
    load = partial(load_params, partial(build_layers, layers=layers), checkpoint, dtype=dtype)
    work = partial(load, device=torch.device("cpu"), ignore=_ignore_nothing)
    before = read_memory()
    start_s = time.perf_counter()
    params, peaks = sample_peaks(work)
    elapsed_s = time.perf_counter() - start_s
    storages = {id(t.untyped_storage()): t.untyped_storage().nbytes() for _, t in named_tensors(params)}
    _, param_bytes = count_params(params)
    shard_bytes = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {
        "param_bytes": param_bytes,
        "storage_bytes": sum(storages.values()),
        "shard_bytes": shard_bytes,
        "peak_bytes": peaks["VmHWM"] - before["VmRSS"],
        "peak_anonymous_bytes": peaks["RssAnon"] - before["RssAnon"],
        "peak_mapped_bytes": peaks["RssFile"] - before["RssFile"],
        "limit_bytes": GROWTH * param_bytes + shard_bytes,
        "elapsed_s": elapsed_s,
    }


def _ignore_nothing(name: str) -> bool:
    return False


def main() -> int:
    """Write a checkpoint, load it in a process of its own, and print what that took; 1 if over the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.5, help="size of the checkpoint, about")
    parser.add_argument("--shards", type=int, default=5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="to load in")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    layers = max(1, round(options.gigabytes * 1e9 / LAYER_BYTES))
    if options.child:
        measured = load_and_measure(options.child, layers=layers, dtype=getattr(torch, options.dtype))
        print(json.dumps(measured))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), layers=layers, shards=options.shards)
        command = [sys.executable, "-m", "bench.load_memory", *sys.argv[1:], "--child", folder]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return report(json.loads(done.stdout.splitlines()[-1]), f"{options.dtype}, torch {torch.__version__}")


def report(measured: dict[str, float], how: str) -> int:
    """Print the numbers; 1 where the peak passes the limit."""
    for kind in ("param", "shard", "peak", "peak_anonymous", "peak_mapped", "limit"):
        print(f"{kind.replace('_', ' '):>15} {measured[f'{kind}_bytes'] / 1e6:10.1f} MB")
    ratio = measured["peak_bytes"] / measured["limit_bytes"]
    over = measured["peak_anonymous_bytes"] / measured["param_bytes"]
    good = ratio <= 1 and measured["storage_bytes"] == measured["param_bytes"]
    print(f"peak / limit {ratio:.3f}, anonymous / parameters {over:.3f}, {measured['elapsed_s']:.1f} s, cpu, {how}")
    print("within the limit" if good else "OVER THE LIMIT")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
