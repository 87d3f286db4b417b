"""Time one way to run an operator: over several weight sets, on even and on skewed routing, and only if it is right.

Letters: T tokens, E routed experts, G gate rows, K routed experts per token, D hidden, R rows of the router.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmoe.functional.moe import MoEParams
from fmoe.functional.quant import Fp8, Weight

from .autotune import Measure
from .candidates import Candidate
from .plan import Implementation, Key
from .tune_ops import read_plain

# implementation, settings, rows, weights -> rows. Weights are MoEParams, or the matrix of a dense projection; either
# may be in FP8 blocks.
Run = Callable[[Implementation, tuple[int, ...], Tensor, Any], Tensor]

SETS = 8  # layers' weights in turn, so that no call finds its weights in a cache
FEW_SETS = 2  # where one call reads far more than a cache holds
FEW_SETS_TOKENS = 512
MOST_SETS = 64  # of a projection: all of a set is read by each call, and small ones take many to fill a cache
ENOUGH_BYTES = 1 << 28  # of all sets: several times what the caches of a large GPU hold
FREE_PART = 4  # a copy takes no more than this part of the free memory
SPREAD = 2.0  # standard deviation of router logits
CONSTANT = 4.0  # first input feature of skewed rows: its router column is a bias
WARM_UPS = 2
LONG_S = 0.5  # calls that take this long together are repeated no further
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 5e-2}  # relative; a tie may send a row elsewhere
SEED = 0


class Case(NamedTuple):
    """Inputs of one call."""

    x_TD: Tensor
    weights: Any


def make_measure(
    key: Key, tokens: int, device: torch.device, run: Run, weights: Sequence[Any], /, *, reference: Implementation
) -> Measure:
    """Prepare to time candidates of one operator at one token count.

    The model's weights are read, never written; routers are drawn, half of them even and half by Zipf's law, and the
    time of a call is the mean over both.

    Args:
        key: the operator.
        tokens: T.
        device: where the weights are.
        run: runs an implementation with settings.
        weights: of all layers of that key, one or more.
        reference: implementation whose results a candidate's must come near; it gets FP8 weights multiplied out.

    Returns:
        Measure; it raises ValueError for wrong results and whatever a candidate raises.
    """
    generator = torch.Generator(device=device).manual_seed(SEED)
    cases = list_cases(key, tokens, weights, generator)
    expected = [run(reference, (), case.x_TD, multiply_out(case.weights)) for case in cases[:2]]
    checked: set[Candidate] = set()
    graphs: dict[Candidate, torch.cuda.CUDAGraph] = {}
    # One pool for all: no result is read, so that graphs may overwrite each other's.
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def measure(candidate: Candidate, repetitions: int) -> float:
        def call(case: Case) -> Tensor:
            return run(candidate.implementation, candidate.settings, *case)

        if candidate not in checked:
            for case, rows in zip(cases, expected, strict=False):
                check_rows(call(case), rows)
            checked.add(candidate)
        if device.type == "cpu":
            return time_calls(call, cases, repetitions)
        if candidate not in graphs:
            graphs[candidate] = capture_calls(call, cases, pool)
        return time_graph(graphs[candidate], repetitions) / len(cases)

    return measure


def list_cases(key: Key, tokens: int, weights: Sequence[Any], generator: torch.Generator, /) -> list[Case]:
    """Make the inputs of the calls, even and skewed routing in turn; of a projection, one for each weight set.

    Several layers are taken in turn. Where they are few, they are copied until they fill the caches; a layer of
    experts that does so alone serves again with another router, which chooses other experts.
    """
    if key.operator == "linear":
        count = min(max(SETS, -(-ENOUGH_BYTES // count_bytes(weights[0]))), MOST_SETS)
        sets = copy_sets(weights[:count], count)
        return [Case(_draw(generator, (tokens, key.sizes[1]), activation_dtype(w)), w) for w in sets]
    count = SETS if tokens <= FEW_SETS_TOKENS else FEW_SETS
    sets = copy_sets(weights[:count], SETS)
    cases = []
    for params in (sets[i % len(sets)] for i in range(max(count, len(sets)))):
        for skewed in (False, True):
            x_TD = _draw(generator, (tokens, key.sizes[4]), activation_dtype(params))
            if skewed:
                x_TD[:, 0] = CONSTANT
            router = draw_router(key, params.w_router_ED.dtype, generator, skewed=skewed)
            bias = None if params.bias_E is None else torch.zeros_like(params.bias_E)
            # Of the layer, not of what stands beside it or comes after it.
            cases.append(Case(x_TD, MoEParams(router, params.w_gate_up_EPD, params.w_down_EDF, bias, None)))
    return cases


def activation_dtype(weights: MoEParams | Weight, /) -> torch.dtype:
    """Give the dtype of the rows that weights are multiplied with.

    Of experts in FP8 blocks it is the router's; of a projection that of its unquantised rows, or bfloat16.
    """
    if isinstance(weights, MoEParams):
        down = weights.w_down_EDF
        return weights.w_router_ED.dtype if isinstance(down, Fp8) else down.dtype
    if isinstance(weights, Fp8):
        return torch.bfloat16 if weights.rest_MD is None else weights.rest_MD.dtype
    return weights.dtype


def draw_router(key: Key, dtype: torch.dtype, generator: torch.Generator, /, *, skewed: bool) -> Tensor:
    """Draw a router [R, D] that spreads tokens evenly, or by Zipf's law with exponent 1 over experts in any order."""
    experts, _, _, gate_rows, hidden, _ = key.sizes
    router_RD: Tensor = _draw(generator, (experts + gate_rows, hidden), torch.float32) * (SPREAD * hidden**-0.5)
    if skewed:
        ranks_E = torch.randperm(experts, generator=generator, device=generator.device) + 1
        router_RD[:experts, 0] = -ranks_E.float().log() / CONSTANT
    return router_RD.to(dtype)


def _draw(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values: Tensor = torch.randn(shape, generator=generator, device=generator.device).to(dtype)
    return values


def copy_sets(sets: Sequence[Any], count: int, /) -> list[Any]:
    """Copy weight sets in turn until there are ``count``, they fill the caches, or memory gets short."""
    found, size = list(sets), count_bytes(sets[0])
    while len(found) < count and size * len(found) < ENOUGH_BYTES and size * FREE_PART <= _free_bytes(sets[0]):
        found.append(_clone(found[len(found) % len(sets)]))
    return found


def count_bytes(weights: MoEParams | Weight, /) -> int:
    """Count the bytes of a weight set: both stacks of a layer, or a matrix."""
    return sum(tensor.nbytes for tensor in _list_tensors(weights))


def _list_tensors(weights: MoEParams | Weight) -> list[Tensor]:
    if isinstance(weights, MoEParams):
        return [*_list_tensors(weights.w_gate_up_EPD), *_list_tensors(weights.w_down_EDF)]
    return [t for t in weights if t is not None] if isinstance(weights, Fp8) else [weights]


def _free_bytes(weights: MoEParams | Weight) -> float:
    device = _list_tensors(weights)[0].device
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else float("inf")


def _clone(weights: Any) -> Any:
    if isinstance(weights, MoEParams):
        return weights._replace(w_gate_up_EPD=_clone(weights.w_gate_up_EPD), w_down_EDF=_clone(weights.w_down_EDF))
    if isinstance(weights, Fp8):
        rest_MD = None if weights.rest_MD is None else weights.rest_MD.clone()
        return Fp8(weights.w.clone(), weights.scale.clone(), rest_MD)
    return weights.clone()


def multiply_out(weights: MoEParams | Weight, /) -> MoEParams | Tensor:
    """Give weights as plain tensors of the dtype of x; those that are not in FP8 blocks as they are."""
    dtype = activation_dtype(weights)
    if not isinstance(weights, MoEParams):
        return read_plain(weights, dtype)
    w_gate_up_EPD = read_plain(weights.w_gate_up_EPD, dtype, parts=2)
    return weights._replace(w_gate_up_EPD=w_gate_up_EPD, w_down_EDF=read_plain(weights.w_down_EDF, dtype))


def check_rows(found: Tensor, expected: Tensor, /) -> None:
    """Raise ValueError unless a result is near the expected one, by the norm of the difference."""
    if found.shape != expected.shape:
        raise ValueError(f"wrong result: shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    difference = (found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-20)
    bound = TOLERANCE.get(expected.dtype, 5e-2)
    if not difference <= bound:  # NaN compares as false
        raise ValueError(f"wrong result: relative error {float(difference):.3g}, expected at most {bound:g}")


def time_calls(
    call: Callable[[Case], object],
    cases: Sequence[Case],
    repetitions: int,
    /,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of a call: the median over repetitions of the mean of two neighbouring cases, sets in turn.

    Slow calls are repeated less often.
    """
    times: list[float] = []
    for i in range(repetitions):
        if 2 * sum(times) > LONG_S:
            break
        pair = [cases[(2 * i + j) % len(cases)] for j in (0, 1)]
        begin = clock()
        for case in pair:
            call(case)
        times.append((clock() - begin) / 2)
    return statistics.median(times)


def capture_calls(call: Callable[[Case], object], cases: Sequence[Case], pool: Any, /) -> torch.cuda.CUDAGraph:
    """Capture one call of each case in a CUDA graph, after runs on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            call(cases[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for case in cases:
            call(case)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_graph(graph: torch.cuda.CUDAGraph, repetitions: int, /) -> float:
    """Median seconds of a replay."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    graph.replay()
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in events)) / 1e3
