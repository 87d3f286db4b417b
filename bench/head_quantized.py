"""The head in FP8 blocks that chooses drafts: held to float64, then timed beside the model's head in bfloat16.

    python -m bench.head_quantized

Microseconds of one choice, in CUDA graphs over so many heads that none is in the cache when it is read; Qwen3-Next's
and DeepSeek-V3's sizes. One seed draws all.

Letters: D hidden, V vocabulary.
"""

import torch

from bench.fp8_kernels import SEED
from bench.moe_shapes import capture, time_graph
from fmoe.compile.decode_settings import QuantizedHeadSettings, default_quantized_head_settings
from fmoe.compile.head_ops import choose_tokens_op
from fmoe.compile.kernels.head_quantized import choose_token_quantized
from fmoe.functional.quant import dequantize, quantize_blocks

SIZES = {"qwen3next": (151936, 2048), "deepseek_v3": (129280, 7168)}
TURNS = 20
OTHERS = ((16, 4, 264), (8, 4, 528), (16, 8, 264), (32, 8, 132), (8, 8, 264), (4, 8, 264), (4, 4, 396), (2, 4, 396))


def check(head_VD: torch.Tensor, settings: QuantizedHeadSettings) -> list[str]:
    """Hold the choice to the logits of the dequantised head in float64; gives what is wrong."""
    quantized = quantize_blocks(head_VD)
    exact_DV = dequantize(quantized, torch.float64).T
    faults = []
    for turn in range(TURNS):
        x_1D = torch.randn(1, head_VD.shape[1], device="cuda", dtype=torch.bfloat16) * 4.0 ** (turn - TURNS // 2)
        token, best = choose_token_quantized(x_1D, quantized, settings)
        logits = (x_1D.double() @ exact_DV)[0]
        size = logits.std().item()
        if logits.amax().item() - logits[token].item() > 5e-3 * size or abs(best.item() - logits.amax().item()) > (
            4e-3 * logits.amax().item()
        ):
            faults.append(f"turn {turn}: token {token.item()}, {best.item():.6g}; largest {logits.amax().item():.6g}")
        if not torch.equal(choose_token_quantized(x_1D, quantized, settings)[1], best):
            faults.append(f"turn {turn}: not the same twice")
    return faults


def measure(name: str, vocabulary: int, hidden: int) -> None:
    """Check the rule's settings, and time them and others."""
    x_1D = torch.randn(1, hidden, device="cuda", dtype=torch.bfloat16)
    heads = [torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5 for _ in range(3)]
    rule = default_quantized_head_settings(hidden, target="hopper")
    faults = check(heads[0], rule)
    print(f"{name}: {len(faults)} faults in {TURNS} choices", *faults[:3], sep="\n  ", flush=True)
    quantized = [quantize_blocks(head) for head in heads]
    of_model = time_graph(capture(lambda: [choose_tokens_op(x_1D, head) for head in heads]), 9) / len(heads)
    print(f"  {of_model:7.1f} us by the model's head, {vocabulary * hidden / 1e6:.0f} MB of FP8", flush=True)
    for settings in (rule, *(QuantizedHeadSettings(*other, pdl=True) for other in OTHERS)):
        graph = capture(lambda s=settings: [choose_token_quantized(x_1D, head, s) for head in quantized])
        print(f"  {time_graph(graph, 9) / len(heads):7.1f} us {settings}", flush=True)


def main() -> None:
    """Go through the sizes."""
    torch.manual_seed(SEED)
    for name, (vocabulary, hidden) in SIZES.items():
        measure(name, vocabulary, hidden)


if __name__ == "__main__":
    main()
