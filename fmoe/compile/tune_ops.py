"""The one thing that tuning asks of the kernels' package: drop candidates that do not compile for a device."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from fmoe.functional.routing import RouterConfig

from .autotune import Task
from .plan import Device, Key

if find_spec("triton"):
    from .kernels.prune import prune_tasks


def keep_compiling(
    tasks: Sequence[Task], device: Device, routers: Mapping[Key, RouterConfig], /, *, budget_s: float
) -> list[Task]:
    """Compile candidates ahead and drop those that do not fit; without Triton none needs to be compiled.

    Args:
        tasks: each with its default first.
        device: whose architecture counts.
        routers: the routing rule of each MoE layer.
        budget_s: of all.

    Returns:
        The tasks with what is left.
    """
    if device.kind == "cpu" or not find_spec("triton"):
        return list(tasks)
    return prune_tasks(tasks, device, routers, budget_s=budget_s)
