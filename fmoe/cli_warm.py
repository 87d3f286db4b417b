"""The command ``fmoe warm``."""

import json
from dataclasses import asdict
from typing import Any

import click

from .cli_options import choosing, command, loading, quiet_progress, running, split_options, switches
from .model import load
from .warming import BATCH_SIZES, PROMPT_TOKENS, format_warmed, warm


def _read_sizes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} must be whole numbers with commas between, such as 1,8") from None


@click.command("warm")
@loading
@choosing
@running
@click.option(
    "--batch-sizes",
    default=",".join(map(str, BATCH_SIZES)),
    show_default=True,
    callback=_read_sizes,
    metavar="N,N,...",
    help="Sequences that will be decoded together.",
)
@click.option(
    "--prompt-tokens",
    default=",".join(map(str, PROMPT_TOKENS)),
    show_default=True,
    callback=_read_sizes,
    metavar="N,N,...",
    help="Lengths of the prompts to come.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@switches
@command
def warm_command(
    path: str,
    batch_sizes: tuple[int, ...],
    prompt_tokens: tuple[int, ...],
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Compile a model's graphs ahead, for this machine and others of its kind."""
    loading_options, _ = split_options(options)
    model = load(path, progress=quiet_progress(quiet), **loading_options)
    warmed = warm(model, batch_sizes=batch_sizes, prompt_tokens=prompt_tokens, progress=quiet_progress(quiet))
    click.echo(json.dumps({**asdict(warmed), "file": str(warmed.file)}) if as_json else format_warmed(warmed))
