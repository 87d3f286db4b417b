"""What the commands share: groups of options, log lines on standard error, errors as one message."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar, get_args

import click
import torch

from fmoe.compile.select import Requested

from .model import Compile
from .options import Speculate
from .planning import Tune
from .random_weights import Weights

LOG = logging.getLogger("fmoe")
INTERRUPTED = 130  # 128 + SIGINT, as shells count
COMPILE: Mapping[str, Compile] = {"auto": "auto", "on": True, "off": False}
OWN = "[default: the checkpoint's own]"

Command = TypeVar("Command", bound=Callable[..., None])


def _remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Note a switch that may stand before or behind the command's name."""
    if value:
        context.meta[f"fmoe.{parameter.name}"] = True


def _set_threads(context: click.Context, parameter: click.Parameter, value: int | None) -> None:
    if value is not None:
        torch.set_num_threads(value)


def options(*several: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Put several options into one decorator, in their order."""

    def decorate(command: Command) -> Command:
        for option in reversed(several):
            command = option(command)
        return command

    return decorate


_switch = partial(click.option, is_flag=True, expose_value=False, callback=_remember)
switches = options(
    _switch("-q", "--quiet", help="No log lines, progress bars or timings on standard error; errors only."),
    _switch("--debug", help="Show the traceback of an error."),
)
loading = options(
    click.option("--model", "path", required=True, metavar="FOLDER", help="A checkpoint folder, or demo."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
    click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16."),
    click.option(
        "--shared-experts",
        type=click.Choice(["auto", "fused", "separate"]),
        default="auto",
        show_default=True,
        help="Run shared experts as routed ones, or apart.",
    ),
    click.option(
        "--compile",
        type=click.Choice(list(COMPILE)),
        default="auto",
        show_default=True,
        callback=lambda context, parameter, value: COMPILE[value],
        help="auto compiles on a GPU and for long work.",
    ),
)
kernels_option = click.option(
    "--kernels",
    type=click.Choice(get_args(Requested)),
    default="auto",
    show_default=True,
    help="Fused kernels: those that can run here, none, or one kind, which must run.",
)
weights_option = click.option(
    "--weights",
    type=click.Choice(get_args(Weights)),
    default="stored",
    show_default=True,
    help="random draws them by config.json alone, to measure a model that is not there.",
)
choosing = options(
    kernels_option,
    weights_option,
    click.option(
        "--state-dtype",
        type=click.Choice(["auto", "float32", "bfloat16"]),
        default="auto",
        show_default=True,
        help="Of recurrent states: auto is float32; bfloat16 halves them, at an error.",
    ),
    click.option(
        "--tune",
        type=click.Choice(get_args(Tune)),
        default="cached",
        show_default=True,
        help="Settings of the kernels: found earlier, searched for now where missing, or by rule.",
    ),
)
running = options(
    click.option(
        "--threads",
        type=click.IntRange(min=1),
        metavar="N",
        expose_value=False,
        callback=_set_threads,
        help="CPU threads; on a busy machine, or with a small model, 1 is often fastest.  [default: torch's choice]",
    ),
)


def _read_drafts(context: click.Context, parameter: click.Parameter, value: str) -> Speculate:
    if value == "auto":
        return "auto"
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} must be a whole number or auto") from None


speculate_option = click.option(
    "--speculate",
    default="0",
    show_default=True,
    callback=_read_drafts,
    metavar="N|auto",
    help="Tokens that the model's own draft (MTP) layer drafts for each step; the text stays the same.",
)
sampling = options(
    click.option("--max-new-tokens", type=int, default=128, show_default=True, help="At most this many tokens."),
    click.option("--temperature", type=float, help=f"0 is greedy. {OWN}"),
    click.option("--top-p", type=float, help=f"Keep the likeliest tokens that reach this probability. {OWN}"),
    click.option("--top-k", type=int, help=f"Keep the K likeliest tokens; 0 is off. {OWN}"),
    click.option("--min-p", type=float, help=f"Keep tokens this likely, relative to the likeliest. {OWN}"),
    click.option("--repetition-penalty", type=float, help=f"Above 1 makes tokens that occurred less likely. {OWN}"),
    click.option("--seed", type=int, default=0, show_default=True, help="Prompt i is sampled with SEED + i."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Go on after end-of-sequence tokens."),
    speculate_option,
)


# What load takes, by the names that the options have.
LOADING = ("device", "dtype", "state_dtype", "shared_experts", "compile", "kernels", "weights", "tune")


def split_options(options: Mapping[str, Any], /) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part what load takes from the rest."""
    rest = dict(options)
    return {name: rest.pop(name) for name in LOADING if name in rest}, rest


def quiet_progress(quiet: bool, /) -> bool | None:
    """Give the ``progress`` of load and generate: no bar where quiet, else a bar on a terminal."""
    return False if quiet else None


def command(function: Command) -> Command:
    """Run a command with log lines on standard error and errors as one message; the command gets ``quiet``."""

    @wraps(function)
    def run(**options: Any) -> None:
        meta = click.get_current_context().meta
        if sys.stdout is None:  # Python's own sign of a descriptor that is closed
            raise click.ClickException("standard output is closed; send it to a file or to /dev/null")
        with _logged(quiet := bool(meta.get("fmoe.quiet"))), _reported(debug=bool(meta.get("fmoe.debug"))):
            function(quiet=quiet, **options)

    return run  # type: ignore[return-value]


@contextmanager
def _logged(quiet: bool) -> Iterator[None]:
    """Send the lines of logger "fmoe" to standard error meanwhile."""
    handler, level = logging.StreamHandler(sys.stderr), LOG.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.ERROR if quiet else logging.INFO)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)


@contextmanager
def _reported(*, debug: bool) -> Iterator[None]:
    """Turn an error that a user can cause into its message and the exit status."""
    try:
        yield
    except BrokenPipeError:
        click.echo("Error: standard output was closed before the end", err=True)
        raise  # click ends the process with status 1 and keeps Python from flushing once more
    except KeyboardInterrupt:
        if debug:
            raise
        click.echo("Interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except (ValueError, NotImplementedError, OSError, RuntimeError, MemoryError) as error:
        if debug or isinstance(error, click.exceptions.Exit):
            raise
        raise click.ClickException(str(error) or type(error).__name__) from error
