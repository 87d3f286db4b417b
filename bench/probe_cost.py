"""What the AITER boundary costs where AITER is not: the probe, cold and kept, and the routing of the fallback.

    python -m bench.probe_cost             also compiled
    python -m bench.probe_cost --quick     plain functions only, fewer samples

The probe runs against the stand-in of the contract tests, which compiles nothing: a real AITER adds, once, the minutes
of its own builds. The routing is compared with the same steps written out in torch.
"""

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fmoe.compile.probing import probe, probe_aiter
from fmoe.functional.routing import RouterConfig, Routing, route_fused
from tests.contract.standin.build import make_standin

from .measure import CLOCKS, median_ratio, spread_of_ratio, time_calls

CPU = torch.device("cpu")
KEPT_LIMIT_S = 0.05
SHAPES = [(tokens, experts, top_k) for experts, top_k in ((512, 10), (128, 8), (60, 4)) for tokens in (1, 16, 512)]

Route = Callable[[Tensor], Routing | tuple[Tensor, Tensor]]


def main() -> int:
    """Measure and print; the exit status is 1 where the two ways to route disagree."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.probe_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples, nothing compiled")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("fmoe").setLevel(logging.ERROR)
    print(f"cpu, {options.threads} threads, torch {torch.__version__}\n")
    measure_probe(rounds=5 if options.quick else 20)
    print(f"\n{'routing, softmax, K + 1 columns, bfloat16':44} {'by hand':>9} {'fmoe':>9}  ratio (quartiles)")
    agree = [measure_routing(compiled=False, rounds=20 if options.quick else 40)]
    if not options.quick:
        agree.append(measure_routing(compiled=True, rounds=40))
    return 0 if all(agree) else 1


def measure_probe(*, rounds: int) -> None:
    """Print the seconds of a probe without an AMD GPU, of the first with the stand-in, and of later ones."""
    nothing_s = [_seconds(partial(probe, CPU)) for _ in range(rounds)]
    print(f"probe without an AMD GPU       {statistics.median(nothing_s) * 1e3:9.2f} ms")
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(make_standin(Path(folder) / "site")))
        os.environ |= {"FMOE_ASSUME_ARCH": "gfx942", "FMOE_CACHE_DIR": str(Path(folder) / "cache")}
        cold_s = _seconds(partial(probe, CPU))
        record = probe_aiter(CPU)
        assert record.present, record.reason
        kept_s = statistics.median([_seconds(partial(probe, CPU)) for _ in range(rounds)])
        sys.path.pop(0)
        del os.environ["FMOE_ASSUME_ARCH"]
    print(f"first probe, with self-test    {cold_s * 1e3:9.2f} ms")
    verdict = "below" if kept_s < KEPT_LIMIT_S else "NOT BELOW"
    print(f"probe whose outcome is kept    {kept_s * 1e3:9.2f} ms  {verdict} {KEPT_LIMIT_S * 1e3:.0f} ms")


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def route_by_hand(logits_TE: Tensor, /, *, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Write the routing of Qwen3-Next out: equal logits to the lowest id, which ``topk`` would not promise."""
    probs_TE = logits_TE[:, :experts].float().softmax(-1)
    sorted_TE, order_TE = probs_TE.sort(dim=-1, descending=True, stable=True)
    weights_TK, ids_TK = sorted_TE[:, :top_k], order_TE[:, :top_k].int()
    weights_TK = (weights_TK / weights_TK.sum(-1, keepdim=True)).to(logits_TE.dtype).float()
    shared_TS = logits_TE[:, experts:].float().sigmoid()
    shared_ids_TS = ids_TK.new_full((len(ids_TK), 1), experts)
    return torch.cat((weights_TK, shared_TS), -1), torch.cat((ids_TK, shared_ids_TS), -1)


def measure_routing(*, compiled: bool, rounds: int) -> bool:
    """Print both ways to route, in turns, over SHAPES.

    Returns:
        Whether they agree.
    """
    agree = True
    for tokens, experts, top_k in SHAPES:
        config = RouterConfig(experts, top_k, renormalize=True, round_weights=True)
        logits_TE = torch.randn(tokens, experts + 1, generator=torch.Generator().manual_seed(0)).bfloat16()
        calls: dict[str, Route] = {
            "by hand": partial(route_by_hand, experts=experts, top_k=top_k),
            "fmoe": partial(_route, config=config),
        }
        if compiled:
            torch.compiler.reset()
            calls = {name: torch.compile(call, fullgraph=True) for name, call in calls.items()}
        with torch.inference_mode():
            found = [call(logits_TE) for call in calls.values()]
            agree &= all(torch.allclose(a, b.to(a.dtype), rtol=2**-7) for a, b in zip(*found, strict=True))
            turns = {name: partial(_repeat, call, logits_TE) for name, call in calls.items()}
            time_calls(turns, rounds=3, clock=CLOCKS["wall"])
            samples = time_calls(turns, rounds=rounds, clock=CLOCKS["wall"])
        name = f"T{tokens} E{experts} K{top_k}{', compiled' if compiled else ''}"
        print(_format(name, samples["fmoe"], samples["by hand"]), flush=True)
    return agree


REPEAT = 5  # calls in one sample


def _route(logits_TE: Tensor, *, config: RouterConfig) -> Routing:
    return route_fused(logits_TE, None, config, slots=1)


def _repeat(call: Route, logits_TE: Tensor) -> None:
    for _ in range(REPEAT):
        call(logits_TE)


def _format(name: str, ours_s: Sequence[float], theirs_s: Sequence[float]) -> str:
    low, high = spread_of_ratio(ours_s, theirs_s)
    ours, theirs = (statistics.median(samples) / REPEAT * 1e6 for samples in (ours_s, theirs_s))
    ratio = median_ratio(ours_s, theirs_s)
    mark = "" if ratio >= 1 else "  slower"
    return f"{name:44} {theirs:6.0f} us {ours:6.0f} us  {ratio:.2f} ({low:.2f}-{high:.2f}){mark}"


if __name__ == "__main__":
    sys.exit(main())
