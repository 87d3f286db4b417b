"""One mixture-of-experts layer against transformers' and against plain torch, in one process, interleaved.

    python -m bench.moe_peers [--shapes qwen3next,qwen3,mixtral,dsv2lite] [--tokens 1,8,64,256,2048,16384] [--json FILE]

Peers: transformers' layer with its grouped_mm and, up to 8 tokens, batched_mm experts, and fmoe's reference over
torch's grouped product. Every method must first agree with a float32 loop over the experts. On a GPU each is captured
in a graph over several weight sets; printed are microseconds for a layer, GB/s of the weights that were hit, and the
ratio to the limit: those bytes at the rate of a copy, or the products at that of a large matmul, both measured here.
On a CPU, with --scale to divide the sizes, calls are timed as they are.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench.moe_layer import SHAPES, draw_weights, planned, router_config, separate_params
from bench.moe_shapes import capture
from fmoe.compile.device import describe_device
from fmoe.functional.moe import add_shared_expert, route_and_compute

BLOCKS = {
    "qwen3next": ("qwen3_next", "Qwen3NextSparseMoeBlock"),
    "qwen3": ("qwen3_moe", "Qwen3MoeSparseMoeBlock"),
    "mixtral": ("mixtral", "MixtralSparseMoeBlock"),
    "dsv2lite": ("deepseek_v2", "DeepseekV2Moe"),
}
ROUNDS = 15
GATE_ROWS = 64  # rows that the correctness gate looks at
LARGEST_ERROR = 2e-2
BATCHED_TOKENS = 8  # beyond, gathering the matrices of every row needs too much memory

Method = Callable[[Tensor], Tensor]


def transformers_layer(name: str, w: Mapping[str, Tensor], s: Mapping[str, Any], experts: str) -> Method:
    """Make transformers' layer over the given weights."""
    family, class_name = BLOCKS[name]
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    config = SimpleNamespace(
        hidden_size=s["D"], num_experts=s["E"], num_local_experts=s["E"], n_routed_experts=s["E"],
        num_experts_per_tok=s["K"], moe_intermediate_size=s["Fi"], intermediate_size=s["Fi"],
        shared_expert_intermediate_size=s["S"], n_shared_experts=s["S"] // s["Fi"], norm_topk_prob=s["renorm"],
        hidden_act="silu", mlp_bias=False, n_group=1, topk_group=1, topk_method="greedy", routed_scaling_factor=1.0,
        router_jitter_noise=0.0, _experts_implementation=experts,
    )  # fmt: skip
    with torch.device("meta"):
        block = getattr(module, class_name)(config)
    gate, up = w["s13"].chunk(2) if s["S"] else (None, None)
    values = {
        "gate.weight": w["gate"], "experts.gate_up_proj": w["w13"], "experts.down_proj": w["w2"],
        "gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": w.get("s2"),
        "shared_expert_gate.weight": w.get("sg"),
    }  # fmt: skip
    state = {
        key: next(value for end, value in values.items() if key == end or key.endswith(f".{end}"))
        for key in block.state_dict()
    }
    block.load_state_dict(state, assign=True)
    block.eval()

    def run(x_TD: Tensor) -> Tensor:
        y = block(x_TD[None])
        y_TD: Tensor = (y[0] if isinstance(y, tuple) else y).view_as(x_TD)
        return y_TD

    return run


def torch_layer(w: Mapping[str, Tensor], s: Mapping[str, Any]) -> Method:
    """Make fmoe's reference: routing, torch's grouped product, and the shared expert apart."""
    params, config = separate_params(w, s), router_config(s)

    def run(x_TD: Tensor) -> Tensor:
        y_TD = route_and_compute(x_TD, params, config)
        return y_TD if params.shared is None else add_shared_expert(y_TD, x_TD, params.shared)

    return run


def make_methods(name: str, w: Mapping[str, Tensor], s: Mapping[str, Any], tokens: int) -> dict[str, Method]:
    """Make every method over one set of weights."""
    methods = {
        "fmoe": planned(w, s),
        "fmoe reference": torch_layer(w, s),
        "transformers grouped_mm": transformers_layer(name, w, s, "grouped_mm"),
    }
    if tokens <= BATCHED_TOKENS:
        methods["transformers batched_mm"] = transformers_layer(name, w, s, "batched_mm")
    return methods


def loop_reference(x_TD: Tensor, w: Mapping[str, Tensor], s: Mapping[str, Any]) -> tuple[Tensor, int]:
    """Compute the layer in float32, one expert after the other, with the number of distinct experts."""
    p_TE = torch.softmax((x_TD @ w["gate"].T).float(), -1)
    weights_TK, ids_TK = p_TE.topk(s["K"], -1)
    if s["renorm"]:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    x32, y_TD = x_TD.float(), torch.zeros(x_TD.shape, device=x_TD.device)
    hit = ids_TK.unique().tolist()
    for e in hit:
        t, k = (ids_TK == e).nonzero(as_tuple=True)
        gate, up = (x32[t] @ w["w13"][e].float().T).chunk(2, -1)
        y_TD.index_add_(0, t, (gate * gate.sigmoid() * up) @ w["w2"][e].float().T * weights_TK[t, k, None])
    if s["S"]:
        gate, up = (x32 @ w["s13"].float().T).chunk(2, -1)
        shared_TD = (gate * gate.sigmoid() * up) @ w["s2"].float().T
        y_TD += torch.sigmoid(x32 @ w["sg"].float().T) * shared_TD if s["gated"] else shared_TD
    return y_TD, len(hit)


def measure_rates(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Measure bytes/s of a copy, read and written, and operations/s of a large product."""
    size = 1 << (30 if device == "cuda" else 25)
    a = torch.ones(size, device=device, dtype=dtype)
    b, side = torch.empty_like(a), 8192 if device == "cuda" else 1024
    m = torch.randn(side, side, device=device, dtype=dtype)
    copy_s, product_s = (min(_seconds(run, device) for _ in range(8)) for run in (lambda: b.copy_(a), lambda: m @ m))
    return 2 * size * a.element_size() / copy_s, 2 * side**3 / product_s


def _seconds(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def run_sets(methods: list[Method], x_TD: Tensor) -> list[Tensor]:
    """Run one method over all weight sets."""
    return [method(x_TD) for method in methods]


def measure(
    name: str, s: dict[str, Any], tokens: int, weights: list[dict[str, Tensor]], rates: tuple[float, float]
) -> Any:
    """Measure one shape at one token count; a method that is wrong or cannot be captured is named, not timed."""
    device, dtype = weights[0]["gate"].device.type, weights[0]["gate"].dtype
    x_TD = torch.randn(tokens, s["D"], device=device).to(dtype)
    sample = torch.randperm(tokens, device=device)[:GATE_ROWS]
    expected = loop_reference(x_TD[sample], weights[0], s)[0]
    hit = statistics.mean(_count_hit(x_TD, w, s) for w in weights)
    size = ((hit * 3 * s["Fi"] + 3 * s["S"] + s["E"]) * s["D"] + 2 * tokens * s["D"]) * x_TD.element_size()
    products = 2 * tokens * s["D"] * (3 * s["Fi"] * s["K"] + 3 * s["S"] + s["E"])
    limit_s = max(size / rates[0], products / rates[1])
    by_set = [make_methods(name, w, s, tokens) for w in weights]
    runs: dict[str, Callable[[], object]] = {}
    found: dict[str, Any] = {}
    for method in by_set[0]:
        y_TD = by_set[0][method](x_TD)[sample].float()
        error = ((y_TD - expected).norm() / expected.norm()).item()
        found[method] = {"error": error}
        if not error < LARGEST_ERROR:
            found[method]["fault"] = f"error {error:.1e}, not timed"
            continue
        call = partial(run_sets, [methods[method] for methods in by_set], x_TD)
        runs[method] = capture(call).replay if device == "cuda" else call
    samples: dict[str, list[float]] = {method: [] for method in runs}
    for turn in range(ROUNDS + 2):
        for method in list(runs) if turn % 2 else list(runs)[::-1]:
            seconds = _seconds(runs[method], device)
            if turn >= 2:
                samples[method].append(seconds / len(weights))
    for method, values in samples.items():
        seconds = statistics.median(values)
        found[method] |= {"us": seconds * 1e6, "gbps": size / seconds / 1e9, "over_limit": seconds / limit_s}
    for method, values_of in found.items():
        line = values_of.get("fault") or (
            f"{values_of['us']:10.1f} us {values_of['gbps']:7.0f} GB/s  x {values_of['over_limit']:.2f}"
        )
        print(f"{name:10s} T={tokens:<6d} {method:24s} {line}  error {values_of['error']:.1e}", flush=True)
    return {"shape": name, "tokens": tokens, "limit_us": limit_s * 1e6, "methods": found}


def _count_hit(x_TD: Tensor, w: Mapping[str, Tensor], s: Mapping[str, Any]) -> int:
    return len((x_TD @ w["gate"].T).float().topk(s["K"], -1).indices.unique())


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,8,64,256,2048,16384")
    parser.add_argument("--scale", type=int, default=1, help="divide widths and the number of experts by this")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rates = measure_rates(device, dtype)
    print(f"copy {rates[0] / 1e12:.2f} TB/s   product {rates[1] / 1e12:.1f} TFLOP/s", flush=True)
    rows = []
    with torch.inference_mode():
        for name in arguments.shapes.split(","):
            s = dict(SHAPES[name])
            for size in ("D", "Fi", "S", "E"):
                s[size] = s[size] // arguments.scale if size != "E" else max(s[size] // arguments.scale, s["K"])
            weights = [draw_weights(s, seed, device, dtype) for seed in range(3 if name == "mixtral" else 5)]
            rows += [measure(name, s, int(count), weights, rates) for count in arguments.tokens.split(",")]
            del weights
    if arguments.json:
        found = describe_device(torch.device(device))
        arguments.json.write_text(
            json.dumps({"device": found.name, "versions": found.versions, "rates": rates, "rows": rows})
        )


if __name__ == "__main__":
    main()
