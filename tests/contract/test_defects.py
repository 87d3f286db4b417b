"""Each documented defect, switched on in the stand-in: a plain call shows it, a call through the ops does not."""

import pytest
import torch

from fmoe.compile.aiter_kernels import grouped_topk_, prepare_experts, topk_softmax_
from fmoe.compile.aiter_ops import compute_experts_aiter, route_aiter
from fmoe.functional.routing import RouterConfig, Routing

from .oracles import assert_routing, difference, experts_by_loop, route_by_loop

T = 7
V3 = RouterConfig(
    64, 8, scoring="sigmoid", renormalize=True, sum_eps=1e-20, scale=2.5, groups=8, groups_kept=4, group_score="top2"
)


def outputs(tokens, k, wide=None):
    return torch.zeros(tokens, wide or k), torch.zeros(tokens, k, dtype=torch.int32)


def call_topk(backend, logits, weights, ids, *shared):
    scratch = torch.zeros(ids.numel(), dtype=torch.int32)
    backend.module.topk_softmax(weights, ids, scratch, logits, False, *shared)


def check_routing(backend, register, logits, config, *, slots, bias=None):
    register(backend)
    routing = route_aiter(logits, bias, config, slots=slots, record=backend.record)
    assert_routing(routing, route_by_loop(logits, bias, config, slots=slots), tolerance=1e-5)


@pytest.mark.parametrize(
    ("version", "experts"), [("v0.1.9", 8), ("v0.1.11", 60), ("v0.1.12", 60), ("v0.1.19", 60), ("v0.1.18", 384)]
)
def test_gating_strides_ignored(version, experts, make_backend, register, rng):
    backend, config = make_backend(version), RouterConfig(experts, 4)
    logits = torch.randn(T, experts + 1, generator=rng)
    expected = route_by_loop(logits, None, config, slots=0)
    weights, ids = outputs(T, 4)

    call_topk(backend, logits[:, :experts], weights, ids)

    assert sorted(ids[0].tolist()) == sorted(expected[0])  # row 0 is right, which hid it for long
    assert any(sorted(row) != sorted(wanted) for row, wanted in zip(ids.tolist(), expected, strict=True))
    check_routing(backend, register, logits, config, slots=1)
    with pytest.raises(ValueError, match="takes logits in adjacent rows"):
        topk_softmax_(backend.module, backend.record, weights, ids, logits[:, :experts], renormalize=False)


@pytest.mark.parametrize("version", ["v0.1.12", "v0.1.19"])
def test_shared_columns_on_the_slow_path(version, make_backend, register, rng):
    backend, config = make_backend(version), RouterConfig(60, 4)
    logits = torch.randn(T, 61, generator=rng)
    weights, ids = outputs(T, 4, wide=5)

    call_topk(backend, logits, weights, ids, 1, "sigmoid")

    expected = route_by_loop(logits, None, config, slots=0)
    assert [sorted(row) for row in ids.tolist()] != [sorted(wanted) for wanted in expected]
    check_routing(backend, register, logits, config, slots=1)
    with pytest.raises(ValueError, match="adjacent rows"):
        topk_softmax_(backend.module, backend.record, weights, ids, logits, renormalize=False, slots=1)


def test_the_width_of_the_weights_taken_for_k(make_backend, register, rng):
    backend, config = make_backend("v0.1.11"), RouterConfig(8, 2)
    logits = torch.randn(T, 8, generator=rng)
    weights, ids = outputs(T, 2, wide=3)

    with pytest.raises(RuntimeError, match="wrote element"):
        call_topk(backend, logits, weights, ids)

    check_routing(backend, register, logits, config, slots=0)
    with pytest.raises(ValueError, match="takes weights in adjacent rows of 2, got row stride 3"):
        topk_softmax_(backend.module, backend.record, weights, ids, logits, renormalize=False)


def test_seven_arguments_where_there_are_five(make_backend, register, rng):
    backend, config = make_backend("v0.1.11"), RouterConfig(8, 2)
    logits = torch.randn(T, 9, generator=rng)

    with pytest.raises(TypeError):
        call_topk(backend, logits, *outputs(T, 2, wide=3), 1, "sigmoid")

    check_routing(backend, register, logits, config, slots=1)


@pytest.mark.parametrize("version", ["v0.1.12", "v0.1.20"])
@pytest.mark.parametrize("defects", [(), ("rubbish_shared_ids",)])
def test_ids_of_shared_columns(version, defects, make_backend, register, rng):
    backend, config = make_backend(version, *defects), RouterConfig(8, 2)
    logits = torch.randn(T, 10, generator=rng)
    weights, ids = torch.zeros(T, 4), torch.full((T, 4), -9, dtype=torch.int32)

    call_topk(backend, logits, weights, ids[:, :2], 2, "sigmoid")

    assert (ids[:, 2:] == (12345 if defects else -9)).all()
    check_routing(backend, register, logits, config, slots=2)


def test_other_dtypes_reinterpreted(make_backend, rng):
    backend = make_backend("v0.1.20")
    logits = torch.randn(T, 8, generator=rng)
    weights, ids = torch.zeros(T, 2), torch.zeros(T, 2, dtype=torch.int64)

    call_topk(backend, logits, weights, ids)

    assert (ids > 7).any()  # two ids in one
    with pytest.raises(ValueError, match=r"float32 weights and int32 ids, got torch\.float32, torch\.int64"):
        topk_softmax_(backend.module, backend.record, weights, ids, logits, renormalize=False)


def test_three_shared_experts(make_backend, register, rng):
    backend, logits = make_backend("v0.1.20"), torch.randn(T, 11, generator=rng)
    with pytest.raises(RuntimeError, match="num_shared_experts=3"):
        call_topk(backend, logits, *outputs(T, 2, wide=5), 3, "sigmoid")
    check_routing(backend, register, logits, RouterConfig(8, 2), slots=3)


def test_the_scale_lost_for_many_tokens(make_backend, register, rng, monkeypatch):
    monkeypatch.setenv("CU_NUM", "1")
    backend, tokens = make_backend("v0.1.20"), 213
    logits, bias = torch.randn(tokens, 64, generator=rng), torch.rand(64, generator=rng)
    weights, ids = outputs(tokens, 8)

    backend.module.biased_grouped_topk(logits, bias, weights, ids, 8, 4, True, 2.5)

    torch.testing.assert_close(weights.sum(-1), torch.ones(tokens))  # and not 2.5
    check_routing(backend, register, logits, V3, slots=1, bias=bias)
    assert backend.calls[-1] == "biased_grouped_topk_hip"


def test_the_bias_read_in_the_dtype_of_the_logits(make_backend, register, rng):
    backend = make_backend("v0.1.20")
    logits, bias = torch.randn(T, 64, generator=rng).bfloat16(), torch.rand(64, generator=rng)
    weights, ids = outputs(T, 8)

    backend.module.biased_grouped_topk_hip(logits, bias, weights, ids, 8, 4, True, 1.0)

    expected = route_by_loop(logits, bias, V3, slots=0)
    assert [sorted(row) for row in ids.tolist()] != [sorted(wanted) for wanted in expected]
    check_routing(backend, register, logits, V3, slots=0, bias=bias)
    with pytest.raises(ValueError, match=r"bias must be contiguous torch\.bfloat16 \[64\]"):
        rule = {"groups": 8, "groups_kept": 4, "softmax": False, "renormalize": True}
        grouped_topk_(backend.module, weights, ids, logits, bias, **rule)


def test_strides_of_grouped_outputs(make_backend, register, rng):
    backend = make_backend("v0.1.20")
    logits, bias = torch.randn(T, 64, generator=rng), torch.rand(64, generator=rng)
    weights, ids = outputs(T, 8, wide=9)

    backend.module.biased_grouped_topk_hip(logits, bias, weights, ids, 8, 4, True, 1.0)

    assert not torch.allclose(weights[:, :8].sum(-1), torch.ones(T))  # written by the stride of the ids
    check_routing(backend, register, logits, V3, slots=1, bias=bias)


def test_strides_of_grouped_logits_ignored(make_backend, register, rng):
    backend, wide = make_backend("v0.1.12"), torch.randn(T, 65, generator=rng)
    weights, ids = outputs(T, 8)

    backend.module.biased_grouped_topk_hip(wide[:, :64], torch.zeros(64), weights, ids, 8, 4, True, 1.0)

    expected = route_by_loop(wide, None, V3, slots=0)
    assert [sorted(row) for row in ids.tolist()] != [sorted(wanted) for wanted in expected]
    check_routing(backend, register, wide, V3, slots=1)


def expert_inputs(rng, *, width):
    def draw(*shape):
        return torch.randn(shape, generator=rng).bfloat16()

    ids = torch.stack([torch.randperm(5, generator=rng)[:2] for _ in range(T)]).int()
    routing = Routing(torch.rand(T, 2, generator=rng), ids)
    return draw(T, 32), routing, draw(5, 2 * width, 32), draw(5, 32, width)


def call_experts(backend, x, routing, w1, w2):
    activation, quant = backend.module.ActivationType.Silu, backend.module.QuantType.No
    return backend.module.fused_moe.fused_moe(x, w1, w2, *routing, None, activation, quant)


def test_the_mark_of_shuffled_weights_lost(make_backend, register, rng):
    backend = make_backend("v0.1.20")
    register(backend)
    x, routing, *stacks = expert_inputs(rng, width=64)
    expected = experts_by_loop(x, routing, *stacks)
    shuffled = [torch.nn.Parameter(w, requires_grad=False) for w in prepare_experts(*stacks)]

    assert difference(call_experts(backend, x, routing, *shuffled), expected) > 0.1
    assert difference(compute_experts_aiter(x, routing, *shuffled, shuffled=True), expected) < 1e-4
    assert not any(hasattr(w, "is_shuffled") for w in shuffled)
    assert difference(compute_experts_aiter(x, routing, *stacks, shuffled=False), expected) < 1e-4


def test_a_wrong_mark_is_overruled(make_backend, register, rng):
    backend = make_backend("v0.1.20")
    register(backend)
    x, routing, *stacks = expert_inputs(rng, width=64)
    for w in stacks:
        w.is_shuffled = True
    y = compute_experts_aiter(x, routing, *stacks, shuffled=False)
    assert difference(y, experts_by_loop(x, routing, *stacks)) < 1e-4


def test_all_weights_taken_for_shuffled(make_backend, register, rng):
    backend = make_backend("v0.1.9")
    register(backend)
    x, routing, *stacks = expert_inputs(rng, width=64)
    expected = experts_by_loop(x, routing, *stacks)

    assert difference(call_experts(backend, x, routing, *stacks), expected) > 0.1
    with pytest.raises(ValueError, match=r"AITER 0\.1\.9 takes all weights to be shuffled"):
        compute_experts_aiter(x, routing, *stacks, shuffled=False)
    assert difference(compute_experts_aiter(x, routing, *prepare_experts(*stacks)), expected) < 1e-4


def test_widths_without_a_kernel(make_backend, register, rng):
    backend = make_backend("v0.1.20")
    register(backend)
    x, routing, *stacks = expert_inputs(rng, width=48)

    with pytest.raises(RuntimeError, match="does not support this GEMM problem"):
        call_experts(backend, x, routing, *stacks)
    with pytest.raises(ValueError, match="expert width 48 must be 64"):
        compute_experts_aiter(x, routing, *stacks, shuffled=False)
    y = compute_experts_aiter(x, routing, *prepare_experts(*stacks))
    assert difference(y, experts_by_loop(x, routing, *stacks)) < 1e-4


@pytest.mark.parametrize("defect", ["kernel_raises", "kernel_exits"])
def test_a_kernel_that_fails_names_the_way_out_and_is_not_tried_again(defect, make_backend, register, rng):
    backend = make_backend("v0.1.20", defect)
    register(backend)
    x, routing, *stacks = expert_inputs(rng, width=64)
    bias = torch.zeros(64)
    for call in (
        lambda: route_aiter(torch.randn(T, 9), None, RouterConfig(8, 2), slots=1, record=backend.record),
        lambda: route_aiter(torch.randn(T, 64), bias, V3, slots=0, record=backend.record),
        lambda: compute_experts_aiter(x, routing, *prepare_experts(*stacks)),
    ):
        before = len(backend.calls)
        with pytest.raises(RuntimeError, match=r"aiter\.\S+ failed .*kernels='reference' \(--kernels reference\)") as e:
            call()
        assert isinstance(e.value.__cause__, SystemExit if defect == "kernel_exits" else RuntimeError)
        assert len(backend.calls) == before + 1


def test_an_output_of_another_dtype_is_refused(make_backend, register, rng):
    register(make_backend("v0.1.20", "wrong_output"))
    x, routing, *stacks = expert_inputs(rng, width=64)
    with pytest.raises(RuntimeError, match=r"must return torch\.bfloat16 \[7, 32\], got torch\.float32 \[7, 32\]"):
        compute_experts_aiter(x, routing, *prepare_experts(*stacks))
