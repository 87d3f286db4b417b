"""What every family must pass. A test file gives the fixtures ``reference`` and ``model`` and imports the tests."""

import json
import shutil
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

import fmoe
from fmoe.architectures import compute_logits
from fmoe.compile.select import choose
from fmoe.compile.step import compile_steps
from fmoe.decoding import compute_head, decode_batch, new_state, run
from fmoe.functional.routing import route, router_logits
from fmoe.info import describe
from fmoe.loading import named_tensors
from fmoe.options import Options

from .families_table import MARGIN, family_name, read_figures

V = 61
LENGTHS = (1, 3, 17, 65)
PIECES = {
    "token by token": [1] * 66,
    "prefill, decode": [17, *[1] * 49],
    "chunks of 7": [7] * 9 + [3],
    "two": [64, 2],
}


def draw_ids(count, seed=0):
    return torch.randint(V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_equal_logits(found, expected, *, within=1e-4):
    """Compare to a part of the largest logit, and the greedy choices wherever the best leads by 1e-3."""
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert (found - expected).abs().max() <= within * max(1.0, expected.abs().max())
    best = expected.topk(2).values
    clear = best[..., 0] - best[..., 1] > 1e-3
    assert clear.any()
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])


def check_figure(model, found, expected, record_property):
    """Report the largest difference, and hold it to the family's figure where families_table.py has noted one."""
    difference = (found - expected).abs().max().item()
    record_property("difference", difference)
    figure = read_figures().get(family_name(model.architecture), {}).get("parity")
    assert figure is None or difference <= MARGIN * figure


def one_pass(model, ids):
    return fmoe.logits(model, torch.tensor([ids]))[0]


def in_pieces(model, ids, sizes, steps=None):
    """Run the ids through one state in pieces of the given sizes; logits at every position."""
    steps, outputs = steps or model.eager, []
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    assert ends[-1] == len(ids)
    with torch.inference_mode():
        state = new_state(model, 1, len(ids))
        for start, end in pairwise(ends):
            x_1TD, state = run(model, steps, torch.tensor([ids[start:end]]), state, visible=end)
            outputs.append(compute_head(model, steps, x_1TD[0]))
    return torch.cat(outputs)


def decode(model, prompts, tokens, steps=None, **settings):
    """Greedy tokens and their log-probabilities, by row."""
    options = Options(tokens, 0.0, 1.0, 0, 0.0, 1.0, 0, (), (), 1)
    with torch.inference_mode():
        turns = list(decode_batch(model, steps or model.eager, prompts, options, **settings))
    return [([turn[row].id for turn in turns], [turn[row].logprob for turn in turns]) for row in range(len(prompts))]


def assert_same_rows(found, expected):
    for (ids, logprobs), (expected_ids, expected_logprobs) in zip(found, expected, strict=True):
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


@pytest.mark.parametrize("length", LENGTHS)
def test_logits(reference, model, length, record_property):
    ids = draw_ids(length, seed=length)
    found, expected = one_pass(model, ids), reference.logits(ids)
    check_figure(model, found, expected, record_property)
    assert_equal_logits(found, expected)


def test_the_reference_is_worth_comparing_with(reference):
    """Logits of order 1 and more that depend on the order of far tokens, as far as layers and windows reach."""
    ids = draw_ids(17)
    logits = reference.logits(ids)
    assert 1 < logits.std() < 100
    assert (reference.logits([*ids[:6], ids[7], ids[6], *ids[8:]])[-1] - logits[-1]).abs().max() > 1e-2


@pytest.mark.parametrize("sizes", PIECES.values(), ids=PIECES)
def test_pieces_equal_one_pass(reference, model, sizes):
    ids = draw_ids(66)
    assert_equal_logits(in_pieces(model, ids, sizes), reference.logits(ids))


def test_decoding_equals_the_reference_with_its_cache(reference, model):
    """transformers' own prefill-then-decode, greedy, token for token until the first close call."""
    ids = draw_ids(20)
    done = fmoe.generate(model, ids, max_new_tokens=16, logprobs=2, ignore_eos=True)[0]
    prompt = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, 20, dtype=torch.int64)}
    expected = reference.model.generate(**prompt, max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=V)
    close = [n for n, step in enumerate(done.logprobs) if step.top[0][1] - step.top[1][1] <= 1e-3]
    compared = min(close, default=16)
    assert compared >= 5
    assert list(done.token_ids[:compared]) == expected[0, 20 : 20 + compared].tolist()


def test_mixed_lengths_equal_single_rows(model):
    prompts = [draw_ids(n, seed=n) for n in (1, 40, 3, 17)]
    alone = [decode(model, [prompt], 8)[0] for prompt in prompts]
    assert_same_rows(decode(model, prompts, 8), alone)


def test_chunked_prefill_equals_one_chunk(model):
    prompts = [draw_ids(n, seed=n) for n in (1, 40, 17)]
    assert_same_rows(decode(model, prompts, 4, chunk=13), decode(model, prompts, 4))


def test_stacked_and_single_experts_load_alike(reference, model, tmp_path):
    reference.model.save_pretrained(tmp_path, save_original_format=False)
    stacked = fmoe.load(tmp_path, compile=False)
    assert stacked.config == model.config
    found, expected = dict(named_tensors(stacked.params)), dict(named_tensors(model.params))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    stored = load_file(tmp_path / "model.safetensors")
    stored["model.extra.weight"] = stored.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"(?s)q_proj.weight.*model.extra.weight"):
        fmoe.load(tmp_path)


def check_compiled(model):
    """Hold compiled layers to the plain ones over mixed lengths and batches, with no graph after the warm-up."""
    layers = model.architecture.make_layers(model.config, choose(model.device, compiled=True))
    head = partial(compute_logits, eps=model.config.decoder.eps)
    steps = compile_steps(layers, head, device=torch.device("cpu"), backend="aot_eager")
    compiled = replace(model, graphs=steps, compile=True)
    prompts = [draw_ids(n, seed=n) for n in (1, 5)]
    for warm_up in ([prompts[0]], [prompts[1]], prompts):
        decode(compiled, warm_up, 2, steps)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for sizes in ((1,), (70,), (2, 130, 1), (3, 17, 65, 9, 33)):
            rows = [draw_ids(n, seed=n) for n in sizes]
            assert_same_rows(decode(compiled, rows, 4, steps), decode(model, rows, 4))
        ids = draw_ids(75)
        assert_equal_logits(in_pieces(compiled, ids, [64, 1, 1, 7, 2], steps), one_pass(model, ids), within=3e-5)


def check_router(router, rule, hidden, rng):
    """Hold a rule to a router of transformers in bfloat16, as dense [T, E] weights."""
    router.weight.data = 0.3 * torch.randn(rule.num_experts, hidden, generator=rng).bfloat16()
    x_TD = torch.randn(33, hidden, generator=rng).bfloat16()
    logits_TE = router_logits(x_TD, router.weight.data, float32=rule.float32_logits)
    if rule.top_k < rule.num_experts:  # equal logits around the last place are nobody's to decide
        edge = logits_TE.float().topk(rule.top_k + 1).values[:, -2:]
        clear = edge[:, 0] > edge[:, 1]
        assert clear.sum() > 25
        x_TD, logits_TE = x_TD[clear], logits_TE[clear]
    with torch.no_grad():
        _, weights, ids = router(x_TD)
    found = route(logits_TE, None, rule)

    def to_dense(ids, weights):
        return torch.zeros(len(ids), rule.num_experts).scatter_add(1, ids.long(), weights.float())

    dense, expected = to_dense(found.experts_TK, found.weights_TK), to_dense(ids, weights)
    assert torch.equal(dense > 0, expected > 0)
    rounded = weights.dtype == torch.bfloat16
    assert rounded == torch.equal(expected, expected.bfloat16().float()) == rule.round_weights
    # a sum in another order can round to the next bfloat16
    torch.testing.assert_close(dense, expected, rtol=2**-7 if rounded else 1e-6, atol=0)


def check_bfloat16(reference):
    """Compare means: in bfloat16 a near tie of two experts may go either way."""
    model = fmoe.load(reference.folder, dtype="bfloat16", compile=False)
    others = [tensor for name, tensor in named_tensors(model.params) if "norm" not in name.rpartition(".")[2]]
    assert {tensor.dtype for tensor in others} == {torch.bfloat16}
    ids = draw_ids(65)
    found, expected = one_pass(model, ids), reference.logits(ids)
    assert (found - expected).abs().mean() < 0.1 * expected.std()


def rewrite_config(reference, target, change):
    """Copy a checkpoint with its config.json changed."""
    shutil.copytree(reference.folder, target)
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(change(raw)))
    return target


def to_hub_keys(raw):
    """Write the keys as published files do, those of transformers 4."""
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = rope | {"type": rope.pop("rope_type")} if rope["rope_type"] != "default" else None
    raw["torch_dtype"] = raw.pop("dtype")
    return raw


def check_flagship(raw, folder, *, total, active):
    """Count the parameters of a published config, active ones with embedding and head; returns what was read."""
    (folder / "config.json").write_text(json.dumps(raw))
    info = describe(folder, device="cpu")
    assert info.params == pytest.approx(total, rel=0.01)
    assert info.active == pytest.approx(active, rel=0.01)
    return info
