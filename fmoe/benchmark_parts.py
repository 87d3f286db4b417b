"""Where a decode step's time goes: the kernels of a trace by their names on a GPU, the parts of a layer on a CPU.

A part holds what runs from its norm to its output projection: DeltaNet and attention by the kind of the mixer, MoE
from router to weighted sum, head from the final norm to the chosen token; embedding, dense MLPs and whatever is not
recognised are the rest.
"""

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmoe.compile.select import choose
from fmoe.compile.step import Steps
from fmoe.functional.moe import MoEParams
from fmoe.functional.routing import RouterConfig, Routing, route_fused, router_logits

from .byte_limit import PARTS, part_of
from .model import Model

PRODUCT = "product"  # a matrix product or pointwise kernel that any part may have
# The first pattern that a kernel's name holds tells its part.
NAMES: tuple[tuple[str, str], ...] = (
    ("DeltaNet", r"delta|causal_conv|gated_delta"),
    ("attention", r"attend|attention|add_splits|flash|fmha|sdpa|rotary|rope|mha_"),
    ("head", r"head_|pick_best|argmax|sample|multinomial"),
    (
        "MoE",
        r"moe|expert|topk|top_k|rout|gate_up|down_(token|grouped|sorted|split|quantized)|combine_pairs|logits_(gemv|dot)|find_rows"
        r"|tabulate_rows|count_block|sum_blocks|place_(pairs|and_list)|list_tiles|grouped|radix|sort",
    ),
    ("rest", r"norm|embedding|indexselect|index_select|gather"),
    (PRODUCT, r"linear_|split_row|sum_parts|gemm|gemv|nvjet|cutlass|cublas|Cijk_|splitk|triton_(poi|red|per)_fused"),
)
MIXERS = ("DeltaNet", "attention")
KERNEL, COPIES = "kernel", ("gpu_memcpy", "gpu_memset")  # categories of a trace's events


class Kernel(NamedTuple):
    """One kernel, copy or fill of a trace."""

    name: str
    start_us: float
    duration_us: float
    is_copy: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """One step, the mean over those that were traced."""

    kernels: float
    copies: float  # copies and fills of memory
    parts_ms: dict[str, float]  # time in which the GPU was busy, overlaps counted once
    parts_kernels: dict[str, float]

    @property
    def busy_ms(self) -> float:
        """Time in which anything ran."""
        return sum(self.parts_ms.values())


def trace_kernels(work: Callable[[], object], /) -> list[Kernel]:
    """Run ``work`` under torch's profiler and list what the GPU did, in the order of its starts."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return read_trace(json.loads(file.read_text()))


def read_trace(trace: Mapping[str, Any], /) -> list[Kernel]:
    """Take the GPU's events out of a trace in Chrome's format, in the order of their starts."""
    kernels = [
        Kernel(event["name"], float(event["ts"]), float(event["dur"]), event["cat"] in COPIES)
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in (KERNEL, *COPIES)
    ]
    return sorted(kernels, key=lambda kernel: kernel.start_us)


def classify_kernels(names: Sequence[str], /) -> list[str]:
    """Tell each kernel's part, by its name or by what runs around it.

    A product belongs to the mixer before or behind it, else to the head behind it, else to the part before it: a
    shared expert that is kept apart and a dense MLP count to the mixer next to them.
    """
    named = [next((part for part, pattern in NAMES if re.search(pattern, name, re.I)), "rest") for name in names]
    before: list[str | None] = []
    last: str | None = None
    for part in named:
        before.append(last)
        last = last if part in (PRODUCT, "rest") else part
    behind: list[str | None] = []
    last = None
    for part in reversed(named):
        behind.append(last)
        last = last if part in (PRODUCT, "rest") else part
    return [
        _choose_neighbour(previous, following) if part == PRODUCT else part
        for part, previous, following in zip(named, before, reversed(behind), strict=True)
    ]


def _choose_neighbour(previous: str | None, following: str | None) -> str:
    if previous in MIXERS or following in MIXERS:
        return str(previous if previous in MIXERS else following)
    return "head" if following == "head" else previous or following or "rest"


def profile_kernels(kernels: Sequence[Kernel], steps: int, /) -> Profile:
    """Share the time of ``steps`` steps among their parts."""
    busy_us, counts = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
    covered = float("-inf")
    for kernel, part in zip(kernels, classify_kernels([kernel.name for kernel in kernels]), strict=True):
        end = kernel.start_us + kernel.duration_us
        busy_us[part] += max(end - max(kernel.start_us, covered), 0.0)
        covered = max(covered, end)
        counts[part] += not kernel.is_copy
    copies = sum(kernel.is_copy for kernel in kernels)
    return Profile(
        kernels=(len(kernels) - copies) / steps,
        copies=copies / steps,
        parts_ms={part: us / 1e3 / steps for part, us in busy_us.items()},
        parts_kernels={part: count / steps for part, count in counts.items()},
    )


class Watch:
    """Uncompiled steps of a model that note which experts are chosen and, on a CPU, how long each part takes."""

    def __init__(self, model: Model, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.distinct: list[int] = []  # of each MoE layer and step, in their order
        self.mixer_end = 0.0
        kernels = choose(model.device, compiled=False, plans=model.plans, decision=model.decision)
        watched = replace(
            kernels,
            add_norm=partial(self._add_norm, kernels.add_norm),
            route=partial(self._route, kernels.route),
            compute_moe=None if kernels.compute_moe is None else partial(self._compute_moe, kernels.compute_moe),
        )
        layers = model.architecture.make_layers(model.config, watched)
        timed = {kind: partial(self._layer, kind, layer) for kind, layer in layers.items()}
        self.steps = Steps(timed, partial(self._head, model.eager.logits), compiled=False)

    def forget(self) -> None:
        """Start anew, behind the prompts for example."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.distinct.clear()

    def distinct_per_layer(self, layers: int, /) -> list[float]:
        """Average the distinct experts of each of ``layers`` MoE layers over the steps that were watched."""
        steps = [self.distinct[i : i + layers] for i in range(0, len(self.distinct), layers)]
        return [sum(counts) / len(counts) for counts in zip(*steps, strict=True)]

    def _layer(self, kind: str, layer: Callable[..., Any], stream: Any, params: Any, cache: Any, *rest: Any) -> Any:
        begin = self.clock()
        self.mixer_end = begin
        y = layer(stream, params, cache, *rest)
        self.seconds[part_of(kind, cache)] += self.mixer_end - begin
        self.seconds["MoE" if isinstance(params.mlp, MoEParams) else "rest"] += self.clock() - self.mixer_end
        return y

    def _add_norm(self, add_norm: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.mixer_end = self.clock()
        return add_norm(*arguments, **options)

    def _head(self, logits: Callable[..., Tensor], *arguments: Any) -> Tensor:
        begin = self.clock()
        y = logits(*arguments)
        self.seconds["head"] += self.clock() - begin
        return y

    def _route(
        self, route: Callable[..., Routing], logits: Tensor, bias: Tensor | None, config: RouterConfig, **options: Any
    ) -> Routing:
        routing = route(logits, bias, config, **options)
        self._count(routing, config)
        return routing

    def _compute_moe(
        self, compute_moe: Callable[..., Tensor], x: Tensor, params: MoEParams, config: RouterConfig, **options: Any
    ) -> Tensor:
        logits = router_logits(x, params.w_router_ED, float32=config.float32_logits)
        self._count(route_fused(logits, params.bias_E, config, slots=0), config)
        return compute_moe(x, params, config, **options)

    def _count(self, routing: Routing, config: RouterConfig) -> None:
        chosen = routing.experts_TK[routing.experts_TK < config.num_experts]
        self.distinct.append(int(chosen.unique().numel()))


def add_rest(seconds: Mapping[str, float], total_s: float, /) -> dict[str, float]:
    """Give the parts of a step that took ``total_s``, what none of them took being the rest."""
    return {**seconds, "rest": seconds["rest"] + max(total_s - sum(seconds.values()), 0.0)}


def count_moe_layers(layers: Iterable[Any], /) -> int:
    """Count the layers whose MLP is a mixture of experts."""
    return sum(isinstance(layer.mlp, MoEParams) for layer in layers)
