"""Decode attention and the head on one GPU: checked first, then timed against torch, and searched for settings.

    python -m bench.attend_kernels [--few | [--quick] [--parts attend,head] [--out FILE.json]]

Microseconds of one call, from CUDA graphs over as many caches as keep the L2 cache from helping. "limit" is what the
bytes that must be read need at this device's copy rate.

Letters: B sequences, H query heads, J kv heads, C head channels, M cache slots, D hidden, V vocabulary.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from bench import attend_few
from bench.moe_shapes import capture, time_graph
from fmoe.compile.attend_ops import attend_lengths_op, attend_op, attend_step_op_
from fmoe.compile.decode_settings import AttendSettings, HeadSettings, default_attend_settings, default_head_settings
from fmoe.compile.head_ops import choose_tokens_op, compute_logits_op
from fmoe.functional import KVCache, append_kv_, apply_rotary, attend, place_tokens, rms_norm

EPS = 1e-6
FLUSH_BYTES = 256 << 20  # what a graph reads at least, several times the L2 cache
PDL = torch.version.hip is None


class Heads(NamedTuple):
    """One attention layer."""

    H: int
    J: int
    C: int
    rotated: int
    gated: bool
    normed: bool


ATTENTION = {
    "qwen3next": Heads(16, 2, 256, 64, True, True),
    "qwen3": Heads(32, 4, 128, 128, False, True),
    "mixtral": Heads(32, 8, 128, 128, False, False),
}
AWKWARD = {"odd": Heads(15, 5, 80, 20, True, True), "one": Heads(20, 1, 192, 192, False, True)}
HEADS = {"qwen": (151936, 2048), "mixtral": (32000, 4096)}


class Case(NamedTuple):
    """What one call takes: a projection, and a cache with all lengths but the token's own."""

    projected: Tensor
    norm: Tensor | None
    cache: KVCache
    lengths: Tensor  # before the token


def make_case(shape: Heads, lengths: list[int], slots: int, dtype: torch.dtype, seed: int) -> Case:
    """Draw one case."""
    rng = torch.Generator(device="cuda").manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=rng, device="cuda", dtype=dtype)

    columns = ((2 if shape.gated else 1) * shape.H + 2 * shape.J) * shape.C
    batch, sizes = len(lengths), (len(lengths), shape.J, slots, shape.C)
    norm = 1 + draw(shape.H + shape.J, shape.C).float() / 4 if shape.normed else None
    cache = KVCache(draw(*sizes), draw(*sizes))
    return Case(draw(batch, 1, columns), norm, cache, torch.tensor(lengths, device="cuda") - 1)


def place(case: Case, shape: Heads, slots: int, window: int | None = None) -> Any:
    """Place the token of a case."""
    frequencies = 10000.0 ** -(torch.arange(shape.rotated // 2, device="cuda") / (shape.rotated // 2))
    return place_tokens(case.lengths, frequencies, tokens=1, slots=slots, dtype=case.projected.dtype, window=window)


def step_reference(case: Case, shape: Heads, placement: Any, mask: Tensor, cache: KVCache) -> Tensor:
    """The functions that ``attend_step_op_`` replaces, one after the other."""
    keys = shape.J * shape.C
    sizes = [(shape.H + shape.J) * shape.C, keys, shape.H * shape.C if shape.gated else 0]
    qk, v, gate = case.projected.split_with_sizes(sizes, -1)
    qk = qk.unflatten(-1, (shape.H + shape.J, shape.C))
    if case.norm is not None:
        qk = rms_norm(qk, case.norm, eps=EPS)
    q, k = apply_rotary(qk, placement.cos_BTR, placement.sin_BTR).split([shape.H, shape.J], 2)
    append_kv_(cache, k, v.unflatten(-1, (shape.J, shape.C)), placement.positions_BT)
    visible = mask.shape[-1]
    y = attend(q, cache.k_BJMC[:, :, :visible], cache.v_BJMC[:, :, :visible], mask).flatten(2)
    return y * gate.sigmoid() if shape.gated else y


def doubled(value: Any) -> Any:
    """Give float64 copies of the tensors of a tuple; others as they are."""
    return type(value)(*(v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in value))


def error(y: Tensor, exact: Tensor) -> float:
    """Relative Frobenius error; NaN counts as infinite."""
    ratio = ((y.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()
    return ratio if ratio == ratio else float("inf")


def settings_of(shape: Heads, batch: int, slots: int, dtype: torch.dtype) -> AttendSettings:
    """Choose by rule for the GPU that torch was built for."""
    target = "hip" if torch.version.hip else "cuda"
    return default_attend_settings(batch, shape.H, shape.J, shape.C, slots, dtype, target=target)


def repeats_equal(run: Callable[[], Tensor], y: Tensor) -> bool:
    """Tell whether a second run and the replay of a graph give the same bits."""
    kept: list[Tensor] = []
    graph = capture(lambda: kept.append(run()))
    kept[-1].fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return torch.equal(run(), y) and torch.equal(kept[-1], y)


def check_attention(name: str, shape: Heads, dtype: torch.dtype, window: int | None, pdl: bool) -> list[str]:
    """Hold the three forms against float64 on mixed lengths."""
    slots = 700
    case = make_case(shape, [slots, 1, 257, 64, 699], slots, dtype, 7)
    placement = place(case, shape, slots, window)
    mask = placement.mask_BTM if window is None else placement.window_mask_BTM
    settings = replace(settings_of(shape, 5, slots, dtype), pdl=pdl)
    exact_cache = doubled(case.cache)
    exact = step_reference(doubled(case), shape, doubled(placement), mask, exact_cache)
    plain_cache = KVCache(*(part.clone() for part in case.cache))
    allowed = 1.5 * error(step_reference(case, shape, placement, mask, plain_cache), exact) + 1e-6

    def step() -> Tensor:
        return attend_step_op_(
            case.projected, case.norm, case.cache, placement, heads=shape.H, eps=EPS, window=window, settings=settings
        )

    found, y = [], step()
    if not error(y, exact) <= allowed:
        found.append(f"step is off by {error(y, exact):.2e}, allowed {allowed:.2e}")
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    for part, exact_part in zip(case.cache, exact_cache, strict=True):
        if not torch.allclose(part.double(), exact_part, rtol=tolerance, atol=tolerance):
            found.append("step wrote another cache")
    if not repeats_equal(step, y):
        found.append("step does not repeat")
    q = torch.randn(5, 1, shape.H, shape.C, device="cuda", dtype=dtype)
    exact = attend(q.double(), *doubled(case.cache), mask)
    allowed = 1.5 * error(attend(q, *case.cache, mask), exact) + 1e-6
    forms: dict[str, Callable[[], Tensor]] = {
        "mask": lambda: attend_op(q, *case.cache, mask, settings=settings),
        "lengths": lambda: attend_lengths_op(q, *case.cache, case.lengths + 1, window=window, settings=settings),
    }
    for form, run in forms.items():
        if not error(y := run(), exact) <= allowed:
            found.append(f"{form} is off by {error(y, exact):.2e}, allowed {allowed:.2e}")
        if not repeats_equal(run, y):
            found.append(f"{form} does not repeat")
    return [f"{name} {dtype} window={window} pdl={pdl}: {fault}" for fault in found]


def check_latents(pdl: bool) -> list[str]:
    """Hold the shared read of keys and values against float64."""
    latent = torch.randn(3, 400, 576, device="cuda", dtype=torch.bfloat16)
    q, k = torch.randn(3, 1, 128, 576, device="cuda", dtype=torch.bfloat16), latent[:, None]
    mask = torch.arange(400, device="cuda") < torch.tensor([400, 1, 130], device="cuda")[:, None, None]
    settings = replace(default_attend_settings(3, 128, 1, 576, 400, torch.bfloat16), pdl=pdl)
    y = attend_op(q, k, k[..., :512], mask, scale=0.05, settings=settings)
    exact = attend(q.double(), k.double(), k[..., :512].double(), mask, scale=0.05)
    return [f"latents pdl={pdl}: off by {error(y, exact):.2e}"] if not error(y, exact) <= 1e-2 else []


def check_head(vocabulary: int, hidden: int, batch: int, dtype: torch.dtype, pdl: bool) -> list[str]:
    """Hold logits against float64, and tokens against the kernel's own logits."""
    x, head = (torch.randn(n, hidden, device="cuda", dtype=dtype) / hidden**0.25 for n in (batch, vocabulary))
    settings = replace(default_head_settings(batch, dtype), pdl=pdl)
    tokens, best, logits = compute_logits_op(x, head, settings=settings)
    exact = x.double() @ head.double().T
    allowed, found = 1.5 * error(F.linear(x, head), exact) + 1e-6, []
    if not error(logits, exact) <= allowed:
        found.append(f"logits off by {error(logits, exact):.2e}, allowed {allowed:.2e}")
    lowest = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    if not torch.equal(tokens, lowest) or not torch.equal(best, logits.amax(-1)):
        found.append("token is not the first largest logit")
    if not torch.equal(choose_tokens_op(x, head, settings=settings)[0], tokens):
        found.append("greedy form differs")
    if not repeats_equal(lambda: compute_logits_op(x, head, settings=settings)[2], logits):
        found.append("does not repeat")
    return [f"head {vocabulary}x{hidden} B={batch} {dtype} pdl={pdl}: {fault}" for fault in found]


def check_all(parts: list[str]) -> list[str]:
    """Run every check."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN
    torch.backends.cuda.matmul.allow_tf32 = False
    found: list[str] = []
    single, half, wide = torch.bfloat16, torch.float16, torch.float32
    # Each combination is compiled, hence few of them.
    cases = [(name, single, None, False) for name in ATTENTION] + [("odd", dtype, 100, False) for dtype in (half, wide)]
    cases += [("qwen3", single, 100, False), ("qwen3next", wide, None, False), ("one", single, None, False)]
    cases += [(name, single, None, True) for name in ("qwen3next", "odd")] if PDL else []
    if "attend" in parts:
        for name, dtype, window, pdl in cases:
            found += check_attention(name, (ATTENTION | AWKWARD)[name], dtype, window, pdl)
        found += check_latents(False)
    if "head" in parts:
        for vocabulary, hidden in (*HEADS.values(), (1003, 200)):
            for batch, dtype, pdl in ((1, single, False), (1, wide, False), (7, single, PDL), (16, half, False)):
                found += check_head(vocabulary, hidden, batch, dtype, pdl)
    torch.use_deterministic_algorithms(False)
    return found


def copy_rate() -> float:
    """Measure terabytes per second, read and written."""
    a = torch.empty(1 << 30, device="cuda", dtype=torch.bfloat16).normal_()
    b = torch.empty_like(a)
    return 2 * a.numel() * 2 / time_graph(capture(lambda: b.copy_(a))) / 1e6


def time_over(runs: list[Callable[[], object]], samples: int) -> float:
    """Microseconds of one of several calls in one graph."""
    return time_graph(capture(lambda: [run() for run in runs]), samples) / len(runs)


def tiles(settings: AttendSettings) -> Iterator[AttendSettings]:
    """Blocks worth trying."""
    for slots, warps, stages in ((16, 4, 2), (32, 2, 3), (32, 4, 2), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 8, 3),
                                 (128, 8, 2)):  # fmt: skip
        yield replace(settings, slots=slots, warps=warps, stages=stages)


def shares(settings: AttendSettings) -> Iterator[AttendSettings]:
    """Numbers of splits worth trying."""
    for splits in (4, 8, 16, 24, 32, 48, 64, 96, 128):
        yield replace(settings, splits=splits)


def finishes(settings: AttendSettings) -> Iterator[AttendSettings]:
    """Ways to end worth trying."""
    for channels in (16, 32, 64, 128):
        for pdl in (False, True) if PDL else (False,):
            yield replace(settings, channels=channels, pdl=pdl)


def search(first: Any, families: list[Callable[[Any], Iterator[Any]]], time_one: Callable[[Any], float]) -> Any:
    """Better one group of settings after the other; (best, {settings: us})."""
    times = {first: time_one(first)}
    for family in families:
        for candidate in family(min(times, key=times.__getitem__)):
            if candidate not in times:
                try:
                    times[candidate] = time_one(candidate)
                except Exception as fault:  # what does not compile or launch is no candidate
                    print("   failed", candidate, str(fault)[:80].replace("\n", " "), flush=True)
    return min(times, key=times.__getitem__), times


def time_attention(name: str, shape: Heads, batch: int, length: int, rate: float, quick: bool) -> dict[str, Any]:
    """Time the step, the plain form and torch's, at one length."""
    slots, samples = length + 64, 5 if quick else 12
    size = 2 * batch * shape.J * length * shape.C * 2
    count = min(max(FLUSH_BYTES // size, 3), 64)
    cases = [make_case(shape, [length] * batch, slots, torch.bfloat16, seed) for seed in range(count)]
    placements = [place(case, shape, length) for case in cases]
    q = torch.randn(batch, 1, shape.H, shape.C, device="cuda", dtype=torch.bfloat16)
    settings = settings_of(shape, batch, slots, torch.bfloat16)

    def over(run: Callable[[Case, Any], object]) -> float:
        return time_over([lambda c=c, p=p: run(c, p) for c, p in zip(cases, placements, strict=True)], samples)

    def step(s: AttendSettings) -> float:
        return over(lambda c, p: attend_step_op_(c.projected, c.norm, c.cache, p, heads=shape.H, eps=EPS, settings=s))

    def sdpa(case: Case, _: Any) -> Tensor:
        keys, values = case.cache.k_BJMC[:, :, :length], case.cache.v_BJMC[:, :, :length]
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, enable_gqa=True)

    best, times = search(settings, [] if quick else [tiles, shares, finishes], step)
    row = {
        "step_default": times[settings],
        "step": times[best],
        "lengths": over(lambda c, p: attend_lengths_op(q, *c.cache, c.lengths + 1, settings=best)),
        "mask": over(lambda c, p: attend_op(q, *(x[:, :, :length] for x in c.cache), p.mask_BTM, settings=best)),
        "functions": over(lambda c, p: step_reference(c, shape, p, p.mask_BTM, c.cache)),
        "sdpa_exact_length": over(sdpa),
        "sdpa_mask": over(lambda c, p: attend(q, *(x[:, :, :length] for x in c.cache), p.mask_BTM)),
        "limit": size / rate / 1e6,
    }
    top = sorted(times.items(), key=lambda item: item[1])[:5]
    return {
        "part": "attend", "shape": name, "batch": batch, "length": length, "us": row, "gbps": size / row["step"] / 1e3,
        "default": asdict(settings), "top": [{"us": us, **asdict(s)} for s, us in top],
    }  # fmt: skip


def head_tiles(settings: HeadSettings) -> Iterator[HeadSettings]:
    """Blocks worth trying."""
    products = ((64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 256, 4, 3), (64, 64, 4, 6), (128, 64, 4, 4),
                (128, 128, 4, 3), (128, 128, 8, 3), (32, 128, 4, 4), (32, 256, 4, 3), (16, 256, 4, 4))  # fmt: skip
    for rows, depth, warps, stages in products:
        yield replace(settings, rows=rows, depth=depth, warps=warps, stages=stages, dot=True)
    if not settings.dot:
        for rows, depth, warps, stages in ((4, 512, 4, 3), (8, 256, 4, 4), (8, 512, 4, 3), (16, 128, 4, 4),
                                           (16, 256, 4, 2), (16, 256, 4, 3), (16, 256, 8, 4), (16, 512, 8, 3),
                                           (32, 128, 4, 4), (32, 256, 8, 4), (64, 64, 4, 4)):  # fmt: skip
            yield replace(settings, rows=rows, depth=depth, warps=warps, stages=stages)


def head_pdl(settings: HeadSettings) -> Iterator[HeadSettings]:
    """With and without dependent launch."""
    yield replace(settings, pdl=PDL)


def time_head(name: str, vocabulary: int, hidden: int, batch: int, rate: float, quick: bool) -> dict[str, Any]:
    """Time the head with its greedy choice, and torch's."""
    samples, size = 5 if quick else 12, vocabulary * hidden * 2
    x = torch.randn(batch, hidden, device="cuda", dtype=torch.bfloat16)
    matrices = [torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    settings = default_head_settings(batch, torch.bfloat16, target="hip" if torch.version.hip else "cuda")

    def over(run: Callable[[Tensor], object]) -> float:
        return time_over([lambda w=w: run(w) for w in matrices], samples)

    families = [] if quick else [head_tiles, head_pdl]
    best, times = search(settings, families, lambda s: over(lambda w: choose_tokens_op(x, w, settings=s)))
    row = {
        "greedy_default": times[settings],
        "greedy": times[best],
        "logits": over(lambda w: compute_logits_op(x, w, settings=best)),
        "linear_argmax": over(lambda w: F.linear(x, w).argmax(-1)),
        "linear": over(lambda w: F.linear(x, w)),
        "limit": size / rate / 1e6,
    }
    top = sorted(times.items(), key=lambda item: item[1])[:5]
    return {
        "part": "head", "shape": name, "batch": batch, "us": row, "gbps": size / row["greedy"] / 1e3,
        "default": asdict(settings), "top": [{"us": us, **asdict(s)} for s, us in top],
    }  # fmt: skip


def report(row: dict[str, Any]) -> None:
    """Print one row."""
    times = "  ".join(f"{key} {us:.1f}" for key, us in row["us"].items())
    length = f" M={row['length']}" if "length" in row else ""
    print(f"{row['part']} {row['shape']} B={row['batch']}{length}: {times}  {row['gbps']:.0f} GB/s", flush=True)
    print(f"   best {row['top'][0]}", flush=True)


def main() -> None:
    """Check, time, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="attend,head")
    parser.add_argument("--quick", action="store_true", help="default settings only")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--lengths", default="512,4096,32768")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--few", action="store_true", help="the newest token with its drafts alone, in seconds")
    arguments = parser.parse_args()
    if arguments.few:
        faults = attend_few.run()
        sys.exit("no figures, since these are wrong:\n" + "\n".join(faults) if faults else 0)
    parts = arguments.parts.split(",")
    batches, lengths = ([int(n) for n in text.split(",")] for text in (arguments.batches, arguments.lengths))
    if faults := check_all(parts):
        sys.exit("no figures, since these are wrong:\n" + "\n".join(faults))
    print("all checks passed", flush=True)
    rate = copy_rate()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    result = {"device": torch.cuda.get_device_name(), "versions": versions, "copy_tbps": rate, "unit": "us, bf16"}
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        report(row)
        if arguments.out:
            arguments.out.write_text(json.dumps(result | {"rows": rows}, indent=1))

    for batch in batches:
        for name, (vocabulary, hidden) in HEADS.items() if "head" in parts else ():
            keep(time_head(name, vocabulary, hidden, batch, rate, arguments.quick))
        for name, shape in ATTENTION.items() if "attend" in parts else ():
            for length in lengths:
                keep(time_attention(name, shape, batch, length, rate, arguments.quick))
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
