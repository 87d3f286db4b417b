"""Compiled steps: the graphs are few, their number does not grow, and no mix of sizes adds one."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fmoe import decoding
from fmoe.architectures import compute_logits, start_step
from fmoe.compile.select import choose
from fmoe.compile.step import SLOTS, Cursor, Steps, advance_, cache_slots, compile_steps, visible_slots
from fmoe.decoding import decode_batch
from fmoe.functional import append_kv_, apply_rotary, attend, rms_norm
from fmoe.model import Model
from fmoe.models import qwen3_next
from fmoe.options import Defaults, Options

CPU = torch.device("cpu")
GREEDY = Options(3, 0.0, 1.0, 0, 0.0, 1.0, 0, (), (), None)


class RandomFill:
    """Draws every parameter; small, so that states stay tame."""

    names: frozenset[str] = frozenset()

    def __init__(self):
        self.rng = torch.Generator().manual_seed(0)

    def __call__(self, shape, pieces, /, *, dtype=None, by_columns=False):
        return torch.nn.Parameter(torch.randn(tuple(shape), generator=self.rng) * 0.2, requires_grad=False)

    def weight(self, shape, pieces, /, *, parts=1, by_columns=False):
        return self(shape, pieces)


def make_model(layers, *, backend="aot_eager"):
    raw = {
        "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12, "partial_rotary_factor": 0.5,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 6,
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
        "max_position_embeddings": 8192, "mlp_only_layers": [1],
    }  # fmt: skip
    config = qwen3_next.parse_config(raw)
    head = partial(compute_logits, eps=config.decoder.eps)
    return Model(
        folder=Path("random"),
        architecture=qwen3_next,
        config=config,
        params=qwen3_next.build_params(RandomFill(), config),
        dtype=torch.float32,
        device=CPU,
        eager=Steps(qwen3_next.make_layers(config, choose(CPU, compiled=False)), head, compiled=False),
        graphs=compile_steps(
            qwen3_next.make_layers(config, choose(CPU, compiled=True)), head, device=CPU, backend=backend
        ),
        compile=True,
        text=None,
        defaults=Defaults(),
    )


def draw_prompts(lengths, seed=0):
    source = random.Random(seed)
    return [[source.randrange(61) for _ in range(length)] for length in lengths]


def generate(model, steps, prompts, *, chunk=2048):
    with torch.inference_mode():
        turns = list(decode_batch(model, steps, prompts, GREEDY, chunk=chunk))
    return [[token.id for token in row] for row in zip(*turns, strict=True)]


def warm_up(model):
    """Each 0/1 variant once: prompts of one and of several tokens, alone and together."""
    generate(model, model.graphs, draw_prompts([1]))
    generate(model, model.graphs, draw_prompts([5]))
    generate(model, model.graphs, draw_prompts([2, 3]))


def count_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_no_mix_of_lengths_and_batches_recompiles():
    model = make_model(4)
    warm_up(model)
    graphs = count_graphs()
    source = random.Random(1)
    mixes = [[length] for length in (1, 2, 63, 64, 65, 129, 2047, 2048, 2049, 4096)]
    mixes += [[source.choice([1, 2, 7, 63, 64, 65, 200]) for _ in range(batch)] for batch in range(1, 17)]

    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in mixes:
            generate(model, model.graphs, draw_prompts(lengths))

    assert count_graphs() == graphs
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("causally", [False, True], ids=["with a mask", "without"])
def test_prompts_of_a_later_row_first_make_no_graph_for_each_length(causally, monkeypatch):
    monkeypatch.setattr(decoding, "attends_causally", lambda model: causally)
    model = make_model(4)
    # a row's part of the caches: behind the start of their memory, and at it
    for lengths in ([1, 5, 17], [1], [5], [1, 1]):
        generate(model, model.graphs, draw_prompts(lengths))
    graphs = count_graphs()

    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([17], [64], [2, 31], [100], [1, 250], [700]):
            generate(model, model.graphs, draw_prompts(lengths))

    assert count_graphs() == graphs


def test_the_number_of_graphs_does_not_grow_with_the_layers():
    counts = []
    for layers in (4, 12):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        warm_up(make_model(layers))
        counts.append(count_graphs())

    # linear and full attention, one of the linear layers dense: three layer graphs and the head, times the variants
    assert counts[0] == counts[1] <= 14


@pytest.mark.parametrize("chunk", [7, 2048])
def test_compiled_gives_the_tokens_of_uncompiled(chunk):
    model = make_model(4)
    prompts = draw_prompts([1, 5, 64, 70])

    compiled = generate(model, model.graphs, prompts, chunk=chunk)

    assert compiled == generate(model, model.eager, prompts)


def test_inductor_gives_the_tokens_of_uncompiled():
    model = make_model(4, backend="inductor")
    prompts = draw_prompts([3])

    assert generate(model, model.graphs, prompts) == generate(model, model.eager, prompts)


def test_steps_leave_the_compiler_of_the_process_alone():
    seen = []

    def backend(graph, _):
        def run(*arguments):
            seen.append(torch._dynamo.eval_frame._stance.skip_guard_eval_unsafe)
            return graph.forward(*arguments)

        return run

    model = make_model(4, backend=backend)
    for _ in range(2):
        generate(model, model.graphs, draw_prompts([1]))

    # The stance holds for every thread: skipping guards here gave other threads' functions wrong graphs.
    assert seen and not any(seen)


def test_nothing_is_compiled_before_the_first_call():
    torch._dynamo.utils.counters.clear()
    make_model(4)

    assert count_graphs() == 0


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 4096])
def test_a_step_never_sees_the_whole_cache_and_always_all_tokens(tokens):
    assert tokens <= visible_slots(tokens) < cache_slots(tokens)
    assert visible_slots(tokens) % SLOTS == 0
    assert visible_slots(tokens) - tokens < SLOTS


def make_cursor(*rows):
    return Cursor(*(torch.tensor(row) for row in rows))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_advance_moves_on_in_place(compiled):
    layers = {"full": lambda stream, params: stream}
    steps = compile_steps(layers, lambda x: x, device=CPU, backend="aot_eager", masked=False)
    advance = steps.advance if compiled else advance_
    for rows in (1, 4, 3):
        cursor = make_cursor([9] * rows, list(range(rows)), [5] * rows)
        parts = list(cursor)
        check = torch.tensor([1.0, torch.nan, -torch.inf, 2.0][:rows])

        codes = advance(torch.tensor([7, 0, 60, 3][:rows]), check, cursor)

        assert codes.tolist() == [7, -1, -61, 3][:rows]
        assert [part.tolist() for part in parts] == [[7, 0, 60, 3][:rows], [n + 1 for n in range(rows)], [6] * rows]


def test_steps_that_need_no_mask_start_in_a_graph_of_their_own():
    """Decode at any batch and cache is one graph more, and the mask's width makes none."""
    model = make_model(4)
    config = model.config.decoder
    head = partial(compute_logits, eps=config.eps)
    kernels = replace(choose(CPU, compiled=True), attend_step=attend_whole)
    start = partial(start_step, config=config, slots=None)
    layers = qwen3_next.make_layers(model.config, kernels)
    steps = compile_steps(layers, head, device=CPU, backend="aot_eager", start=start, masked=False)
    free = replace(model, graphs=steps)
    warm_up(free)
    assert count_graphs()

    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([1], [63], [64, 5], [2, 600, 3]):
            prompts = draw_prompts(lengths)
            assert generate(free, steps, prompts) == generate(model, model.eager, prompts)


def attend_whole(projected_BTN, norm_HC, cache, placement, /, *, heads, eps, window=None):
    """The reference of ``attend_step``: no mask comes in, and the whole cache is looked at."""
    assert placement.mask_BTM is None and window is None
    B, kv_heads, M, size = cache.k_BJMC.shape
    sizes = [(heads + kv_heads) * size, kv_heads * size, heads * size]
    qk_BTN, v_BTN, gate_BTN = projected_BTN.split(sizes, -1)
    qk_BTHC = rms_norm(qk_BTN.view(B, 1, -1, size), norm_HC, eps=eps)
    qk_BTHC = apply_rotary(qk_BTHC, placement.cos_BTR, placement.sin_BTR)
    append_kv_(cache, qk_BTHC[:, :, heads:], v_BTN.view(B, 1, kv_heads, size), placement.positions_BT)
    mask_BTM = torch.arange(M) <= placement.positions_BT[..., None]
    return attend(qk_BTHC[:, :, :heads], *cache, mask_BTM).flatten(-2) * gate_BTN.sigmoid()
