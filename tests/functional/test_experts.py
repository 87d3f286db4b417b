"""The four forms of expert compute against loops in float64, eager and compiled."""

import math

import pytest
import torch
from torch.testing import assert_close

from fmoe.functional.experts import (
    compute_experts_dense,
    compute_experts_grouped,
    compute_experts_loop,
    compute_experts_per_slot,
    grouped_mm,
    permute_rows,
    unpermute_rows,
)
from fmoe.functional.routing import Routing

NAN = math.nan
FORMS = [compute_experts_grouped, compute_experts_loop, compute_experts_dense, compute_experts_per_slot]
MODES = ["eager", "aot_eager"]
# relative RMS error against float64
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
# 24 and 16 fit the grouped product in every dtype, 25 in none, 36 and 20 in float32 alone
SIZES = [(1, 1, 1, 8, 16), (1, 8, 2, 24, 16), (7, 8, 8, 25, 20), (5, 6, 3, 33, 36), (33, 60, 4, 16, 24)]
SHAPES = [pytest.param(*s, id="T{}-E{}-K{}-D{}-F{}".format(*s)) for s in SIZES]


def in_mode(fn, mode):
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=mode, dynamic=False)


def by_name(fn):
    return fn.__name__


def make_weights(E, D, F, rng, dtype=torch.float32):
    w_gate_up_EPD = torch.randn(E, 2 * F, D, generator=rng) / D**0.5
    w_down_EDF = torch.randn(E, D, F, generator=rng) / F**0.5
    return w_gate_up_EPD.to(dtype), w_down_EDF.to(dtype)


def make_routing(T, E, K, rng):
    ids = [torch.randperm(E, generator=rng)[:K] for _ in range(T)]
    experts_TK = torch.stack(ids).int() if ids else torch.empty(0, K, dtype=torch.int32)
    return Routing(torch.rand(T, K, generator=rng), experts_TK)


def experts_by_loop(x_TD, routing, w_gate_up_EPD, w_down_EDF):
    """Sum the experts of each token one after the other, in float64."""
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    width = w_down_EDF.shape[-1]
    for t, (weights, ids) in enumerate(zip(routing.weights_TK.tolist(), routing.experts_TK.tolist(), strict=True)):
        for weight, e in zip(weights, ids, strict=True):
            z_P = w_gate_up_EPD[e].double() @ x_TD[t].double()
            hidden = [z_P[f] / (1 + torch.exp(-z_P[f])) * z_P[width + f] for f in range(width)]
            y_TD[t] += weight * (w_down_EDF[e].double() @ torch.stack(hidden))
    return y_TD


def rms_error(y, exact):
    return ((y.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item()


def multiply_by_mask(rows_NK, weights_EKM, offsets_E):
    """Stand in for the grouped product: every row times every matrix, and a mask that keeps one."""
    places_N = torch.arange(rows_NK.shape[0])
    starts_E = torch.cat((torch.zeros(1, dtype=offsets_E.dtype), offsets_E[:-1]))
    mine_NE = (places_N[:, None] >= starts_E) & (places_N[:, None] < offsets_E)
    return torch.einsum("nk,ekm,ne->nm", rows_NK, weights_EKM, mine_NE.to(rows_NK.dtype))


# Sorting


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_permute_rows(dtype, mode, rng):
    for T, E, K in [(0, 5, 2), (1, 1, 1), (1, 9, 3), (7, 4, 4), (33, 60, 4)]:
        experts_TK = make_routing(T, E, K, rng).experts_TK.to(dtype)
        order_N, offsets_E = in_mode(permute_rows, mode)(experts_TK, E)
        flat = experts_TK.flatten().tolist()
        assert order_N.tolist() == sorted(range(T * K), key=lambda n: (flat[n], n))
        assert offsets_E.tolist() == [sum(e <= expert for e in flat) for expert in range(E)]
        assert (order_N.dtype, offsets_E.dtype) == (torch.int64, torch.int32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unpermute_rows(dtype, mode, rng):
    for T, K, D in [(0, 3, 5), (1, 1, 4), (6, 3, 5)]:
        order_N = torch.randperm(T * K, generator=rng)
        rows_ND, weights_TK = torch.randn(T * K, D, generator=rng).to(dtype), torch.rand(T, K, generator=rng)
        y_TD = in_mode(unpermute_rows, mode)(rows_ND, order_N, weights_TK)
        exact_TD = torch.zeros(T, D, dtype=torch.float64)
        for place, n in enumerate(order_N.tolist()):
            exact_TD[n // K] += weights_TK[n // K, n % K].item() * rows_ND[place].double()
        assert_close(y_TD, exact_TD.float(), rtol=1e-6, atol=1e-6)


# The grouped product


@pytest.mark.parametrize("dtype", [*TOLERANCES, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [1, 4, 24, 25, 36])
def test_grouped_mm_at_any_stride(columns, dtype, rng):
    sizes = [0, 3, 0, 4, 1, 0]
    offsets_E = torch.tensor(sizes).cumsum(0).int()
    for width in (1, 8, 20):
        rows_NK = torch.randn(8, columns, generator=rng).to(dtype)
        weights_EMK = torch.randn(6, width, columns, generator=rng).to(dtype)
        spread_NK = torch.zeros(16, columns, dtype=dtype)
        spread_NK[::2] = rows_NK
        shifted_NK = torch.zeros(8 * columns + 1, dtype=dtype)[1:].view(8, columns).copy_(rows_NK)
        for case_NK in (rows_NK, rows_NK.T.contiguous().T, spread_NK[::2], shifted_NK):
            for weights_EKM in (weights_EMK.transpose(1, 2), weights_EMK.transpose(1, 2).contiguous()):
                y_NM = grouped_mm(case_NK, weights_EKM, offsets_E)
                assert (y_NM.shape, y_NM.dtype) == ((8, width), dtype)
                experts = [e for e, size in enumerate(sizes) for _ in range(size)]
                rows = [row @ weights_EMK[e].double().T for row, e in zip(rows_NK.double(), experts, strict=True)]
                assert rms_error(y_NM, torch.stack(rows)) < TOLERANCES.get(dtype, 1e-14)


def test_grouped_mm_of_no_rows():
    for width in (24, 25):
        y_NM = grouped_mm(torch.empty(0, width), torch.randn(3, 16, width).transpose(1, 2), torch.zeros(3).int())
        assert y_NM.shape == (0, 16)


def test_grouped_mm_compiled(rng):
    rows_NK, weights_EMK = (
        torch.randn(8, 24, generator=rng).bfloat16(),
        torch.randn(3, 16, 24, generator=rng).bfloat16(),
    )
    arguments = (rows_NK, weights_EMK.transpose(1, 2), torch.tensor([2, 2, 8]).int())
    y_NM = in_mode(grouped_mm, "aot_eager")(*arguments)  # float32 does not trace: torch's meta function refuses it
    exact_NM = torch.cat(
        (rows_NK[:2].double() @ weights_EMK[0].double().T, rows_NK[2:].double() @ weights_EMK[2].double().T)
    )
    assert rms_error(y_NM, exact_NM) < TOLERANCES[torch.bfloat16]


# The four forms


@pytest.mark.parametrize("form", FORMS, ids=by_name)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("T", "E", "K", "D", "F"), SHAPES)
def test_compute_experts(T, E, K, D, F, dtype, form, rng):
    x_TD, routing = torch.randn(T, D, generator=rng).to(dtype), make_routing(T, E, K, rng)
    weights = make_weights(E, D, F, rng, dtype)
    y_TD = form(x_TD, routing, *weights)
    assert (y_TD.shape, y_TD.dtype) == (x_TD.shape, dtype)
    assert rms_error(y_TD, experts_by_loop(x_TD, routing, *weights)) < TOLERANCES[dtype]
    wide = form(x_TD, routing._replace(experts_TK=routing.experts_TK.long()), *weights)
    assert torch.equal(wide, y_TD)


@pytest.mark.parametrize("form", FORMS, ids=by_name)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_compute_experts_of_no_tokens(dtype, form, rng):
    weights = make_weights(5, 24, 16, rng, dtype)
    y_TD = form(torch.empty(0, 24, dtype=dtype), make_routing(0, 5, 3, rng), *weights)
    assert (y_TD.shape, y_TD.dtype) == ((0, 24), dtype)


@pytest.mark.parametrize(
    ("form", "dtype", "options"),
    [
        # float32 F.grouped_mm does not trace, bfloat16 does
        (compute_experts_grouped, torch.float32, {"multiply": multiply_by_mask}),
        (compute_experts_grouped, torch.bfloat16, {}),
        (compute_experts_dense, torch.float32, {}),
        (compute_experts_dense, torch.bfloat16, {}),
        (compute_experts_per_slot, torch.float32, {}),
        (compute_experts_per_slot, torch.bfloat16, {}),
    ],
)
def test_compute_experts_compiled(form, dtype, options, rng):
    fn = in_mode(form, "aot_eager")
    for T, E, K in [(0, 5, 2), (1, 8, 2), (7, 8, 8), (2, 11, 3)]:
        x_TD, routing = torch.randn(T, 24, generator=rng).to(dtype), make_routing(T, E, K, rng)
        weights = make_weights(E, 24, 16, rng, dtype)
        y_TD = fn(x_TD, routing, *weights, **options)
        assert (y_TD.shape, y_TD.dtype) == ((T, 24), dtype)
        if T:
            assert rms_error(y_TD, experts_by_loop(x_TD, routing, *weights)) < TOLERANCES[dtype]


@pytest.fixture
def nan_in_new_memory():
    """Make every ``torch.empty`` return NaN."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("form", FORMS, ids=by_name)
@pytest.mark.parametrize(("D", "F"), [(24, 16), (25, 20)])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.usefixtures("nan_in_new_memory")
def test_experts_without_tokens_leave_no_trace(dtype, D, F, form, rng):
    assert torch.empty(3).isnan().all()
    E = 6
    x_TD, weights = torch.randn(4, D, generator=rng).to(dtype), make_weights(E, D, F, rng, dtype)
    for ids in ([[0]] * 4, [[E - 1]] * 4, [[2]] * 4, [[0, 4], [4, 0], [0, 4], [4, 0]], [[1, 1]] * 4):
        experts_TK = torch.tensor(ids, dtype=torch.int32)
        routing = Routing(torch.rand(experts_TK.shape, generator=rng), experts_TK)
        unused = [e for e in range(E) if e not in experts_TK]
        poisoned = [w.clone() for w in weights]
        for w in poisoned:
            w[unused] = NAN
        y_TD = form(x_TD, routing, *poisoned)
        assert rms_error(y_TD, experts_by_loop(x_TD, routing, *weights)) < TOLERANCES[dtype]


@pytest.mark.parametrize("form", FORMS, ids=by_name)
def test_a_nan_row_leaves_its_neighbours_alone(form, rng):
    x_TD, routing, weights = torch.randn(5, 24, generator=rng), make_routing(5, 6, 3, rng), make_weights(6, 24, 16, rng)
    clean_TD = form(x_TD, routing, *weights)
    x_TD[2] = NAN
    y_TD = form(x_TD, routing, *weights)
    assert y_TD[2].isnan().all()
    assert_close(y_TD[[0, 1, 3, 4]], clean_TD[[0, 1, 3, 4]])


@pytest.mark.parametrize("form", FORMS, ids=by_name)
def test_the_order_of_the_columns_does_not_matter(form, rng):
    x_TD, routing, weights = torch.randn(5, 24, generator=rng), make_routing(5, 6, 4, rng), make_weights(6, 24, 16, rng)
    turned = Routing(*(t.flip(-1) for t in routing))
    assert_close(form(x_TD, turned, *weights), form(x_TD, routing, *weights), rtol=1e-5, atol=1e-6)


def test_every_function_with_inductor(rng):
    weights, routing = make_weights(6, 24, 16, rng, torch.bfloat16), make_routing(5, 6, 3, rng)

    def every(x_TD):
        order_N, offsets_E = permute_rows(routing.experts_TK, 6)
        y_TD = unpermute_rows(x_TD[order_N // 3], order_N, routing.weights_TK)
        forms = (compute_experts_grouped, compute_experts_dense, compute_experts_per_slot)
        return order_N, offsets_E, y_TD, *(form(x_TD, routing, *weights) for form in forms)

    x_TD = torch.randn(5, 24, generator=rng).bfloat16()
    compiled, eager = torch.compile(every, fullgraph=True)(x_TD), every(x_TD)
    assert_close(compiled[:3], eager[:3], rtol=1e-5, atol=1e-6)
    exact_TD = experts_by_loop(x_TD, routing, *weights)
    assert all(rms_error(y_TD, exact_TD) < TOLERANCES[torch.bfloat16] for y_TD in compiled[3:])
