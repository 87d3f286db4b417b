"""fmoe/decoding.py on the demo: a batch changes nothing, chunks change nothing, and NaN is traced to its layer."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fmoe
from fmoe.decoding import PREFILL_CHUNK, Token, compute_head, decode_batch, explain_nan, new_state, prefill, run
from fmoe.functional.cache import KVCache
from fmoe.options import Options

V = 4096
LENGTHS = (1, 5, 5, 17, 64, 64)  # neighbours of one length prefill together


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", device="cpu", compile=False)


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def draw_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(1, V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_options(**changes):
    settings = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0}
    settings |= {"max_new_tokens": 8, "stop": (), "eos_ids": (), "logprobs": None}
    return Options(**settings | changes)


def decode(model, prompts, steps=None, **arguments):
    """Collect decode_batch's turns as one list of tokens per row."""
    options = make_options(**{key: arguments.pop(key) for key in [*arguments] if key in Options.__dataclass_fields__})
    turns = decode_batch(model, steps or model.eager, prompts, options, **arguments)
    return [list(row) for row in zip(*turns, strict=True)]


def play(model, prompts, forced_NB, *, chunk=PREFILL_CHUNK):
    """Prefill, then feed the forced tokens; (logits [turns, B, V], the state)."""
    lengths = [len(ids) for ids in prompts]
    state = new_state(model, len(prompts), max(lengths) + len(forced_NB))
    steps = model.eager
    logits = [prefill(model, steps, prompts, state, chunk=chunk)]
    state = state._replace(lengths_B=torch.tensor(lengths))
    for n, tokens_B in enumerate(forced_NB, 1):
        x_B1D, state = run(model, steps, tokens_B[:, None], state, visible=max(lengths) + n)
        logits.append(compute_head(model, steps, x_B1D[:, -1]))
    return torch.stack(logits), state


def assert_close(found, expected, *, within):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= within * max(1.0, expected.abs().max())


def assert_equal_state(state, row, expected, *, within=1e-4):
    """Compare one row of a state to a state of batch 1: windows, recurrent states, and what the slots hold so far."""
    length = int(expected.lengths_B)
    assert int(state.lengths_B[row]) == length
    for cache, single in zip(state.caches, expected.caches, strict=True):
        for part, single_part in zip(cache, single, strict=True):
            mine, other = part[row], single_part[0]
            if isinstance(cache, KVCache):
                mine, other = mine[:, :length], other[:, :length]
            assert (mine - other).abs().max() <= within * other.abs().max()


def test_a_batch_of_mixed_lengths_changes_no_logits_and_no_state(demo):
    prompts = [draw_ids(n, seed=n) for n in LENGTHS]
    forced_NB = torch.tensor([draw_ids(len(LENGTHS), seed=100 + n) for n in range(12)])

    logits, state = play(demo, prompts, forced_NB)

    for row, ids in enumerate(prompts):
        expected, single = play(demo, [ids], forced_NB[:, row : row + 1])
        if LENGTHS.count(len(ids)) == 1:  # such a prompt runs alone, so not even the rounding differs
            assert torch.equal(logits[0, row], expected[0, 0])
        assert_close(logits[:, row], expected[:, 0], within=1e-5)
        assert_equal_state(state, row, single)


def test_decoding_is_one_pass(demo):
    ids, forced = draw_ids(60), draw_ids(9, seed=1)
    logits, _ = play(demo, [ids], torch.tensor(forced)[:, None])
    expected = fmoe.logits(demo, torch.tensor([ids + forced]))[0, 59:]
    assert_close(logits[:, 0], expected, within=1e-4)


def test_decode_batch_gives_each_row_what_it_gets_alone(demo):
    prompts = [draw_ids(n, seed=n) for n in LENGTHS]
    rows = decode(demo, prompts, max_new_tokens=16, logprobs=2)
    for ids, row in zip(prompts, rows, strict=True):
        alone = decode(demo, [ids], max_new_tokens=16, logprobs=2)[0]
        gaps = [token.top[0][1] - token.top[1][1] for token in alone]
        clear = next((n for n, gap in enumerate(gaps) if gap <= 1e-3), 16)
        assert clear >= 8
        assert [token.id for token in row[:clear]] == [token.id for token in alone[:clear]]
        assert [t.logprob for t in row[:clear]] == pytest.approx([t.logprob for t in alone[:clear]], abs=1e-4)


def test_decode_batch_is_greedy_over_one_pass(demo):
    """Across the boundary of 64 slots, where a step begins to look at more of them."""
    prompts = [draw_ids(59, seed=1), draw_ids(3)]
    for ids, row in zip(prompts, decode(demo, prompts, max_new_tokens=10, logprobs=0), strict=True):
        tokens = [token.id for token in row]
        logprobs_TV = fmoe.logits(demo, torch.tensor([ids + tokens]))[0, len(ids) - 1 : -1].log_softmax(-1)
        assert logprobs_TV.argmax(-1).tolist() == tokens
        assert [token.logprob for token in row] == pytest.approx(logprobs_TV.amax(-1).tolist(), abs=1e-3)


def test_rows_are_seeded_by_their_place(demo):
    prompts = [draw_ids(n, seed=n) for n in (3, 20, 9)]
    sampled = {"temperature": 1.3, "top_p": 0.9, "max_new_tokens": 10}
    rows = decode(demo, prompts, seed=40, **sampled)
    alone = [decode(demo, [ids], seed=40 + i, **sampled)[0] for i, ids in enumerate(prompts)]
    assert rows == alone
    assert decode(demo, prompts[1:], seed=40, first_row=1, **sampled) == rows[1:]
    assert decode(demo, prompts[:1], seed=41, **sampled) != rows[:1]
    assert decode(demo, prompts[:1] * 2, seed=40, **sampled)[1] != rows[0]


@pytest.mark.parametrize("chunk", [7, 64, 199])
def test_chunks_change_nothing(demo, chunk):
    ids = draw_ids(200)
    forced = torch.tensor(draw_ids(3, seed=1))[:, None]
    logits, state = play(demo, [ids], forced, chunk=chunk)
    expected, whole = play(demo, [ids], forced, chunk=200)
    assert_close(logits, expected, within=1e-4)
    assert_equal_state(state, 0, whole)
    tokens = decode(demo, [ids, ids[:9]], chunk=chunk, logprobs=0)
    for row, other in zip(tokens, decode(demo, [ids, ids[:9]], logprobs=0), strict=True):
        assert [token.id for token in row] == [token.id for token in other]
        assert [token.logprob for token in row] == pytest.approx([token.logprob for token in other], abs=1e-3)


def test_a_prompt_longer_than_the_default_chunk(demo):
    ids = draw_ids(PREFILL_CHUNK + 70)
    none = torch.empty(0, 1, dtype=torch.int64)
    logits, state = play(demo, [ids], none)
    expected, whole = play(demo, [ids], none, chunk=2 * PREFILL_CHUNK)
    assert_close(logits, expected, within=1e-4)
    assert_equal_state(state, 0, whole)


def test_tokens_bear_what_was_asked_for(demo):
    ids = draw_ids(5)
    plain, own, top = (decode(demo, [ids], logprobs=n, max_new_tokens=3)[0] for n in (None, 0, 2))
    assert [type(token) for token in plain] == [Token] * 3
    assert {token.logprob for token in plain} == {None} and {token.top for token in plain} == {()}
    assert all(token.logprob < 0 and token.top == () for token in own)
    assert all(len(token.top) == 2 and token.top[0] == (token.id, token.logprob) for token in top)


def poisoned(tensor):
    bad = tensor.clone()
    bad[(0,) * bad.dim()] = torch.nan
    return nn.Parameter(bad, requires_grad=False)


def poison_layer(model, index, field):
    layers = list(model.params.layers)
    part = getattr(layers[index], field)
    layers[index] = layers[index]._replace(**{field: part._replace(**{part._fields[0]: poisoned(part[0])})})
    return replace(model, params=model.params._replace(layers=tuple(layers)))


@pytest.mark.parametrize(
    ("index", "field", "kind"),
    [
        (0, "mixer", "linear_attention"),
        (3, "mixer", "full_attention"),
        (5, "mlp", "linear_attention"),
        (7, "mlp", "full_attention"),
    ],
)
def test_nan_names_the_layer(demo, index, field, kind):
    model = poison_layer(demo, index, field)
    with pytest.raises(
        RuntimeError,
        match=rf"hold NaN or infinity, which first shows in layer {index} \({kind}\); check its weights or load",
    ):
        decode(model, [draw_ids(3), draw_ids(70)], chunk=64)


def test_nan_outside_the_layers(demo):
    for field, where in (("norm_D", "the final norm and head"), ("head_VD", "the final norm and head")):
        model = replace(demo, params=demo.params._replace(**{field: poisoned(getattr(demo.params, field))}))
        with pytest.raises(RuntimeError, match=f"first shows in {where}"):
            decode(model, [draw_ids(3)])


def poison_token(model, token_id):
    embed_VD = model.params.embed_VD.clone()
    embed_VD[token_id, 5] = torch.nan
    return replace(model, params=model.params._replace(embed_VD=nn.Parameter(embed_VD, requires_grad=False)))


@pytest.mark.parametrize("bad_row", [0, 1, 2])
def test_nan_of_one_row_in_a_batch(demo, bad_row):
    prompts = [draw_ids(n, seed=n) for n in (4, 9, 30)]
    prompts[bad_row][2] = 0
    with pytest.raises(RuntimeError, match="first shows in the embedding"):
        decode(poison_token(demo, 0), prompts)


def test_nan_in_a_later_step(demo):
    prompts = [draw_ids(4, seed=2), draw_ids(9)]
    third = decode(demo, prompts)[1][2].id
    assert third not in [token.id for row in decode(demo, prompts) for token in row[:2]] + prompts[0] + prompts[1]
    model = poison_token(demo, third)
    turns = decode_batch(model, model.eager, prompts, make_options())
    assert [next(turns)[1].id for _ in range(3)][2] == third  # chosen, and not yet looked up
    with pytest.raises(RuntimeError, match="first shows in the embedding"):
        next(turns)


def test_nan_of_an_inactive_row_stops_nobody(demo):
    prompts = [draw_ids(4, seed=2), [5, 0, 7]]
    options = make_options(logprobs=1)
    model = poison_token(demo, 0)
    expected = decode(model, prompts[:1], logprobs=1)
    turns = list(decode_batch(model, model.eager, prompts, options, is_active=lambda row: row == 0))
    assert [turn[0].id for turn in turns] == [token.id for token in expected[0]]
    assert all(0 <= turn[1].id < V for turn in turns)


def test_nan_that_the_plain_functions_do_not_give(demo):
    def broken(x, *arguments):
        stream = demo.eager.layers["full_attention"](x, *arguments)
        return stream._replace(branch_BTD=stream.branch_BTD * torch.nan)

    layers = {**demo.eager.layers, "full_attention": broken}
    graphs = replace(demo.eager, layers=layers, compiled=True)
    with pytest.raises(RuntimeError, match="the same tokens uncompiled do not give; load with compile=False"):
        decode(demo, [draw_ids(3)], steps=graphs)
    with pytest.raises(RuntimeError, match="a second run of the same tokens gave none; check the machine's memory"):
        decode(demo, [draw_ids(3)], steps=replace(demo.eager, layers=layers))
    assert explain_nan(demo, draw_ids(70), graphs, chunk=64).endswith("compile=False and report it")


def test_infinity_is_an_error_too(demo):
    head_VD = torch.zeros_like(demo.params.head_VD)
    head_VD[7, 0], head_VD[8, 0] = 3e38, -3e38
    norm_D = torch.full_like(demo.params.norm_D, 1e10)
    params = demo.params._replace(head_VD=head_VD, norm_D=norm_D)
    logits = fmoe.logits(replace(demo, params=params), torch.tensor([[3]]))
    assert logits.isinf().any() and not logits.isnan().any()
    with pytest.raises(RuntimeError, match="NaN or infinity, which first shows in the final norm and head"):
        decode(replace(demo, params=params), [[3]])


def test_infinity_at_an_earlier_position_is_found(demo):
    """The head's weights are such that the last position's logits, which alone are decoded, just stay finite."""
    ids = draw_ids(40)
    largest_T = fmoe.logits(demo, [ids])[0].abs().amax(-1).double()
    last = int(largest_T[1:].argmin()) + 1
    scale = torch.finfo(torch.float32).max / (largest_T[:last].max() * largest_T[last]).sqrt()
    params = demo.params._replace(head_VD=(demo.params.head_VD.double() * scale).float())
    broken = replace(demo, params=params)
    finite_T = fmoe.logits(broken, [ids[: last + 1]])[0].isfinite().all(-1)
    assert finite_T[-1] and not finite_T.all()
    for chunk in (3, 64):
        found = explain_nan(broken, ids[: last + 1], broken.eager, chunk=chunk)
        assert "first shows in the final norm and head" in found
    with pytest.raises(RuntimeError, match="first shows in the final norm and head"):
        fmoe.score(broken, ids[: last + 1])
