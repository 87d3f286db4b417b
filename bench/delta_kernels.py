"""The DeltaNet decode kernels and the norm kernel on a GPU: first right, then how long.

    python -m bench.delta_kernels                       check, then sweep at 1, 8 and 64 sequences
    python -m bench.delta_kernels --batches 1 --out found.json
    python -m bench.delta_kernels --verify              the kernel over drafts alone, in seconds

Each figure is the median replay of a CUDA graph over so many layers that none of their states is in the cache when it
is read, per layer. No setting is timed before it agreed with ``delta_mix`` over many steps, under replay too.

Letters: B sequences, T tokens of a step with drafts, G key heads, H value heads, K key channels, V value channels, W
taps, N mixed channels.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from bench.moe_shapes import capture, time_graph
from fmoe.compile.delta_settings import (
    DeltaSettings,
    VerifySettings,
    default_delta_settings,
    default_verify_settings,
)
from fmoe.compile.device import target_of
from fmoe.compile.kernels.add_norm import add_rms_norm_rows
from fmoe.compile.kernels.delta_decode import decode_delta_
from fmoe.compile.kernels.delta_verify import verify_delta_
from fmoe.functional import (
    DeltaCache,
    DeltaConfig,
    DeltaParams,
    PendingDelta,
    add_rms_norm,
    delta_mix,
    delta_verify,
    pend_delta,
)
from fmoe.functional.delta_drafts import select_pending

QWEN = DeltaConfig(16, 32, 128, 128, 4, 1e-6)
AWKWARD = {
    "ratio 3": DeltaConfig(3, 9, 96, 80, 3, 1e-6),
    "small": DeltaConfig(2, 4, 5, 7, 2, 1e-6),
    "ratio 4": DeltaConfig(4, 16, 128, 128, 4, 1e-6),
}
CACHE_BYTES = 192_000_000  # three times the L2 cache of an H200
HIDDEN = 2048
STEPS = 40
SEED = 1
# Relative Frobenius errors of y and of the state; in half precision a rounding may fall to the other side.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}


class Layer(NamedTuple):
    """What one launch needs."""

    projected_BTN: Tensor
    cache: DeltaCache
    params: DeltaParams
    arrivals_BG: Tensor


def random_layer(config: DeltaConfig, batch: int, seed: int, dtype: torch.dtype) -> Layer:
    """Draw weights, a token's projection and a state."""
    rng = torch.Generator(device="cuda").manual_seed(seed)

    def draw(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(sizes, generator=rng, device="cuda").to(dtype)

    mixed, heads = config.split_sizes[0], config.value_heads
    empty = torch.empty(0, device="cuda")
    params = DeltaParams(
        w_in_ND=empty,
        w_conv_WN=draw(config.conv_size, mixed, dtype=dtype),
        decay_H=-draw(heads).exp(),
        dt_bias_H=draw(heads),
        norm_V=draw(config.value_size, dtype=dtype),
        w_out_DN=empty,
    )
    cache = DeltaCache(
        draw(batch, config.conv_size - 1, mixed, dtype=dtype),
        draw(batch, heads, config.key_size, config.value_size),
    )
    arrivals = torch.zeros(batch, config.key_heads, dtype=torch.int32, device="cuda")
    return Layer(draw(batch, 1, sum(config.split_sizes), dtype=dtype), cache, params, arrivals)


def run_kernel(layer: Layer, config: DeltaConfig, settings: DeltaSettings) -> Tensor:
    """Launch once."""
    return decode_delta_(
        layer.projected_BTN, *layer.cache, *layer.params[1:5], config, settings, arrivals_BG=layer.arrivals_BG
    )


def relative(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; NaN counts as infinite."""
    error = ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()
    return error if error == error else float("inf")


def check_settings(config: DeltaConfig, batch: int, dtype: torch.dtype, settings: DeltaSettings) -> list[str]:
    """Take steps by the reference, by launches and by replays of a graph, and say where they part."""
    reference, launched, replayed = (random_layer(config, batch, SEED, dtype) for _ in range(3))
    kept: list[Tensor] = []
    graph = capture(lambda: kept.append(run_kernel(replayed, config, settings)))
    for part, before in zip(replayed.cache, reference.cache, strict=True):
        part.copy_(before)  # the capture took steps of its own
    rng = torch.Generator(device="cuda").manual_seed(SEED + 1)
    faults = []
    for step in range(STEPS):
        for layer in (launched, replayed):
            layer.projected_BTN.copy_(reference.projected_BTN)
        expected = delta_mix(reference.projected_BTN, reference.cache, reference.params, config)
        y = run_kernel(launched, config, settings)
        kept[-1].fill_(float("nan"))
        graph.replay()
        if not torch.equal(launched.cache.window_BWN, reference.cache.window_BWN):
            faults.append(f"step {step}: window differs")
        for what, one, other in (("y", y, expected), ("state", launched.cache[1], reference.cache[1])):
            if (error := relative(one, other)) > TOLERANCES[dtype]:
                faults.append(f"step {step}: {what} errs by {error:.2g}")
        pairs = [(y, kept[-1]), *zip(launched.cache, replayed.cache, strict=True)]
        if not all(torch.equal(one, other) for one, other in pairs):
            faults.append(f"step {step}: replay differs")
        if faults:
            break
        reference.projected_BTN.normal_(generator=rng)
    if launched.arrivals_BG.any() or replayed.arrivals_BG.any():
        faults.append("the count of arrivals is not zero again")
    return faults


def candidates(config: DeltaConfig) -> list[DeltaSettings]:
    """Settings worth trying: 16 to 128 elements of the state for each thread."""
    found = []
    ratio = config.value_heads // config.key_heads
    for heads, columns, warps in product({0, 1} if ratio > 1 else {0}, (64, 128), (1, 2, 4, 8, 16)):
        elements = (heads or ratio) * triton.next_power_of_2(config.key_size) * columns
        if columns <= triton.next_power_of_2(config.value_size) and 16 <= elements // (32 * warps) <= 128:
            found.append(DeltaSettings(heads, columns, warps))
    return found


def check_all() -> int:
    """Check the default settings and some candidates on odd layers, and on the timed one; print each fault."""
    faults = 0
    for name, config in (AWKWARD | {"qwen3next": QWEN}).items():
        tried = {default_delta_settings(config, batch) for batch in (1, 64)} | {*candidates(config)[::9]}
        tried |= {DeltaSettings(1, 128, 4, pdl=True)}
        for settings, batch, dtype in product(tried, (1, 5), (torch.float32, torch.bfloat16)):
            for line in check_settings(config, batch, dtype, settings):
                faults += 1
                print(f"WRONG {name} B={batch} {dtype} {settings}: {line}", flush=True)
        print(f"{name}: {len(tried)} settings checked, {faults} faults so far", flush=True)
    return faults


def moved_bytes(config: DeltaConfig, batch: int, dtype: torch.dtype) -> int:
    """Bytes that a launch reads and writes at least."""
    mixed, gates = config.split_sizes[0], sum(config.split_sizes[1:])
    state = 2 * 4 * config.value_heads * config.key_size * config.value_size
    values = config.value_heads * config.value_size
    token = mixed * (2 * config.conv_size - 1) + gates + values
    return batch * (state + token * dtype.itemsize) + config.conv_size * mixed * dtype.itemsize


def time_layers(layers: list[Any], run: Callable[[Any], Any]) -> float:
    """Median microseconds of one launch under replay."""

    def run_each() -> None:
        for layer in layers:
            run(layer)

    return time_graph(capture(run_each)) / len(layers)


def sweep(batch: int, dtype: torch.dtype, layers: list[Layer]) -> dict[str, Any]:
    """Time the reference, the default and every candidate; dependent launch with the best few."""
    times: dict[DeltaSettings, float] = {}

    def measure(settings: DeltaSettings) -> None:
        try:
            if faults := check_settings(QWEN, batch, dtype, settings):
                print(f"   wrong {settings}: {faults}", flush=True)
                return
            times[settings] = time_layers(layers, lambda layer: run_kernel(layer, QWEN, settings))
        except Exception as error:  # a candidate that does not compile or launch is no candidate
            print(f"   failed {settings}: {str(error)[:90]}", flush=True)

    default = default_delta_settings(QWEN, batch)
    for settings in dict.fromkeys([default, *candidates(QWEN)]):
        measure(settings)
    for settings in sorted(times, key=times.__getitem__)[:4]:
        measure(replace(settings, pdl=True))
    ranked = sorted(times, key=times.__getitem__)
    reference = time_layers(layers[:4], lambda layer: delta_mix(*layer[:3], QWEN))
    best, moved = ranked[0], moved_bytes(QWEN, batch, dtype)
    print(
        f"B={batch} best {times[best]:.2f} us {best}, default {times.get(default, float('nan')):.2f} us, "
        f"reference {reference:.1f} us, {moved / times[best] / 1e3:.0f} GB/s",
        flush=True,
    )
    for settings in ranked[:8]:
        print(f"   {times[settings]:.2f} us {settings}", flush=True)
    found = [{**asdict(settings), "us": times[settings]} for settings in ranked]
    return {
        "batch": batch,
        "dtype": str(dtype),
        "layers": len(layers),
        "bytes": moved,
        "reference_us": reference,
        "default_us": times.get(default),
        "settings": found,
    }


def time_norms(rows: int, count: int = 64) -> dict[str, Any]:
    """Time residual and norm of a few rows, and a launch that does next to nothing; check them first."""
    shape = (count, rows, HIDDEN)
    xs, branches = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(HIDDEN, device="cuda")
    for x, branch in zip(xs, branches, strict=True):
        y, total = add_rms_norm_rows(x, branch, weight, eps=1e-6)
        expected_y, expected_total = add_rms_norm(x, branch, weight, eps=1e-6)
        if not torch.equal(total, expected_total) or relative(y, expected_y) > 1e-3:
            raise SystemExit(f"WRONG: the norm of {rows} rows errs by {relative(y, expected_y):.2g}")

    def run(norm: Callable[..., Any], width: int, **options: Any) -> float:
        def run_each() -> None:
            for x, branch in zip(xs, branches, strict=True):
                norm(x[:1, :width] if width < HIDDEN else x, branch[:1, :width] if width < HIDDEN else branch,
                     weight[:width], eps=1e-6, **options)  # fmt: skip

        return time_graph(capture(run_each)) / count

    found = {
        "rows": rows,
        "kernel_us": run(add_rms_norm_rows, HIDDEN),
        "kernel_pdl_us": run(add_rms_norm_rows, HIDDEN, pdl=True),
        "reference_us": run(add_rms_norm, HIDDEN),
        "smallest_launch_us": run(add_rms_norm_rows, 16),
        "smallest_launch_pdl_us": run(add_rms_norm_rows, 16, pdl=True),
    }
    print(found, flush=True)
    return found


class Drafts(NamedTuple):
    """What one launch over drafts needs."""

    projected_BTN: Tensor
    cache: PendingDelta
    params: DeltaParams
    kept_B: Tensor


def random_drafts(config: DeltaConfig, batch: int, tokens: int, seed: int, dtype: torch.dtype) -> Drafts:
    """Draw a layer and a step's projections, in a cache with room for one token more."""
    layer = random_layer(config, batch, seed, dtype)
    cache = select_pending(pend_delta(layer.cache, config, tokens + 1), tokens)
    projected_BTN = layer.projected_BTN.repeat(1, tokens, 1)
    projected_BTN.normal_(generator=torch.Generator(device="cuda").manual_seed(seed))
    return Drafts(projected_BTN, cache, layer.params, torch.zeros(batch, dtype=torch.int64, device="cuda"))


def run_verify(drafts: Drafts, config: DeltaConfig, settings: VerifySettings) -> Tensor:
    """Launch once."""
    return verify_delta_(*drafts[:2], *drafts.params[1:5], drafts.kept_B, config, settings)


def check_verify(
    config: DeltaConfig, batch: int, tokens: int, dtype: torch.dtype, settings: VerifySettings
) -> list[str]:
    """Take steps that keep from none to all of their tokens, three ways as ``check_settings``; say where they part."""
    reference, launched, replayed = (random_drafts(config, batch, tokens, SEED, dtype) for _ in range(3))
    kept: list[Tensor] = []
    graph = capture(lambda: kept.append(run_verify(replayed, config, settings)))
    for part, before in zip(replayed.cache, reference.cache, strict=True):
        part.copy_(before)
    rng = torch.Generator(device="cuda").manual_seed(SEED + 1)
    for step in range(STEPS):
        for drafts in (launched, replayed):
            drafts.kept_B.copy_(reference.kept_B)
            drafts.projected_BTN.copy_(reference.projected_BTN)  # last: the launch in front may not write the count
        expected = delta_verify(*reference[:3], config, reference.kept_B)
        y = run_verify(launched, config, settings)
        kept[-1].fill_(float("nan"))
        graph.replay()
        errors = {"y": relative(y, expected)}
        parts = zip(PendingDelta._fields, launched.cache, reference.cache, strict=True)
        errors |= {name: relative(one, other) for name, one, other in parts}
        faults = [f"{name} errs by {error:.2g}" for name, error in errors.items() if error > TOLERANCES[dtype]]
        faults += [f"{name} differs" for name in ("window_BWN", "inputs_BTN") if errors[name]]
        pairs = [(y, kept[-1]), *zip(launched.cache, replayed.cache, strict=True)]
        if not all(torch.equal(one, other) for one, other in pairs):
            faults.append("replay differs")
        if faults:
            return [f"step {step}, kept {reference.kept_B.tolist()}: {fault}" for fault in faults]
        reference.projected_BTN.normal_(generator=rng)
        reference.kept_B.random_(0, tokens + 1, generator=rng)
    return []


def bench_verify() -> list[dict[str, Any]]:
    """Check the kernel over drafts, then time it at one sequence of which all tokens stay but the last.

    Raises:
        SystemExit: anything was wrong; then nothing is timed.
    """
    cases = [(QWEN, 2, tokens, torch.bfloat16) for tokens in (2, 3, 4)]
    cases += [(AWKWARD["ratio 3"], 5, 3, torch.float32), (AWKWARD["small"], 3, 2, torch.float16)]
    target, faults = target_of(torch.device("cuda", 0)), 0
    for config, batch, tokens, dtype in cases:
        settings = default_verify_settings(config, target=target)
        for line in check_verify(config, batch, tokens, dtype, settings):
            faults += 1
            print(f"WRONG {config} B={batch} T={tokens} {dtype} {settings}: {line}", flush=True)
    if faults:
        raise SystemExit(f"{faults} FAULTS: nothing is timed")
    print(f"{len(cases)} cases agree with the reference and repeat themselves over {STEPS} steps each", flush=True)
    settings = default_verify_settings(QWEN, target=target)
    count, found = -(-CACHE_BYTES // moved_bytes(QWEN, 1, torch.bfloat16)), []
    for tokens in (2, 3, 4):
        layers = [random_drafts(QWEN, 1, tokens, SEED + i, torch.bfloat16) for i in range(count)]
        for layer in layers:
            layer.kept_B.fill_(tokens - 1)
        micros = time_layers(layers, lambda layer: run_verify(layer, QWEN, settings))
        reference = time_layers(layers[:2], lambda layer: delta_verify(*layer[:3], QWEN, layer.kept_B))
        found.append({"batch": 1, "tokens": tokens, "us": micros, "reference_us": reference, **asdict(settings)})
        print(f"B=1 T={tokens} {micros:.2f} us a layer, reference {reference:.1f} us, {settings}", flush=True)
    return found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--skip-checks", action="store_true", help="check the timed layer alone")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--verify", action="store_true", help="check and time the kernel over drafts, and nothing else")
    arguments = parser.parse_args()
    if arguments.verify:
        found = bench_verify()
        if arguments.out:
            arguments.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "verify": found}, indent=1))
        return
    if not arguments.skip_checks and (faults := check_all()):
        raise SystemExit(f"{faults} FAULTS: nothing is timed")
    dtype, batches = getattr(torch, arguments.dtype), [int(batch) for batch in arguments.batches.split(",")]
    results = []
    for batch in batches:
        count = max(4, -(-CACHE_BYTES // moved_bytes(QWEN, batch, dtype)))
        results.append(sweep(batch, dtype, [random_layer(QWEN, batch, SEED + i, dtype) for i in range(count)]))
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "delta": results,
        "add_norm": [time_norms(rows) for rows in batches],
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
