"""How a model will run: which kernels it gets, the layout of their weights, and the plans of its operators."""

import logging
import sys
from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import nn
from tqdm import tqdm

from fmoe.compile.aiter_kernels import prepare_experts
from fmoe.compile.aiter_selftest import Outcome, run_selftest
from fmoe.compile.capabilities import AiterRecord, Capabilities
from fmoe.compile.device import describe_device
from fmoe.compile.plan import Key, Plan, describe_choice, linear_key, make_plan, moe_key
from fmoe.compile.plan_tables import read_tables
from fmoe.compile.probing import SelfTest, probe
from fmoe.compile.select import Decision, Requested, connect_aiter, decide, list_allowed
from fmoe.compile.variants import describe_variant
from fmoe.functional.mlp import SWIGLU
from fmoe.functional.moe import MoEParams
from fmoe.functional.quant import Fp8, Weight, weight_dtype, weight_shape

from .architectures import FamilyConfig, Params

LOG = logging.getLogger("fmoe")
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
            rows, (stacked, hidden, width) = layer.mlp.w_router_ED.shape[0], weight_shape(layer.mlp.w_down_EDF)
            experts = router.num_experts
            sizes = (experts, router.top_k, stacked - experts, rows - experts, hidden, width)
            variant = describe_variant(layer.mlp, getattr(config, "activation", SWIGLU))
            keys[moe_key(*sizes, weight_dtype(layer.mlp.w_down_EDF), variant=variant)] = None
        for weights in _find_projections(layer):
            rows, columns = weight_shape(weights)
            keys[linear_key(rows, columns, weight_dtype(weights))] = None
    return list(keys)


def _find_projections(values: object) -> Iterable[Weight]:
    """Find the matrices of a layer outside its routed experts; what is too small to matter is none."""
    if isinstance(values, MoEParams):
        yield from _find_projections(values.shared)
    elif isinstance(values, Fp8):
        yield values
    elif isinstance(values, torch.Tensor):
        if values.dim() == 2 and min(values.shape) >= SMALLEST:
            yield values
    elif isinstance(values, tuple):
        for value in values:
            yield from _find_projections(value)


def decide_for(
    params: Params, config: FamilyConfig, capabilities: Capabilities, /, *, requested: Requested
) -> Decision:
    """Decide what would run a model's layers on a machine of these capabilities; the errors are ``decide``'s."""
    key = next((key for key in list_keys(params, config) if key.operator == "moe"), None)
    biased = any(isinstance(layer.mlp, MoEParams) and layer.mlp.bias_E is not None for layer in params.layers)
    sinks = any(getattr(layer.mixer, "sinks_H", None) is not None for layer in params.layers)
    return decide(key, config.router, biased=biased, capabilities=capabilities, requested=requested, sinks=sinks)


def decide_kernels(
    params: Params, /, *, config: FamilyConfig, device: torch.device, requested: Requested, progress: bool | None = None
) -> Decision:
    """Decide what runs a model's layers here, and with "auto" log it; AITER is imported where it is taken.

    Args:
        params: the model's, which may be on the meta device.
        config: the model.
        device: where the parameters will be.
        requested: kernels asked for by name.
        progress: show how AITER is tried out, once for an installation; None does so on a terminal.

    Raises:
        RuntimeError: kernels asked for by name cannot run.
    """
    sparse = any(isinstance(layer.mlp, MoEParams) for layer in params.layers)
    ask_aiter = sparse and requested in ("auto", "aiter")
    capabilities = probe(device, selftest=show_selftest(progress), ask_aiter=ask_aiter)
    decision = decide_for(params, config, capabilities, requested=requested)
    if decision.record is not None:
        decision = decide_for(params, config, connect_aiter(capabilities), requested=requested)
    if requested == "auto":
        # A computer without a GPU runs the references by nature: nobody who types a command there need read of it.
        plain = capabilities.device_type == "cpu" and not capabilities.aiter.arch
        for line in decision.lines:
            LOG.log(logging.DEBUG if plain else logging.INFO, line)
    return decision


def show_selftest(progress: bool | None, /) -> SelfTest:
    """Give the self-test of AITER with its last line shown while it runs; None shows it on a terminal only."""
    if not (sys.stderr.isatty() if progress is None else progress):
        return run_selftest

    def run(record: AiterRecord, device: str) -> Outcome:
        with tqdm(bar_format="{desc}", file=sys.stderr, leave=False) as bar:

            def show(seconds: float, last_line: str) -> None:
                bar.set_description_str(f"trying AITER out, once: {seconds:.0f} s  {last_line}")

            return run_selftest(record, device, progress=show)

    return run


def prepare_layout(loaded: list[Params], decision: Decision, /) -> Params:
    """Bring the weights into the layout that their kernels read, layer by layer.

    Args:
        loaded: the parameters alone in a list, which is emptied: with no other reference to them, what a layer had
            is freed before the next one is prepared.
        decision: what runs them.

    Returns:
        The parameters.
    """
    params = loaded.pop()
    if decision.experts != "aiter":
        return params
    layers = list(params.layers)
    params = params._replace(layers=())
    for i, layer in enumerate(layers):
        if isinstance(layer.mlp, MoEParams):
            layers[i] = layer._replace(mlp=_prepare_experts(layer.mlp, decision.gate_rows))
        del layer
    return params._replace(layers=tuple(layers))


def _prepare_experts(params: MoEParams, gate_rows: int) -> MoEParams:
    """Pad and shuffle both stacks, and give each slot a row of the router where one gate serves them all."""
    assert isinstance(params.w_gate_up_EPD, torch.Tensor) and isinstance(params.w_down_EDF, torch.Tensor)
    stacks = prepare_experts(params.w_gate_up_EPD, params.w_down_EDF)  # of FP8 AITER was not chosen
    # Parameters, as the loader makes them: only then do CUDA graphs treat them as static.
    w_gate_up_EPD, w_down_EDF = (nn.Parameter(stack, requires_grad=False) for stack in stacks)
    w_router_ED = params.w_router_ED
    if gate_rows:
        rows = torch.cat((w_router_ED, w_router_ED[-1:].expand(gate_rows - 1, -1)))
        w_router_ED = nn.Parameter(rows, requires_grad=False)
    return params._replace(w_router_ED=w_router_ED, w_gate_up_EPD=w_gate_up_EPD, w_down_EDF=w_down_EDF)


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
        requested: ``Decision.requested``, or kernels asked for by name.
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
