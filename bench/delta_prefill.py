"""The chunk rule of Gated DeltaNet on a GPU: checked against float64 first, then timed for a few settings.

    python -m bench.delta_prefill [--tokens 2048,4096,16384] [--limit 22] [--out FILE.json]

Milliseconds of one layer of Qwen3-Next, one sequence, from a CUDA graph; "matrices" is the first of the two launches.
No further settings are compiled once the limit, in seconds, is over. A setting is timed after it agreed with the
reference in float64, under replay too.

Letters: B sequences, T tokens, H value heads, K key channels, V value channels.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from bench.moe_shapes import capture, time_graph
from fmoe.compile.chunk_settings import ChunkSettings, default_chunk_settings
from fmoe.compile.device import target_of
from fmoe.compile.kernels.delta_prefill import chunk_delta, make_chunk_matrices
from fmoe.functional.deltanet import delta_chunked

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
QWEN = (32, 128, 128)  # H, K, V
# Relative Frobenius errors of outputs and state against float64, from inputs that were not rounded.
TOLERANCES = {F32: 3e-6, F16: 1e-3, BF16: 8e-3}
CUDA = torch.device("cuda")
HIP = torch.version.hip is not None


class Case(NamedTuple):
    """Inputs to check: B, T and (H, K, V), the largest decay, how parallel the keys are, the dtype of q and k."""

    name: str
    batch: int
    tokens: int
    sizes: tuple[int, int, int]
    dtype: torch.dtype = F16
    decay: float = 0.2
    parallel: float = 0.0
    strong: bool = False
    size: float = 1.0


CASES = (
    Case("qwen3next", 1, 1000, QWEN),
    Case("two sequences, slow decay", 2, 64, QWEN, decay=1e-3),
    Case("one token", 1, 1, QWEN),
    Case("strong decays", 1, 200, QWEN, strong=True),
    Case("parallel keys", 1, 500, QWEN, decay=1e-2, parallel=3.0),
    Case("large values", 1, 200, QWEN, size=1e6),
    Case("float32", 1, 200, QWEN, dtype=F32),
    Case("float32, strong decays", 1, 200, QWEN, dtype=F32, strong=True),
    Case("odd", 2, 200, (3, 96, 80)),
)


def draw_inputs(case: Case, seed: int = 1) -> tuple[Tensor, ...]:
    """Draw q, k, v, g, beta and a state in float32."""
    heads, key_size, value_size = case.sizes
    rng = torch.Generator(device="cuda").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device="cuda")

    shape = case.batch, case.tokens, heads
    shared = case.parallel * draw(case.batch, 1, heads, key_size)
    q, k = (F.normalize(draw(*shape, key_size) + shared, dim=-1) for _ in range(2))
    v = (case.size * draw(*shape, value_size)).bfloat16().float()
    g = -case.decay * torch.rand(shape, generator=rng, device="cuda")
    if case.strong:
        g = torch.where(torch.rand(shape, generator=rng, device="cuda") < 0.05, -1e4, g)
    beta = torch.rand(shape, generator=rng, device="cuda")
    return q * key_size**-0.5, k, v, g, beta, case.size * draw(case.batch, heads, key_size, value_size)


def round_inputs(inputs: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Round as a layer in half precision does: q and k to this dtype, v to bfloat16."""
    if dtype == F32:
        return inputs
    q, k, v, *rest = inputs
    return q.to(dtype), k.to(dtype), v.bfloat16(), *rest


def relative(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; NaN counts as infinite."""
    error = ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    return error if error == error else float("inf")


def check(
    name: str, inputs: tuple[Tensor, ...], expected: tuple[Tensor, ...], settings: ChunkSettings, dtype: torch.dtype
) -> bool:
    """Compare a launch with float64, and a replay with the launch to the bit; print the errors."""
    rounded = round_inputs(inputs, dtype)
    launched = chunk_delta(*rounded, settings)
    kept: list[tuple[Tensor, Tensor]] = []
    graph = capture(lambda: kept.append(chunk_delta(*rounded, settings)))
    for part in kept[-1]:
        part.fill_(float("nan"))
    graph.replay()
    errors = [relative(one, other) for one, other in zip(launched, expected, strict=True)]
    same = all(torch.equal(one, other) for one, other in zip(launched, kept[-1], strict=True))
    most = TOLERANCES[dtype] * (4 if "parallel" in name else 1)
    right = same and max(errors) <= most
    verdict = "right" if right else f"WRONG (at most {most:.0e})" if same else "WRONG: replay differs"
    print(f"{verdict}: {name}, {dtype}: o errs by {errors[0]:.1e}, state by {errors[1]:.1e}", flush=True)
    return right


def default_for(sizes: tuple[int, int, int], dtype: torch.dtype) -> ChunkSettings:
    """Ask the rule for this device."""
    return default_chunk_settings(*sizes[1:], dtype, target=target_of(CUDA))


def check_all() -> bool:
    """Check the default settings on every case."""
    results = []
    for case in CASES:
        inputs = draw_inputs(case)
        expected = delta_chunked(*(x.double() for x in inputs))
        results.append(check(case.name, inputs, expected, default_for(case.sizes, case.dtype), case.dtype))
    return all(results)


def candidates() -> Iterator[tuple[str, torch.dtype, ChunkSettings]]:
    """Give the default first, then neighbours, then other operands."""
    default = default_for(QWEN, F16)
    yield "default", F16, default
    if HIP:
        changes: tuple[dict[str, int], ...] = ({"columns": 64}, {"columns": 16}, {"warps": 8}, {"matrix_warps": 8})
    else:
        changes = (
            {"stages": 2}, {"columns": 16}, {"columns": 64, "warps": 8}, {"warps": 8}, {"matrix_warps": 8},
            {"matrix_warps": 2},
        )  # fmt: skip
    for change in changes:
        yield ", ".join(f"{name}={value}" for name, value in change.items()), F16, replace(default, **change)
    yield "bfloat16 operands", BF16, default_for(QWEN, BF16)
    yield "float32", F32, default_for(QWEN, F32)


def measure(inputs: tuple[Tensor, ...], settings: ChunkSettings, dtype: torch.dtype) -> tuple[float, float]:
    """Median milliseconds of both launches, and of the first."""
    rounded = round_inputs(inputs, dtype)
    q, k, _, g, beta, _ = rounded
    both = time_graph(capture(lambda: chunk_delta(*rounded, settings)), samples=10)
    return both / 1e3, time_graph(capture(lambda: make_chunk_matrices(q, k, g, beta, settings)), samples=10) / 1e3


def sweep(lengths: list[int], limit_s: float, begin: float) -> tuple[list[dict[str, Any]], bool]:
    """Check and time each candidate at each length."""
    drawn = {tokens: draw_inputs(Case("timed", 1, tokens, QWEN)) for tokens in lengths}
    case = draw_inputs(Case("checked", 1, 500, QWEN))
    expected = delta_chunked(*(x.double() for x in case))
    rows: list[dict[str, Any]] = []
    right = True
    for name, dtype, settings in candidates():
        if rows and time.monotonic() - begin > limit_s:
            print(f"{name} and what follows: not timed, the limit of {limit_s:g} s is over", flush=True)
            break
        try:
            if not check(name, case, expected, settings, dtype):
                right = False
                continue
            times = {tokens: measure(inputs, settings, dtype) for tokens, inputs in drawn.items()}
        except Exception as error:  # a candidate that does not compile or launch is no candidate
            right = right and name != "default"
            print(f"FAILED {name}: {str(error)[:200]}", flush=True)
            continue
        figures = ", ".join(f"T={t} {both:.3f} ms (matrices {first:.3f})" for t, (both, first) in times.items())
        print(f"   {name}: {figures}", flush=True)
        rows.append({"name": name, "dtype": str(dtype), **asdict(settings), "ms": times})
    return rows, right


def time_reference(tokens: int) -> float:
    """Median milliseconds of ``delta_chunked`` in float32, without a graph."""
    inputs = draw_inputs(Case("reference", 1, tokens, QWEN))
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        delta_chunked(*inputs)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times)[1]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="2048,4096,16384")
    parser.add_argument("--limit", type=float, default=22.0, help="seconds after which no further settings are tried")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    begin, lengths = time.monotonic(), [int(tokens) for tokens in arguments.tokens.split(",")]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    if not check_all():
        raise SystemExit("WRONG: nothing is timed")
    reference = {tokens: time_reference(tokens) for tokens in lengths if tokens <= 4096}
    print(f"reference, ms: { ({t: round(ms, 3) for t, ms in reference.items()}) }", flush=True)
    rows, right = sweep(lengths, arguments.limit, begin)
    print(f"{time.monotonic() - begin:.1f} s", flush=True)
    if arguments.out:
        record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        arguments.out.write_text(json.dumps(record | {"settings": rows, "reference_ms": reference}, indent=1))
    if not right:
        raise SystemExit("WRONG: see above")


if __name__ == "__main__":
    main()
