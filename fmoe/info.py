"""What a checkpoint folder would be once loaded: layers, parameters, memory, and what runs here. No weight is read."""

import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from fmoe.compile.plan import Plan
from fmoe.compile.select import choose
from fmoe.compile.step import cache_slots
from fmoe.functional.cache import DeltaCache
from fmoe.functional.kernels import Kernels
from fmoe.functional.mlp import MLPParams
from fmoe.functional.moe import MoEParams, SharedExperts, SharedPlan
from fmoe.functional.quant import weight_shape
from fmoe.functional.routing import RouterConfig

from .architectures import DIFFER, SCALE, Architecture, FamilyConfig, Params, find_architecture, ignored_tensors
from .checkpoint import (
    INDEX,
    TensorInfo,
    check_quantization,
    config_dtype,
    is_present,
    open_checkpoint,
    read_config,
    stored_dtype,
)
from .loading import check_params, count_elements, count_params, make_meta_params, named_tensors
from .model import CPU_COMPILE_TOKENS, Compile, find_folder, text_config
from .placing import available_bytes, resolve_device, resolve_dtype, why_not_fp8
from .planning import list_keys, plan_layers
from .random_weights import quantised_names

USUAL_TOKENS = 4096
PARTS = ("embedding", "head", "mixers", "dense MLPs", "routers", "routed experts", "shared experts", "norms")
META = torch.device("meta")
IN_FP8, IN_MXFP4 = ", most weights in FP8 blocks", ", experts in MXFP4"
EXPERT_FIELDS = ("compute_experts", "compute_experts_decode")
ROUTER_FIELDS = ("w_router_ED", "bias_E", "bias_logits_E")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that are alike; experts, top_k and shared_slots are 0 in a dense layer."""

    layers: tuple[int, ...]
    kind: str  # of the mixer
    mlp: str  # "dense" or "sparse"
    width: int  # of the dense MLP or of one expert
    experts: int
    top_k: int
    shared_width: int  # of all shared experts together
    shared_slots: int  # slots of the expert stacks that hold them; 0 where they are run apart
    shared: str  # how the shared experts are run, and why


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the parameters; ``active`` of them work on each token."""

    name: str
    params: int
    active: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StateMemory:
    """What is allocated for one sequence of ``tokens`` positions, between steps."""

    tokens: int
    kv_bytes: int  # caches, whose size depends on the number of tokens
    recurrent_bytes: int  # states, whose size does not


@dataclass(frozen=True, slots=True)
class Machine:
    """What would run here; a byte count is None where the machine does not tell it."""

    device: str
    dtype: str
    kernels: dict[str, str]
    compiled_kernels: dict[str, str]  # as kernels, those that the family uses
    compile: str
    tokens: int  # length of the one sequence that needed_bytes counts
    needed_bytes: int  # parameters and that sequence's state
    free_bytes: int | None
    fits: bool | None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Everything ``fmoe info`` prints.

    Parameters are counted as they lie in memory, a tied head once and draft (MTP) layers not at all. Active are all
    but the routed experts that a token does not choose: embedding and head count in full, as published numbers do;
    active_inner counts neither.
    """

    folder: str
    family: str
    model_type: str
    weights: str  # what is in the folder
    stored_dtype: str
    hidden_size: int
    vocab_size: int
    max_context: int
    groups: tuple[LayerGroup, ...]
    params: int
    active: int
    active_inner: int
    bytes: int
    parts: tuple[Part, ...]
    token_bytes: int  # what the caches of one sequence grow by with one more token
    state: tuple[StateMemory, ...]
    machine: Machine


def describe(
    path: str | os.PathLike[str],
    /,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    shared_experts: SharedExperts = "auto",
    compile: Compile = "auto",
) -> ModelInfo:
    """Work out what ``fmoe.load`` would give, from config.json and, where there are weights, the shards' headers.

    Weights that do not fit the config are no error here; ``weights`` says what is wrong with them. Every other error
    is as in ``fmoe.load``.
    """
    folder = find_folder(path)
    raw = read_config(folder)
    architecture = find_architecture(raw)
    config = architecture.parse_config(text_config(raw), shared_experts=shared_experts)
    weights, target = _find_weights(folder, architecture, config, raw), resolve_device(device)
    params, resolved = _plan_params(architecture, config, weights, dtype, target)
    parts, (token_bytes, state) = _split_parts(params, config), _measure_state(architecture, config, resolved)
    used = _find_used_kernels(params, architecture.init_state(config, 1, 64, dtype=resolved, device=META).caches)
    size = sum(part.bytes for part in parts)
    plans = plan_layers(list_keys(params, config), target, requested="auto", tune="cached")
    return ModelInfo(
        folder=str(folder),
        family=getattr(architecture, "__name__", "").rpartition(".")[2],
        model_type=str(raw.get("model_type")),
        weights=weights.note,
        stored_dtype=_short(weights.dtype) + weights.blocks,
        hidden_size=config.decoder.hidden_size,
        vocab_size=config.decoder.vocab_size,
        max_context=config.decoder.max_context,
        groups=_group_layers(params, config),
        params=sum(part.params for part in parts),
        active=sum(part.active for part in parts),
        active_inner=sum(part.active for part in parts if part.name not in ("embedding", "head")),
        bytes=size,
        parts=parts,
        token_bytes=token_bytes,
        state=state,
        machine=_describe_machine(target, resolved, compile, size, state, used, plans),
    )


class _Weights(NamedTuple):
    note: str
    dtype: torch.dtype
    names: Container[str]
    blocks: str  # which of them are quantised, for people


def _build(architecture: Architecture, config: FamilyConfig, fill: Any) -> Params:
    return architecture.build_params(fill, config)


def _find_weights(folder: Path, architecture: Architecture, config: FamilyConfig, raw: Mapping[str, Any]) -> _Weights:
    """Read the headers, if there are any, and say whether they agree with config.json."""
    named = config_dtype(raw)
    names: Container[str] = frozenset()
    if not is_present(folder / INDEX) and not any(folder.glob("*.safetensors")):
        note = "none in the folder" + ("" if named else "; config.json names no dtype, bfloat16 is assumed")
        try:
            check_quantization(raw)
        except (ValueError, NotImplementedError) as error:
            note += f"; those of this config.json cannot be loaded: {error}"
        names = quantised_names(raw)
        quantization = raw.get("quantization_config")
        mxfp4 = isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"
        return _Weights(note, named or torch.bfloat16, names, IN_FP8 if names else IN_MXFP4 if mxfp4 else "")
    blocks = ""
    try:
        checkpoint = open_checkpoint(folder)
        names, stored = checkpoint.tensors, stored_dtype(checkpoint)
        blocks = _name_blocks(checkpoint.tensors)
        ignore = ignored_tensors(config.decoder)
        report = check_params(partial(_build, architecture, config), checkpoint, dtype=stored, ignore=ignore)
    except (ValueError, NotImplementedError, OSError) as error:
        return _Weights(f"these cannot be loaded: {error}", named or torch.bfloat16, names, blocks)
    unused = f"; {len(report.ignored)} more are not used" if report.ignored else ""
    note = f"{report.read} tensors ({format_bytes(report.read_bytes)}) that agree with config.json{unused}"
    return _Weights(note, stored, names, blocks)


def _name_blocks(tensors: Mapping[str, TensorInfo]) -> str:
    if any(name.endswith(SCALE) for name in tensors):
        return IN_FP8
    return IN_MXFP4 if any(info.dtype == torch.uint8 for info in tensors.values()) else ""


def _plan_params(
    architecture: Architecture,
    config: FamilyConfig,
    weights: _Weights,
    dtype: str | torch.dtype,
    device: torch.device,
) -> tuple[Params, torch.dtype]:
    """Return the parameters on the meta device, in the dtype in which they would be loaded, and that dtype."""
    build, keep = partial(_build, architecture, config), not why_not_fp8(device)
    params = make_meta_params(build, dtype=weights.dtype, names=weights.names, keep_fp8=keep)
    resolved = resolve_dtype(dtype, stored=weights.dtype, num_params=count_params(params)[0], device=device)
    if resolved != weights.dtype:
        params = make_meta_params(build, dtype=resolved, names=weights.names, keep_fp8=keep)
    return params, resolved


def _per_layer(config: FamilyConfig, kind: type[T]) -> list[T | None]:
    """Find a family's value of one kind, or its one per layer, among the fields of its config."""
    count = len(config.decoder.layer_kinds)
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if isinstance(value, kind):
            return [value] * count
        if isinstance(value, tuple) and len(value) == count and any(isinstance(item, kind) for item in value):
            return [item if isinstance(item, kind) else None for item in value]
    return [None] * count


def _group_layers(params: Params, config: FamilyConfig) -> tuple[LayerGroup, ...]:
    """Describe each layer by its parameters' shapes and put equal layers together, in order of appearance."""
    routers, plans = _per_layer(config, RouterConfig), _per_layer(config, SharedPlan)
    found: dict[tuple[Any, ...], list[int]] = {}
    for i, (kind, layer) in enumerate(zip(config.decoder.layer_kinds, params.layers, strict=True)):
        mlp, router, plan = layer.mlp, routers[i], plans[i]
        if isinstance(mlp, MLPParams):
            key: tuple[Any, ...] = (kind, "dense", weight_shape(mlp.w_down_DF)[-1], 0, 0, 0, 0, "no shared expert")
        else:
            assert router is not None
            stacked, _, width = weight_shape(mlp.w_down_EDF)
            slots = stacked - router.num_experts
            shared_width = slots * width if mlp.shared is None else weight_shape(mlp.shared.mlp.w_down_DF)[-1]
            reason = "" if plan is None else plan.reason if plan.slots == slots else f"separate: {DIFFER}"
            key = (kind, "sparse", width, router.num_experts, router.top_k, shared_width, slots, reason)
        found.setdefault(key, []).append(i)
    return tuple(LayerGroup(tuple(layers), *key) for key, layers in found.items())


def _split_parts(params: Params, config: FamilyConfig) -> tuple[Part, ...]:
    """Add up parameters by part."""
    totals: dict[str, list[int]] = {}
    for name, path, tensor, size, active in _count_tensors(params, config):
        total = totals.setdefault(name, [0, 0, 0])
        elements = size if count_elements(path, tensor) else 0
        for i, amount in enumerate((elements, active if elements else 0, size * tensor.dtype.itemsize)):
            total[i] += amount
    ordered = sorted(totals, key=lambda name: PARTS.index(name.partition(",")[0]))
    return tuple(Part(name, *totals[name]) for name in ordered)


def _count_tensors(params: Params, config: FamilyConfig) -> Iterator[tuple[str, str, torch.Tensor, int, int]]:
    """Yield (part, path, tensor, its elements in that part, those of them that are active)."""
    whole = [("embedding", "embed_VD", params.embed_VD), ("norms", "norm_D", params.norm_D)]
    if params.head_VD is not params.embed_VD:
        whole.append(("head", "head_VD", params.head_VD))
    routers = _per_layer(config, RouterConfig)
    for kind, router, layer in zip(config.decoder.layer_kinds, routers, params.layers, strict=True):
        for path, tensor in named_tensors(layer):
            field, _, rest = path.partition(".")
            if field == "mixer":
                whole.append((f"mixers, {kind}", path, tensor))
            elif field != "mlp":
                whole.append(("norms", path, tensor))
            elif not isinstance(layer.mlp, MoEParams):
                whole.append(("dense MLPs", path, tensor))
            elif rest.startswith("shared."):
                whole.append(("shared experts", path, tensor))
            else:
                assert router is not None, "a family with sparse layers has a RouterConfig in its Config"
                yield from _split_rows(rest, tensor, router)
    for name, path, tensor in whole:
        yield name, path, tensor, tensor.numel(), tensor.numel()


def _split_rows(
    path: str, tensor: torch.Tensor, router: RouterConfig
) -> Iterator[tuple[str, str, torch.Tensor, int, int]]:
    """Part the rows of a router or a stack: the first E are the routed experts', the rest the shared experts'."""
    count, row = router.num_experts, tensor.numel() // tensor.shape[0]
    if path in ROUTER_FIELDS:
        yield "routers", path, tensor, count * row, count * row
    else:
        yield "routed experts", path, tensor, count * row, router.top_k * row
    shared = tensor.numel() - count * row
    if shared:
        yield "shared experts", path, tensor, shared, shared


def _measure_state(
    architecture: Architecture, config: FamilyConfig, dtype: torch.dtype
) -> tuple[int, tuple[StateMemory, ...]]:
    """Measure what one more token costs, and one sequence's caches at the usual length and at the whole context."""
    limit = config.decoder.max_context

    def measure(slots: int) -> list[int]:
        state = architecture.init_state(config, 1, slots, dtype=dtype, device=META)
        return [tensor.nbytes for _, tensor in named_tensors(state.caches)]

    small, large = measure(64), measure(64 + 64)
    grows = [before != after for before, after in zip(small, large, strict=True)]
    found = []
    for tokens in sorted({min(USUAL_TOKENS, limit), limit}):
        sizes = measure(cache_slots(tokens))
        kv = sum(size for size, grown in zip(sizes, grows, strict=True) if grown)
        found.append(StateMemory(tokens, kv, sum(sizes) - kv))
    return (sum(large) - sum(small)) // 64, tuple(found)


def _find_used_kernels(params: Params, caches: Iterable[Any]) -> frozenset[str]:
    """Name the fields of Kernels that a model with these parameters and caches calls."""
    is_delta = {isinstance(cache, DeltaCache) for cache in caches}
    used = {"add_norm"}
    if any(isinstance(layer.mlp, MoEParams) for layer in params.layers):
        used |= {"route", *EXPERT_FIELDS}
    if True in is_delta:
        used |= {"delta_prefill", "delta_decode"}
    if False in is_delta:
        used |= {"attend_prefill", "attend_decode"}
    return frozenset(used)


def _describe_machine(
    device: torch.device,
    dtype: torch.dtype,
    compile: Compile,
    size: int,
    state: tuple[StateMemory, ...],
    used: Container[str],
    plans: tuple[Plan, ...],
) -> Machine:
    usual = state[0]
    needed = size + usual.kv_bytes + usual.recurrent_bytes
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    return Machine(
        device=name,
        dtype=_short(dtype),
        kernels=_name_kernels(choose(device, compiled=False, plans=plans), used),
        compiled_kernels=_name_kernels(choose(device, compiled=True, plans=plans), used),
        compile=_compile_policy(compile, device),
        tokens=usual.tokens,
        needed_bytes=needed,
        free_bytes=free,
        fits=None if free is None else needed <= free,
    )


def _compile_policy(compile: Compile, device: torch.device) -> str:
    if compile != "auto":
        return "compiled, as requested" if compile else "uncompiled, as requested"
    if device.type != "cpu":
        return "auto: compiled"
    return f"auto: uncompiled, on a CPU; compiled for work of {CPU_COMPILE_TOKENS:,} tokens and more"


def _name_kernels(kernels: Kernels, used: Container[str]) -> dict[str, str]:
    chosen = {field.name: getattr(kernels, field.name) for field in fields(kernels) if field.name in used}
    if kernels.compute_moe is not None:  # instead of these three
        chosen = {name: value for name, value in chosen.items() if name not in ("route", *EXPERT_FIELDS)}
        chosen["compute_moe"] = kernels.compute_moe
    functions = {name: getattr(value, "func", value) for name, value in chosen.items()}
    return {name: str(getattr(function, "__name__", function)) for name, function in functions.items()}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def format_bytes(size: int, /) -> str:
    """Write a size in binary units, such as 1.50 GiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.2f} {unit}"
    return f"{size} B"
