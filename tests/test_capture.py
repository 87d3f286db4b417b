"""Captured decode steps: what a loop over replays gives is what a loop over calls gives, however late tokens are read.

A stand-in for CUDA graphs runs on a CPU. As a graph's, its outputs are the same tensors after each replay, so that
whoever reads them too late, or writes what a graph does not look at, gives wrong tokens.
"""

import logging
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

import fmoe
from fmoe.capture import DirectMachine, GraphMachine, Launcher, Shelf
from fmoe.decoding import choose_machine, decode_batch
from fmoe.functional.sampling import penalize_repetition, sample, sampling_params
from fmoe.options import Options

V = 4096
LENGTHS = (1, 5, 5, 17, 64, 63)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to capture on")


class StandIn:
    """Graphs as a CPU can have them; notes what is done in which order."""

    ahead = 1
    least = 2

    def __init__(self):
        self.events = []

    def warm_up(self, step):
        self.events.append("warm-up")
        return step()

    def capture(self, step):
        self.events.append("capture")
        outputs = []

        def replay():
            self.events.append("replay")
            new = step()
            if not outputs:
                outputs.extend(output.clone() for output in new)
            for output, value in zip(outputs, new, strict=True):
                output.copy_(value)
            return tuple(outputs)

        return replay

    def fetch(self, outputs):
        copies = [output.clone() for output in outputs]

        def read():
            self.events.append("read")
            return copies

        return read


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", device="cpu", compile=False)


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True)
def empty_shelf(demo):
    demo.shelf.take(lambda kept: False)


@pytest.fixture
def captured(monkeypatch):
    """Every decode loop on the stand-in."""
    machine = StandIn()
    monkeypatch.setattr("fmoe.decoding.choose_machine", lambda model, steps: machine)
    return machine


def draw_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(1, V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [draw_ids(n, seed=n) for n in LENGTHS]


def make_options(**changes):
    settings = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0}
    settings |= {"max_new_tokens": 12, "stop": (), "eos_ids": (), "logprobs": None}
    return Options(**settings | changes)


def decode(model, prompts, machine, *, steps=None, first_row=0, **options):
    options = make_options(**options)
    return list(decode_batch(model, steps or model.eager, prompts, options, machine=machine, first_row=first_row))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": 2},
        {"temperature": 1.3, "top_p": 0.9, "seed": 7},
        {"temperature": 0.8, "top_k": 5, "min_p": 0.05, "logprobs": 0},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7, "temperature": 1.0, "logprobs": 1},
    ],
    ids=str,
)
def test_replays_give_the_tokens_of_calls(demo, options):
    expected = decode(demo, PROMPTS, DirectMachine(), **options)
    machine = StandIn()

    found = decode(demo, PROMPTS, machine, **options)

    assert found == expected
    assert machine.events.count("capture") == 1 and machine.events.count("replay") == 10


def test_every_draw_is_that_of_its_seed_and_place(demo):
    """Twice through one batch, against passes over the whole sequence and ``sample`` with the number of each token."""
    machine, settings = StandIn(), {"temperature": 1.1, "top_p": 0.95}
    for seed, penalty, row in ((5, 1.3, 4), (11, 1.2, 3)):
        ids = PROMPTS[row]
        options = settings | {"seed": seed, "repetition_penalty": penalty}
        params = sampling_params(1, **options)
        drawn = []
        for n in range(8):
            logits_1V = fmoe.logits(demo, [ids + drawn])[:, -1]
            seen_1V = torch.zeros(1, V, dtype=torch.bool)
            seen_1V[0, ids + drawn] = True
            logits_1V = penalize_repetition(logits_1V, seen_1V, params.repetition_penalty_B)
            drawn.append(int(sample(logits_1V, params, torch.tensor([n]))))

        assert [token.id for [token] in decode(demo, [ids], machine, max_new_tokens=8, **options)] == drawn
    assert machine.events.count("capture") == 1


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_few_tokens(demo, count):
    machine = StandIn()
    found = decode(demo, PROMPTS, machine, max_new_tokens=count)
    assert found == decode(demo, PROMPTS, DirectMachine(), max_new_tokens=count)
    assert len(found) == count
    assert machine.events.count("capture") == (count >= 4)  # the second step captures where two are left


def test_a_step_runs_ahead_and_no_more(demo):
    machine = StandIn()
    turns = decode_batch(demo, demo.eager, PROMPTS, make_options(max_new_tokens=6), machine=machine)
    for _ in turns:
        machine.events.append("token")

    first = ["read", "token", "warm-up", "capture", "replay", "read", "token"]
    assert machine.events == [*first, *["replay", "read", "token"] * 3, "read", "token"]


def test_whoever_stops_leaves_one_step_behind(demo):
    machine = StandIn()
    turns = decode_batch(demo, demo.eager, PROMPTS, make_options(max_new_tokens=50), machine=machine)
    assert list(islice(turns, 5)) == decode(demo, PROMPTS, DirectMachine(), max_new_tokens=5)
    turns.close()
    assert machine.events.count("replay") == 4 and machine.events.count("read") == 5
    # what ran too far is forgotten by whoever decodes next
    assert decode(demo, PROMPTS[::-1], machine) == decode(demo, PROMPTS[::-1], DirectMachine())


def test_rows_that_finish_apart(demo, captured):
    """Each row ends at its own end token; the surplus is trimmed, and the next batch starts anew."""
    prompts = PROMPTS[::-1]
    plain = fmoe.generate(demo, prompts, max_new_tokens=12, ignore_eos=True)
    captured.events.clear()
    ends = (plain[0].token_ids[2], plain[3].token_ids[7])
    model = replace(demo, defaults=replace(demo.defaults, eos_ids=ends), shelf=Shelf())

    rows = fmoe.generate(model, prompts, max_new_tokens=12, batch_size=3)

    for row, whole in zip(rows, plain, strict=True):
        stop = next((n for n, token in enumerate(whole.token_ids) if token in ends), 11)
        assert row.token_ids == whole.token_ids[: stop + 1]
    assert len({len(row.token_ids) for row in rows}) > 2
    assert captured.events.count("capture") == 1


def test_streaming_gives_what_generate_gives(demo, captured):
    texts = [piece for prompt in ("Once upon", "A") for piece in ["|", *fmoe.stream(demo, prompt, max_new_tokens=20)]]
    rows = fmoe.generate(demo, ["Once upon", "A"], max_new_tokens=20, batch_size=1)
    assert "".join(texts) == "".join(f"|{row.text}" for row in rows)
    assert captured.events.count("capture") == 1


def test_what_is_read_and_written_stays_at_one_address(demo):
    seen = set()

    def layer(stream, params, cache, placement):
        seen.add((cache[0].data_ptr(), cache[1].data_ptr()))
        return demo.eager.layers["full_attention"](stream, params, cache, placement)

    steps = replace(demo.eager, layers={**demo.eager.layers, "full_attention": layer})
    for prompts in (PROMPTS[:2], PROMPTS[1:3]):
        decode(demo, [ids[-1:] for ids in prompts], StandIn(), steps=steps, max_new_tokens=9)
    layers = demo.config.decoder.layer_kinds.count("full_attention")
    prefilled = 1  # the second row's own view, where it is prefilled alone
    assert len(seen) <= (1 + prefilled) * layers


def test_a_batch_is_kept_for_the_next_generation(demo):
    machine = StandIn()
    decode(demo, PROMPTS, machine, temperature=1.0, seed=3, max_new_tokens=30)
    del machine.events[:]

    found = decode(demo, PROMPTS[::-1], machine, temperature=0.7, seed=9, first_row=2)

    assert found == decode(demo, PROMPTS[::-1], DirectMachine(), temperature=0.7, seed=9, first_row=2)
    assert set(machine.events) == {"replay", "read"}


def test_captured_rows_start_from_a_state_and_leave_one(demo):
    """The kept batch takes a state of its own each time; the step that ran ahead counts as seen."""
    machine, ends = StandIn(), [[], draw_ids(3, 9), draw_ids(70, 8)]
    for ids in (PROMPTS[4], PROMPTS[1], PROMPTS[4]):
        state, kept = fmoe.prefill(demo, ids), []
        prompts = [[*ids, *end] for end in ends]

        def keep(rows, seen, kept=kept):
            kept.append(seen)

        turns = decode_batch(demo, demo.eager, prompts, make_options(), machine=machine, origin=state, keep=keep)
        found = [next(turns) for _ in range(5)]
        turns.close()

        plain = decode_batch(demo, demo.eager, prompts, make_options(), origin=state, machine=DirectMachine())
        assert found == [next(plain) for _ in range(5)]
        [seen] = kept
        assert seen == [[*prompt, *(turn[row].id for turn in found)] for row, prompt in enumerate(prompts)]
    assert machine.events.count("capture") == 1


@pytest.mark.parametrize("change", ["rows", "room", "greedy", "logprobs", "params", "steps"])
def test_a_batch_of_another_kind_is_not_taken(demo, change):
    machine = StandIn()
    decode(demo, PROMPTS, machine, max_new_tokens=5)
    del machine.events[:]
    model, prompts, options = demo, PROMPTS, {}
    if change == "rows":
        prompts = PROMPTS[:5]
    elif change == "params":
        params = demo.params._replace(norm_D=nn.Parameter(demo.params.norm_D * 1.5, requires_grad=False))
        model = replace(demo, params=params)
    elif change == "steps":
        model = replace(demo, eager=replace(demo.eager))
    else:
        options = {"room": {"max_new_tokens": 200}, "greedy": {"temperature": 1.0}, "logprobs": {"logprobs": 0}}[change]
    options = {"max_new_tokens": 5} | options

    found = decode(model, prompts, machine, **options)

    assert machine.events.count("capture") == 1
    assert found == decode(model, prompts, DirectMachine(), **options)


def test_generations_that_take_turns_have_their_own_batch(demo):
    options = make_options(max_new_tokens=10)
    expected = [decode(demo, [ids], DirectMachine(), max_new_tokens=10) for ids in PROMPTS[3:5]]
    both = [decode_batch(demo, demo.eager, [ids], options, machine=StandIn()) for ids in PROMPTS[3:5]]
    assert [list(turn) for turn in zip(*zip(*both, strict=True), strict=True)] == expected


def poison_token(model, token_id):
    embed_VD = model.params.embed_VD.clone()
    embed_VD[token_id, 5] = torch.nan
    return replace(model, params=model.params._replace(embed_VD=nn.Parameter(embed_VD, requires_grad=False)))


def test_nan_is_raised_at_its_token(demo):
    """The step behind it has been launched by then."""
    prompts = [draw_ids(4, seed=2), draw_ids(9)]
    fifth = decode(demo, prompts, DirectMachine())[4][1].id
    model, machine = poison_token(demo, fifth), StandIn()
    turns = decode_batch(model, model.eager, prompts, make_options(), machine=machine)
    assert [next(turns)[1].id for _ in range(5)][4] == fifth
    with pytest.raises(RuntimeError, match="first shows in the embedding"):
        next(turns)
    assert machine.events.count("replay") == 5
    # a batch that held NaN is as good as new
    clean = replace(model, params=demo.params)
    assert decode(clean, prompts, machine) == decode(demo, prompts, DirectMachine())


def test_nan_of_a_finished_row_stops_nobody(demo):
    prompts = [draw_ids(4, seed=2), draw_ids(9)]
    expected, other = ([turn[row].id for turn in decode(demo, prompts, DirectMachine())] for row in (0, 1))
    model = poison_token(demo, next(token for token in other[:-1] if token not in expected + prompts[0] + prompts[1]))
    turns = decode_batch(model, model.eager, prompts, make_options(), machine=StandIn(), is_active=lambda row: row == 0)
    assert [turn[0].id for turn in turns] == expected


def test_what_cannot_be_captured_is_called_and_said_once(demo, caplog):
    class Refuses(StandIn):
        def capture(self, step):
            self.events.append("refused")
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    machine = Refuses()
    with caplog.at_level(logging.WARNING, logger="fmoe"):
        found = decode(demo, PROMPTS, machine)
    assert found == decode(demo, PROMPTS, DirectMachine())
    assert machine.events.count("refused") == 1
    assert caplog.messages == [
        "decode steps run one call after the other, for they cannot be captured: "
        "operation not permitted when stream is capturing"
    ]


def test_a_cpu_calls_its_steps(demo):
    machine = choose_machine(demo, demo.graphs)
    assert isinstance(machine, DirectMachine)
    with pytest.raises(NotImplementedError, match="are not captured; launch them"):
        machine.capture(lambda: ())
    fmoe.generate(demo, [[5]], max_new_tokens=3)
    assert demo.shelf.take(lambda kept: True) is None


def test_a_launcher_counts_what_is_left():
    machine = StandIn()
    launcher = Launcher(machine)
    for remaining in (9, 1, 1, 2, 1):
        launcher.launch(lambda: (torch.zeros(1),), remaining=remaining)
    assert machine.events == ["warm-up", "capture", "replay", "replay"]


def test_a_shelf_keeps_the_last_thing():
    shelf = Shelf()
    assert shelf.take(lambda kept: True) is None
    shelf.put("a")
    shelf.put("b")
    assert shelf.take(lambda kept: kept == "a") is None
    assert shelf.take(lambda kept: True) is None  # what does not fit is dropped
    shelf.put("c")
    assert shelf.take(lambda kept: kept == "c") == "c"


# --- on a GPU


@GPU
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": 2}], ids=str)
def test_a_gpu_gives_captured_what_it_gives_uncaptured(options):
    prompts = [draw_ids(n, seed=n) for n in (1, 5, 17, 64, 130, 3, 33)]
    model = fmoe.load("demo", device="cuda", dtype="float32")
    assert isinstance(choose_machine(model, model.graphs), GraphMachine)
    options = {"max_new_tokens": 64} | options

    found = decode(model, prompts, None, steps=model.graphs, **options)

    assert found == decode(model, prompts, DirectMachine(), steps=model.graphs, **options)
    assert found == decode(model, prompts, None, steps=model.graphs, **options)  # from the shelf


@GPU
def test_a_gpu_captures(caplog):
    model = fmoe.load("demo", device="cuda", dtype="float32")
    with caplog.at_level(logging.WARNING, logger="fmoe"):
        decode(model, [draw_ids(5)], None, steps=model.graphs, max_new_tokens=40)
    assert not caplog.messages
    assert model.shelf.take(lambda kept: True).launcher.replay is not None
