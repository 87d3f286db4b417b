"""Decode of a published model cut to a few layers: fmoe and transformers, random weights, one process, in turns.

    python -m bench.whole_model --model bench/configs/qwen3_next_80b_a3b --layers 4

Each library draws its own weights, so times are compared and tokens are not. transformers runs uncompiled with a
dynamic cache, and compiled with a static one (on a GPU in CUDA graphs), as its ``generate`` would. A contender that
fails is reported with its error.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

import fmoe
from fmoe.benchmark import draw_prompts
from fmoe.model import Model

from .contenders import make_step, start_fmoe
from .measure import CLOCKS, Start, median_ratio, rate, run_interleaved, spread_of_ratio

OURS = "fmoe"
PEERS = ("uncompiled grouped_mm", "uncompiled batched_mm", "compiled grouped_mm", "compiled batched_mm")
SKIP = 4  # steps before the clock starts


def cut_config(raw: Mapping[str, Any], layers: int, /) -> dict[str, Any]:
    """Keep the first layers of a config.json, unquantised: transformers needs kernels of its own for FP8.

    Raises:
        ValueError: the model has fewer.
    """
    if not 1 <= layers <= raw["num_hidden_layers"]:
        raise ValueError(f"--layers {layers} must be in 1..{raw['num_hidden_layers']}, the model's")
    cut = {key: value for key, value in raw.items() if key != "quantization_config"}
    cut["num_hidden_layers"] = layers
    if cut.get("layer_types"):
        cut["layer_types"] = cut["layer_types"][:layers]
    if "mlp_only_layers" in cut:
        cut["mlp_only_layers"] = [i for i in cut["mlp_only_layers"] or [] if i < layers]
    return cut


def load_peer(folder: Path, experts: str, model: Model, /) -> Any:
    """Make a model of transformers where and in the dtype in which fmoe's is, weights as it initialises them."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    with model.device:
        peer = AutoModelForCausalLM.from_config(config, dtype=model.dtype, experts_implementation=experts)
    return peer.to(model.device).eval()


def make_peer(peer: Any, prompts: Sequence[Sequence[int]], tokens: int, device: torch.device, compiled: bool) -> Start:
    """Give what starts a sequence of a peer; a compiled one keeps its static cache and its graph."""
    step = make_step(peer, compile=False)
    prompts_BT = torch.tensor(prompts, device=device)
    if not compiled:
        return lambda: _loop(step, step, prompts_BT, DynamicCache(config=peer.config), tokens)
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    decode = torch.compile(step, fullgraph=True, dynamic=False, mode=mode)
    cache = StaticCache(config=peer.config, max_cache_len=prompts_BT.shape[1] + tokens)

    def start() -> Iterator[list[int]]:
        cache.reset()
        return _loop(step, decode, prompts_BT, cache, tokens)

    return start


def _loop(
    prefill: Callable[[Tensor, Any], Tensor],
    decode: Callable[[Tensor, Any], Tensor],
    prompts_BT: Tensor,
    cache: Any,
    tokens: int,
) -> Iterator[list[int]]:
    tokens_B = prefill(prompts_BT, cache).argmax(-1)
    yield tokens_B.tolist()
    for _ in range(tokens - 1):
        tokens_B = decode(tokens_B[:, None], cache).argmax(-1)
        yield tokens_B.tolist()


def measure_batch(
    model: Model, peers: Mapping[str, Any], batch: int, options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time all contenders at one batch size.

    Returns:
        (seconds per step of each turn by contender, what went wrong by contender).
    """
    tokens = 1 + SKIP + options.repetitions * options.new_tokens
    prompts = draw_prompts(model, batch, options.context, 0)
    starts: dict[str, Start] = {OURS: partial(start_fmoe, model, prompts, tokens)}
    failed: dict[str, str] = {}
    run = partial(run_interleaved, skip=SKIP, turns=options.repetitions, turn_steps=options.new_tokens)
    for name, peer in peers.items():
        start = make_peer(peer, prompts, tokens, model.device, name.startswith("compiled"))
        try:
            for _ in start():  # warms up and compiles
                pass
            starts[name] = start
        except Exception as error:  # whatever a peer's compiler raises is a result, too
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    for _ in starts[OURS]():
        pass
    samples, _ = run(starts, clock=CLOCKS["wall"])
    return samples, failed


def summarise(samples: Mapping[str, list[float]], batch: int, /) -> list[dict[str, Any]]:
    """Turn samples into one row for each contender; ``ratio`` says how many times as fast fmoe is."""
    rows = []
    for name, seconds in samples.items():
        rows.append(
            {
                "contender": name,
                "batch": batch,
                "samples_ms": [s * 1e3 for s in seconds],
                "ms_per_step": statistics.median(seconds) * 1e3,
                "tokens_per_s": rate(seconds, batch),
                "ratio": median_ratio(samples[OURS], seconds),
                "ratio_quartiles": spread_of_ratio(samples[OURS], seconds),
            }
        )
    return rows


def describe_run(model: Model, options: argparse.Namespace, /) -> dict[str, Any]:
    """Say what was measured where."""
    where = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device)
    return {
        "model": options.model.name,
        "layers": options.layers,
        "context": options.context,
        "new_tokens": options.new_tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": where,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Cut the config, make the models, measure, print, and write the samples where asked."""
    options = _parse_arguments(arguments)
    transformers.logging.set_verbosity_error()
    raw = cut_config(json.loads((options.model / "config.json").read_text()), options.layers)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(raw))
        model = fmoe.load(folder, weights="random", device=options.device, dtype=options.dtype, compile=options.compile)
        experts = dict.fromkeys(peer.split()[-1] for peer in options.peers)
        loaded = {how: load_peer(folder, how, model) for how in experts}
    peers = {peer: loaded[peer.split()[-1]] for peer in options.peers}
    head = describe_run(model, options)
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    rows, failed = [], {}
    for batch in options.batch_sizes:
        with torch.inference_mode():
            samples, wrong = measure_batch(model, peers, batch, options)
        failed |= {f"{name}, batch {batch}": error for name, error in wrong.items()}
        for row in summarise(samples, batch):
            rows.append(row)
            numbers = f"{row['ms_per_step']:9.3f} ms/step {row['tokens_per_s']:9.1f} tokens/s"
            print(f"batch {batch:3}  {row['contender']:24} {numbers}  fmoe {row['ratio']:.2f} x as fast", flush=True)
    for name, error in failed.items():
        print(f"{name} failed: {error}")
    if options.json is not None:
        options.json.write_text(json.dumps({**head, "results": rows, "failed": failed}, indent=1) + "\n")
    return 0


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a config.json")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-sizes", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=32, help="steps of one sample")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--peers", type=lambda text: [p for p in text.split(",") if p], default=list(PEERS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default="auto")
    parser.add_argument("--json", type=Path, help="where the samples are written")
    options = parser.parse_args(arguments)
    if unknown := [peer for peer in options.peers if peer not in PEERS]:
        parser.error(f"unknown peers {unknown}; known are {', '.join(PEERS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
