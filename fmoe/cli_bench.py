"""The command ``fmoe bench``."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from .benchmark import Settings, run_benchmark
from .benchmark_report import check_plot, format_benchmark, make_record
from .cli_options import (
    choosing,
    command,
    loading,
    quiet_progress,
    running,
    speculate_option,
    split_options,
    switches,
)
from .model import load
from .options import Speculate

USUAL = Settings()


def _read_sizes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in value.split(",")) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r} must be whole numbers with commas between, such as 1,8") from None


def _write_sizes(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


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
    as_json: bool,
    plot: Path | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Measure decode and prefill beside the least time that this machine's memory allows."""
    settings = Settings(batch_sizes, context, prefill_tokens, new_tokens, repetitions, seed, speculate)
    if plot is not None:
        check_plot(plot)
    loading_options, _ = split_options(options)
    begin = time.perf_counter()
    model = load(path, progress=quiet_progress(quiet), seed=seed, **loading_options)
    load_s = time.perf_counter() - begin
    done = run_benchmark(model, settings, weights=loading_options["weights"], load_s=load_s)
    text = json.dumps(make_record(done))
    click.echo(text if as_json else format_benchmark(done))
    if plot is not None:
        drawn = subprocess.run(
            [sys.executable, "-m", "fmoe.benchmark_plot", "-", str(plot)], input=text, text=True, stderr=subprocess.PIPE
        )
        if drawn.returncode:
            raise RuntimeError(f"{plot} was not drawn: {drawn.stderr.strip().splitlines()[-1]}")
