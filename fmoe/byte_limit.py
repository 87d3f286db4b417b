"""What a step must read and compute whatever runs it, and how long a machine needs at least for that.

Bytes: every weight once, of a MoE layer those of the experts that its rows choose between them; the keys and values
of all positions; recurrent states and convolution windows read and written. What passes between layers is left out,
it stays in caches. Operations: two for each weight and row, and attention's; the recurrences are left out.

Letters: B sequences, T tokens of each, D hidden, E routed experts, S shared slots, K experts per token, M cache slots.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fmoe.functional.cache import Cache, DeltaCache, KVCache, LatentCache
from fmoe.functional.moe import MoEParams

from .architectures import FamilyConfig, Params
from .loading import named_tensors

PARTS = ("MoE", "DeltaNet", "attention", "head", "rest")
STACKS = ("w_gate_up_EPD", "w_down_EDF", "biases")
WINDOWED = "sliding_attention"  # layer kind that sees the window only


class Work(NamedTuple):
    """What one step must do."""

    bytes: dict[str, float]  # by part
    flops: dict[str, float]  # by part
    distinct: float  # experts that a MoE layer reads, the mean over layers; 0 without MoE layers

    @property
    def total_bytes(self) -> float:
        """Of all parts."""
        return sum(self.bytes.values())

    @property
    def total_flops(self) -> float:
        """Of all parts."""
        return sum(self.flops.values())


class Rates(NamedTuple):
    """What was measured on a device."""

    copy_gbps: float  # 1e9 bytes a second, read and written ones counted
    read_gbps: float | None  # of a pure read, None where that was not measured
    tflops: float  # of a large product in the model's dtype

    @property
    def gbps(self) -> float:
        """The better of the two."""
        return max(self.copy_gbps, self.read_gbps or 0.0)


def expected_experts(experts: int, top_k: int, rows: int, /) -> float:
    """Compute how many experts ``rows`` tokens choose between them when every choice is as likely: E(1-(1-K/E)^T)."""
    return experts * (1.0 - (1.0 - top_k / experts) ** rows)


def part_of(kind: str, cache: Cache, /) -> str:
    """Name the part that a layer's mixer belongs to."""
    return "DeltaNet" if isinstance(cache, DeltaCache) else "attention"


def count_work(
    params: Params,
    config: FamilyConfig,
    caches: Sequence[Cache],
    /,
    *,
    batch: int,
    context: int,
    tokens: int = 1,
    distinct: Sequence[float] | None = None,
) -> Work:
    """Count what a step of ``tokens`` more tokens in each sequence must read and compute.

    Args:
        params: the model's; meta tensors do.
        config: the model's.
        caches: of one sequence, of any number of slots; meta tensors do.
        batch: B.
        context: positions that each sequence has before the step.
        tokens: T; only the last one's logits are computed.
        distinct: routed experts that each MoE layer reads, in the order of the layers; None takes the expected ones.

    Returns:
        Work.
    """
    rows = batch * tokens
    counts = iter(distinct) if distinct is not None else None
    size, flops = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
    size["rest"] += rows * _bytes_of(params.embed_VD) / config.decoder.vocab_size + _bytes_of(params.norm_D)
    size["head"] += _bytes_of(params.head_VD)
    flops["head"] += 2.0 * batch * _elements_of(params.head_VD)
    met: list[float] = []
    for kind, layer, cache in zip(config.decoder.layer_kinds, params.layers, caches, strict=True):
        part = part_of(kind, cache)
        visible = _visible(kind, config.decoder.window, context + tokens)
        size[part] += _bytes_of(layer.mixer) + batch * _cache_bytes(cache, visible)
        flops[part] += 2.0 * rows * _elements_of(layer.mixer)
        if part == "attention":
            # on the average a token sees half of those that come with it
            flops[part] += rows * _attention_flops(config, min(visible, context + (tokens + 1) / 2))
        size["rest"] += _bytes_of((layer.input_norm_D, layer.post_norm_D))
        if not isinstance(layer.mlp, MoEParams):
            size["rest"] += _bytes_of(layer.mlp)
            flops["rest"] += 2.0 * rows * _elements_of(layer.mlp)
            continue
        router = config.router
        met.append(expected_experts(router.num_experts, router.top_k, rows) if counts is None else next(counts))
        fixed, each = _split_experts(layer.mlp, router.num_experts)
        size["MoE"] += fixed.bytes + each.bytes * met[-1]
        flops["MoE"] += 2.0 * rows * (fixed.elements + each.elements * router.top_k)
    return Work(size, flops, sum(met) / len(met) if met else 0.0)


def limit_seconds(work: Work, rates: Rates, /) -> float:
    """Compute the least time of a step: that of its bytes, or of its operations where they take longer."""
    return max(work.total_bytes / (rates.gbps * 1e9), work.total_flops / (rates.tflops * 1e12))


def part_limits(work: Work, rates: Rates, /) -> Mapping[str, float]:
    """Compute the least seconds of each part taken alone."""
    return {
        part: max(size / (rates.gbps * 1e9), work.flops[part] / (rates.tflops * 1e12))
        for part, size in work.bytes.items()
    }


class _Amount(NamedTuple):
    bytes: float
    elements: float


def _split_experts(params: MoEParams, experts: int) -> tuple[_Amount, _Amount]:
    """Count what every row needs (router, shared slots, a shared expert apart), and what one routed expert is."""
    fixed_bytes = fixed_elements = each_bytes = each_elements = 0.0
    for name, value in zip(params._fields, params, strict=True):
        for _, tensor in named_tensors(value):
            size, elements = float(tensor.nbytes), float(tensor.numel())
            if name in STACKS:
                slots = tensor.shape[0]
                each_bytes, each_elements = each_bytes + size / slots, each_elements + elements / slots
                size, elements = size * (slots - experts) / slots, elements * (slots - experts) / slots
            fixed_bytes, fixed_elements = fixed_bytes + size, fixed_elements + elements
    return _Amount(fixed_bytes, fixed_elements), _Amount(each_bytes, each_elements)


def _visible(kind: str, window: int | None, positions: int) -> int:
    return positions if window is None or kind != WINDOWED else min(window, positions)


def _cache_bytes(cache: Cache, positions: int) -> float:
    """Count what one sequence's step reads and writes of a cache."""
    size = _bytes_of(cache)
    if isinstance(cache, KVCache):
        return size * positions / cache.k_BJMC.shape[2]
    if isinstance(cache, LatentCache):
        return size * positions / cache.latent_BMR.shape[1]
    return 2.0 * size


def _attention_flops(config: Any, visible: float) -> float:
    """Count scores and weighted sums of one token; latent attention as if keys and values were made."""
    attention = config.attention
    key = getattr(attention, "head_size", None) or attention.key_size
    value = getattr(attention, "head_size", None) or attention.value_size
    return 2.0 * float(attention.heads * (key + value)) * visible


def _bytes_of(values: Any) -> float:
    return float(sum(tensor.nbytes for _, tensor in named_tensors(values)))


def _elements_of(values: Tensor | Any) -> float:
    return float(sum(tensor.numel() for _, tensor in named_tensors(values)))
