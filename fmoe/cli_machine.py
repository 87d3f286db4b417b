"""Commands about this machine: ``fmoe tune`` and ``fmoe doctor``."""

import json
from dataclasses import asdict
from typing import Any

import click

from .cli_options import (
    command,
    kernels_option,
    loading,
    quiet_progress,
    running,
    split_options,
    switches,
    weights_option,
)
from .doctor import diagnose, format_diagnosis
from .model import load
from .plan_search import BATCH_SIZES, BUDGET_S, KEY_BUDGET_S, MAX_TOKENS, Search
from .planning import format_plans
from .tuning import check_export, export_tuned, tune


def _read_sizes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} must be whole numbers with commas between, such as 1,4,16") from None


@click.command("tune")
@loading
@kernels_option
@weights_option
@running
@click.option(
    "--batch-sizes",
    default=",".join(map(str, BATCH_SIZES)),
    show_default=True,
    callback=_read_sizes,
    metavar="N,N,...",
    help="Sequences that will be decoded together.",
)
@click.option("--max-tokens", type=int, default=MAX_TOKENS, show_default=True, help="Longest prompt to come.")
@click.option("--budget", type=float, default=BUDGET_S, show_default=True, help="Seconds for everything.")
@click.option(
    "--key-budget", type=float, default=KEY_BUDGET_S, show_default=True, help="Seconds for one operator and size."
)
@click.option("--force", is_flag=True, help="Measure again what was measured on this machine.")
@click.option("--out", type=click.Path(dir_okay=False), help="Also write what was found as a table to ship.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per operator and line.")
@switches
@command
def tune_command(
    path: str,
    batch_sizes: tuple[int, ...],
    max_tokens: int,
    budget: float,
    key_budget: float,
    force: bool,
    out: str | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Measure what a model's operators run best with here; later loads take it from the cache."""
    # Both are said here, too, because loading a large model and measuring take minutes.
    Search(batch_sizes, max_tokens, budget, key_budget)
    if out is not None:
        check_export(out)
    loading_options, _ = split_options(options)
    progress = quiet_progress(quiet)
    model = load(path, progress=progress, **loading_options)
    tuned = tune(
        model,
        batch_sizes=batch_sizes,
        max_tokens=max_tokens,
        budget_s=budget,
        key_budget_s=key_budget,
        progress=progress,
        force=force,
    )
    if as_json:
        for plan in tuned.plans:
            rows = [asdict(row) for row in plan.rows]
            click.echo(json.dumps({"key": str(plan.key), "rows": rows}))
    else:
        click.echo(format_plans(tuned.plans))
    if out is not None:
        export_tuned(tuned, out)


@click.command("doctor")
@click.option("--model", "path", metavar="FOLDER", help="Also say what this model would get; no weight is read.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--dtype", default="auto", show_default=True, help="Of the model: auto, float32, bfloat16 or float16.")
@click.option("--check-aiter", "checkout", metavar="PATH", help="Look up every name of AITER's in a checkout of it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@switches
@command
def doctor_command(path: str | None, device: str, dtype: str, checkout: str | None, as_json: bool, quiet: bool) -> None:
    """Say what can run on this machine, why not what cannot, and where plans come from."""
    found = diagnose(device=device, dtype=dtype, model=path, checkout=checkout, progress=quiet_progress(quiet))
    click.echo(json.dumps(asdict(found)) if as_json else format_diagnosis(found))
    absent = [name for name, place in (found.checkout or {}).items() if not place]
    if absent:
        raise ValueError(f"the checkout {checkout} lacks {', '.join(absent)}; fmoe needs another release of AITER")
