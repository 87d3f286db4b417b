"""What a GPU computes against the CPU reference: logits, tokens of captured steps, long batches, FP8 against bf16.

    python -m bench.device_parity                  all checks, on the GPU; exit status 1 where one fails
    python -m bench.device_parity --device cpu     the same code against itself, to try it

Tokens are compared up to the first step at which the two best logits of the reference are closer than 1e-3: behind it
float32 decides by rounding.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fmoe
from fmoe.decoding import new_state, prefill
from fmoe.functional.quant import Fp8, dequantize
from fmoe.model import Model

from .whole_model import cut_config

CONFIGS = Path(__file__).parent / "configs"
SMALL = {
    "vocab_size": 509,
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 8,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
MOST_EXPERTS = 24
GAP = 1e-3
LOGITS = 1e-4  # of max(1, |logit|), in float32
# Of logits, relative to float32, by tokens: up to 16 the weights alone are in FP8; behind, rows are rounded to it, too.
FP8_ERRORS = {1: 5e-2, 16: 5e-2, 40: 0.12, 200: 0.12}
LENGTHS = (1, 5, 17, 64, 100, 31, 250)  # of the prompts of a batch of seven


class Check(NamedTuple):
    """One line of the report."""

    name: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        """Within the bound."""
        return self.value <= self.bound


def shrink(raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Cut a published config to a few narrow layers of float32."""
    small = cut_config(raw, layers) | SMALL
    small |= {key: min(raw[key], MOST_EXPERTS) for key in EXPERTS if key in raw}
    return small | {"num_key_value_heads": min(raw["num_key_value_heads"], small["num_attention_heads"])}


def load_config(raw: Mapping[str, Any], **options: Any) -> Model:
    """Load random weights of a config."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        return fmoe.load(folder, weights="random", **options)


def map_params(value: Any, change: Any) -> Any:
    """Change each weight of nested tuples."""
    if isinstance(value, Tensor | Fp8):
        return change(value)
    if isinstance(value, tuple):
        items = [map_params(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def on_cpu(model: Model, raw: Mapping[str, Any]) -> Model:
    """Give the same weights to a model on the CPU."""
    reference = load_config(raw, device="cpu", compile=False, kernels="reference")
    return replace(reference, params=map_params(model.params, lambda tensor: tensor.cpu()))


def draw_prompts(vocabulary: int, lengths: Sequence[int]) -> list[list[int]]:
    """Draw token ids, none of them special."""
    rng = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocabulary, (length,), generator=rng).tolist() for length in lengths]


def compare_tokens(found: Any, reference: Any) -> int:
    """Count tokens that differ from the reference's before its first close call; both with two log-probabilities."""
    wrong = 0
    for mine, theirs in zip(found, reference, strict=True):
        for i, (token, expected) in enumerate(zip(mine.token_ids, theirs.token_ids, strict=False)):
            (_, best), (_, second) = theirs.logprobs[i].top
            if best - second < GAP:
                break
            if token != expected:
                wrong += 1
                break
    return wrong


def check_families(device: str) -> Iterator[Check]:
    """Logits and tokens of small random models of the published shapes."""
    for name in ("qwen3_next_80b_a3b", "qwen3_30b_a3b", "mixtral_8x7b", "deepseek_v2_lite"):
        raw = shrink(json.loads((CONFIGS / name / "config.json").read_text()), 4)
        model = load_config(raw, device=device)
        reference, prompts = on_cpu(model, raw), draw_prompts(raw["vocab_size"], (1, 9, 130))
        error = 0.0
        for ids in prompts:
            mine, theirs = (logits_of(m, ids) for m in (model, reference))
            error = max(error, ((mine.cpu() - theirs).abs() / theirs.abs().clamp_min(1.0)).max().item())
        yield Check(f"{name}, small, float32: logits", error, LOGITS)
        options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0, "logprobs": 2, "ignore_eos": True}
        expected = fmoe.generate(reference, prompts, **options)
        yield Check(
            f"{name}: tokens that differ from the CPU's",
            compare_tokens(fmoe.generate(model, prompts, **options), expected),
            0,
        )
        captured = fmoe.generate(model, prompts, max_new_tokens=64, temperature=0.0, ignore_eos=True)
        plain = fmoe.generate(
            replace(model, compile=False), prompts, max_new_tokens=64, temperature=0.0, ignore_eos=True
        )
        differ = sum(a.token_ids != b.token_ids for a, b in zip(captured, plain, strict=True))
        yield Check(f"{name}: rows whose captured tokens differ from uncaptured ones", differ, 0)


def logits_of(model: Model, ids: Sequence[int]) -> Tensor:
    """Logits behind a prompt, [1, V], uncompiled."""
    return prefill(model, model.eager, [list(ids)], new_state(model, 1, len(ids)))


def check_long_batch(device: str, tokens: int) -> Iterator[Check]:
    """The demo in float32: a batch of seven prompts of other lengths against each row alone."""
    model = fmoe.load("demo", device=device, dtype="float32")
    prompts = draw_prompts(4000, LENGTHS)
    options: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0.0, "logprobs": 2, "ignore_eos": True}
    together = fmoe.generate(model, prompts, **options)
    alone = [fmoe.generate(model, [ids], **options)[0] for ids in prompts]
    made = sum(len(row.token_ids) for row in alone)
    yield Check(f"demo: rows of seven that differ from rows alone, {made} tokens", compare_tokens(together, alone), 0)
    plain: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    best = fmoe.generate(model, prompts, **plain)
    yield Check("demo: the same by the kernel of the head", compare_tokens(best, alone), 0)
    for drafts in (1, 3):
        found = fmoe.generate(model, prompts, speculate=drafts, **plain)
        yield Check(f"demo: the same with {drafts} drafts", compare_tokens(found, alone), 0)
    prompt = draw_prompts(4000, (700,))[0]
    (whole,) = fmoe.generate(model, [prompt], **options)
    (rest,) = fmoe.generate(model, [prompt[512:]], state=fmoe.prefill(model, prompt[:512]), **options)
    yield Check("demo: going on from a state", compare_tokens([rest], [whole]), 0)


def check_fp8(device: str) -> Iterator[Check]:
    """Qwen3-Next's FP8 form cut to four layers, against the same weights multiplied out, in float32 and in bfloat16.

    Every expert is chosen: where two are nearly as good, rounding alone would choose, and the logits be others.
    """
    raw = json.loads((CONFIGS / "qwen3_next_80b_a3b_fp8" / "config.json").read_text())
    plain = cut_config(raw, 4) | {"num_experts": raw["num_experts_per_tok"]}
    quantised = plain | {"quantization_config": raw["quantization_config"]}
    model = load_config(quantised, device=device, compile=False)
    exact, rounded = (
        replace(
            load_config(plain, device=device, compile=False, dtype=str(dtype).removeprefix("torch.")),
            params=map_params(model.params, partial(multiply_out, dtype=dtype)),
        )
        for dtype in (torch.float32, torch.bfloat16)
    )
    for length, bound in FP8_ERRORS.items():
        (ids,) = draw_prompts(plain["vocab_size"], (length,))
        mine, theirs, alone = (logits_of(m, ids) for m in (model, exact, rounded))
        norm = theirs.norm()
        yield Check(f"FP8 logits, prompt of {length}: relative error", ((mine - theirs).norm() / norm).item(), bound)
        yield Check(f"of bfloat16 weights, prompt of {length}", ((alone - theirs).norm() / norm).item(), bound)


def multiply_out(weight: Tensor | Fp8, *, dtype: torch.dtype) -> Tensor:
    """Give a weight in another dtype; a stack of gate and up rows is the one with twice the blocks."""
    if not isinstance(weight, Fp8):
        return weight.to(dtype) if weight.dtype == torch.bfloat16 else weight
    rows, blocks = weight.w.shape[-2], weight.scale.shape[-2]
    parts = 2 if weight.w.dim() == 3 and weight.w.shape[-1] > rows // 2 and blocks % 2 == 0 else 1
    return dequantize(weight, dtype, parts=parts)


def main() -> int:
    """Run the checks, print each, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=1000, help="of each row of the long batch")
    parser.add_argument("--checks", default="families,demo,fp8", help="which to run")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = []
    checks = {
        "families": check_families(arguments.device),
        "demo": check_long_batch(arguments.device, arguments.tokens),
        "fp8": check_fp8(arguments.device),
    }
    for name in arguments.checks.split(","):
        for check in checks[name]:
            found.append(check)
            print(
                f"{'ok  ' if check.passed else 'FAIL'} {check.value:10.3g} <= {check.bound:g}  {check.name}", flush=True
            )
    if arguments.out:
        rows = [check._asdict() | {"passed": check.passed} for check in found]
        arguments.out.write_text(json.dumps({"device": arguments.device, "checks": rows}, indent=1) + "\n")
    return 0 if all(check.passed for check in found) else 1


if __name__ == "__main__":
    sys.exit(main())
