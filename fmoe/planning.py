"""The plans of a loaded model: which operators it has, and what this machine and fmoe know about them."""

from collections.abc import Iterable
from typing import Literal, get_args

import torch

from fmoe.compile.device import describe_device
from fmoe.compile.plan import Key, Plan, describe_choice, linear_key, make_plan, moe_key
from fmoe.compile.plan_tables import read_tables
from fmoe.compile.select import Requested, list_allowed
from fmoe.functional.moe import MoEParams

from .architectures import FamilyConfig, Params

SMALLEST = 16  # rows and columns of a matrix that is worth a plan

Tune = Literal["cached", "search", "off"]


def check_tune(tune: str, /) -> None:
    """Raise ValueError unless ``tune`` is what load takes."""
    if tune not in get_args(Tune):
        raise ValueError(f"tune={tune!r} must be one of {', '.join(get_args(Tune))}")


def list_keys(params: Params, config: FamilyConfig, /) -> list[Key]:
    """List the operators of a model that a plan chooses for, each once, in the order of the layers."""
    keys: dict[Key, None] = {}
    for layer in params.layers:
        if isinstance(layer.mlp, MoEParams):
            router = config.router
            rows, (stacked, hidden, width) = layer.mlp.w_router_ED.shape[0], layer.mlp.w_down_EDF.shape
            experts = router.num_experts
            sizes = (experts, router.top_k, stacked - experts, rows - experts, hidden, width)
            keys[moe_key(*sizes, layer.mlp.w_down_EDF.dtype)] = None
        for weights in _find_projections(layer):
            keys[linear_key(*weights.shape, weights.dtype)] = None
    return list(keys)


def _find_projections(values: object) -> Iterable[torch.Tensor]:
    """Find the matrices of a layer outside its routed experts; what is too small to matter is none."""
    if isinstance(values, MoEParams):
        yield from _find_projections(values.shared)
    elif isinstance(values, torch.Tensor):
        if values.dim() == 2 and min(values.shape) >= SMALLEST:
            yield values
    elif isinstance(values, tuple):
        for value in values:
            yield from _find_projections(value)


def format_plans(plans: Iterable[Plan], /) -> str:
    """Write plans as a table: operator, up to how many tokens, what runs, and where the choice comes from."""
    lines = []
    for plan in plans:
        lines.append(str(plan.key))
        for row in plan.rows:
            bound = f"up to {row.bound}" if row.bound >= 0 else "more"
            choice = describe_choice(row.implementation, row.settings)
            lines.append(f"  {bound:>12}  {row.source:14}  {choice}")
    return "\n".join(lines)


def plan_layers(keys: Iterable[Key], device: torch.device, /, *, requested: Requested, tune: Tune) -> tuple[Plan, ...]:
    """Choose for each key, from this machine's table, the one that comes with fmoe, and the rule.

    Args:
        keys: as listed.
        device: where the parameters are.
        requested: kernels asked for by name.
        tune: ``off`` leaves both tables aside.

    Raises:
        RuntimeError: kernels asked for by name cannot run.
    """
    described = describe_device(device)
    tuned, shipped = ({}, {}) if tune == "off" else read_tables(described)
    plans = []
    for key in keys:
        allowed = list_allowed(key, device, requested=requested)
        if allowed != ("library",):  # nothing to choose
            entries = tuned.get(str(key)), shipped.get(str(key))
            plans.append(make_plan(key, described, tuned=entries[0], shipped=entries[1], allowed=allowed))
    return tuple(plans)
