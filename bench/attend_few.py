"""Attention of the newest token and its drafts on one GPU: held against the functions it replaces, then timed.

``python -m bench.attend_kernels --few`` runs this file. Letters: as there; T tokens of each sequence.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.moe_shapes import capture, time_graph
from fmoe.compile.attend_few_ops import attend_few_lengths_op, attend_few_step_op_
from fmoe.compile.attend_ops import attend_step_op_
from fmoe.compile.decode_settings import AttendSettings, default_attend_settings
from fmoe.compile.device import target_of
from fmoe.functional import KVCache, Placement, append_kv_, apply_rotary, attend_rows, place_tokens, rms_norm

EPS = 1e-6
SLOTS = 4224  # of every cache, whatever its content, as a batch's caches are
CONTEXTS = (512, 4096)
TOKENS = (2, 3, 4)
COPIES = {512: 160, 4096: 24}  # caches that one graph reads, so that the L2 cache does not help


class Heads(NamedTuple):
    """One attention layer."""

    H: int
    J: int
    C: int
    rotated: int
    gated: bool


SHAPES = {"qwen3next": Heads(16, 2, 256, 64, True), "qwen3-30b": Heads(32, 4, 128, 128, False)}


class Case(NamedTuple):
    """What one call takes."""

    projected: Tensor
    norm: Tensor
    cache: KVCache
    placement: Placement


def make_case(shape: Heads, tokens: int, before: list[int], dtype: torch.dtype, *, slots: int | None = None) -> Case:
    """Draw a case whose rows have so many tokens before the new ones; ``slots`` asks for a mask over as many."""

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device="cuda", dtype=dtype)

    columns = ((2 if shape.gated else 1) * shape.H + 2 * shape.J) * shape.C
    cache = KVCache(*(draw(len(before), shape.J, SLOTS, shape.C) for _ in range(2)))
    half = shape.rotated // 2
    frequencies = 10000.0 ** -(torch.arange(half, device="cuda") / half)
    lengths = torch.tensor(before, device="cuda")
    placement = place_tokens(lengths, frequencies, tokens=tokens, slots=slots, dtype=dtype)
    norm = 1 + draw(shape.H + shape.J, shape.C).float() / 4
    return Case(draw(len(before), tokens, columns), norm, cache, placement)


def doubled(case: Case) -> Case:
    """Give the case in float64."""
    placement = Placement(*(p.double() if p is not None and p.is_floating_point() else p for p in case.placement))
    return Case(case.projected.double(), case.norm.double(), KVCache(*(p.double() for p in case.cache)), placement)


def by_functions(case: Case, shape: Heads) -> Tensor:
    """The functions that the step replaces, one after the other."""
    keys = shape.J * shape.C
    sizes = [(shape.H + shape.J) * shape.C, keys, shape.H * shape.C if shape.gated else 0]
    qk, v, gate = case.projected.split_with_sizes(sizes, -1)
    qk = rms_norm(qk.unflatten(-1, (shape.H + shape.J, shape.C)), case.norm, eps=EPS)
    q, k = apply_rotary(qk, case.placement.cos_BTR, case.placement.sin_BTR).split([shape.H, shape.J], 2)
    append_kv_(case.cache, k, v.unflatten(-1, (shape.J, shape.C)), case.placement.positions_BT)
    mask = case.placement.mask_BTM
    assert mask is not None
    y = attend_rows(q, *(part[:, :, : mask.shape[-1]] for part in case.cache), mask).flatten(2)
    return y * gate.sigmoid() if shape.gated else y


def settings_of(shape: Heads, tokens: int, dtype: torch.dtype, batch: int = 1) -> AttendSettings:
    """Choose by rule for this GPU."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    return default_attend_settings(batch, shape.H, shape.J, shape.C, SLOTS, dtype, target=target, tokens=tokens)


def run_step(case: Case, shape: Heads, settings: AttendSettings) -> Tensor:
    """Call the op."""
    op = attend_few_step_op_ if case.projected.shape[1] > 1 else attend_step_op_
    return op(case.projected, case.norm, case.cache, case.placement, heads=shape.H, eps=EPS, settings=settings)


def error(y: Tensor, exact: Tensor) -> float:
    """Relative Frobenius error; NaN counts as infinite."""
    ratio = ((y.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()
    return ratio if ratio == ratio else float("inf")


def check_step(name: str, tokens: int, dtype: torch.dtype) -> list[str]:
    """Hold a step on mixed lengths against float64, and its cache too; it may be off as much as the functions are."""
    shape, before = SHAPES[name], [700 - tokens, 0, 257, 64]
    case = make_case(shape, tokens, before, dtype, slots=700)
    exact_case = doubled(case)
    exact = by_functions(exact_case, shape)
    plain = case._replace(cache=KVCache(*(part.clone() for part in case.cache)))
    allowed = 1.5 * error(by_functions(plain, shape), exact) + 1e-6
    settings = settings_of(shape, tokens, dtype)
    y, found = run_step(case, shape, settings), []
    if not error(y, exact) <= allowed:
        found.append(f"off by {error(y, exact):.2e}, allowed {allowed:.2e}")
    pairs = zip(case.cache, exact_case.cache, strict=True)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    if not all(torch.allclose(a.double(), b, rtol=tolerance, atol=tolerance) for a, b in pairs):
        found.append("wrote another cache")
    if not torch.equal(run_step(case, shape, settings), y):
        found.append("does not repeat")
    return [f"{name} T={tokens} {dtype}: {fault}" for fault in found]


def check_latents() -> list[str]:
    """Hold three tokens over latents against float64."""
    latent = torch.randn(3, 1, 400, 576, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(3, 3, 128, 576, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([400, 3, 130], device="cuda")
    ends = lengths[:, None] - 2 + torch.arange(3, device="cuda")
    mask = torch.arange(400, device="cuda") < ends[..., None]
    y = attend_few_lengths_op(q, latent, latent[..., :512], lengths, scale=0.05)
    exact = attend_rows(q.double(), latent.double(), latent[..., :512].double(), mask, scale=0.05)
    return [] if error(y, exact) <= 1e-2 else [f"latents: off by {error(y, exact):.2e}"]


def check_all() -> list[str]:
    """Run every check; each combination is compiled, hence few of them."""
    torch.backends.cuda.matmul.allow_tf32 = False
    found = check_latents()
    for name in SHAPES:
        for tokens in TOKENS:
            found += check_step(name, tokens, torch.bfloat16)
        found += check_step(name, 3, torch.float32)
    return found


def time_shape(name: str, context: int) -> dict[str, float]:
    """Microseconds of a step for one token and for a few, by the number of splits where it is not the rule's."""
    shape, row = SHAPES[name], {}
    for tokens in (1, *TOKENS):
        cases = [
            make_case(shape, tokens, [context - tokens], torch.bfloat16, slots=None) for _ in range(COPIES[context])
        ]
        rule = settings_of(shape, tokens, torch.bfloat16)
        for splits in dict.fromkeys((rule.splits, 32, 64, 128) if tokens > 1 else (rule.splits,)):
            settings = replace(rule, splits=splits)
            graph = capture(lambda cases=cases, s=settings: [run_step(case, shape, s) for case in cases])
            key = f"T={tokens}" if splits == rule.splits else f"T={tokens}/{splits}"
            row[key] = time_graph(graph, 5) / len(cases)
    return row


def run() -> list[str]:
    """Check, then print the times; gives what is wrong."""
    if faults := check_all():
        return faults
    print("all checks passed", flush=True)
    for name in SHAPES:
        for context in CONTEXTS:
            times: dict[str, Any] = time_shape(name, context)
            print(
                f"few {name} B=1 M={context} us: " + "  ".join(f"{k} {us:.1f}" for k, us in times.items()), flush=True
            )
    return []
