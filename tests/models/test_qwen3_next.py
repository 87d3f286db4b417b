"""models/qwen3_next.py against transformers, on re-randomised tiny models that go through save_pretrained and load."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import Qwen3NextConfig

import fmoe
from fmoe.architectures import compute_logits
from fmoe.compile.select import choose
from fmoe.compile.step import compile_steps
from fmoe.decoding import compute_head, new_state, run

from .parity import check_figure

V = 61
LENGTHS = (1, 3, 63, 64, 65, 200)
BASE = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}
L, A = "linear_attention", "full_attention"
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS = {
    "plain": {},
    "dense-layers": {
        "num_hidden_layers": 6,
        "layer_types": [A, L, A, L, L, A],
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 36,  # 1.5 F
    },
    "odd": {
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 3,
        "num_experts": 5,
        "num_experts_per_tok": 5,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 20,  # 2 F
        "norm_topk_prob": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
    },
    "no-shared": {
        "shared_expert_intermediate_size": 0,
        "num_experts": 9,
        "num_experts_per_tok": 1,
        "rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "factor": 8.0},
    },
    "yarn": {
        "layer_types": [A, L, A, L],
        "rope_parameters": YARN | {"mscale": 0.9, "mscale_all_dim": 0.3},
        "tie_word_embeddings": True,
    },
    "dense": {"num_experts": 0, "num_hidden_layers": 2, "layer_types": [L, A]},
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def reference(variant, make_reference):
    return make_reference(Qwen3NextConfig(**BASE | VARIANTS[variant]))


@pytest.fixture(scope="module")
def model(reference):
    return fmoe.load(reference.folder, compile=False)


def draw_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_equal_logits(found, expected, *, within: float = 1e-4):
    """Compare to a part of the largest logit, and the greedy choices wherever the best leads by 1e-3."""
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert (found - expected).abs().max() <= within * max(1.0, expected.abs().max())
    best = expected.topk(2).values
    clear = best[..., 0] - best[..., 1] > 1e-3
    assert clear.any()
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])


def one_pass(model, ids):
    return fmoe.logits(model, torch.tensor([ids]))[0]


def in_pieces(model, ids, sizes, steps=None):
    """Run the ids through one state in pieces of the given sizes; (logits at every position, the state)."""
    steps = steps or model.eager
    assert sum(sizes) == len(ids)
    outputs, start = [], 0
    with torch.inference_mode():
        tokens_1T = torch.tensor([ids])
        state = new_state(model, 1, len(ids))
        for size in sizes:
            end = start + size
            x_1TD, state = run(model, steps, tokens_1T[:, start:end], state, visible=end)
            outputs.append(compute_head(model, steps, x_1TD[0]))
            start = end
    return torch.cat(outputs), state


@pytest.mark.parametrize("length", LENGTHS)
def test_logits(reference, model, length, record_property):
    ids = draw_ids(length, seed=length)
    found, expected = one_pass(model, ids), reference.logits(ids)
    check_figure(model, found, expected, record_property)
    assert_equal_logits(found, expected)


def test_the_reference_is_worth_comparing_with(reference):
    """Logits of order 1 and more that depend on far tokens: the comparison would see a lost state."""
    ids = draw_ids(65)
    logits = reference.logits(ids)
    assert 1 < logits.std() < 100
    other = reference.logits([(ids[0] + 1) % V, *ids[1:]])
    assert (other[-1] - logits[-1]).abs().max() > 1e-2


@pytest.mark.parametrize(
    "sizes",
    [[n, 200 - n] for n in (1, 3, 4, 63, 64, 65, 128, 199)]
    + [[7] * 28 + [4], [1] * 200, [64, *[1] * 70, 66], [3, 0, 197]],
    ids=lambda sizes: "-".join(map(str, sizes[:3])),
)
def test_pieces_equal_one_pass(reference, model, sizes):
    ids = draw_ids(200)
    whole, state = in_pieces(model, ids, [200])
    found, found_state = in_pieces(model, ids, sizes)

    assert_equal_logits(found, whole)
    assert_equal_logits(found, reference.logits(ids))
    assert found_state.lengths_B.tolist() == [200]
    for cache, expected in zip(found_state.caches, state.caches, strict=True):
        for part, expected_part in zip(cache, expected, strict=True):
            assert expected_part.abs().max() > 0.1
            assert (part - expected_part).abs().max() <= 1e-4 * max(1.0, expected_part.abs().max())


def test_decoding_equals_the_reference_with_its_cache(reference, model):
    """transformers' own prefill-then-decode, greedy, against ours; token for token until the first close call."""
    ids = draw_ids(9)
    done = fmoe.generate(model, ids, max_new_tokens=24, logprobs=2)[0]
    prompt = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, 9, dtype=torch.int64)}
    expected = reference.model.generate(**prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
    close = [n for n, step in enumerate(done.logprobs) if step.top[0][1] - step.top[1][1] <= 1e-3]
    compared = min(close, default=24)
    assert compared >= 5
    assert list(done.token_ids[:compared]) == expected[0, 9 : 9 + compared].tolist()


def test_repetition_penalty_is_that_of_transformers(make_reference):
    reference = make_reference(Qwen3NextConfig(**BASE))
    ids = draw_ids(9)
    prompt = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, 9, dtype=torch.int64)}
    options = {"max_new_tokens": 24, "repetition_penalty": 1.6}
    expected = reference.model.generate(**prompt, **options, do_sample=False, pad_token_id=0)[0, 9:].tolist()
    model = fmoe.load(reference.folder, compile=False)
    assert list(fmoe.generate(model, ids, **options)[0].token_ids) == expected
    assert list(fmoe.generate(model, ids, max_new_tokens=24)[0].token_ids) != expected


def test_fused_and_separate_give_the_same_logits(variant, reference, model):
    separate = fmoe.load(reference.folder, shared_experts="separate", compile=False)

    width = (BASE | VARIANTS[variant])["shared_expert_intermediate_size"]
    slots = {"plain": 1, "odd": 2, "yarn": 1, "dense": 1}.get(variant, 0)
    assert (model.config.shared.slots, separate.config.shared.slots) == (slots, 0)
    assert model.config.shared.width == separate.config.shared.width == width
    ids = draw_ids(65)
    assert_equal_logits(one_pass(separate, ids), reference.logits(ids))
    assert_equal_logits(one_pass(separate, ids), one_pass(model, ids), within=3e-5)
    sparse = [layer.mlp for layer in separate.params.layers if hasattr(layer.mlp, "shared")]
    assert all((mlp.shared is None) == (width == 0) for mlp in sparse)
    assert len(sparse) == {"dense-layers": 2, "dense": 0}.get(variant, 4)


def test_fused_is_refused_where_widths_differ(make_reference):
    folder = make_reference(Qwen3NextConfig(**BASE | VARIANTS["dense-layers"])).folder
    with pytest.raises(ValueError, match=r"'fused' is not possible: shared width 36 is not a multiple of .* 24; use"):
        fmoe.load(folder, shared_experts="fused")
    with pytest.raises(ValueError, match="shared_experts='both' must be 'auto', 'fused' or 'separate'"):
        fmoe.load(folder, shared_experts="both")


def with_graphs(model, backend):
    """The model, forced to run its layers compiled by ``backend``."""
    layers = model.architecture.make_layers(model.config, choose(model.device, compiled=True))
    head = partial(compute_logits, eps=model.config.decoder.eps)
    return replace(model, graphs=compile_steps(layers, head, device=model.device, backend=backend), compile=True)


def test_compiled_equals_eager(make_reference, record_property):
    """Both kinds of layer with dense and sparse blocks, a fused shared expert, B and T of 1 and more."""
    record_property("family", "qwen3_next")
    config = BASE | VARIANTS["dense-layers"] | {"shared_expert_intermediate_size": 24}
    model = fmoe.load(make_reference(Qwen3NextConfig(**config)).folder, compile=False)
    compiled = with_graphs(model, "aot_eager")
    assert compiled.graphs.compiled and compiled.config.shared.slots == 1
    for length in (1, 65, 130):
        ids = draw_ids(length, seed=length)
        assert_equal_logits(one_pass(compiled, ids), one_pass(model, ids), within=3e-5)
    pieces = [64, 1, 1, 7, 1]
    ids = draw_ids(sum(pieces))
    found, found_state = in_pieces(compiled, ids, pieces, compiled.graphs)
    expected, state = in_pieces(model, ids, pieces)
    assert_equal_logits(found, expected, within=3e-5)
    for cache, expected_cache in zip(found_state.caches, state.caches, strict=True):
        torch.testing.assert_close(cache, expected_cache, rtol=1e-4, atol=1e-4)
    prompts = [draw_ids(n, seed=n) for n in (1, 5, 17)]
    assert fmoe.generate(compiled, prompts, max_new_tokens=6) == fmoe.generate(model, prompts, max_new_tokens=6)


def test_inductor_generates_what_eager_does(make_reference):
    """The real back end through load(compile=True), in as few graphs as possible: one token at a time."""
    folder = make_reference(Qwen3NextConfig(**BASE | {"num_hidden_layers": 2, "layer_types": [L, A]})).folder
    expected = fmoe.generate(fmoe.load(folder, compile=False), [[5]], max_new_tokens=5, logprobs=0)[0]

    found = fmoe.generate(fmoe.load(folder, compile=True), [[5]], max_new_tokens=5, logprobs=0)[0]

    assert found.token_ids == expected.token_ids
    for mine, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)


def rewrite_config(folder, target, change):
    """Copy a checkpoint folder with its config.json changed; the weights are linked."""
    shutil.copytree(folder, target, copy_function=lambda a, b: shutil.os.symlink(a, b))
    raw = json.loads((folder / "config.json").read_text())
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(change(raw)))
    return target


def to_old_keys(raw):
    """Write the keys as transformers 4 did."""
    rope = raw.pop("rope_parameters")
    kinds = raw.pop("layer_types")
    raw["rope_theta"] = rope["rope_theta"]
    raw["partial_rotary_factor"] = rope["partial_rotary_factor"]
    raw["rope_scaling"] = None
    raw["full_attention_interval"] = kinds.index(A) + 1
    raw["torch_dtype"] = raw.pop("dtype")
    raw["mlp_only_layers"] = raw["mlp_only_layers"] or None
    return raw


def test_old_config_keys(make_reference, tmp_path):
    options = {"num_hidden_layers": 6, "layer_types": [L, L, A] * 2}
    rope = {"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 0.5}
    reference = make_reference(Qwen3NextConfig(**BASE | options, rope_parameters=rope))
    old = fmoe.load(rewrite_config(reference.folder, tmp_path / "old", to_old_keys), compile=False)
    assert old.config == fmoe.load(reference.folder).config
    assert old.config.decoder.layer_kinds == (L, L, A, L, L, A)
    ids = draw_ids(65)
    assert_equal_logits(one_pass(old, ids), reference.logits(ids))


def test_old_yarn_keys(make_reference, tmp_path):
    def change(raw):
        rope = raw.pop("rope_parameters")
        raw["rope_theta"], raw["partial_rotary_factor"] = rope.pop("rope_theta"), rope.pop("partial_rotary_factor")
        raw["rope_scaling"] = rope | {"type": rope.pop("rope_type")}
        return raw

    reference = make_reference(Qwen3NextConfig(**BASE | VARIANTS["yarn"]))
    old = fmoe.load(rewrite_config(reference.folder, tmp_path / "old", change), compile=False)
    assert old.config.decoder.rope.factor == 4.0
    assert old.config == fmoe.load(reference.folder).config
