"""``fmoe warm``: compile ahead what a model's runs will need, into a file that other machines of its kind can use."""

import logging
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fmoe.compile.artefacts import kept_kernels, save_artefacts

from .ambient import check_model
from .cache_size import find_room
from .decoding import ROOM
from .generation import generate
from .graph_files import find_graph_file
from .model import Model, check_progress
from .options import is_integer

LOG = logging.getLogger("fmoe")
BATCH_SIZES = (1, 8, 32, 64)
PROMPT_TOKENS = (16, 128, 512, 2048)
SHORT = 4  # tokens of the prompts behind which the steps of a batch run


@dataclass(frozen=True, slots=True)
class Warmed:
    """What was prepared."""

    file: Path
    graphs: int
    kernels: int  # of fmoe's own, where there is a GPU
    bytes: int
    seconds: float
    tuned: int  # operators whose plan was measured on this machine
    shipped: int  # whose plan is of the table that comes with fmoe
    by_rule: int


@dataclass(frozen=True, slots=True)
class _Run:
    """One generation that makes compiled steps run."""

    rows: int
    tokens: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.rows} x {self.tokens} tokens" + (", sampled" if self.temperature else "")


def warm(
    model: Model,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    prompt_tokens: Sequence[int] = PROMPT_TOKENS,
    progress: bool | None = None,
) -> Warmed:
    """Compile what prompts and batches of these sizes need, and write it to a file in the cache folder.

    ``fmoe.load`` finds the file there, on this machine and, where the file or FMOE_CACHE_DIR is copied, on every other
    one with the same device and the same versions of Python, torch, Triton and fmoe.

    Args:
        model: as loaded.
        batch_sizes: of the steps to come; those whose caches do not fit into memory are left out, which is logged.
        prompt_tokens: lengths of the prompts to come.
        progress: show a bar of the runs; None does so on a terminal.

    Raises:
        ValueError: no model, or a size that cannot be run.
        RuntimeError: torch keeps no compiled graphs here.
        OSError: the cache folder cannot be written.
    """
    check_model(model, "warming.warm")
    check_progress(progress)
    limit = model.config.decoder.max_context - 2
    sizes = _check_sizes("batch_sizes", batch_sizes)
    lengths = sorted({min(length, limit) for length in _check_sizes("prompt_tokens", prompt_tokens)})
    runs = [_Run(1, length, 0.0) for length in lengths]
    runs += [_Run(rows, min(SHORT, limit), temperature) for rows in sizes for temperature in (0.0, 1.0)]
    model, start = replace(model, compile=True), time.perf_counter()
    found = find_graph_file(model.architecture, model.config, model.dtype, model.device, str(model.kernels))
    on_gpu = model.device.type == "cuda"
    keeping: AbstractContextManager[None] = kept_kernels(found.file) if on_gpu else nullcontext()
    with keeping:
        _run_all(model, runs, progress)
        graphs, kernels = save_artefacts(found.file, dict(found.identity))
    sources = [{row.source.partition(" ")[0] for row in plan.rows} for plan in model.plans]
    tuned, shipped = (sum(name in source for source in sources) for name in ("tuned", "shipped"))
    size, seconds = found.file.stat().st_size, time.perf_counter() - start
    by_rule = sum(not source & {"tuned", "shipped"} for source in sources)
    return Warmed(found.file, graphs, kernels, size, seconds, tuned, shipped, by_rule)


def format_warmed(warmed: Warmed, /) -> str:
    """Write what was prepared as lines to read."""
    plans = f"plans: {warmed.tuned} tuned here, {warmed.shipped} of the table of fmoe's, {warmed.by_rule} by rule"
    hint = "; fmoe tune measures them" if warmed.by_rule or warmed.shipped else ""
    kernels = f" and {warmed.kernels} kernels" if warmed.kernels else ""
    return (
        f"{warmed.graphs} graphs{kernels} in {warmed.file} ({warmed.bytes / 2**20:.1f} MiB), {warmed.seconds:.0f} s\n"
        f"{plans}{hint}"
    )


def _check_sizes(name: str, values: Any) -> list[int]:
    sizes = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else []
    if not sizes or not all(is_integer(size) and size >= 1 for size in sizes):
        raise ValueError(f"{name}={values!r} must be ints >= 1, such as [1, 8]")
    return sorted({int(size) for size in sizes})


def _run_all(model: Model, runs: Sequence[_Run], progress: bool | None) -> None:
    disable = None if progress is None else not progress
    with tqdm(runs, desc="warming", unit="run", file=sys.stderr, disable=disable) as bar:
        for run in bar:
            bar.set_postfix_str(str(run))
            room = find_room(model, run.tokens + 2)
            if not room.fits(run.rows, run.tokens + 2 + ROOM):
                LOG.warning("left out %s, whose caches do not fit into memory", run)
                continue
            generate(
                model,
                [[0] * run.tokens] * run.rows,
                max_new_tokens=2,
                temperature=run.temperature,
                repetition_penalty=1.0,
                ignore_eos=True,
                batch_size=run.rows,
                progress=False,
            )
