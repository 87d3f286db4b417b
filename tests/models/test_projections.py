"""Every dense projection of every family is a call of ``Kernels.linear``, with its bias."""

import pytest
import torch
import torch.nn.functional as F

from fmoe.architectures import compute_logits, find_architecture
from fmoe.functional.kernels import Kernels
from fmoe.functional.moe import MoEParams
from fmoe.models.decoder import forward

V, D = 61, 32
COMMON = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
QWEN = {"head_dim": 16, "num_experts": 8, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 36}
FAMILIES = {
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": QWEN | SHARED | {"qkv_bias": True},
    "qwen3_moe": QWEN,
    "qwen3_next": QWEN | SHARED | DELTA,
    "deepseek_v2": LATENT,
}


class RandomFill:
    """Draw each parameter, whatever the checkpoint would hold."""

    names = ()

    def __init__(self, rng):
        self.rng = rng

    def __call__(self, shape, pieces, /, *, dtype=None, by_columns=False):
        return torch.randn(tuple(shape), generator=self.rng) / 4

    def weight(self, shape, pieces, /, *, parts=1, by_columns=False):
        return self(shape, pieces)


def projections(layer, *, decode):
    """List (weight, bias) of all that a layer multiplies with, but for router and experts."""
    mixer = layer.mixer
    found = [(mixer.w_in_ND, getattr(mixer, "bias_N", None)), (mixer.w_out_DN, getattr(mixer, "bias_out_D", None))]
    if hasattr(mixer, "w_kv_HCR"):
        found.append((mixer.w_q_NQ, None))
        if not decode:
            found.append((mixer.w_kv_HCR, None))
    mlp = layer.mlp
    if isinstance(mlp, MoEParams):
        if mlp.shared is None:
            return found
        if mlp.shared.w_gate_1D is not None:
            found.append((mlp.shared.w_gate_1D, None))
        mlp = mlp.shared.mlp
    return [*found, (mlp.w_gate_up_PD, None), (mlp.w_down_DF, None)]


def identify(pairs):
    return sorted((w.data_ptr(), 0 if bias is None else bias.data_ptr()) for w, bias in pairs)


def run(family, config, params, kernels, tokens):
    state = family.init_state(config, 2, 64, dtype=torch.float32, device=torch.device("cpu"))
    ids = torch.arange(2 * tokens).view(2, tokens) % V
    layers = family.make_layers(config, kernels)
    x_BTD, _ = forward(ids, params, state, config.decoder, layers, slots=64)
    return compute_logits(x_BTD, params.norm_D, params.head_VD, eps=1e-6, linear=kernels.linear)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_projections_are_what_the_kernels_give(name, tokens, rng):
    raw = COMMON | FAMILIES[name] | {"model_type": name}
    family = find_architecture(raw)
    config = family.parse_config(raw, shared_experts="separate")
    params = family.build_params(RandomFill(rng), config)
    seen = []

    def linear(x, w, bias=None):
        seen.append((w, bias))
        return F.linear(x, w, bias)

    found_BTV = run(family, config, params, Kernels(linear=linear), tokens)

    expected = [pair for layer in params.layers for pair in projections(layer, decode=tokens == 1)]
    assert identify(seen) == identify([*expected, (params.head_VD, None)])
    assert any(bias is not None for _, bias in seen) == (name == "qwen2_moe")
    assert found_BTV.std() > 0.01
    assert torch.equal(found_BTV, run(family, config, params, Kernels(), tokens))


def test_every_projection_matters(rng):
    """A linear that doubles its result changes the logits, so no call's result is dropped."""
    raw = COMMON | FAMILIES["qwen2_moe"] | {"model_type": "qwen2_moe"}
    family = find_architecture(raw)
    config = family.parse_config(raw, shared_experts="separate")
    params = family.build_params(RandomFill(rng), config)
    expected_BTV = run(family, config, params, Kernels(), 3)
    calls = len([pair for layer in params.layers for pair in projections(layer, decode=False)]) + 1
    for doubled in range(calls):
        numbers = iter(range(calls))
        kernels = Kernels(linear=lambda *a, n=numbers, d=doubled: F.linear(*a) * (2 if next(n) == d else 1))
        assert not torch.allclose(run(family, config, params, kernels, 3), expected_BTV, rtol=1e-3, atol=1e-4)
