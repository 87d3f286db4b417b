"""A ModelInfo as text for a terminal."""

from collections.abc import Iterable, Mapping

from .info import LayerGroup, Machine, ModelInfo, format_bytes


def format_count(count: int, /) -> str:
    """Write a number of parameters, such as 10.96 M."""
    for power, unit in ((12, "T"), (9, "B"), (6, "M"), (3, "K")):
        if count >= 10**power:
            return f"{count / 10**power:.2f} {unit}"
    return str(count)


def format_info(info: ModelInfo, /) -> str:
    """Lay out everything, a line or a few for each question."""
    layers = sum(len(group.layers) for group in info.groups)
    lines = [
        f"model       {info.folder}",
        f"family      {info.family} (model_type {info.model_type})",
        f"weights     {info.weights}",
        f"stored as   {info.stored_dtype}",
        f"sizes       hidden {info.hidden_size:,}, vocabulary {info.vocab_size:,}, context {info.max_context:,} tokens",
        f"layers      {layers}",
        *(f"  {_format_group(group)}" for group in info.groups),
        f"parameters  {format_count(info.params)}, active per token {format_count(info.active)} "
        f"({format_count(info.active_inner)} without embedding and head)",
        "            active are all but the routed experts not chosen; draft layers are not counted",
        *_format_parts(info),
        "one sequence allocates",
        *_format_state(info),
        *_format_machine(info.machine),
    ]
    return "\n".join(lines)


def _format_group(group: LayerGroup) -> str:
    numbers = ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in _ranges(group.layers))
    head = f"{len(group.layers)} x {group.kind}, {group.mlp}"
    if group.mlp == "dense":
        return f"{head}: width {group.width:,} (layers {numbers})"
    text = f"{head}: {group.experts} experts of width {group.width:,}, {group.top_k} per token"
    shared = f"shared width {group.shared_width:,}, {group.shared}" if group.shared_width else group.shared
    return f"{text}; {shared} (layers {numbers})"


def _ranges(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _format_parts(info: ModelInfo) -> Iterable[str]:
    rows = [(part.name, part.params, part.bytes) for part in info.parts]
    for name, params, size in [*rows, (f"all, as {info.machine.dtype}", info.params, info.bytes)]:
        yield f"  {name:<26} {format_count(params):>10} {format_bytes(size):>12}"


def _format_state(info: ModelInfo) -> Iterable[str]:
    if info.token_bytes:
        yield f"  {'for one more token':<26} {format_bytes(info.token_bytes)} KV cache"
    for memory in info.state:
        sizes = [(memory.kv_bytes, "KV cache"), (memory.recurrent_bytes, "recurrent state")]
        parts = [f"{format_bytes(size)} {name}" for size, name in sizes if size]
        yield f"  {f'at {memory.tokens:,} tokens':<26} {' + '.join(parts)}"


def _format_machine(machine: Machine) -> Iterable[str]:
    yield f"here        {machine.device}, {machine.dtype}, {machine.compile}"
    yield f"  uncompiled  {_format_kernels(machine.kernels)}"
    yield f"  compiled    {_format_kernels(machine.compiled_kernels)}"
    needed = f"needs {format_bytes(machine.needed_bytes)} with one sequence of {machine.tokens:,} tokens"
    if machine.free_bytes is None:
        yield f"  memory      {needed}; how much is free is unknown"
    else:
        fits = "fits" if machine.fits else f"does not fit; {_advise(machine)}"
        yield f"  memory      {needed}; {format_bytes(machine.free_bytes)} free: {fits}"


def _advise(machine: Machine) -> str:
    """Say what could make a model fit."""
    elsewhere = "load on the CPU (--device cpu)" if machine.device.startswith("cuda") else "load on another machine"
    smaller = "load in half the bytes (--dtype bfloat16) or " if machine.dtype == "float32" else ""
    return f"{smaller}{elsewhere}"


def _format_kernels(kernels: Mapping[str, str]) -> str:
    return ", ".join(f"{field}={function}" for field, function in kernels.items())
