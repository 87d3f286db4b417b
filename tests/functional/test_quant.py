"""Weights in FP8 blocks against loops over their values, and every reference function on them against tensors."""

import math

import pytest
import torch
import torch.nn.functional as F

from fmoe.functional import (
    Fp8,
    Kernels,
    MLPParams,
    MoEParams,
    RouterConfig,
    Routing,
    SharedParams,
    compute_experts_dense,
    compute_experts_grouped,
    compute_experts_loop,
    compute_experts_per_slot,
    count_blocks,
    dequantize,
    linear,
    mlp_layer,
    moe_layer,
    read_experts,
    read_weight,
    weight_dtype,
    weight_shape,
)
from fmoe.functional.quant import quantize_blocks, quantize_rows

SHAPES = [pytest.param(*s, id="N{}-D{}".format(*s)) for s in [(1, 1), (128, 256), (129, 127), (300, 140)]]
FUNCTIONS = [compute_experts_grouped, compute_experts_loop, compute_experts_dense, compute_experts_per_slot]


def draw_fp8(rng, *shape, parts=1):
    """Random values and factors that differ widely from block to block."""
    *outer, rows, columns = shape
    w = (40 * torch.randn(shape, generator=rng)).to(torch.float8_e4m3fn)
    blocks = (*outer, parts * -(-(rows // parts) // 128), -(-columns // 128))
    return Fp8(w, torch.rand(blocks, generator=rng) / 100 + 1e-5)


def by_loop(fp8, parts=1):
    """Multiply value by value, in Python, in float32; [E, N, D]."""
    values, scale = fp8.w.float(), fp8.scale
    values, scale = (values[None], scale[None]) if values.dim() == 2 else (values, scale)
    part = values.shape[1] // parts
    blocks = -(-part // 128)
    out = torch.empty_like(values)
    for e in range(values.shape[0]):
        for n in range(values.shape[1]):
            block = n // part * blocks + n % part // 128
            for d in range(values.shape[2]):
                out[e, n, d] = values[e, n, d] * scale[e, block, d // 128]
    return out


@pytest.mark.parametrize(("size", "parts", "expected"), [(0, 1, 0), (1, 1, 1), (128, 1, 1), (129, 1, 2), (200, 2, 2)])
def test_count_blocks(size, parts, expected):
    assert count_blocks(size, parts=parts) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("N", "D"), SHAPES)
def test_dequantize(N, D, dtype, rng):
    fp8 = draw_fp8(rng, N, D)

    w_ND = dequantize(fp8, dtype)

    assert w_ND.dtype == dtype
    assert torch.equal(w_ND, by_loop(fp8)[0].to(dtype))


@pytest.mark.parametrize("F", [3, 100, 130])
def test_up_blocks_start_anew(F, rng):
    fp8 = draw_fp8(rng, 2, 2 * F, 7, parts=2)
    assert fp8.scale.shape == (2, 2 if F <= 128 else 4, 1)

    assert torch.equal(dequantize(fp8, torch.float32, parts=2), by_loop(fp8, parts=2))


def test_unquantised_rows_stand_behind(rng):
    fp8 = draw_fp8(rng, 130, 5)
    rest_MD = torch.randn(3, 5, generator=rng).bfloat16()

    w_ND = dequantize(fp8._replace(rest_MD=rest_MD), torch.float32)

    assert torch.equal(w_ND, torch.cat((by_loop(fp8)[0], rest_MD.float())))
    assert weight_shape(fp8._replace(rest_MD=rest_MD)) == (133, 5)


def test_shape_and_dtype_of_either(rng):
    tensor, fp8 = torch.ones(2, 3, 4), draw_fp8(rng, 2, 3, 4)

    assert weight_shape(tensor) == weight_shape(fp8) == (2, 3, 4)
    assert (weight_dtype(tensor), weight_dtype(fp8)) == (torch.float32, torch.float8_e4m3fn)


def test_a_tensor_is_read_as_it_is(rng):
    tensor, fp8 = torch.ones(3, 4), draw_fp8(rng, 3, 4)

    assert read_weight(tensor, torch.bfloat16) is tensor
    assert torch.equal(read_weight(fp8, torch.bfloat16), by_loop(fp8)[0].bfloat16())


@pytest.mark.parametrize("experts", [2, torch.tensor([1, 1, 0])], ids=["one", "several"])
def test_read_experts(experts, rng):
    fp8, tensor = draw_fp8(rng, 3, 2 * 70, 130, parts=2), torch.randn(3, 4, 5, generator=rng)

    assert torch.equal(read_experts(fp8, experts, torch.float32, parts=2), by_loop(fp8, parts=2)[experts])
    assert torch.equal(read_experts(tensor, experts, torch.float32), tensor[experts])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_linear(compiled, rng):
    fp8, bias_N, x_TD = draw_fp8(rng, 150, 200), torch.randn(150, generator=rng), torch.randn(2, 3, 200, generator=rng)
    fn = torch.compile(linear, fullgraph=True, backend="aot_eager") if compiled else linear

    y_TN = fn(x_TD, fp8, bias_N)

    torch.testing.assert_close(y_TN, F.linear(x_TD, by_loop(fp8)[0], bias_N))
    assert torch.equal(linear(x_TD, by_loop(fp8)[0], bias_N), F.linear(x_TD, by_loop(fp8)[0], bias_N))
    assert Kernels().linear is linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_experts_on_blocks_equal_those_on_tensors(function, dtype, rng):
    E, D, F, T, K = 5, 136, 72, 7, 3
    gate_up, down = draw_fp8(rng, E, 2 * F, D, parts=2), draw_fp8(rng, E, D, F)
    x_TD = torch.randn(T, D, generator=rng).to(dtype)
    experts_TK = torch.rand(T, E, generator=rng).topk(K).indices.int()
    routing = Routing(torch.rand(T, K, generator=rng), experts_TK)

    found = function(x_TD, routing, gate_up, down)

    assert torch.equal(found, function(x_TD, routing, by_loop(gate_up, parts=2).to(dtype), by_loop(down).to(dtype)))


def test_moe_layer_and_mlp_layer_on_blocks(rng):
    E, D, F = 4, 130, 128
    gate_up, down = draw_fp8(rng, E + 1, 2 * F, D), draw_fp8(rng, E + 1, D, F)
    shared = MLPParams(draw_fp8(rng, 2 * F, D), draw_fp8(rng, D, F))
    w_router_ED, x_TD = torch.randn(E + 1, D, generator=rng), torch.randn(3, D, generator=rng)
    plain_shared = MLPParams(*(by_loop(w)[0] for w in shared))
    params = MoEParams(w_router_ED, gate_up, down, None, SharedParams(shared, None))
    plain = MoEParams(w_router_ED, by_loop(gate_up), by_loop(down), None, SharedParams(plain_shared, None))
    config = RouterConfig(num_experts=E, top_k=2)

    assert torch.equal(mlp_layer(x_TD, shared), mlp_layer(x_TD, plain_shared))
    found, expected = (moe_layer(x_TD, p, config, kernels=Kernels()) for p in (params, plain))
    assert torch.equal(found, expected)


def nearest_fp8(value):
    """Round to e4m3: three bits behind the leading one, from 2^-6 on, and steps of 2^-9 below; halves to even."""
    magnitude = abs(value)
    step = 2.0 ** (max(math.floor(math.log2(magnitude)), -6) - 3) if magnitude else 1.0
    return math.copysign(min(round(magnitude / step) * step, 448.0), value)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantize_rows(dtype, compiled, rng):
    x = (torch.randn(2, 3, 256, generator=rng) * torch.tensor([1e-4, 1.0, 300.0])[:, None]).to(dtype)
    x[0, 0, :128] = 0
    fn = torch.compile(quantize_rows, fullgraph=True) if compiled else quantize_rows

    q, factors = fn(x)

    assert (q.dtype, factors.dtype, factors.shape) == (torch.float8_e4m3fn, torch.float32, (2, 3, 2))
    for outer, values in zip(x.double().view(6, 2, 128), q.double().view(6, 2, 128), strict=True):
        for part, rounded in zip(outer.tolist(), values.tolist(), strict=True):
            factor = max(map(abs, part)) / 448 or 1.0
            # A value near the middle of two may go to either: the factor is rounded to float32.
            differ = sum(a != nearest_fp8(b / factor) for a, b in zip(rounded, part, strict=True))
            assert differ <= (2 if dtype == torch.float32 else 6)
    back = q.double().unflatten(-1, (2, 128)) * factors.double()[..., None]
    assert 0.02 < (back.flatten(-2) - x.double()).norm() / x.double().norm() < 0.03
    torch.testing.assert_close(factors.flatten()[1:].double(), x.double().abs().view(12, 128).amax(1)[1:] / 448)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 256), (200, 130), (300, 384)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantize_blocks(rows, columns, dtype, rng):
    w = (torch.randn(rows, columns, generator=rng) * torch.rand(rows, 1, generator=rng)).to(dtype)
    w[:128, :128] *= 1e-3

    fp8 = quantize_blocks(w)

    assert (fp8.w.shape, fp8.w.dtype, fp8.w.is_contiguous()) == (w.shape, torch.float8_e4m3fn, True)
    assert (fp8.scale.shape, fp8.scale.dtype) == ((-(-rows // 128), -(-columns // 128)), torch.float32)
    for n, row in enumerate(fp8.scale.tolist()):
        for d, factor in enumerate(row):
            part = w[n * 128 : (n + 1) * 128, d * 128 : (d + 1) * 128].double()
            assert factor == pytest.approx(part.abs().max().item() / 448, rel=1e-6)
            q = fp8.w[n * 128 : (n + 1) * 128, d * 128 : (d + 1) * 128].double()
            step = 2.0 ** (q.abs().log2().floor().clamp_min(-6) - 3)  # between neighbours, at most
            assert ((q * factor - part).abs() <= 0.501 * step * factor).all()
    assert torch.equal(dequantize(quantize_blocks(torch.zeros(3, 5)), torch.float32), torch.zeros(3, 5))
