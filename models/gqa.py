"""Grouped-query attention as most families have it: optional biases, q/k norm per head, output gate.

Letters: B sequences, T tokens, D hidden, H query heads, J kv heads, C head channels, N projected columns.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from fmoe.functional.attention import Placement, causal_mask
from fmoe.functional.cache import KVCache, append_kv_
from fmoe.functional.kernels import Kernels
from fmoe.functional.norm import rms_norm
from fmoe.functional.quant import Weight
from fmoe.functional.rotary import apply_rotary

from .settings import Raw, read_int
from .weights import Fill, Piece, matrix, matrix_rows, plain, rows


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Sizes and options of one attention layer."""

    heads: int
    kv_heads: int
    head_size: int
    eps: float
    gated: bool = False  # sigmoid of a second half of q_proj multiplies the output
    window: int | None = None  # tokens that one sees, itself included; None is all before it
    rotates_first: bool = False  # q and k are normed after the rotation
    norms_whole: bool = False  # all q channels are normed as one vector, all k channels as another
    clip: float | None = None  # beyond which no value of q, k or v goes, behind those norms
    interleaved: bool = False  # the checkpoint's q and k rotate channel pairs (2j, 2j + 1), not (j, j + C/2)

    def __post_init__(self) -> None:
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads={self.heads} must be a multiple of num_key_value_heads={self.kv_heads}; "
                "check config.json"
            )

    @property
    def split_sizes(self) -> list[int]:
        """Columns of the input projection: q and k, v, output gate."""
        keys = self.kv_heads * self.head_size
        queries = self.heads * self.head_size
        return [queries + keys, keys, queries if self.gated else 0]


class AttentionParams(NamedTuple):
    """One layer; ``w_in`` rows are q heads, k heads, v heads, then the output gate."""

    w_in_ND: Weight
    bias_N: Tensor | None
    norm_HC: Tensor | None  # weights of the q norm for H rows, then of the k norm for J rows
    w_out_DN: Weight
    bias_out_D: Tensor | None = None
    sinks_H: Tensor | None = None  # of the softmax


def attention_config(raw: Raw, *, eps: float, gated: bool = False) -> AttentionConfig:
    """Read the head counts; an absent ``head_dim`` is hidden / heads, absent kv heads are as many as heads."""
    heads, hidden = read_int(raw, "num_attention_heads", minimum=1), read_int(raw, "hidden_size", minimum=1)
    head_size = read_int(raw, "head_dim", hidden // heads, minimum=1)
    if head_size < 1:
        raise ValueError(
            f"config.json: num_attention_heads={heads} must be at most hidden_size={hidden} where head_dim is absent"
        )
    return AttentionConfig(heads, read_int(raw, "num_key_value_heads", heads, minimum=1), head_size, eps, gated)


def attention_params(
    fill: Fill,
    prefix: str,
    config: AttentionConfig,
    hidden: int,
    /,
    *,
    biased: str = "",
    norm: str | None = None,
    norm_names: tuple[str, str] = ("q_norm", "k_norm"),
) -> AttentionParams:
    """Describe one layer's parameters.

    Args:
        fill: makes parameters.
        prefix: such as ``model.layers.0.self_attn``.
        config: sizes.
        hidden: D.
        biased: projections with a bias: none, ``qkv`` or ``qkvo``.
        norm: ``standard`` or ``centred`` q and k norms over the head's channels, or None.
        norm_names: of those two in the checkpoint.
    """
    size = config.head_size
    queries, keys = config.heads * size, config.kv_heads * size
    part_pairs = partial(_part_pairs, size) if config.interleaved else None
    if config.gated:
        source = f"{prefix}.q_proj.weight"
        q_rows = [Piece(source, (2 * queries, hidden), take=lambda w: _half_of_each_head(w, size, 0), shares=True)]
        gate_rows = [Piece(source, (2 * queries, hidden), take=lambda w: _half_of_each_head(w, size, 1), shares=True)]
        counts = [queries, keys, keys, queries]
    else:
        q_rows, gate_rows = [Piece(f"{prefix}.q_proj.weight", (queries, hidden), take=part_pairs)], []
        counts = [queries, keys, keys]
    k_rows = Piece(f"{prefix}.k_proj.weight", (keys, hidden), take=part_pairs)
    v_rows = Piece(f"{prefix}.v_proj.weight", (keys, hidden))
    w_in_ND = matrix_rows(fill, [*q_rows, k_rows, v_rows, *gate_rows], hidden, counts=counts)
    bias_N = bias_out_D = None
    if biased:
        parts = (("q", queries, part_pairs), ("k", keys, part_pairs), ("v", keys, None))
        bias_N = rows(fill, [Piece(f"{prefix}.{name}_proj.bias", (n,), take=take) for name, n, take in parts])
    if "o" in biased:
        bias_out_D = plain(fill, f"{prefix}.o_proj.bias", (hidden,))
    norm_HC = None if norm is None else _head_norms(fill, prefix, norm_names, config, centred=norm == "centred")
    w_out_DN = matrix(fill, f"{prefix}.o_proj.weight", (hidden, queries))
    return AttentionParams(w_in_ND, bias_N, norm_HC, w_out_DN, bias_out_D)


def _half_of_each_head(w_ND: Tensor, size: int, half: int) -> Tensor:
    return rearrange(w_ND, "(h two c) d -> two (h c) d", two=2, c=size)[half]


def _part_pairs(size: int, w_ND: Tensor) -> Tensor:
    """Bring channels (2j, 2j + 1) of each head to (j, j + C/2); scores are the same if q and k both are."""
    return rearrange(w_ND, "(h c two) ... -> (h two c) ...", two=2, c=size // 2)


def _head_norms(fill: Fill, prefix: str, names: tuple[str, str], config: AttentionConfig, *, centred: bool) -> Tensor:
    def spread(count: int, w: Tensor) -> Tensor:
        w = w.float() + 1.0 if centred else w
        return w.unflatten(0, (count, -1)) if config.norms_whole else w.expand(count, -1)

    heads, kv_heads, size = config.heads, config.kv_heads, config.head_size
    q_size, k_size = (heads * size, kv_heads * size) if config.norms_whole else (size, size)
    pieces = [
        Piece(f"{prefix}.{names[0]}.weight", (q_size,), (slice(0, heads),), lambda w: spread(heads, w)),
        Piece(f"{prefix}.{names[1]}.weight", (k_size,), (slice(heads, None),), lambda w: spread(kv_heads, w)),
    ]
    return fill((heads + kv_heads, size), pieces, dtype=torch.float32 if centred else None)


def attention_mixer(
    projected_BTN: Tensor,
    params: AttentionParams,
    cache: KVCache,
    placement: Placement,
    /,
    *,
    config: AttentionConfig,
    kernels: Kernels,
) -> Tensor:
    """Norm, rotate, remember, attend, gate, project back.

    Returns:
        [B, T, D].
    """
    if config.norms_whole:
        assert params.norm_HC is not None
        projected_BTN, params = _norm_whole(projected_BTN, params.norm_HC, config), params._replace(norm_HC=None)
    attend_step = kernels.attend_few_step if placement.kept_B is not None else kernels.attend_step
    if projected_BTN.shape[1] > 1 and placement.kept_B is None:
        attend_step = None
    if attend_step is not None and not config.rotates_first and params.sinks_H is None:
        options = {"heads": config.heads, "eps": config.eps, "window": config.window}
        out_BTN = attend_step(projected_BTN, params.norm_HC, cache, placement, **options)
    else:
        out_BTN = _attend_projected(projected_BTN, params, cache, placement, config, kernels)
    return kernels.linear(out_BTN, params.w_out_DN, params.bias_out_D)


def _norm_whole(projected_BTN: Tensor, norm_HC: Tensor, config: AttentionConfig) -> Tensor:
    """Norm all queries as one vector and all keys as another, then clip; what follows does neither."""
    sizes = [config.heads * config.head_size, config.kv_heads * config.head_size]
    q_BTN, k_BTN, rest_BTN = projected_BTN.split_with_sizes([*sizes, projected_BTN.shape[-1] - sum(sizes)], -1)
    q_norm_N, k_norm_N = norm_HC.flatten().split_with_sizes(sizes)
    q_BTN, k_BTN = rms_norm(q_BTN, q_norm_N, eps=config.eps), rms_norm(k_BTN, k_norm_N, eps=config.eps)
    normed_BTN = torch.cat((q_BTN, k_BTN, rest_BTN), -1)
    return normed_BTN if config.clip is None else normed_BTN.clamp(-config.clip, config.clip)


def _attend_projected(
    projected_BTN: Tensor,
    params: AttentionParams,
    cache: KVCache,
    placement: Placement,
    config: AttentionConfig,
    kernels: Kernels,
) -> Tensor:
    """What stands between the two projections, [B, T, H * C]."""
    qk_BTN, v_BTN, gate_BTN = projected_BTN.split_with_sizes(config.split_sizes, -1)
    step, norm_HC, sinks_H = projected_BTN.shape[:2], params.norm_HC, params.sinks_H
    qk_BTHC = qk_BTN.view(*step, config.heads + config.kv_heads, config.head_size)
    if norm_HC is not None and not config.rotates_first:
        qk_BTHC = rms_norm(qk_BTHC, norm_HC, eps=config.eps)
    qk_BTHC = apply_rotary(qk_BTHC, placement.cos_BTR, placement.sin_BTR)
    if norm_HC is not None and config.rotates_first:
        qk_BTHC = rms_norm(qk_BTHC, norm_HC, eps=config.eps)
    q_BTHC, k_BTJC = qk_BTHC.split_with_sizes([config.heads, config.kv_heads], 2)
    v_BTJC = v_BTN.view(*step, config.kv_heads, config.head_size)
    if placement.kept_B is not None:  # a weight of zero would not keep a draft's NaN from the tokens before it
        k_BTJC, v_BTJC = (torch.nan_to_num(part, 0.0, 0.0, 0.0) for part in (k_BTJC, v_BTJC))
    append_kv_(cache, k_BTJC, v_BTJC, placement.positions_BT)
    if placement.visible_M is not None:
        assert config.window is None
        visible = placement.visible_M.shape[0]
        seen = (cache.k_BJMC[:, :, :visible], cache.v_BJMC[:, :, :visible])
        if sinks_H is None:
            out_BTHC = kernels.attend_causal(q_BTHC, *seen)
        else:
            out_BTHC = kernels.attend_prefill(q_BTHC, *seen, causal_mask(q_BTHC, visible), sinks_H)
    elif placement.mask_BTM is None:  # a kind that attend_step does not do
        attend = kernels.attend_lengths if placement.kept_B is None else kernels.attend_few_lengths
        assert attend is not None and config.window is None and sinks_H is None
        out_BTHC = attend(q_BTHC, *cache, placement.lengths_B, scale=config.head_size**-0.5)
    else:
        mask_BTM = placement.mask_BTM if config.window is None else placement.window_mask_BTM
        assert mask_BTM is not None
        visible = mask_BTM.shape[-1]
        attend = kernels.attend_decode if step[1] == 1 else kernels.attend_prefill
        if placement.kept_B is not None:
            attend = kernels.attend_few
        sinks = () if sinks_H is None else (sinks_H,)
        out_BTHC = attend(q_BTHC, cache.k_BJMC[:, :, :visible], cache.v_BJMC[:, :, :visible], mask_BTM, *sinks)
    out_BTN: Tensor = out_BTHC.flatten(-2)
    return out_BTN * gate_BTN.sigmoid() if config.gated else out_BTN


def attention_cache(
    config: AttentionConfig, batch: int, slots: int, /, *, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Make an empty cache of ``slots`` positions for each of ``batch`` sequences."""
    shape = (batch, config.kv_heads, slots, config.head_size)
    return KVCache(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
