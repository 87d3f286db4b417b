"""Many tokens over weights in FP8 blocks: rows rounded to FP8 (W8A8) against weights converted in the loop (W8A16).

    python -m bench.prefill_fp8                    Qwen3-Next's MoE layer and its projections, 2,048 to 16,384 tokens
    python -m bench.prefill_fp8 --tokens 4096 --out found.json

Each form is first held to sums over the same rounded rows, and its error against the exact rows printed.
A layer's weights are 1.6 GB: none is in the cache when it is read.

Letters: T tokens, D hidden, N rows of a projection, F expert width.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.jit import JITFunction

from bench.fp8_kernels import DTYPE, PROJECTIONS, SEED, SHAPE, MoELayer, draw_layer, empty_fp8, relative, run_layer
from bench.moe_shapes import capture, time_graph
from bench.tune_layers import draw_fp8
from fmoe.compile.kernels import Settings, Tile, default_settings, route_tokens
from fmoe.compile.kernels.fp8 import read_fp8
from fmoe.compile.kernels.linear_fp8 import Form, default_form, run_linear_quantized
from fmoe.compile.kernels.moe_prefill_fp8 import compute_experts_tiled
from fmoe.functional.quant import FP8, Fp8, quantize_rows, read_experts
from fmoe.functional.routing import Routing

# tokens of a tile, warps, stages, programs, group
LAYER_FORMS = ((128, 8, 4, 132, 8), (128, 8, 3, 132, 8), (64, 8, 4, 132, 8), (64, 8, 2, 264, 8), (64, 4, 2, 264, 8))
GROUPS = (2, 4, 16)  # also tried of the best
LINEAR_FORMS = (Form(), Form(stages=3), Form(64, 8, 2, 264), Form(group=16))
LINEAR_TOKENS = (256, 512, 1024)  # also timed of a projection
SAMPLED = 8  # tokens that are held to the reference
BOUND = 3e-3  # of a projection
# Of a layer: where a sum's last bits put a value of h on the other side of a border, it comes out a step of FP8 away.
LAYER_BOUND = 1.5e-2


def layer_settings(tokens: int, form: tuple[int, int, int, int, int] | None) -> Settings:
    """Give the rule's settings of W8A16, or those of a form of W8A8."""
    sizes = (SHAPE.E, SHAPE.K, SHAPE.S, SHAPE.D, SHAPE.F, FP8)
    plain = default_settings(tokens, *sizes, target="hopper", quantize=False)
    if form is None:
        return plain
    block, warps, stages, programs, group = form
    tile = Tile(block, 128, 128, warps, stages)
    return replace(plain, path="quantized", gate_up=tile, down=tile, programs=programs, group=group)


def warm(calls: Sequence[Callable[[], object]]) -> None:
    """Compile what calls would launch, in threads, launching none."""
    launch = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    def compile_one(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # it fails again, by name, where it is measured
            print(f"    warm: {str(error).splitlines()[0][:120]}", flush=True)

    with patch.object(JITFunction, "run", run), ThreadPoolExecutor(12) as pool:
        list(pool.map(compile_one, calls))


def empty(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Give a tensor without values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def warm_layer(settings: Settings) -> None:
    """Compile the experts' kernels of settings."""
    experts = SHAPE.E + SHAPE.S
    columns = SHAPE.K + SHAPE.S
    routing = Routing(empty(2048, columns, dtype=torch.float32), empty(2048, columns, dtype=torch.int32))
    stacks = empty_fp8(experts, 2 * SHAPE.F, SHAPE.D, parts=2), empty_fp8(experts, SHAPE.D, SHAPE.F)
    compute_experts_tiled(empty(2048, SHAPE.D), routing, *stacks, settings)


def round_rows(x: Tensor) -> Tensor:
    """Give rows in float64 as FP8 holds them."""
    q, factors = quantize_rows(x)
    return (q.double().unflatten(-1, (-1, 128)) * factors.double()[..., None]).flatten(-2)


def expect_layer(x_TD: Tensor, layer: MoELayer, settings: Settings, *, rounded: bool) -> Tensor:
    """Compute sampled tokens in float64, over rounded x and h or exact ones."""
    router, gate_up, down = layer
    routing, _ = route_tokens(x_TD, router, None, SHAPE.config, settings, slots=SHAPE.S)
    y_TD = torch.zeros(SAMPLED, SHAPE.D, dtype=torch.float64, device="cuda")
    rows = round_rows(x_TD[-SAMPLED:]) if rounded else x_TD[-SAMPLED:].double()
    for t in range(SAMPLED):
        at = len(x_TD) - SAMPLED + t
        for weight, e in zip(routing.weights_TK[at].tolist(), routing.experts_TK[at].tolist(), strict=True):
            gate, up = (read_experts(gate_up, e, torch.float64, parts=2) @ rows[t]).chunk(2)
            h = F.silu(gate) * up
            h = round_rows(h[None])[0] if rounded else h
            y_TD[t] += weight * (read_experts(down, e, torch.float64) @ h)
    return y_TD


def check(name: str, run: Callable[[], Tensor], expected: Tensor, exact: Tensor, bound: float) -> float:
    """Hold a result's last rows to the expected ones and to a repeated run; give the error against the exact ones.

    Raises:
        ValueError: it is further off, or differs when repeated.
    """
    first = run()
    error = relative(first[-len(expected) :], expected)
    torch.full_like(first, torch.nan)  # the allocator gives this memory to a result
    if not error <= bound or not torch.equal(run(), first):
        raise ValueError(f"{name}: error {error:.2e} must be at most {bound:.1e}, and a repeated run equal")
    return relative(first[-len(exact) :], exact)


def measure_layer(layers: list[MoELayer], tokens: int) -> dict[str, float]:
    """Check and time the forms of the layer at one token count."""
    x_TD = torch.randn(tokens, SHAPE.D, device="cuda", dtype=DTYPE)
    plain = layer_settings(tokens, None)
    exact = expect_layer(x_TD, layers[0], plain, rounded=False)
    expected = expect_layer(x_TD, layers[0], plain, rounded=True)
    print(f"layer T={tokens}: the rounded rows are off by {relative(expected, exact):.2%}", flush=True)
    found: dict[str, float] = {}

    def measure(form: tuple[int, int, int, int, int] | None) -> float:
        settings = layer_settings(tokens, form)
        run = partial(run_layer, x_TD, layers[0], settings)
        error = check(str(form), run, expected if form else exact, exact, LAYER_BOUND)
        us = time_graph(capture(lambda: [run_layer(x_TD, layer, settings) for layer in layers]), 5) / len(layers)
        flops = 6 * tokens * (SHAPE.K + SHAPE.S) * SHAPE.D * SHAPE.F
        print(
            f"  {'W8A8 ' + str(form) if form else 'W8A16':30s} {us:8.1f} us  {flops / us / 1e6:5.0f} TFLOP/s in all  "
            f"error {error:.2%}",
            flush=True,
        )
        return us

    for form in (None, *LAYER_FORMS):
        try:
            found[str(form)] = measure(form)
        except Exception as error:  # the others still count
            print(f"  {form}: {str(error).splitlines()[0][:160]}", flush=True)
    best = min((form for form in LAYER_FORMS if str(form) in found), key=lambda form: found[str(form)], default=None)
    if best:
        for group in GROUPS:
            form = (*best[:4], group)
            found[str(form)] = measure(form)
        profile(partial(run_layer, x_TD, layers[0], layer_settings(tokens, best)))
    return found


def profile(run: Callable[[], object]) -> None:
    """Print the microseconds of each kernel of a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    for event in sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)[:8]:
        print(f"      {event.self_device_time_total / 3:8.1f} us  {event.key[:60]}", flush=True)


def measure_linear(name: str, tokens: Sequence[int]) -> dict[str, float]:
    """Check and time a projection: dequantised and torch's product, and the forms of products in FP8."""
    outputs, rest, hidden = PROJECTIONS[name]
    rng = torch.Generator("cuda").manual_seed(SEED)
    weights = [draw_fp8(outputs, hidden, rng=rng) for _ in range(4)]
    if rest:
        rest_MD = torch.randn(rest, hidden, generator=rng, device="cuda", dtype=DTYPE) * hidden**-0.5
        weights = [w._replace(rest_MD=rest_MD) for w in weights]
    w_ND = read_fp8(weights[0], torch.float64)
    found: dict[str, float] = {}
    for count in tokens:
        x_TD = torch.randn(count, hidden, generator=rng, device="cuda", dtype=DTYPE)
        last = x_TD[-SAMPLED:]
        exact = last.double() @ w_ND.T
        expected = torch.cat((round_rows(last) @ w_ND[:outputs].T, exact[:, outputs:]), 1)
        calls: dict[str, Callable[[Fp8], Tensor]] = {
            "torch": lambda w, x_TD=x_TD: F.linear(x_TD, read_fp8(w, DTYPE)),  # type: ignore[misc]
            **{
                str(tuple(form)): partial(lambda w, x, form: run_linear_quantized(x, w, form=form), x=x_TD, form=form)
                for form in LINEAR_FORMS
            },
        }
        print(f"{name} T={count}: rule {tuple(default_form(count))}", flush=True)
        for label, call in calls.items():
            try:
                error = check(label, partial(call, weights[0]), exact if label == "torch" else expected, exact, BOUND)
                us = time_graph(capture(lambda call=call: [call(w) for w in weights]), 5) / len(weights)  # type: ignore[misc]
            except Exception as problem:  # the others still count
                print(f"  {label}: {str(problem).splitlines()[0][:160]}", flush=True)
                continue
            found[f"{count} {label}"] = us
            flops = 2 * count * hidden * (outputs + rest)
            print(f"  {label:30s} {us:8.1f} us  {flops / us / 1e6:5.0f} TFLOP/s  error {error:.2%}", flush=True)
    return found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="2048,4096,8192,16384", help="token counts")
    parser.add_argument("--out", type=Path, help="write the microseconds as JSON")
    arguments = parser.parse_args()
    counts = [int(text) for text in arguments.tokens.split(",")]
    begin = time.monotonic()
    settings = [layer_settings(2048, form) for form in (None, *LAYER_FORMS)] + [layer_settings(16384, None)]
    warm(
        [partial(warm_layer, one) for one in settings]
        + [
            partial(
                run_linear_quantized,
                empty(2048, hidden),
                empty_fp8(outputs, hidden)._replace(rest_MD=empty(rest, hidden) if rest else None),
                form=form,
            )
            for outputs, rest, hidden in PROJECTIONS.values()
            for form in LINEAR_FORMS
        ]
    )
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    layers = [draw_layer(SEED + i) for i in range(2)]
    found = {f"layer {count}": measure_layer(layers, count) for count in counts}
    del layers
    for name in PROJECTIONS:
        found[name] = measure_linear(name, [*LINEAR_TOKENS, *counts])
    print(f"{time.monotonic() - begin:.0f} s in all", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "us": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
