"""The routing rule of each family against the router module of transformers, as dense [T, E] weights."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeConfig, Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeConfig, Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeConfig, GraniteMoeTopKRouter
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Gate
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeConfig, OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeTopKRouter
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextTopKRouter

from fmoe.functional.routing import RouterConfig, route, router_logits

D, E, K = 32, 12, 3
LOCAL = {"hidden_size": D, "num_local_experts": E, "num_experts_per_tok": K}
QWEN = {"hidden_size": D, "num_experts": E, "num_experts_per_tok": K}
DEEPSEEK = {"hidden_size": D, "n_routed_experts": E, "num_experts_per_tok": K}
ERNIE = {"hidden_size": D, "moe_num_experts": E, "moe_k": K}
GROUPS = {"n_group": 4, "topk_group": 2}
QWEN_RULE = {"round_weights": True}
V3_RULE = {"scoring": "sigmoid", "sum_eps": 1e-20, "float32_logits": True}
V3_GROUPS = {"groups": 4, "groups_kept": 2, "group_score": "top2"}
# family: router module, its config, our rule
FAMILIES = {
    "mixtral": (MixtralTopKRouter, MixtralConfig(**LOCAL), {"renormalize": True}),
    "qwen2_moe": (Qwen2MoeTopKRouter, Qwen2MoeConfig(**QWEN, norm_topk_prob=False), QWEN_RULE),
    "qwen2_moe-renormalised": (
        Qwen2MoeTopKRouter,
        Qwen2MoeConfig(**QWEN, norm_topk_prob=True),
        QWEN_RULE | {"renormalize": True},
    ),
    "qwen3_moe": (Qwen3MoeTopKRouter, Qwen3MoeConfig(**QWEN, norm_topk_prob=True), QWEN_RULE | {"renormalize": True}),
    "qwen3_moe-plain": (Qwen3MoeTopKRouter, Qwen3MoeConfig(**QWEN, norm_topk_prob=False), QWEN_RULE),
    "qwen3_next": (
        Qwen3NextTopKRouter,
        Qwen3NextConfig(**QWEN, norm_topk_prob=True),
        QWEN_RULE | {"renormalize": True},
    ),
    "qwen3_5_moe": (Qwen3_5MoeTopKRouter, SimpleNamespace(**QWEN), QWEN_RULE | {"renormalize": True}),
    "olmoe": (OlmoeTopKRouter, OlmoeConfig(**QWEN, norm_topk_prob=False), QWEN_RULE),
    "deepseek_v2-greedy": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(**DEEPSEEK, topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.5),
        {"scale": 1.5, "float32_logits": True},
    ),
    "deepseek_v2-groups": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(**DEEPSEEK, **GROUPS, topk_method="group_limited_greedy", routed_scaling_factor=16.0),
        {"scale": 16.0, "float32_logits": True, "groups": 4, "groups_kept": 2, "group_score": "max"},
    ),
    "deepseek_v3": (
        DeepseekV3TopkRouter,
        DeepseekV3Config(**DEEPSEEK, **GROUPS, norm_topk_prob=True, routed_scaling_factor=2.5),
        V3_RULE | V3_GROUPS | {"renormalize": True, "scale": 2.5},
    ),
    "deepseek_v3-plain": (
        DeepseekV3TopkRouter,
        DeepseekV3Config(**DEEPSEEK, **GROUPS, norm_topk_prob=False, routed_scaling_factor=2.827),
        V3_RULE | V3_GROUPS | {"scale": 2.827},
    ),
    "glm4_moe": (
        Glm4MoeTopkRouter,
        Glm4MoeConfig(**DEEPSEEK, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5),
        V3_RULE | {"renormalize": True, "scale": 2.5},
    ),
    "ernie4_5_moe": (
        Ernie4_5_MoeTopKRouter,
        Ernie4_5_MoeConfig(**ERNIE, moe_norm_min=1e-12),
        {"renormalize": True, "sum_floor": 1e-12, "float32_logits": True, "round_weights": True},
    ),
    "ernie4_5_moe-floor": (
        Ernie4_5_MoeTopKRouter,
        Ernie4_5_MoeConfig(**ERNIE, moe_norm_min=0.5),
        {"renormalize": True, "sum_floor": 0.5, "float32_logits": True, "round_weights": True},
    ),
    "hunyuan_v1_moe": (
        HunYuanMoEV1Gate,
        SimpleNamespace(hidden_size=D, num_experts=E, moe_topk=K),
        {"renormalize": True, "float32_logits": True},
    ),
    "gpt_oss": (GptOssTopKRouter, GptOssConfig(**LOCAL), {"scoring": "chosen_softmax", "round_weights": True}),
    "granitemoe": (
        GraniteMoeTopKRouter,
        GraniteMoeConfig(**LOCAL),
        {"scoring": "chosen_softmax", "round_weights": True},
    ),
    "llama4": (Llama4Router, SimpleNamespace(**LOCAL), {"scoring": "chosen_sigmoid", "round_weights": True}),
}


def their_router(family, dtype, rng):
    """Build transformers' router with random weights, biases too, as loading in ``dtype`` would leave it."""
    kind, settings, _ = FAMILIES[family]
    router = kind(settings)
    tensors = dict([*router.named_parameters(), *router.named_buffers()])
    for name, tensor in tensors.items():
        stays = name == "wg.weight" or "correction_bias" in name
        value = torch.randn(tensor.shape, generator=rng) * (0.3 if "bias" in name else 0.6)
        tensor.data = value if stays else value.to(dtype)
    return router, {name.rsplit(".", 1)[-1]: tensor.data for name, tensor in tensors.items()}


def their_weights(router, x_TD):
    if isinstance(router, Llama4Router):
        return router(x_TD)[0].float()
    logits_TE, weights_TK, experts_TK = router(x_TD)
    return torch.zeros(logits_TE.shape).scatter(1, experts_TK, weights_TK.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_dense_weights_equal_those_of_transformers(family, dtype, rng):
    router, tensors = their_router(family, dtype, rng)
    config = RouterConfig(E, K, **FAMILIES[family][2])
    x_TD = torch.randn(41, D, generator=rng).to(dtype)
    logits_TE = router_logits(x_TD, tensors["weight"], float32=config.float32_logits)
    if "bias" in tensors:  # gpt-oss alone biases the logits themselves
        logits_TE = F.linear(x_TD, tensors["weight"], tensors["bias"])
    bias_E = tensors["e_score_correction_bias"].flatten() if "e_score_correction_bias" in tensors else None
    assert (bias_E is not None) == family.startswith(("deepseek_v3", "glm4", "ernie"))

    weights_TK, experts_TK = route(logits_TE, bias_E, config)

    if config.round_weights and config.float32_logits:
        weights_TK = weights_TK.to(dtype).float()  # as moe_layer does
    ours_TE = torch.zeros(41, E).scatter(1, experts_TK.long(), weights_TK)
    # Equal bfloat16 logits are chosen by id here and in no stated order there.
    distinct_T = logits_TE.sort(-1).values.diff(dim=-1).ne(0).all(-1)
    assert distinct_T.sum() >= (41 if dtype == torch.float32 else 10)
    theirs_TE = their_weights(router, x_TD)
    assert (theirs_TE != 0).sum(-1).tolist() == [K] * 41
    assert_close(ours_TE[distinct_T], theirs_TE[distinct_T], rtol=1e-6, atol=1e-7)


def test_the_settings_tell_the_families_apart(rng):
    """Changing any one setting of a rule changes the weights, so no setting above is idle."""
    logits_TE, bias_E = torch.randn(41, E, generator=rng), torch.randn(E, generator=rng) * 0.3
    for _, _, rule in FAMILIES.values():
        whole = route(logits_TE, bias_E, RouterConfig(E, K, **rule))
        for name in set(rule) & {"scoring", "renormalize", "scale", "groups"}:
            less = {
                key: value for key, value in rule.items() if key != name and not (name == "groups" and "group" in key)
            }
            other = route(logits_TE, bias_E, RouterConfig(E, K, **less))
            assert not torch.equal(whole.weights_TK, other.weights_TK), (name, rule)
