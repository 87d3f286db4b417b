"""What a chunk of a prompt spends outside the experts, on a GPU: DeltaNet between its projections, and attention.

    python -m bench.prefill_parts [--tokens 4096,16384] [--limit 40] [--out FILE.json]

Microseconds of one layer of Qwen3-Next, one sequence. DeltaNet: the layer in kernels against the reference in float64
first, then all of it, what stands before the chunk rule, the rule and the gated norm, for a few settings; and the layer
as a compiler fuses it. Attention: each form against float64 at (past, new) slots, then its time, also that of the
first call with a size, for which some libraries plan anew. No further candidates are tried behind the limit, seconds.

Letters: B sequences, T tokens, N mixed channels, H query heads, J kv heads, C head channels, M slots.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.moe_shapes import capture, time_graph
from fmoe.compile.causal_ops import attend_causal_op, attend_flash
from fmoe.compile.chunk_ops import delta_prefill_kernels
from fmoe.compile.chunk_settings import ChunkSettings, InputSettings, default_chunk_settings, default_input_settings
from fmoe.compile.device import target_of
from fmoe.compile.kernels.delta_inputs import mix_chunk_inputs, norm_chunk_outputs, prefill_delta_
from fmoe.compile.kernels.delta_prefill import chunk_delta
from fmoe.functional import DeltaCache, DeltaConfig, DeltaParams, causal_conv
from fmoe.functional.attention import attend, causal_mask
from fmoe.functional.deltanet import delta_chunked, delta_mix

CUDA, BF16, F16, F32 = torch.device("cuda"), torch.bfloat16, torch.float16, torch.float32
QWEN = DeltaConfig(16, 32, 128, 128, 4, 1e-6)
CONFIGS = {"qwen3next": QWEN, "odd": DeltaConfig(3, 9, 96, 80, 3, 1e-6)}
LAYER_ERROR, ATTENTION_ERROR = 8e-3, 8e-3  # relative Frobenius, against float64; the result is rounded to bfloat16
HEADS, KV_HEADS, SIZE = 16, 2, 256
PLACES = ((0, 4096), (0, 16384), (16384, 16384), (16384, 2048))
RULES: tuple[dict[str, int], ...] = (
    {},
    {"stages": 2},
    {"columns": 16},
    {"columns": 64, "warps": 8},
    {"matrix_warps": 8},
)
INPUTS: tuple[dict[str, int], ...] = (
    {}, {"tokens": 16}, {"tokens": 64}, {"tokens": 64, "warps": 8}, {"rows": 16}, {"rows": 8, "norm_warps": 1},
    {"tokens": 16, "warps": 2, "rows": 64, "norm_warps": 8},
)  # fmt: skip


def draw_layer(config: DeltaConfig, tokens: int, dtype: torch.dtype = BF16) -> tuple[Tensor, DeltaCache, DeltaParams]:
    """Draw a projection, a cache and weights."""
    rng = torch.Generator(device="cuda").manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device="cuda")

    mixed, heads = config.split_sizes[0], config.value_heads
    params = DeltaParams(
        draw(0),
        (draw(config.conv_size, mixed) / 2).to(dtype),
        -draw(heads).exp() / 8,
        draw(heads),
        (1 + draw(config.value_size) / 4).to(dtype),
        draw(0),
    )
    state = draw(1, heads, config.key_size, config.value_size)
    cache = DeltaCache(draw(1, config.conv_size - 1, mixed).to(dtype), state)
    return draw(1, tokens, sum(config.split_sizes)).to(dtype), cache, params


def mix_exactly(
    projected: Tensor, cache: DeltaCache, params: DeltaParams, config: DeltaConfig
) -> tuple[Tensor, Tensor]:
    """Compute ``delta_mix`` in float64: (y, the new state)."""
    mixed, z, b, a = projected.double().split_with_sizes(config.split_sizes, -1)
    mixed, _ = causal_conv(mixed, cache.window_BWN.double(), params.w_conv_WN.double())
    keys, shape = config.key_heads * config.key_size, projected.shape[:2]
    q, k, v = mixed.split_with_sizes([keys, keys, mixed.shape[-1] - 2 * keys], -1)

    def normed(x: Tensor) -> Tensor:
        heads = F.normalize(x.view(*shape, config.key_heads, config.key_size), dim=-1)
        return heads.repeat_interleave(config.value_heads // config.key_heads, 2)

    beta, g = b.sigmoid(), params.decay_H.double() * F.softplus(a + params.dt_bias_H.double())
    values = (*shape, config.value_heads, config.value_size)
    o, state = delta_chunked(
        normed(q) * config.key_size**-0.5, normed(k), v.view(values), g, beta, cache.state_BHKV.double()
    )
    n = o * (o.square().mean(-1, keepdim=True) + config.eps).rsqrt() * params.norm_V.double()
    return (n * F.silu(z.view(values))).flatten(-2), state


def relative(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; NaN counts as infinite."""
    error = ((actual.double() - expected).norm() / expected.norm()).item()
    return error if error == error else float("inf")


def check_layers() -> bool:
    """Compare the layer in kernels with float64 at several lengths, in one call and in two."""
    results = []
    for name, config in CONFIGS.items():
        for tokens in (3, 64, 1000):
            projected, cache, params = draw_layer(config, tokens)
            expected, state = mix_exactly(projected, cache, params, config)
            for cuts in ((tokens,), (2, tokens - 2)):
                own = DeltaCache(*(part.clone() for part in cache))
                parts = projected.split(cuts, 1)
                y = torch.cat([delta_prefill_kernels(part, own, params, config) for part in parts], 1)
                errors = relative(y, expected), relative(own.state_BHKV, state)
                kept = config.conv_size - 1
                newest = torch.cat((cache.window_BWN, projected[..., : config.split_sizes[0]]), 1)[:, -kept:]
                right = errors[0] <= LAYER_ERROR and errors[1] <= LAYER_ERROR / 4
                results.append(right and torch.equal(own.window_BWN, newest))
                verdict = "right" if results[-1] else "WRONG"
                print(
                    f"{verdict}: {name}, {cuts} tokens, y errs by {errors[0]:.1e}, state by {errors[1]:.1e}", flush=True
                )
    return all(results)


def time_layer(tokens: int, rule: ChunkSettings, settings: InputSettings) -> dict[str, float]:
    """Time the layer and its parts."""
    projected, cache, params = draw_layer(QWEN, tokens)
    weights = params.w_conv_WN, params.decay_H, params.dt_bias_H
    inputs = mix_chunk_inputs(projected, cache.window_BWN, *weights, QWEN, settings)
    o, _ = chunk_delta(*inputs, cache.state_BHKV, rule)
    works: dict[str, Callable[[], object]] = {
        "all": lambda: prefill_delta_(projected, *cache, *weights, params.norm_V, QWEN, rule, settings),
        "inputs": lambda: mix_chunk_inputs(projected, cache.window_BWN, *weights, QWEN, settings),
        "rule": lambda: chunk_delta(*inputs, cache.state_BHKV, rule),
        "norm": lambda: norm_chunk_outputs(o, projected, params.norm_V, QWEN, settings),
    }
    return {name: round(time_graph(capture(work), samples=5), 1) for name, work in works.items()}


def attend_in_parts(q_BTHC: Tensor, k_BJMC: Tensor, v_BJMC: Tensor, /, *, scale: float | None = None) -> Tensor:
    """``attend_causal`` by cuDNN in two parts: the slots before the chunk, seen by all, and the chunk's own.

    Each part gives the logarithm of its softmax's sum, by which the two are weighed.
    """
    past, q_BHTC = k_BJMC.shape[2] - q_BTHC.shape[1], q_BTHC.transpose(1, 2)
    (old_BHTC, old_lse), (own_BHTC, own_lse) = (
        torch.ops.aten._scaled_dot_product_cudnn_attention(
            q_BHTC, k_BJMC[:, :, part], v_BJMC[:, :, part], None, True, 0.0, causal, False, scale=scale
        )[:2]
        for part, causal in ((slice(past), False), (slice(past, None), True))
    )
    weight_BHT1 = (old_lse - own_lse).view(*q_BHTC.shape[:3], 1).sigmoid()
    out_BHTC = torch.lerp(own_BHTC.float(), old_BHTC.float(), weight_BHT1).to(q_BTHC.dtype)
    return out_BHTC.transpose(1, 2).contiguous()


def mix_composed(projected_BTN: Tensor, cache: DeltaCache, params: DeltaParams, config: DeltaConfig) -> Tensor:
    """``delta_mix`` with the chunk rule's kernels alone; all else is left to the compiler."""
    settings = default_chunk_settings(
        config.key_size, config.value_size, torch.float16, target=target_of(projected_BTN.device)
    )

    def rule(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return chunk_delta(q.half(), k.half(), v.to(projected_BTN.dtype), *rest, settings)

    return delta_mix(projected_BTN, cache, params, config, chunk_rule=rule)


def time_composed(tokens: int) -> float:
    """Time ``mix_composed`` as it is compiled."""
    projected, cache, params = draw_layer(QWEN, tokens)
    run = torch.compile(mix_composed, fullgraph=True, dynamic=False)
    return round(time_graph(capture(lambda: run(projected, cache, params, QWEN)), samples=5), 1)


def sweep_layers(lengths: list[int], end: float) -> list[dict[str, Any]]:
    """Time each setting at each length."""
    rule, settings = default_chunk_settings(128, 128, F16, target=target_of(CUDA)), default_input_settings(128)
    rows = []
    tries = [(replace(rule, **change), settings, change) for change in RULES]
    tries += [(rule, replace(settings, **change), change) for change in INPUTS[1:]]
    for one, other, change in tries:
        if rows and time.monotonic() > end:
            print(f"{change} and what follows: not timed", flush=True)
            break
        try:
            times = {tokens: time_layer(tokens, one, other) for tokens in lengths}
        except Exception as error:  # a candidate that does not compile or launch is no candidate
            print(f"FAILED {change}: {str(error)[:200]}", flush=True)
            continue
        print(f"   delta {change or 'default'}: {times}", flush=True)
        rows.append({"rule": asdict(one), "inputs": asdict(other), "us": times})
    return rows


def attend_by(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, *, widen: bool = False) -> Tensor:
    """Run PyTorch's attention of one backend from the first slot on; ``widen`` repeats keys for their query heads."""
    if widen:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, enable_gqa=not widen)
    return out.transpose(1, 2).contiguous()


def attend_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by a mask, as before."""
    return attend(q, k, v, causal_mask(q, k.shape[2]))


FORMS: dict[str, Callable[..., Tensor]] = {
    "op": attend_causal_op,
    "flash": attend_flash,
    "in parts, cuDNN": attend_in_parts,
    "cuDNN": partial(attend_by, SDPBackend.CUDNN_ATTENTION),
    "cuDNN, widened": partial(attend_by, SDPBackend.CUDNN_ATTENTION, widen=True),
    "masked": attend_masked,
}


def takes(name: str, past: int) -> bool:
    """Tell whether a form is for this place."""
    return (past == 0) if name.startswith("cuDNN") else (past > 0) if "parts" in name else True


def draw_attention(past: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw queries, and keys and values in a larger cache."""
    rng = torch.Generator(device="cuda").manual_seed(2)
    q = torch.randn(1, tokens, HEADS, SIZE, generator=rng, device="cuda", dtype=BF16)
    slots = past + tokens
    k, v = (torch.randn(1, KV_HEADS, slots + 77, SIZE, generator=rng, device="cuda", dtype=BF16) for _ in range(2))
    return q, k[:, :, :slots], v[:, :, :slots]


def attend_exactly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention in float64."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = q.double().transpose(1, 2) @ k.mT * SIZE**-0.5
    return (scores.masked_fill(~causal_mask(q, k.shape[2])[:, None], -torch.inf).softmax(-1) @ v).transpose(1, 2)


def time_calls(work: Callable[[], object]) -> tuple[float, float]:
    """Give milliseconds of the first call and microseconds of the best of a few."""
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return round(times[0] * 1e3, 1), round(min(times[1:]) * 1e6, 1)


def measure_attention() -> tuple[list[dict[str, Any]], bool]:
    """Check each form, then time it; of wrong forms only what the op takes matters."""
    right, rows, good = True, [], []
    for name, form in FORMS.items():
        try:
            errors = []
            for past, tokens in ((0, 300), (300, 200), (7, 65)):
                if takes(name, past):
                    inputs = draw_attention(past, tokens)
                    errors.append(relative(form(*inputs), attend_exactly(*inputs)))
            fine = max(errors) <= ATTENTION_ERROR
        except Exception as error:  # a backend may refuse
            print(f"FAILED attention {name}: {str(error)[:200]}", flush=True)
            right = right and name != "op"
            continue
        print(f"{'right' if fine else 'WRONG'}: attention {name} errs by {max(errors):.1e}", flush=True)
        right, good = right and (fine or name != "op"), [*good, *([name] if fine else [])]
    for past, tokens in PLACES:
        inputs = draw_attention(past, tokens)
        for name in good:
            if takes(name, past) and not (name == "masked" and past + tokens > 20000):
                first_ms, us = time_calls(partial(FORMS[name], *inputs))
                print(f"   attention ({past}, {tokens}) {name}: {us} us, first call {first_ms} ms", flush=True)
                rows.append({"past": past, "tokens": tokens, "form": name, "us": us, "first_ms": first_ms})
    return rows, right


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds after which no further settings are tried")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    begin, lengths = time.monotonic(), [int(tokens) for tokens in arguments.tokens.split(",")]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    with torch.inference_mode():
        attention, right = measure_attention()
        print(f"{time.monotonic() - begin:.1f} s", flush=True)
        layers_right = check_layers()
        if not layers_right:
            raise SystemExit("WRONG: DeltaNet is not timed")
        layers = sweep_layers(lengths, begin + arguments.limit)
        composed = {tokens: time_composed(tokens) for tokens in lengths}
    print(f"   delta composed: {composed}\n{time.monotonic() - begin:.1f} s", flush=True)
    if arguments.out:
        record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        record |= {"attention": attention, "delta": layers, "delta_composed_us": composed}  # type: ignore[dict-item]
        arguments.out.write_text(json.dumps(record, indent=1))
    if not right:
        raise SystemExit("WRONG: see above")


if __name__ == "__main__":
    main()
