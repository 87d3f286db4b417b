"""Latent attention alone: both forms against loops over heads and tokens in float64."""

import math

import pytest
import torch

from fmoe.functional.attention import place_tokens
from fmoe.functional.cache import LatentCache
from fmoe.functional.kernels import Kernels
from fmoe.functional.rotary import RopeConfig, rotary_frequencies
from fmoe.models.mla import (
    LATENT_EPS,
    LatentConfig,
    LatentParams,
    attend_absorbed,
    attend_expanded,
    latent_cache,
    latent_config,
    latent_mixer,
    latent_params,
)

B, T, M, D, H, Q, R, NOPE, ROPE, V = 2, 5, 9, 11, 3, 7, 10, 4, 6, 8
ROTARY = RopeConfig(ROPE, 100.0)
RAW = {
    "num_attention_heads": H,
    "q_lora_rank": Q,
    "kv_lora_rank": R,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": V,
}


def make_config(*, rank=Q, scale=0.4, interleaved=True):
    return LatentConfig(H, rank, R, NOPE, ROPE, V, scale, interleaved)


def make_params(config, rng):
    def draw(*shape):
        return 0.3 * torch.randn(*shape, generator=rng)

    low_rank = config.query_rank is not None
    return LatentParams(
        w_in_ND=draw(sum(config.split_sizes), D),
        q_norm_Q=1 + draw(Q) if low_rank else None,
        w_q_NQ=draw(H * (NOPE + ROPE), Q) if low_rank else None,
        norm_R=1 + draw(R),
        w_kv_HCR=draw(H, NOPE + V, R),
        w_out_DN=draw(D, H * V),
    )


def norm_by_loop(row, weight):
    mean = sum(float(v) ** 2 for v in row) / len(row)
    return torch.tensor([float(v) / math.sqrt(mean + LATENT_EPS) * float(w) for v, w in zip(row, weight, strict=True)])


def rotate_by_loop(row, position, config):
    out = [0.0] * ROPE
    for j in range(ROPE // 2):
        angle = position * ROTARY.theta ** (-2 * j / ROPE)
        a, b = (2 * j, 2 * j + 1) if config.interleaved else (j, j + ROPE // 2)
        out[a] = float(row[a]) * math.cos(angle) - float(row[b]) * math.sin(angle)
        out[b] = float(row[b]) * math.cos(angle) + float(row[a]) * math.sin(angle)
    return torch.tensor(out)


def mix_by_loop(x_TD, params, config):
    """One sequence from position 0, one token and head at a time."""
    params = LatentParams(*(None if p is None else p.double() for p in params))
    first = config.split_sizes[0]
    queries, keys, values, out = [], [], [], []
    for t, x in enumerate(x_TD.double()):
        y = params.w_in_ND @ x
        q = y[:first] if params.w_q_NQ is None else params.w_q_NQ @ norm_by_loop(y[:first], params.q_norm_Q)
        latent = norm_by_loop(y[first : first + R], params.norm_R)
        shared = rotate_by_loop(y[first + R :], t, config)
        for h in range(H):
            one = q[h * (NOPE + ROPE) : (h + 1) * (NOPE + ROPE)]
            queries.append(torch.cat((one[:NOPE], rotate_by_loop(one[NOPE:], t, config))))
            kv = params.w_kv_HCR[h] @ latent
            keys.append(torch.cat((kv[:NOPE], shared)))
            values.append(kv[NOPE:])
        heads = []
        for h in range(H):
            scores = torch.stack([queries[t * H + h] @ keys[s * H + h] for s in range(t + 1)]) * config.scale
            weights = scores.exp() / scores.exp().sum()
            heads.append(sum(w * values[s * H + h] for s, w in enumerate(weights)))
        out.append(params.w_out_DN @ torch.cat(heads))
    return torch.stack(out)


def mix_in_steps(x_BTD, params, config, sizes):
    """Run the mixer over one cache in steps of the given sizes; the cache is left with garbage behind them."""
    cache = latent_cache(config, B, M, dtype=torch.float32, device=torch.device("cpu"))
    cache.latent_BMR.fill_(1e4)
    lengths_B, inv_freq, outputs = torch.zeros(B, dtype=torch.int64), rotary_frequencies(ROTARY), []
    for part in x_BTD.split(sizes, 1):
        placement = place_tokens(lengths_B, inv_freq, tokens=part.shape[1], slots=M - 1, dtype=torch.float32)
        outputs.append(
            latent_mixer(part @ params.w_in_ND.T, params, cache, placement, config=config, kernels=Kernels())
        )
        lengths_B = lengths_B + part.shape[1]
    return torch.cat(outputs, 1), cache


@pytest.fixture(autouse=True)
def float64_loops():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("sizes", [[T], [1] * T, [3, 1, 1]], ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rank", [Q, None])
def test_latent_mixer(rank, interleaved, sizes, rng):
    config = make_config(rank=rank, interleaved=interleaved)
    params = LatentParams(*(None if p is None else p.float() for p in make_params(config, rng)))
    x_BTD = torch.randn(B, T, D, generator=rng).float()

    found_BTD, cache = mix_in_steps(x_BTD, params, config, sizes)

    expected_BTD = torch.stack([mix_by_loop(x_TD, params, config) for x_TD in x_BTD])
    assert expected_BTD.abs().max() > 0.1
    torch.testing.assert_close(found_BTD.double(), expected_BTD, rtol=1e-5, atol=1e-5)
    assert cache.latent_BMR.shape == (B, M, R + ROPE)
    assert bool((cache.latent_BMR[:, T:] == 1e4).all()) and cache.latent_BMR[:, :T].abs().max() < 100


def test_both_forms_agree_and_call_their_kernel(rng):
    config = make_config()
    called = []

    def kernel(name):
        def attend(*arguments, **options):
            called.append((name, arguments[1].shape[1], options["scale"]))
            return Kernels().attend_prefill(*arguments, **options)

        return attend

    kernels = Kernels(**{f"attend_{name}": kernel(name) for name in ("prefill", "decode", "few")})
    arguments = (
        torch.randn(B, T, H, NOPE, generator=rng),
        torch.randn(B, T, H, ROPE, generator=rng),
        torch.randn(B, M, R + ROPE, generator=rng),
        torch.rand(B, T, M, generator=rng) < 0.6,
        torch.randn(H, NOPE + V, R, generator=rng),
    )
    arguments[3][..., 0] = True
    expanded = attend_expanded(*arguments, config=config, kernels=kernels)
    absorbed = attend_absorbed(*arguments, config=config, kernels=kernels)
    assert expanded.shape == (B, T, H, V)
    torch.testing.assert_close(absorbed, expanded)
    one = (*(part[:, :1] for part in arguments[:2]), arguments[2], arguments[3][:, :1], arguments[4])
    torch.testing.assert_close(attend_absorbed(*one, config=config, kernels=kernels), expanded[:, :1])
    assert called == [("prefill", H, 0.4), ("few", 1, 0.4), ("decode", 1, 0.4)]


def yarn(factor, **keys):
    return {"type": "yarn", "factor": factor, "original_max_position_embeddings": 4096, **keys}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (yarn(40, mscale=1.0, mscale_all_dim=1.0), 0.1352338),  # DeepSeek-V3
        (yarn(40, mscale=0.707, mscale_all_dim=0.707), 0.1147214),  # DeepSeek-V2
        (yarn(32, mscale=1.0, mscale_all_dim=1.0), 0.1308608),  # Kimi-K2
        (yarn(40), 192**-0.5),
        (yarn(40, mscale=1.0), 192**-0.5),
        (None, 192**-0.5),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scale_of_the_scores(scaling, expected, key):
    raw = RAW | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, key: scaling}
    rope = RopeConfig(64, 1e4, factor=float((scaling or {}).get("factor", 1.0)), original_context=4096)
    assert latent_config(raw, rope).scale == pytest.approx(expected, abs=5e-8)


def test_latent_config():
    assert latent_config(RAW | {"head_dim": 99}, ROTARY) == make_config(scale=10**-0.5)
    assert latent_config(RAW | {"q_lora_rank": None}, ROTARY, interleaved=False) == make_config(
        rank=None, scale=10**-0.5, interleaved=False
    )
    assert make_config().split_sizes == [Q, R, ROPE]
    assert make_config(rank=None).split_sizes == [H * (NOPE + ROPE), R, ROPE]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"q_lora_rank": 0}, ValueError, "q_lora_rank must be an integer >= 1, got 0"),
        ({"kv_lora_rank": 0}, ValueError, "kv_lora_rank must be an integer >= 1, got 0"),
        ({"num_attention_heads": 0}, ValueError, "num_attention_heads must be an integer >= 1, got 0"),
        (
            {"num_attention_heads": 0, "num_key_value_heads": 3},
            ValueError,
            "num_attention_heads must be an integer >= ",
        ),
        ({"v_head_dim": None}, ValueError, "v_head_dim must be an integer >= 1, got None"),
        ({"attention_bias": True}, NotImplementedError, "attention_bias=True is not implemented; implemented: False"),
        ({"num_key_value_heads": 1}, NotImplementedError, "num_key_value_heads=1 is not implemented; implemented: 3"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            NotImplementedError,
            "partial_rotary_factor=0.5 is not implemented",
        ),
    ],
)
def test_refused_values(change, error, match):
    with pytest.raises(error, match=match):
        latent_config(RAW | change, ROTARY)


def test_query_rank_must_be_named():
    with pytest.raises(ValueError, match="q_lora_rank is missing; expected an integer, or null for a single q_proj"):
        latent_config({key: value for key, value in RAW.items() if key != "q_lora_rank"}, ROTARY)


@pytest.mark.parametrize("rank", [Q, None])
def test_latent_params_read_every_tensor_once(rank):
    config, asked = make_config(rank=rank), {}

    class Fill:
        names = frozenset()

        def __call__(self, shape, pieces, /, *, dtype=None, by_columns=False):
            asked.update({piece.name: piece.shape for piece in pieces})
            return torch.empty(tuple(shape))

        def weight(self, shape, pieces, /, *, parts=1, by_columns=False):
            return self(shape, pieces)

    params = latent_params(Fill(), "a", config, D)

    queries = H * (NOPE + ROPE)
    expected = {
        "a.kv_a_proj_with_mqa.weight": (R + ROPE, D),
        "a.kv_a_layernorm.weight": (R,),
        "a.kv_b_proj.weight": (H * (NOPE + V), R),
        "a.o_proj.weight": (D, H * V),
    }
    if rank is None:
        expected["a.q_proj.weight"] = (queries, D)
    else:
        expected |= {"a.q_a_proj.weight": (Q, D), "a.q_a_layernorm.weight": (Q,), "a.q_b_proj.weight": (queries, Q)}
    assert asked == expected
    assert params.w_in_ND.shape == (sum(config.split_sizes), D)
    assert params.w_kv_HCR.shape == (H, NOPE + V, R)


def test_cache_is_one_latent_and_one_key_per_token():
    cache = latent_cache(make_config(), 4, 70, dtype=torch.bfloat16, device=torch.device("meta"))
    assert isinstance(cache, LatentCache)
    assert cache.latent_BMR.shape == (4, 70, R + ROPE) and cache.latent_BMR.dtype == torch.bfloat16
