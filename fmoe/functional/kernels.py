"""The choice of implementations, as a value; every default is the reference."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .attention import attend, attend_causal, attend_rows
from .delta_drafts import delta_verify
from .deltanet import delta_mix
from .experts import compute_experts_grouped
from .norm import add_rms_norm
from .quant import linear as linear_reference
from .routing import Routing, route_fused


@dataclass(frozen=True, slots=True)
class Kernels:
    """Functions that a model's forward pass calls; each has the signature of its default.

    compute_moe: router, routing and experts in one, ``(x [T, D], MoEParams, RouterConfig) -> [T, D]``, without a
        separate shared expert; None composes ``route`` and ``compute_experts``.
    compute_moe_normed: ``compute_moe`` behind ``add_norm``, ``(x [T, D], branch, norm, MoEParams, RouterConfig, *, eps)
        -> (x + branch, its norm, [T, D])``; None composes the two.
    linear_normed: ``linear`` behind ``add_norm``, ``(x [..., D], branch, norm, w, bias, *, eps) -> (x + branch, [...,
        N])``; None composes the two.
    normed_tokens: the most tokens of each sequence that these two take; above one where their number is a constant of
        a step's graph, as it is with drafts.
    attend_step: what stands between the projections of grouped-query attention for one token of each sequence,
        ``(projected [B, 1, N], norm, KVCache, Placement, *, heads, eps, window) -> [B, 1, H * C]``, over the whole
        cache; it reads positions and no mask. None composes norm, rotation, ``append_kv_`` and ``attend_decode``.
    attend_lengths: ``attend_decode`` with lengths [B] in place of a mask, over the whole cache; latent attention of
        one token takes it where the placement has lengths.
    delta_verify: ``delta_decode`` for the newest token and its drafts, over a cache that keeps the last step's apart.
    attend_few, attend_few_step, attend_few_lengths: ``attend_decode``, ``attend_step`` and ``attend_lengths`` for the
        newest token and its drafts, T tokens of each sequence; the lengths are those of the last of them, token t looks
        at T - 1 - t slots fewer. The last two are None where there are none, and then a mask is made.
    choose_tokens: each row's most probable token from the normed hidden states, ``(x [B, D], head [V, D]) -> (tokens
        [B], best logits [B])``, the latter NaN or infinite where the row's logits are; a single row's head may
        be in FP8 blocks. None takes the logits.
    """

    route: Callable[..., Routing] = route_fused
    compute_experts: Callable[..., Tensor] = compute_experts_grouped
    compute_experts_decode: Callable[..., Tensor] = compute_experts_grouped
    attend_prefill: Callable[..., Tensor] = attend
    attend_causal: Callable[..., Tensor] = attend_causal
    attend_decode: Callable[..., Tensor] = attend
    delta_prefill: Callable[..., Tensor] = delta_mix
    delta_decode: Callable[..., Tensor] = delta_mix
    delta_verify: Callable[..., Tensor] = delta_verify
    attend_few: Callable[..., Tensor] = attend_rows
    compute_moe: Callable[..., Tensor] | None = None
    compute_moe_normed: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    add_norm: Callable[..., tuple[Tensor, Tensor]] = add_rms_norm
    attend_step: Callable[..., Tensor] | None = None
    attend_lengths: Callable[..., Tensor] | None = None
    attend_few_step: Callable[..., Tensor] | None = None
    attend_few_lengths: Callable[..., Tensor] | None = None
    choose_tokens: Callable[..., tuple[Tensor, Tensor]] | None = None
    linear: Callable[..., Tensor] = linear_reference  # (x [..., D], w [N, D] or Fp8, bias [N] or None) -> [..., N]
    linear_normed: Callable[..., tuple[Tensor, Tensor]] | None = None
    normed_tokens: int = 1
