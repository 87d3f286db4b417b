"""The command ``fmoe bench``."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from .benchmark import Settings, run_benchmark
from .benchmark_report import check_plot, format_benchmark, make_record
from .benchmark_sweep import SweepSettings, run_sweep
from .cli_options import (
    Command,
    choosing,
    command,
    loading,
    quiet_progress,
    running,
    speculate_option,
    split_options,
    switches,
)
from .cli_options import options as group
from .model import load
from .options import Speculate

USUAL = Settings()
SWEPT = SweepSettings()


def _read_sizes(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(int(size) for size in value.split(",")) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r} must be whole numbers with commas between, such as 1,8") from None


def _write_sizes(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


def _sizes_option(name: str, usual: tuple[int, ...], text: str) -> Callable[[Command], Command]:
    shown = f"{text} [default: {usual[0]}, doubled up to {usual[-1]}]"
    return click.option(name, default=None, callback=_read_sizes, metavar="N,N,...", help=shown)


sweeping = group(
    click.option(
        "--sweep",
        is_flag=True,
        help="Measure cost against size instead: prefill over tokens, decode over context and over sequences.",
    ),
    _sizes_option("--sweep-tokens", SWEPT.tokens, "Lengths of the sweep's prompts; '' sweeps over none."),
    _sizes_option("--sweep-contexts", SWEPT.contexts, "Tokens behind which its one sequence decodes."),
    _sizes_option("--sweep-batches", SWEPT.batches, "Its sequences, behind --context tokens."),
)


@click.command("bench")
@loading
@choosing
@running
@click.option(
    "--batch-sizes",
    default=_write_sizes(USUAL.batch_sizes),
    show_default=True,
    callback=_read_sizes,
    metavar="N,N,...",
    help="Sequences that are decoded together; '' measures no decode.",
)
@click.option("--context", type=int, default=USUAL.context, show_default=True, help="Tokens of their prompts.")
@click.option(
    "--prefill-tokens",
    default=_write_sizes(USUAL.prefill_tokens),
    show_default=True,
    callback=_read_sizes,
    metavar="N,N,...",
    help="Lengths of prompts whose prefill is measured; '' measures none.",
)
@click.option("--new-tokens", type=int, default=USUAL.new_tokens, show_default=True, help="Steps of one sample.")
@click.option("--repetitions", type=int, default=USUAL.repetitions, show_default=True, help="Samples of each case.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of random weights and prompts.")
@speculate_option
@sweeping
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png", help="Draw it, too.")
@switches
@command
def bench_command(
    path: str,
    batch_sizes: tuple[int, ...],
    context: int,
    prefill_tokens: tuple[int, ...],
    new_tokens: int,
    repetitions: int,
    seed: int,
    speculate: Speculate,
    sweep: bool,
    sweep_tokens: tuple[int, ...] | None,
    sweep_contexts: tuple[int, ...] | None,
    sweep_batches: tuple[int, ...] | None,
    as_json: bool,
    plot: Path | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Measure decode and prefill beside the least time that this machine's memory allows."""
    settings = Settings(batch_sizes, context, prefill_tokens, new_tokens, repetitions, seed, speculate)
    sizes = {"tokens": sweep_tokens, "contexts": sweep_contexts, "batches": sweep_batches}
    swept = _read_sweep(settings, sizes) if sweep else None
    if swept is None and any(given is not None for given in sizes.values()):
        raise ValueError("--sweep-tokens, --sweep-contexts and --sweep-batches need --sweep; add it or leave them out")
    if swept is not None:
        settings = replace(settings, batch_sizes=(), prefill_tokens=())
    if plot is not None:
        check_plot(plot)
    loading_options, _ = split_options(options)
    begin = time.perf_counter()
    model = load(path, progress=quiet_progress(quiet), seed=seed, **loading_options)
    load_s = time.perf_counter() - begin
    done = run_benchmark(model, settings, weights=loading_options["weights"], load_s=load_s)
    found = run_sweep(model, swept, done.rates) if swept is not None else None
    text = json.dumps(make_record(done, found))
    click.echo(text if as_json else format_benchmark(done, found))
    if plot is not None:
        _draw(text, plot)


def _read_sweep(settings: Settings, sizes: Mapping[str, tuple[int, ...] | None]) -> SweepSettings:
    if settings.speculate:
        raise ValueError("--sweep measures steps without drafts; leave out --speculate, or measure it without --sweep")
    given = {name: values for name, values in sizes.items() if values is not None}
    return replace(
        SWEPT,
        context=settings.context,
        new_tokens=settings.new_tokens,
        repetitions=settings.repetitions,
        seed=settings.seed,
        **given,
    )


def _draw(text: str, plot: Path) -> None:
    """Draw a record in a process of its own, which alone waits for matplotlib."""
    drawn = subprocess.run(
        [sys.executable, "-m", "fmoe.benchmark_plot", "-", str(plot)], input=text, text=True, stderr=subprocess.PIPE
    )
    if drawn.returncode:
        raise RuntimeError(f"{plot} was not drawn: {drawn.stderr.strip().splitlines()[-1]}")
