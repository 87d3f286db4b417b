"""Compare every MoE kernel with torch on the GPU, and say what is wrong.

    python -m bench.check_kernels [--quick]

Uninitialised memory is filled with NaN. The choice of experts is held against ``route_fused`` on the kernel's own
logits, the outputs against float64 on sampled tokens, where the error may be 1.5 times that of torch in the model's
dtype; a second run and a graph's replay must give the same bits.
"""

import argparse
from dataclasses import replace

import torch
from torch import Tensor

from bench.moe_shapes import SHAPES, Layer, Shape, capture, default_for, random_layer
from fmoe.compile.kernels import Settings, compute_experts_kernels, route_tokens, run_moe_layer, sort_pairs
from fmoe.compile.kernels.route import compute_logits
from fmoe.functional import compute_experts_grouped, route_fused
from fmoe.functional.routing import RouterConfig, Routing

AWKWARD = {
    "E60": Shape(60, 4, 1, 96, 40, 1, True),
    "E7": Shape(7, 3, 0, 96, 40, 0, False),
    "E33": Shape(33, 5, 3, 200, 72, 3, True),
    "E8": Shape(8, 8, 2, 64, 24, 0, False),
}
RULES = {
    "softmax": lambda s: s.config,
    "sigmoid": lambda s: RouterConfig(s.E, s.K, scoring="sigmoid", renormalize=True, sum_eps=1e-20, scale=2.5),
    "chosen": lambda s: RouterConfig(s.E, s.K, scoring="chosen_softmax", round_weights=True),
    "fp32": lambda s: RouterConfig(s.E, s.K, scoring="chosen_sigmoid", float32_logits=True),
}


def settings_of(shape: Shape, tokens: int) -> dict[str, Settings]:
    """Give settings of every path that can run a token count."""
    plain = default_for(shape, tokens)
    few, some, many = (default_for(SHAPES["qwen3next"], count) for count in (1, 64, 16384))
    found = {"default": plain, "sorted": default_for(SHAPES["qwen3next"], 4096), "sorted128": many}
    found["descriptors"] = replace(many, descriptors=True, programs=132)
    pairs = tokens * (shape.K + shape.S)
    if pairs <= 20000:
        found |= {
            "grouped": some,
            "owners": replace(some, owners=True),
            "token": replace(some, token_down=True, down=few.down),
        }
    if pairs <= 3000:
        found |= {"slots": replace(few, fuse_choice=False), "fused": few}
    return found | {f"{name}+pdl": replace(s, pdl=True) for name, s in found.items() if name != "default"}


def relative(y: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; NaN counts as infinite."""
    error = ((y.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    return error if error == error else float("inf")


def experts_exact(x_TD: Tensor, routing: Routing, stacks: Layer) -> Tensor:
    """Compute the experts' outputs in float64, one expert at a time."""
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float64, device=x_TD.device)
    for e in routing.experts_TK.unique().tolist():
        t, k = (routing.experts_TK == e).nonzero(as_tuple=True)
        gate, up = (x_TD[t].double() @ stacks.w_gate_up_EPD[e].double().T).chunk(2, -1)
        rows = (gate * gate.sigmoid() * up) @ stacks.w_down_EDF[e].double().T
        y_TD.index_add_(0, t, rows * routing.weights_TK[t, k, None].double())
    return y_TD


def check_routing(x_TD: Tensor, stacks: Layer, shape: Shape, config: RouterConfig, settings: Settings) -> list[str]:
    """Hold the routing kernel against ``route_fused`` on the same logits, and its table against its ids."""
    bias_E = torch.randn(shape.E, device=x_TD.device) * 0.1 if config.scoring == "sigmoid" else None
    faults = []
    parts, _ = compute_logits(x_TD, stacks.w_router_RD, settings, num_experts=shape.E)
    logits_TE = parts[0].clone()
    for part in parts[1:]:
        logits_TE += part
    exact = x_TD.double() @ stacks.w_router_RD.double().T
    if (error := relative(logits_TE, exact)) > 1e-5:
        faults.append(f"logits: error {error:.2g}")
    if not config.float32_logits:
        logits_TE = logits_TE.to(x_TD.dtype)
    expected = route_fused(logits_TE, bias_E, config, slots=shape.S)
    routing, table = route_tokens(x_TD, stacks.w_router_RD, bias_E, config, settings, slots=shape.S)
    wrong = (routing.experts_TK != expected.experts_TK).sum().item()
    if wrong:
        faults.append(f"ids: {wrong} of {routing.experts_TK.numel()} differ")
    elif (error := relative(routing.weights_TK, expected.weights_TK.double())) > 4e-3 * config.round_weights + 1e-5:
        faults.append(f"weights: error {error:.2g}")
    if settings.path == "grouped":
        counts = torch.bincount(routing.experts_TK[:, : shape.K].flatten(), minlength=shape.E)
        if not torch.equal(counts.int(), table.counts_E):
            faults.append("table: counts differ")
    return faults


def check_sort(ids_TK: Tensor, experts: int, block: int) -> list[str]:
    """Hold the counting sort against a stable sort."""
    tiles = sort_pairs(ids_TK, num_experts=experts, block=block)
    flat = ids_TK.flatten()
    faults = []
    if not torch.equal(tiles.order_N.long(), flat.argsort(stable=True)):
        faults.append("sort: order differs")
    counts = torch.bincount(flat, minlength=experts)
    if not torch.equal(tiles.offsets_E.long(), counts.cumsum(0)):
        faults.append("sort: offsets differ")
    cut = [(e, s) for e, (n, end) in enumerate(zip(counts.tolist(), counts.cumsum(0).tolist(), strict=True))
           for s in range(end - n, end, block)]  # fmt: skip
    n = int(tiles.used)
    found = list(zip(tiles.experts_X[:n].tolist(), tiles.starts_X[:n].tolist(), strict=True))
    return faults if found == cut else [*faults, f"tiles: {n} listed, {len(cut)} expected or in other order"]


def check_experts(x_TD: Tensor, stacks: Layer, shape: Shape, settings: Settings, routing: Routing) -> list[str]:
    """Hold one path against float64 and torch."""
    y = compute_experts_kernels(x_TD, routing, stacks.w_gate_up_EPD, stacks.w_down_EDF, settings, slots=shape.S)
    sample = torch.randperm(x_TD.shape[0], device=x_TD.device)[:48]
    some = Routing(routing.weights_TK[sample], routing.experts_TK[sample])
    exact = experts_exact(x_TD[sample], some, stacks)
    torch_y = compute_experts_grouped(x_TD[sample], some, stacks.w_gate_up_EPD, stacks.w_down_EDF)
    error, allowed = relative(y[sample], exact), 1.5 * relative(torch_y, exact) + 1e-6
    faults = [] if error <= allowed else [f"error {error:.3g}, allowed {allowed:.3g}"]
    return [*faults, "NaN in y"] if y.isnan().any() else faults


def check_layer(x_TD: Tensor, stacks: Layer, shape: Shape, settings: Settings) -> list[str]:
    """Hold repetition and replay of the whole layer against its first run."""

    def run() -> Tensor:
        return run_moe_layer(
            x_TD, stacks.w_router_RD, None, stacks.w_gate_up_EPD, stacks.w_down_EDF, shape.config, settings
        )

    first = run()
    routing, _ = route_tokens(
        x_TD, stacks.w_router_RD, None, shape.config, replace(settings, fuse_choice=False), slots=shape.S
    )
    sample = torch.arange(min(32, x_TD.shape[0]), device=x_TD.device)
    exact = experts_exact(x_TD[sample], Routing(routing.weights_TK[sample], routing.experts_TK[sample]), stacks)
    faults = [] if (error := relative(first[sample], exact)) < 1e-2 else [f"layer: error {error:.3g}"]
    if not torch.equal(first, run()):
        faults.append("repetition differs")
    kept: list[Tensor] = []
    graph = capture(lambda: kept.append(run()))
    for _ in range(10):
        kept[-1].fill_(float("nan"))
        graph.replay()
    if not torch.equal(first, kept[-1]):
        faults.append("replay differs")
    return faults


def skewed_routings(shape: Shape, tokens: int) -> dict[str, Routing]:
    """Give routings that are spread, and that all tokens share."""
    shared = torch.arange(shape.E, shape.E + shape.S, dtype=torch.int32, device="cuda").expand(tokens, -1)
    weights = torch.rand(tokens, shape.K + shape.S, device="cuda")
    spread = torch.rand(tokens, shape.E, device="cuda").topk(shape.K).indices.int()
    same = torch.arange(shape.E - shape.K, shape.E, dtype=torch.int32, device="cuda").expand(tokens, -1)
    return {
        name: Routing(weights, torch.cat((ids, shared), 1).contiguous())
        for name, ids in (("spread", spread), ("same", same))
    }


def check_shape(name: str, shape: Shape, tokens: list[int], dtype: torch.dtype) -> int:
    """Check all paths of a shape; print each fault."""
    stacks, faults, checks = random_layer(shape, 0, dtype=dtype), 0, 0
    for count in tokens:
        x_TD = torch.randn(count, shape.D, device="cuda", dtype=dtype)
        routings = skewed_routings(shape, count)
        found: list[tuple[str, list[str]]] = [
            ("sort", check_sort(routing.experts_TK, shape.E + shape.S, block))
            for routing in routings.values() for block in (16, 128)
        ]  # fmt: skip
        for label, settings in settings_of(shape, count).items():
            try:
                if "pdl" not in label:
                    for rule, config in RULES.items():
                        plain = replace(settings, fuse_choice=False)
                        found.append((f"{label} {rule}", check_routing(x_TD, stacks, shape, config(shape), plain)))
                found += [(f"{label} {r}", check_experts(x_TD, stacks, shape, settings, routings[r])) for r in routings]
                found.append((f"{label} layer", check_layer(x_TD, stacks, shape, settings)))
                torch.cuda.synchronize()
            except Exception as error:
                found.append((label, [f"{type(error).__name__}: {str(error)[-160:]}"]))
        checks += len(found)
        for label, lines in found:
            faults += len(lines)
            for line in lines:
                print(f"WRONG {name} {dtype} T={count} {label}: {line}", flush=True)
    print(f"{name} {dtype}: {checks} checks, {faults} faults", flush=True)
    return faults


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer token counts, bfloat16 only")
    parser.add_argument("--shapes", default=",".join((*AWKWARD, *SHAPES)))
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    faults = 0
    for name in arguments.shapes.split(","):
        shape = (AWKWARD | SHAPES)[name]
        small = name in AWKWARD
        tokens = [1, 2, 5, 33, 70] if small else [1, 8, 64, 700]
        if not arguments.quick:
            tokens += [128, 1000] if small else [2, 16, 256, 5000]
        for dtype in (torch.bfloat16,) if arguments.quick or not small else (torch.bfloat16, torch.float16):
            faults += check_shape(name, shape, tokens, dtype)
        torch.cuda.empty_cache()
    print("ALL RIGHT" if not faults else f"{faults} FAULTS")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
