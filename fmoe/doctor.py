"""What this machine can run and why not the rest, where plans come from, and what a model would get."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from fmoe.compile.aiter_kernels import BIASED_GROUPED_TOPK, FUSED_MOE, GROUPED_TOPK, SYMBOLS, TOPK_SOFTMAX
from fmoe.compile.aiter_static import check_checkout
from fmoe.compile.capabilities import AiterRecord, Availability, Capabilities
from fmoe.compile.device import describe_device
from fmoe.compile.json_store import read_store
from fmoe.compile.plan import Plan
from fmoe.compile.plan_tables import read_tables, shipped_file, tuned_file
from fmoe.compile.probing import SelfTest, probe
from fmoe.compile.select import Decision

from .architectures import FamilyConfig, Params, find_architecture
from .checkpoint import config_dtype, open_checkpoint
from .loading import count_params, make_meta_params
from .model import find_folder, text_config
from .placing import resolve_device, resolve_dtype
from .planning import decide_for, format_plans, list_keys, plan_layers, show_selftest
from .random_weights import open_config, quantised_names

# The operators that have more than one implementation, and what each of AITER's needs.
OPERATORS: dict[str, str] = {
    "experts": FUSED_MOE,
    "softmax top-k": TOPK_SOFTMAX,
    "grouped top-k": GROUPED_TOPK,
    "grouped top-k with bias": BIASED_GROUPED_TOPK,
    "projections": "",
}
ELSEWHERE = (
    "This is a CPU: the reference functions run.",
    "On an NVIDIA GPU of sm_80 or later fmoe's Triton kernels would run; its build of torch brings Triton.",
    "On an AMD GPU of gfx942 or gfx950 (MI300, MI350) AITER would run where it is installed and passes its self-test, "
    "else the Triton kernels; see docs/rocm.md.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """Whether one implementation of an operator can run here; if not, ``reason`` says why."""

    operator: str
    implementation: str
    can_run: bool
    version: str
    reason: str


@dataclass(frozen=True, slots=True)
class Level:
    """One of the places that plans come from, the first that knows an operator wins."""

    name: str
    path: str  # "" of the rule
    operators: int  # that it knows
    versions: str  # that they were measured with


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What a model would get here."""

    folder: str
    dtype: str
    decision: tuple[str, ...]
    plans: tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that the command prints."""

    fmoe: str
    torch: str
    device: str
    name: str
    arch: str
    units: int
    rows: tuple[Row, ...]
    advice: tuple[str, ...]
    levels: tuple[Level, ...]
    model: ModelPart | None = None
    checkout: dict[str, str] | None = None  # AITER's names -> file:line, "" where there is none


def diagnose(
    *,
    device: str = "auto",
    dtype: str = "auto",
    model: str | Path | None = None,
    checkout: str | Path | None = None,
    progress: bool | None = None,
    selftest: SelfTest | None = None,
) -> Diagnosis:
    """Ask the machine anew, and a checkpoint folder where one is given; no weight is read, and AITER not imported.

    Args:
        device, dtype: as in ``fmoe.load``.
        model: a checkpoint folder; its config.json is enough.
        checkout: of AITER; every name that fmoe uses is looked up in its files.
        progress: show how AITER is tried out; None does so on a terminal.
        selftest: how to try it out.

    Raises:
        FileNotFoundError: there is no such folder or checkout.
        ValueError, NotImplementedError: the model's config.json is not supported.
    """
    where = resolve_device(device)
    # What was asked for comes first: trying AITER out takes minutes.
    checked = None if checkout is None else check_checkout(Path(checkout), SYMBOLS)
    described = None if model is None else _describe_model(model, dtype, where)
    found = probe(where, fresh=True, selftest=selftest or show_selftest(progress))
    return Diagnosis(
        fmoe=version("fmoe"),
        torch=found.torch,
        device=str(where),
        name=found.device_name,
        arch=found.arch,
        units=found.units,
        rows=tuple(list_rows(found)),
        advice=ELSEWHERE if found.device_type == "cpu" and not found.aiter.present else (),
        levels=tuple(_list_levels(where)),
        model=None if described is None else _plan_model(*described, where, found),
        checkout=checked,
    )


def list_rows(found: Capabilities, /) -> Iterable[Row]:
    """List operators and their implementations, the reference first."""
    triton = found.triton
    for operator, symbol in OPERATORS.items():
        yield Row(operator, "reference", True, f"torch {found.torch}", "")
        yield Row(operator, "triton", triton.can_run, triton.version, triton.reason)
        if symbol:
            aiter = _ask_symbol(found.aiter, symbol)
            yield Row(operator, "aiter", aiter.can_run, aiter.version, aiter.reason)
    grouped = found.grouped_mm
    yield Row("grouped product", "torch", grouped.can_run, grouped.version, grouped.reason)


def _ask_symbol(record: AiterRecord, symbol: str) -> Availability:
    if not record.present:
        return Availability(False, record.reason, record.version)
    if symbol not in record.symbols:
        return Availability(False, f"this release has no {symbol}", record.version)
    note = ""
    if symbol == TOPK_SOFTMAX:
        note = f"{record.topk_arity} arguments: shared columns " + (
            "in the kernel" if record.topk_arity == 7 else "behind it"
        )
    return Availability(True, note, record.version)


def _list_levels(device: torch.device) -> Iterable[Level]:
    described = describe_device(device)
    tables, shipped = read_tables(described), shipped_file(described)
    yield Level("tuned here", str(tuned_file(described)), len(tables.tuned), described.versions)
    made_with = str(read_store(shipped).get("versions", ""))
    yield Level("shipped table", str(shipped), len(tables.shipped), made_with)
    yield Level("rule", "", 0, "")


def _describe_model(
    path: str | Path, dtype: str, device: torch.device
) -> tuple[Path, torch.dtype, FamilyConfig, Params]:
    """Read what a folder says about a model; the parameters are on the meta device."""
    folder = find_folder(path)
    checkpoint = open_checkpoint(folder) if any(folder.glob("*.safetensors")) else open_config(folder)
    architecture = find_architecture(checkpoint.config)
    config = architecture.parse_config(text_config(checkpoint.config), shared_experts="auto")
    build = partial(architecture.build_params, config=config)
    names = checkpoint.tensors or quantised_names(checkpoint.config)
    stored = config_dtype(checkpoint.config) or torch.bfloat16
    count, _ = count_params(make_meta_params(build, dtype=stored, names=names))
    resolved = resolve_dtype(dtype, stored=stored, num_params=count, device=device)
    return folder, resolved, config, make_meta_params(build, dtype=resolved, names=names)


def _plan_model(
    folder: Path,
    dtype: torch.dtype,
    config: FamilyConfig,
    params: Params,
    device: torch.device,
    found: Capabilities,
) -> ModelPart:
    decision: Decision = decide_for(params, config, found, requested="auto")
    plans = plan_layers(list_keys(params, config), device, requested=decision.requested, tune="cached")
    return ModelPart(str(folder), str(dtype).removeprefix("torch."), decision.lines, plans)


def format_diagnosis(found: Diagnosis, /) -> str:
    """Write a diagnosis as text."""
    lines = [
        f"fmoe {found.fmoe}, torch {found.torch}",
        f"{found.device}: {found.name}, {found.arch}, {found.units} units",
        "",
        *_format_rows(found.rows),
        "",
        *found.advice,
        *([""] if found.advice else []),
        "plans come from the first of these that knows an operator",
        *(f"  {_format_level(level)}" for level in found.levels),
    ]
    if found.model is not None:
        lines += ["", f"{found.model.folder} in {found.model.dtype}", *(f"  {line}" for line in found.model.decision)]
        lines += [format_plans(found.model.plans) or "  nothing to plan"]
    if found.checkout is not None:
        lines += ["", "AITER's names in this checkout"]
        lines += [f"  {name:<36} {place or 'ABSENT'}" for name, place in found.checkout.items()]
    return "\n".join(lines)


def _format_rows(rows: Iterable[Row]) -> Iterable[str]:
    yield f"{'operator':<24} {'implementation':<15} {'here':<5} {'version':<18} note"
    before = ""
    for row in rows:
        name = "" if row.operator == before else row.operator
        here = "yes" if row.can_run else "no"
        yield f"{name:<24} {row.implementation:<15} {here:<5} {row.version or '-':<18} {row.reason}".rstrip()
        before = row.operator


def _format_level(level: Level) -> str:
    if not level.path:
        return level.name
    exists = level.operators or Path(level.path).exists()
    known = f"{level.operators} operators" if exists else "no such file"
    return f"{level.name}: {known}, {level.path}" + (f" ({level.versions})" if level.versions else "")
