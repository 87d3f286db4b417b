"""Which experts each token goes to, and with what weight: every rule of the supported families.

Letters: T tokens, E routed experts, G expert groups, K experts per token, S shared-expert slots, D hidden.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Scoring = Literal["softmax", "sigmoid", "chosen_softmax", "chosen_sigmoid"]
GroupScore = Literal["max", "top2"]


SORTED_VALUES = 4096  # up to this many in all rows, a stable sort is faster than an integer top-k (one core)
RANKED_VALUES = 32  # up to this many in a single row, a compiler ranks them faster than it calls a top-k


class Routing(NamedTuple):
    """Expert ids and weights of each token; with fused shared experts the last S columns are ids E to E+S-1."""

    weights_TK: Tensor  # float32
    experts_TK: Tensor  # int32


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The routing rule of one model.

    scoring: ``softmax`` or ``sigmoid`` over all experts before the choice; ``chosen_softmax`` and ``chosen_sigmoid``
        choose by raw logits and score only the chosen.
    renormalize: divide the weights of the chosen by ``max(sum, sum_floor) + sum_eps``.
    scale: multiplies the routed weights, after everything else, never the shared columns.
    groups, groups_kept, group_score: G groups of equal size; only experts of the best ``groups_kept`` can be chosen.
        ``max`` scores a group by its best expert and gives dropped experts score 0, ``top2`` by the sum of its two
        best (biased) scores and gives them -inf.
    float32_logits: both operands of the router's linear are upcast.
    round_weights: the weights are rounded to the model's dtype, as families do that multiply in it; by ``route`` to
        the dtype of the logits, by ``moe_layer`` to that of its rows where ``float32_logits`` hides it from ``route``.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False
    sum_eps: float = 0.0
    sum_floor: float = 0.0
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_score: GroupScore = "max"
    float32_logits: bool = False
    round_weights: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("scoring", self.scoring, get_args(Scoring)),
            ("group_score", self.group_score, get_args(GroupScore)),
        ):
            if value not in known:
                raise NotImplementedError(f"{name}={value!r} is not built; choose one of {', '.join(known)}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k={self.top_k} must be in 1..num_experts={self.num_experts}; check config.json")
        if self.groups < 1 or self.num_experts % self.groups:
            raise ValueError(f"n_group={self.groups} must divide num_experts={self.num_experts}; check config.json")
        if not 1 <= self.groups_kept <= self.groups:
            raise ValueError(f"topk_group={self.groups_kept} must be in 1..n_group={self.groups}; check config.json")
        if self.groups > 1 and self.scoring.startswith("chosen"):
            raise NotImplementedError(
                f"n_group={self.groups} with scoring={self.scoring!r} is not built; "
                "groups need softmax or sigmoid scores"
            )
        size = self.num_experts // self.groups
        if self.groups_kept * size < self.top_k:
            raise ValueError(
                f"topk_group={self.groups_kept} groups of {size} experts hold fewer than top_k={self.top_k}; "
                "check config.json"
            )
        if self.groups > 1 and self.group_score == "top2" and size < 2:
            raise ValueError(
                f"n_group={self.groups} leaves {size} expert per group, but groups are scored by their two best; "
                "check config.json"
            )


def router_logits(x_TD: Tensor, w_router_ED: Tensor, bias_E: Tensor | None = None, /, *, float32: bool) -> Tensor:
    """Compute the router's linear, [T, rows of w_router]; ``float32`` upcasts all operands first.

    The bias is one of the logits, and so of the weights; that of ``route`` steers the choice alone.
    """
    if float32:
        return F.linear(x_TD.float(), w_router_ED.float(), None if bias_E is None else bias_E.float())
    return F.linear(x_TD, w_router_ED, bias_E)


def select_largest(values_TE: Tensor, k: int, /) -> Tensor:
    """Find the k largest entries of each row; equal values go to the lowest index.

    Few values are sorted stably, or ranked by comparing all pairs where a compiler fuses them. Many are mapped to
    integers of the same order with the index below them, so that one integer top-k decides ties. NaN counts as larger
    than every number, hence a row of NaN gives 0..k-1, and no row affects another.

    Args:
        values_TE: compared in float32; -0 and +0 are equal.
        k: 1 <= k <= E.

    Returns:
        int64 indices [T, k], largest value first.
    """
    return _take_largest(values_TE.float(), k)[1]


def _take_largest(values_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Give the k largest values of each row and their indices."""
    count = values_TE.shape[-1]
    if torch.compiler.is_compiling():
        if count <= RANKED_VALUES and values_TE.shape[0] == 1:
            return _take_by_rank(values_TE, k)
    elif values_TE.numel() <= SORTED_VALUES:
        sorted_TE, order_TE = values_TE.sort(dim=-1, descending=True, stable=True)
        return sorted_TE[..., :k], order_TE[..., :k]
    descending_E = torch.arange(count - 1, -1, -1, device=values_TE.device)
    keys_TK: Tensor = torch.topk((_order_bits(values_TE).long() << 32) | descending_E, k).values
    indices_TK = count - 1 - (keys_TK & 0xFFFFFFFF)
    return values_TE.gather(-1, indices_TK), indices_TK


def _take_by_rank(values_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Count for each value those that come before it; the one with r before it is the r-th largest."""
    bits_TE = _order_bits(values_TE)
    index_E = torch.arange(values_TE.shape[-1], device=values_TE.device)
    other_TEE, own_TEE = bits_TE[..., None, :], bits_TE[..., :, None]
    before_TEE = (other_TEE > own_TEE) | ((other_TEE == own_TEE) & (index_E < index_E[:, None]))
    is_kth_TKE = before_TEE.sum(-1)[..., None, :] == torch.arange(k, device=values_TE.device)[:, None]
    chosen_TK = torch.where(is_kth_TKE, values_TE[..., None, :], 0.0).sum(-1)
    return chosen_TK, torch.where(is_kth_TKE, index_E, 0).sum(-1)


def _order_bits(values_TE: Tensor) -> Tensor:
    """Map float32 to int32 of the same order; both zeros are equal and NaN, of either sign, is the largest."""
    bits_TE = (values_TE + 0.0).view(torch.int32).masked_fill(values_TE.isnan(), 0x7FC00000)
    return bits_TE ^ ((bits_TE >> 31) & 0x7FFFFFFF)


def keep_best_groups(values_TE: Tensor, /, *, groups: int, kept: int, group_score: GroupScore) -> Tensor:
    """Mask the experts of all but the ``kept`` best groups; equal groups go to the lowest.

    Args:
        values_TE: (biased) scores, float32.
        groups: G, divides E.
        kept: groups that stay.
        group_score: ``max`` of the group, dropped experts become 0; or sum of its ``top2``, dropped become -inf.

    Returns:
        float32 [T, E].

    Source: arXiv:2405.04434, section 2.2.2 (max); arXiv:2412.19437, section 2.1.2 (top2).
    """
    grouped_TGE: Tensor = values_TE.unflatten(-1, (groups, -1))
    if group_score == "max":
        scores_TG, dropped = grouped_TGE.amax(-1), 0.0
    else:
        scores_TG, dropped = grouped_TGE.topk(2, -1).values.sum(-1), -torch.inf
    keep_TG = torch.zeros_like(scores_TG, dtype=torch.bool)
    keep_TG = keep_TG.scatter(-1, select_largest(scores_TG, kept), True)
    return grouped_TGE.masked_fill(~keep_TG[..., None], dropped).flatten(-2)


def route(logits_TE: Tensor, bias_E: Tensor | None, config: RouterConfig, /) -> Routing:
    """Choose K experts for each token and weigh them by the rule of ``config``.

    Scores are computed from the logits in float32; the bias, where a family has one, steers the choice and never
    enters a weight.

    Args:
        logits_TE: router logits of the routed experts, any float dtype.
        bias_E: float32 correction bias, or None.
        config: the rule.

    Returns:
        Routing: weights_TK float32, experts_TK int32, most preferred first.

    Source: arXiv:2401.04088, eq. 1-2; arXiv:2405.04434; arXiv:2412.19437.
    """
    scores_TE = logits_TE.float()
    if config.scoring == "softmax":
        scores_TE = scores_TE.softmax(-1)
    elif config.scoring == "sigmoid":
        # On a CPU the last few elements of a float32 sigmoid round otherwise than the rest, which would decide ties.
        scores_TE = scores_TE.double().sigmoid().float()
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if config.groups > 1:
        choice_TE = keep_best_groups(
            choice_TE, groups=config.groups, kept=config.groups_kept, group_score=config.group_score
        )
        if config.group_score == "max" and bias_E is None:
            # Where kept experts underflow to 0 a dropped one may be chosen by its id; its weight is 0 too.
            scores_TE = choice_TE
    chosen_TK, experts_TK = _take_largest(choice_TE, config.top_k)
    if choice_TE is not scores_TE:
        chosen_TK = scores_TE.gather(-1, experts_TK)
    weights_TK = weigh_chosen(chosen_TK, config, dtype=logits_TE.dtype)
    return Routing(weights_TK, experts_TK.int())


def weigh_chosen(scores_TK: Tensor, config: RouterConfig, /, *, dtype: torch.dtype) -> Tensor:
    """Turn the scores of the chosen experts into their weights.

    Args:
        scores_TK: float32 unbiased scores (logits for the ``chosen_`` rules).
        config: the rule.
        dtype: the model's dtype, used by ``round_weights``.

    Returns:
        float32 [T, K].
    """
    if config.scoring == "chosen_softmax":
        scores_TK = scores_TK.softmax(-1)
    elif config.scoring == "chosen_sigmoid":
        scores_TK = scores_TK.sigmoid()
    if config.renormalize:
        sums_T1 = scores_TK.sum(-1, keepdim=True)
        if config.sum_floor > 0:
            sums_T1 = sums_T1.clamp_min(config.sum_floor)
        scores_TK = scores_TK / (sums_T1 + config.sum_eps if config.sum_eps else sums_T1)
    if config.scale != 1.0:
        scores_TK = scores_TK * config.scale
    return scores_TK.to(dtype).float() if config.round_weights else scores_TK


def inject_shared_experts(routing: Routing, gate_logits_TS: Tensor | None, /, *, slots: int, first: int) -> Routing:
    """Append the shared experts as columns that every token has.

    Slot s has id ``first + s`` and weight ``sigmoid(gate logit)`` in float32, or 1 where the family has no gate.
    The routed columns are unchanged: shared weights are neither renormalised with them nor scaled.

    Args:
        routing: the routed columns.
        gate_logits_TS: [T, 1] (one gate for all slots), [T, S], or None.
        slots: S.
        first: E, the id of the first shared slot.

    Returns:
        Routing of K + S columns.
    """
    tokens, device = routing.experts_TK.shape[0], routing.experts_TK.device
    if slots == 1:
        experts_TK = F.pad(routing.experts_TK, (0, 1), value=first)  # one call for what takes three below
    else:
        ids_TS = torch.arange(first, first + slots, dtype=torch.int32, device=device).expand(tokens, slots)
        experts_TK = torch.cat((routing.experts_TK, ids_TS), -1)
    if gate_logits_TS is None:
        return Routing(F.pad(routing.weights_TK, (0, slots), value=1.0), experts_TK)
    weights_TS = gate_logits_TS.float().sigmoid().expand(tokens, slots)
    return Routing(torch.cat((routing.weights_TK, weights_TS), -1), experts_TK)


def route_fused(logits_TE: Tensor, bias_E: Tensor | None, config: RouterConfig, /, *, slots: int) -> Routing:
    """Route over one linear's logits: E routed columns, then the shared gate's, if any.

    Args:
        logits_TE: [T, E + gate rows]; gate rows is 0, 1 or S.
        bias_E: as in ``route``.
        config: the rule of the routed columns.
        slots: S, shared slots stacked behind the E routed experts; 0 gives routed columns alone.

    Returns:
        Routing of K + S columns.
    """
    experts = config.num_experts
    routing = route(logits_TE[:, :experts], bias_E, config)
    if slots == 0:
        return routing
    gates_TS = logits_TE[:, experts:] if logits_TE.shape[-1] > experts else None
    return inject_shared_experts(routing, gates_TS, slots=slots, first=experts)


def fuse_router_weights(w_router_ED: Tensor, w_shared_gate_SD: Tensor, /) -> Tensor:
    """Append the shared gate's rows to the router, so that one linear gives all logits.

    Args:
        w_router_ED: [E, D].
        w_shared_gate_SD: [gate rows, D], the same dtype.

    Returns:
        [E + gate rows, D].

    Raises:
        ValueError: the hidden sizes or dtypes differ.
    """
    if w_router_ED.shape[1:] != w_shared_gate_SD.shape[1:] or w_router_ED.dtype != w_shared_gate_SD.dtype:
        raise ValueError(
            f"the shared gate {tuple(w_shared_gate_SD.shape)} {w_shared_gate_SD.dtype} must have the hidden size and "
            f"dtype of the router {tuple(w_router_ED.shape)} {w_router_ED.dtype}; keep them separate otherwise"
        )
    return torch.cat((w_router_ED, w_shared_gate_SD))
