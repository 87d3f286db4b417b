"""Reading the routers that several families share: DeepSeek-V3's rule, and how many experts and groups there are."""

from fmoe.functional.routing import RouterConfig

from .settings import MOST_EXPERTS, SMALLEST, Raw, read_bool, read_float, read_int, read_top_k, require

BIAS = "gate.e_score_correction_bias"  # the tensor's name below a layer's MoE block


def read_choice(raw: Raw, /, *, grouped: bool) -> tuple[int, int, int, int]:
    """Read from how many experts how many are chosen: E, K, then G and the groups kept, 1 and 1 unless ``grouped``."""
    experts = read_int(raw, "n_routed_experts", minimum=1, maximum=MOST_EXPERTS)
    top_k = read_top_k(raw, experts)
    if not grouped:
        return experts, top_k, 1, 1
    groups, kept = read_int(raw, "n_group", minimum=1), read_int(raw, "topk_group", minimum=1)
    if experts % groups:
        raise ValueError(f"config.json: n_group={groups} must divide n_routed_experts={experts}")
    if kept <= groups and kept * (experts // groups) < top_k:
        raise ValueError(
            f"config.json: topk_group={kept} of n_group={groups} groups hold {kept * (experts // groups)} of "
            f"n_routed_experts={experts}, fewer than num_experts_per_tok={top_k}"
        )
    return experts, top_k, groups, kept


def read_sigmoid_router(raw: Raw, /, *, scoring: tuple[str, ...] = ("sigmoid",)) -> RouterConfig:
    """Read V3's rule: sigmoid scores, chosen with the bias among the best groups, weighed without it.

    Args:
        raw: config.json.
        scoring: what the family's files call this rule in ``scoring_func``.

    Source: arXiv:2412.19437, section 2.1.2.
    """
    require(raw, {"scoring_func": scoring, "topk_method": ("noaux_tc",)})
    experts, top_k, groups, kept = read_choice(raw, grouped=True)
    return RouterConfig(
        num_experts=experts,
        top_k=top_k,
        scoring="sigmoid",
        renormalize=read_bool(raw, "norm_topk_prob", True),
        sum_eps=1e-20,
        scale=read_float(raw, "routed_scaling_factor", 2.5, minimum=SMALLEST),
        groups=groups,
        groups_kept=kept,
        group_score="top2",
        float32_logits=True,
    )
