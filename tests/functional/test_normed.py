"""Residual and norm with what reads them: the compositions, and where kernels of one token are taken."""

from dataclasses import replace

import pytest
import torch

from fmoe.functional import (
    Kernels,
    MLPParams,
    MoEParams,
    RouterConfig,
    SharedParams,
    add_norm_linear,
    add_norm_moe,
)

B, T, D, N, EPS = 2, 3, 8, 5, 1e-3
ROUTER = RouterConfig(6, 2, renormalize=True)


@pytest.fixture
def rows(rng):
    return torch.randn(2, B, T, D, generator=rng).double()


def norm_by_loop(x, branch, norm):
    total = x + branch
    return torch.stack([row / (row.square().mean() + EPS).sqrt() * norm for row in total.flatten(0, -2)])


def layer(rng, *, shared):
    def draw(*shape):
        return torch.randn(shape, generator=rng).double()

    apart = SharedParams(MLPParams(draw(8, D), draw(D, 4)), draw(1, D)) if shared else None
    return MoEParams(draw(6, D), draw(6, 8, D), draw(6, D, 4), None, apart)


def swiglu(x, w_gate_up, w_down):
    gate, up = (w_gate_up @ x).chunk(2)
    return w_down @ (gate / (1 + torch.exp(-gate)) * up)


def moe_by_loop(x, params):
    p = torch.softmax(params.w_router_ED @ x, 0)
    best = p.argsort(descending=True)[:2]
    y = sum(p[e] / p[best].sum() * swiglu(x, params.w_gate_up_EPD[e], params.w_down_EDF[e]) for e in best)
    if params.shared is not None:
        y = y + torch.sigmoid(params.shared.w_gate_1D @ x) * swiglu(x, *params.shared.mlp)
    return y


@pytest.mark.parametrize("biased", [False, True])
def test_add_norm_linear(biased, rows, rng):
    norm, w, bias = (torch.randn(shape, generator=rng).double() for shape in ((D,), (N, D), (N,)))
    total, y = add_norm_linear(*rows, norm, w, bias if biased else None, eps=EPS, kernels=Kernels())
    expected = norm_by_loop(*rows, norm) @ w.T + (bias if biased else 0)
    torch.testing.assert_close(total, rows[0] + rows[1])
    torch.testing.assert_close(y, expected.view(B, T, N))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens", [1, T])
def test_add_norm_moe(tokens, shared, rows, rng):
    x, branch = rows[:, :, :tokens]
    norm, params = torch.randn(D, generator=rng).double(), layer(rng, shared=shared)
    total, y = add_norm_moe(x, branch, norm, params, ROUTER, eps=EPS, kernels=Kernels())
    expected = torch.stack([moe_by_loop(row, params) for row in norm_by_loop(x, branch, norm)])
    torch.testing.assert_close(total, x + branch)
    torch.testing.assert_close(y, expected.view_as(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tokens", "most"), [(1, 1), (T, T)])
def test_kernels_take_up_to_so_many_tokens(tokens, most, rows, rng):
    norm, params = torch.randn(D, generator=rng).double(), layer(rng, shared=True)
    seen = []

    def linear_normed(x, branch, norm, w, bias, /, *, eps):
        seen.append((x.shape, bias, eps))
        return x, branch

    def compute_moe_normed(x, branch, norm, params, config, /, *, eps):
        seen.append((x.shape, config, eps))
        return x, branch, torch.zeros_like(x)

    kernels = Kernels(linear_normed=linear_normed, compute_moe_normed=compute_moe_normed, compute_moe=max)
    kernels = replace(kernels, normed_tokens=most)
    few, w = rows[:, :, :tokens], torch.randn(N, D, generator=rng).double()
    assert all(map(torch.equal, add_norm_linear(*few, norm, w, None, eps=EPS, kernels=kernels), few))
    total, y = add_norm_moe(*few, norm, params, ROUTER, eps=EPS, kernels=kernels)
    assert seen == [((B, tokens, D), None, EPS), ((B * tokens, D), ROUTER, EPS)]
    assert torch.equal(total, few[0])
    # the kernel leaves a shared expert apart, which reads the normed rows, to others
    gate, mlp = params.shared.w_gate_1D, params.shared.mlp
    expected = [torch.sigmoid(gate @ row) * swiglu(row, *mlp) for row in few[1].flatten(0, 1)]
    torch.testing.assert_close(y, torch.stack(expected).view_as(y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, T])
def test_kernels_leave_other_layers_alone(tokens, rows, rng):
    """Several tokens of a sequence, and experts with biases."""
    x, branch = rows[:, :, :tokens]
    norm, params = torch.randn(D, generator=rng).double(), layer(rng, shared=False)
    if tokens == 1:
        params = params._replace(bias_logits_E=torch.zeros(6).double())
    total, y = add_norm_moe(
        x, branch, norm, params, ROUTER, eps=EPS, kernels=Kernels(compute_moe_normed=max, linear_normed=max)
    )
    expected = torch.stack([moe_by_loop(row, params) for row in norm_by_loop(x, branch, norm)])
    torch.testing.assert_close(y, expected.view_as(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(total, x + branch)
