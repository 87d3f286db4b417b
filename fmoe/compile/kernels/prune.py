"""Drop candidates whose kernels do not compile, spill, or take too much shared memory, without running any.

What is compiled here is in Triton's cache when the candidate is measured.
"""
# mypy: disable-error-code="no-untyped-call"

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor

from fmoe.functional.quant import FP8
from fmoe.functional.routing import RouterConfig

from ..autotune import Task
from ..candidates import Candidate, Inputs
from ..linear_settings import linear_from_ints
from ..plan import KERNELS, Device, Key
from ..settings import settings_from_ints
from .linear import run_linear
from .offline import (
    TARGETS,
    Compile,
    Launch,
    compile_launch,
    empty_weight,
    find_misfits,
    record_layer,
    recorded_launches,
)

logger = logging.getLogger("fmoe")

MOST_WORKERS = 16


def prune_tasks(
    tasks: Sequence[Task],
    device: Device,
    inputs: Mapping[Key, Inputs],
    /,
    *,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
    compile_one: Compile = compile_launch,
) -> list[Task]:
    """Compile the kernels of all candidates for a device, in several threads, and drop those that do not fit.

    Args:
        tasks: each with its default first, which is never dropped.
        device: whose architecture counts; one that is not known is not compiled for, and nothing is dropped.
        inputs: what the kernels of a key are compiled for besides it; those of a key that is not there are plain.
        budget_s: a candidate that is not compiled when it is over is dropped too.
        clock: seconds.
        compile_one: compiles a launch for a target.

    Returns:
        The tasks with what is left.
    """
    if device.arch not in TARGETS:
        return list(tasks)
    launches = {task: [_record(task, c, inputs) for c in task.candidates] for task in tasks}
    deadline = clock() + budget_s
    faults: dict[str, Future[list[str]]] = {}
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_WORKERS)) as pool:
        # The first candidates of all tasks, then the second ones: when the time is over, each task has its likeliest.
        for turn in zip_longest(*launches.values(), fillvalue=()):
            for launch in (launch for recorded in turn for launch in recorded or ()):
                name = identify(launch)
                if name not in faults:
                    faults[name] = pool.submit(_find_faults, launch, device.arch, compile_one)
        wait(faults.values(), timeout=max(deadline - clock(), 0.0))
        pool.shutdown(wait=True, cancel_futures=True)
    return [replace(task, candidates=_keep(task, recorded, faults)) for task, recorded in launches.items()]


def identify(launch: Launch, /) -> str:
    """Name what is compiled for a launch: equal names compile to the same."""
    values = {
        name: f"{value.dtype}" if isinstance(value, Tensor) else _specialize(launch, name, value)
        for name, value in launch.values.items()
    }
    return f"{launch.kernel.__name__} {values} {launch.options}"


def _specialize(launch: Launch, name: str, value: object) -> str:
    """Write a constant, or of an integer that is none what the compiler is told of it."""
    constant = any(p.name == name and p.is_constexpr for p in launch.kernel.params)
    if constant or type(value) is not int or value == 1:
        return str(getattr(value, "block_shape", value))
    return "multiple of 16" if value % 16 == 0 else "integer"


def _record(task: Task, candidate: Candidate, inputs: Mapping[Key, Inputs]) -> list[Launch] | None:
    """Record a candidate's launches; None where it cannot even be launched."""
    if candidate.implementation not in KERNELS:
        return []
    try:
        return record_candidate(task.key, task.tokens, candidate, inputs.get(task.key, Inputs()))
    except (ValueError, NotImplementedError) as error:
        logger.debug("%s at %d: %s is out (%s)", task.key, task.tokens, candidate, error)
        return None


def record_candidate(key: Key, tokens: int, candidate: Candidate, inputs: Inputs, /) -> list[Launch]:
    """Record the launches of a candidate that runs kernels; of separate shared experts, those of the routed ones."""
    dtype: torch.dtype = getattr(torch, key.dtype)
    if key.operator == "linear":
        of_x = inputs.activations if dtype == FP8 else dtype
        x_TD = torch.empty(tokens, key.sizes[1], dtype=of_x, device="meta")
        w_ND = empty_weight(*key.sizes, dtype=dtype, rest=inputs.rest, activations=of_x)
        with recorded_launches() as launches:
            run_linear(x_TD, w_ND, linear_from_ints(candidate.settings))
        return launches
    experts, top_k, slots, _, hidden, width = key.sizes
    return record_layer(
        settings_from_ints(candidate.settings),
        inputs.router or RouterConfig(experts, top_k),
        tokens=tokens,
        slots=slots if candidate.implementation == "triton" else 0,
        hidden=hidden,
        width=width,
        dtype=dtype,
        activations=inputs.activations,
    )


def _find_faults(launch: Launch, target: str, compile_one: Compile) -> list[str]:
    try:
        return find_misfits([launch], target, compile_one)
    except Exception as error:  # the compiler has many ways to refuse a kernel
        return [f"{type(error).__name__}: {error}".split("\n")[0][:200]]


def _keep(
    task: Task, recorded: Sequence[list[Launch] | None], faults: Mapping[str, Future[list[str]]]
) -> tuple[Candidate, ...]:
    kept = list(task.candidates[:1])
    for candidate, launches in zip(task.candidates[1:], recorded[1:], strict=True):
        if launches is None:
            continue
        futures = [faults[identify(launch)] for launch in launches]
        if any(future.cancelled() for future in futures):
            logger.debug("%s at %d: %s is out (not compiled in time)", task.key, task.tokens, candidate)
        elif found := [fault for future in futures for fault in future.result()]:
            logger.debug("%s at %d: %s is out (%s)", task.key, task.tokens, candidate, found[0])
        else:
            kept.append(candidate)
    return tuple(kept)
