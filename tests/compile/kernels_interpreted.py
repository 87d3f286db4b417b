"""The kernels in Triton's interpreter, against the references; test_kernels_interpreter.py runs this file.

The interpreter is chosen when Triton is imported, for the whole process, hence a process of its own.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.kernels import (
    Settings,
    Tile,
    compute_experts_kernels,
    route_tokens,
    run_moe_layer,
    run_moe_layer_apart,
    sort_pairs,
    tabulate,
)
from fmoe.functional import RouterConfig, Routing, route_fused

# Triton's interpreter asks numpy for scalars of arrays; NaN and infinities are meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

D, F = 96, 40
MV = Tile(1, 32, 128, 4, 2)
SMALL = Tile(16, 32, 64, 4, 2)
SLOTS = Settings("slots", Tile(0, 16, 64, 4, 2), MV, MV, token_down=True, combine=64)
GROUPED = Settings("grouped", SMALL, SMALL, SMALL, splits=2, combine=64)
PATHS = {
    "slots": SLOTS,
    "fused": replace(SLOTS, fuse_choice=True),
    "grouped": GROUPED,
    "owners": replace(GROUPED, owners=True),
    "token": replace(GROUPED, token_down=True, down=MV),
    "sorted": Settings("sorted", SMALL, SMALL, SMALL, combine=64, group=3),
    "unswapped": Settings(
        "sorted", SMALL, Tile(64, 16, 32, 4, 2), Tile(64, 32, 32, 4, 2), combine=128, programs=5, group=2
    ),
    "descriptors": Settings("sorted", SMALL, Tile(64, 8, 32, 4, 2), Tile(64, 32, 8, 4, 2), descriptors=True),
    "swapped descriptors": Settings(
        "sorted", SMALL, Tile(16, 8, 32, 4, 2), Tile(16, 32, 8, 4, 2), descriptors=True, programs=5
    ),
}
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3}

# tokens, experts, top_k, slots, gate rows
CASES = [
    (1, 60, 4, 1, 1), (2, 7, 3, 0, 0), (5, 60, 4, 3, 3), (5, 7, 7, 2, 0), (33, 7, 3, 4, 1), (70, 7, 3, 2, 0),
]  # fmt: skip


def weights(experts, slots, gate_rows, rng, dtype):
    def draw(*sizes):
        return (torch.randn(sizes, generator=rng) * sizes[-1] ** -0.5).to(dtype)

    return draw(experts + gate_rows, D), draw(experts + slots, 2 * F, D), draw(experts + slots, D, F)


def experts_by_loop(x, routing, w_gate_up, w_down):
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, (row, ids) in enumerate(zip(routing.weights_TK.tolist(), routing.experts_TK.tolist(), strict=True)):
        for weight, e in zip(row, ids, strict=True):
            gate, up = (w_gate_up[e].double() @ x[t].double()).split(F)
            y[t] += weight * (w_down[e].double() @ (gate / (1 + torch.exp(-gate)) * up))
    return y


def relative_error(y, expected):
    return ((y.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_the_layer_equals_the_formula(path, case, dtype, rng):
    tokens, experts, top_k, slots, gate_rows = case
    if tokens > 5 and (dtype == torch.float32 or path in ("fused", "token") or (path == "slots" and tokens > 33)):
        pytest.skip("as with fewer tokens; each costs many seconds in the interpreter")
    config = RouterConfig(experts, top_k, renormalize=True)
    router, w_gate_up, w_down = weights(experts, slots, gate_rows, rng, dtype)
    x = torch.randn(tokens, D, generator=rng).to(dtype)

    y = run_moe_layer(x, router, None, w_gate_up, w_down, config, PATHS[path])

    routing = route_fused((x.double() @ router.double().T).to(dtype), None, config, slots=slots)
    assert y.dtype == dtype
    assert relative_error(y, experts_by_loop(x, routing, w_gate_up, w_down)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("slots", "gate_rows"), [(1, 1), (3, 0), (2, 1), (2, 2)])
@pytest.mark.parametrize("path", ["slots", "grouped"])
def test_shared_slots_apart_give_the_layer(path, slots, gate_rows, rng):
    config = RouterConfig(7, 3, scale=2.5)
    router, w_gate_up, w_down = weights(7, slots, gate_rows, rng, torch.float32)
    x = torch.randn(4, D, generator=rng)

    y = run_moe_layer_apart(x, router, None, w_gate_up, w_down, config, PATHS[path], beside=False)

    routing = route_fused(x.double() @ router.double().T, None, config, slots=slots)
    assert relative_error(y, experts_by_loop(x, routing, w_gate_up, w_down)) < 3e-6


def test_what_the_kernels_would_read_wrongly_is_refused(rng):
    config = RouterConfig(7, 3)
    router, w_gate_up, w_down = weights(7, 1, 1, rng, torch.float32)
    x, bias = torch.randn(2, D, generator=rng), torch.zeros(7)
    for wrong, message in (
        ((x, router.T.contiguous().T, None, w_gate_up, w_down), "w_router must be contiguous torch.float32, got"),
        ((x, router.half(), None, w_gate_up, w_down), "w_router must be contiguous torch.float32, got torch.float16"),
        ((x, router[:5], None, w_gate_up, w_down), r"w_router \(5, 96\) must be \[7 experts \+ 0, 1 or 1 gates, 96\]"),
        ((x, router, bias.half(), w_gate_up, w_down), r"bias must be contiguous float32 \[7\], got torch.float16"),
        ((x, router, bias[:6], w_gate_up, w_down), r"bias must be contiguous float32 \[7\], got torch.float32 \(6,\)"),
        ((x, router, None, w_gate_up.mT.contiguous().mT, w_down), "x and the experts must be contiguous"),
        ((x, router, None, w_gate_up, w_down.half()), "x and the experts must have one dtype"),
        ((x[:, :90], router, None, w_gate_up, w_down), r"must be \[T, D\], \[E, 2F, D\] and \[E, D, F\]"),
    ):
        with pytest.raises(ValueError, match=message):
            run_moe_layer(*wrong, config, SLOTS)
    with pytest.raises(NotImplementedError, match="no MoE kernel reads"):
        run_moe_layer(*(t.double() for t in (x, router)), None, w_gate_up.double(), w_down.double(), config, SLOTS)
    with pytest.raises(ValueError, match="the stacks hold 7 experts and no shared slot; use run_moe_layer"):
        run_moe_layer_apart(x, router[:7], None, w_gate_up[:7], w_down[:7], config, SLOTS, beside=False)


@pytest.mark.parametrize("path", PATHS)
def test_no_tokens(path, rng):
    router, w_gate_up, w_down = weights(7, 1, 1, rng, torch.float32)
    y = run_moe_layer(torch.empty(0, D), router, None, w_gate_up, w_down, RouterConfig(7, 3), PATHS[path])
    assert y.shape == (0, D)


@pytest.mark.parametrize("path", [name for name in PATHS if name != "fused"])
def test_a_given_routing_with_all_tokens_on_one_expert(path, rng):
    _, w_gate_up, w_down = weights(5, 1, 0, rng, torch.float32)
    x = torch.randn(20, D, generator=rng)
    ids = torch.tensor([3, 5], dtype=torch.int32).expand(20, 2).contiguous()
    routing = Routing(torch.rand(20, 2, generator=rng), ids)

    with_slots = compute_experts_kernels(x, routing, w_gate_up, w_down, PATHS[path], slots=1)
    without = compute_experts_kernels(x, routing, w_gate_up, w_down, PATHS[path])

    expected = experts_by_loop(x, routing, w_gate_up, w_down)
    assert relative_error(with_slots, expected) < 3e-6
    assert relative_error(without, expected) < 3e-6


@pytest.mark.parametrize(("hidden", "descriptors"), [(320, False), (256, True)])
def test_wide_blocks_are_stored_in_halves(hidden, descriptors, rng):
    w_gate_up = torch.randn(3, 2 * F, hidden, generator=rng) * hidden**-0.5
    w_down = torch.randn(3, hidden, F, generator=rng) * F**-0.5
    x = torch.randn(9, hidden, generator=rng)
    ids = torch.randint(3, (9, 2), generator=rng, dtype=torch.int32)
    routing = Routing(torch.rand(9, 2, generator=rng), ids)
    settings = replace(PATHS["descriptors"], down=Tile(64, 256, 8, 4, 2), descriptors=descriptors)

    y = compute_experts_kernels(x, routing, w_gate_up, w_down, settings)

    assert relative_error(y, experts_by_loop(x, routing, w_gate_up, w_down)) < 3e-6


SCORINGS = ("softmax", "sigmoid", "chosen_softmax", "chosen_sigmoid")
RULES = [RouterConfig(60, 4, scoring=s, renormalize=r) for s in SCORINGS for r in (True, False)]
RULES += [
    RouterConfig(60, 4, scale=2.5, round_weights=True, sum_eps=1e-3, renormalize=True),
    RouterConfig(60, 4, scoring="sigmoid", renormalize=True, sum_floor=3.0, float32_logits=True),
    RouterConfig(60, 4, groups=6, groups_kept=2),
    RouterConfig(60, 4, groups=5, groups_kept=2, scoring="sigmoid", group_score="top2", renormalize=True),
    RouterConfig(60, 4, groups=4, groups_kept=1, scoring="sigmoid"),
    RouterConfig(8, 8, scoring="softmax"),
    RouterConfig(1, 1, scoring="sigmoid"),
]


@pytest.mark.parametrize(("config", "with_bias"), list(itertools.product(RULES, (False, True))), ids=str)
def test_routing_equals_the_reference(config, with_bias, rng):
    """Small whole numbers make every logit exact, and many of them equal."""
    experts, tokens = config.num_experts, 6
    x = torch.randint(-1, 2, (tokens, 32), generator=rng).half()
    router = torch.randint(-1, 2, (experts + 1, 32), generator=rng).half()
    bias = torch.randint(-2, 3, (experts,), generator=rng) / 8 if with_bias else None

    routing, _ = route_tokens(x, router, bias, config, GROUPED, slots=3)

    logits = (x.double() @ router.double().T).to(torch.float32 if config.float32_logits else torch.float16)
    expected = route_fused(logits, bias, config, slots=3)
    torch.testing.assert_close(routing.experts_TK, expected.experts_TK, rtol=0, atol=0)
    rounding = 1e-3 if config.round_weights else 0
    torch.testing.assert_close(routing.weights_TK, expected.weights_TK, rtol=2e-6 + rounding, atol=1e-7)


@pytest.mark.parametrize("settings", [SLOTS, GROUPED], ids=["product", "dot"])
def test_ties_and_not_a_number(settings):
    x = torch.zeros(3, 32)
    x[1, 0] = torch.nan
    router = torch.ones(60, 32)

    routing, _ = route_tokens(x, router, None, RouterConfig(60, 4), settings, slots=0)

    assert routing.experts_TK.tolist() == [[0, 1, 2, 3]] * 3
    assert routing.weights_TK[0].tolist() == pytest.approx([1 / 60] * 4)
    assert routing.weights_TK[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scoring", ["softmax", "chosen_softmax"])
@pytest.mark.parametrize("experts", [5, 300])
def test_logits_of_16_bits_are_ordered_like_their_values(experts, scoring, dtype, rng):
    """Signs, zeros of both, infinities and what is no number, with many equal ones among them."""
    special = torch.tensor([0.0, -0.0, -1e-8, 1e-8, torch.inf, -torch.inf, -torch.nan, torch.nan, 3.0, -3.0, 6e4, -6e4])
    rows = torch.randn(4, experts, generator=rng).mul(2).round().div(4)
    rows[1] = special[torch.randint(4, (experts,), generator=rng)]
    rows[2] = special[torch.randint(12, (experts,), generator=rng)]
    rows[3] = -torch.inf

    for row in rows.to(dtype):
        x, router = torch.zeros(1, 32, dtype=dtype), torch.zeros(experts, 32, dtype=dtype)
        x[0, 0], router[:, 0] = 1, row
        routing, _ = route_tokens(x, router, None, RouterConfig(experts, 5, scoring=scoring), SLOTS, slots=0)

        order = sorted(range(experts), key=lambda e: (not row[e].isnan(), -row[e].nan_to_num(0, torch.inf), e))
        assert routing.experts_TK.tolist() == [order[:5]]
        assert routing.weights_TK.isnan().any() == (row.isnan().any() or bool(row.isinf().all() or row.max().isinf()))


def test_the_table_holds_each_pair_once(rng):
    ids = torch.stack([torch.randperm(7, generator=rng)[:3] for _ in range(11)]).int()
    shared = torch.tensor([[7, 8]], dtype=torch.int32).expand(11, 2)

    table = tabulate(torch.cat((ids, shared), 1), GROUPED, num_experts=7, slots=2)

    for e in range(7):
        rows = table.rows_ET[e, : table.counts_E[e]].tolist()
        assert sorted(rows) == [t * 5 + k for t in range(11) for k in range(3) if ids[t, k] == e]
        for rank, row in enumerate(rows):
            assert table.ranks_TK[row // 5, row % 5] == rank
    assert table.rows_ET[7].tolist() == [t * 5 + 3 for t in range(11)]
    assert table.rows_ET[8].tolist() == [t * 5 + 4 for t in range(11)]


@pytest.mark.parametrize(("tokens", "experts", "block"), [(1, 3, 16), (40, 60, 4), (150, 7, 16), (150, 1, 64)])
def test_sorted_pairs_and_their_tiles(tokens, experts, block, rng):
    ids = torch.randint(experts, (tokens, 3), generator=rng, dtype=torch.int32)

    tiles = sort_pairs(ids, num_experts=experts, block=block)

    flat = ids.flatten().tolist()
    assert tiles.order_N.tolist() == sorted(range(len(flat)), key=lambda n: flat[n])
    ends = list(itertools.accumulate(flat.count(e) for e in range(experts)))
    assert tiles.offsets_E.tolist() == ends
    expected = [(e, start) for e, end in enumerate(ends) for start in range(end - flat.count(e), end, block)]
    used = int(tiles.used)
    assert list(zip(tiles.experts_X[:used].tolist(), tiles.starts_X[:used].tolist(), strict=True)) == expected
