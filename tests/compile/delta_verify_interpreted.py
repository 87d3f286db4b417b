"""DeltaNet's kernel over drafts in Triton's interpreter, against ``delta_verify``; test_delta_verify_kernel.py runs it.

The interpreter is chosen when Triton is imported, for the whole process, hence a process of its own.
"""

from dataclasses import replace

import pytest
import torch
from torch.library import opcheck
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.decode_choice import delta_verify_any
from fmoe.compile.delta_ops import delta_verify_op
from fmoe.compile.delta_settings import VerifySettings
from fmoe.compile.kernels.delta_verify import verify_delta_
from fmoe.functional import DeltaCache, DeltaConfig, DeltaParams, PendingDelta, delta_verify, pend_delta
from fmoe.functional.delta_drafts import select_pending

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

EPS = 1e-5
# G, H, K, V, W; nothing a power of two, one of each, a key head for each value head, more taps than tokens;
# and powers of two
CONFIGS = {
    "odd": DeltaConfig(3, 6, 12, 10, 4, EPS),
    "single": DeltaConfig(1, 1, 1, 1, 1, EPS),
    "alone": DeltaConfig(3, 3, 5, 20, 2, EPS),
    "three": DeltaConfig(2, 6, 7, 9, 3, EPS),
    "taps": DeltaConfig(1, 2, 6, 5, 7, EPS),
    "powers": DeltaConfig(2, 4, 16, 16, 4, EPS),
}
WHOLE, PARTS = VerifySettings(0, 4), VerifySettings(1, 2)
LANES = VerifySettings(0, 2, columns=4, key_lanes=4)
# Relative to the largest element. The interpreter cuts bfloat16 off instead of rounding it, so float16 stands for it.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}
ROOM = 5


def make_layer(config, rng, dtype, *, norm_dtype=None):
    def draw(*sizes):
        return torch.randn(sizes, generator=rng)

    mixed, heads = config.split_sizes[0], config.value_heads
    return DeltaParams(
        w_in_ND=torch.empty(0),
        w_conv_WN=draw(config.conv_size, mixed).to(dtype),
        decay_H=-draw(heads).exp(),
        dt_bias_H=draw(heads),
        norm_V=(1 + draw(config.value_size) / 4).to(norm_dtype or dtype),
        w_out_DN=torch.empty(0),
    )


def make_cache(config, batch, rng, dtype, *, room=ROOM):
    window = torch.randn(batch, config.conv_size - 1, config.split_sizes[0], generator=rng).to(dtype)
    state = torch.randn(batch, config.value_heads, config.key_size, config.value_size, generator=rng)
    cache = pend_delta(DeltaCache(window, state), config, room)
    for part in cache[2:]:
        part.fill_(torch.nan)  # nobody may look at a token that does not stay
    return cache


def project(config, batch, tokens, rng, dtype):
    return torch.randn(batch, tokens, sum(config.split_sizes), generator=rng).to(dtype)


def copy(cache):
    return PendingDelta(*(part.clone() for part in cache))


def assert_near(actual, expected, tolerance):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.numel():
        error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
        assert error.item() < tolerance  # NaN is not


def assert_caches_agree(actual, expected, tolerance):
    for name in ("window_BWN", "inputs_BTN"):  # copies
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    for one, other in zip(actual, expected, strict=True):
        assert_near(one, other, tolerance)


def run_kernel(projected, cache, params, config, kept, settings=WHOLE):
    return verify_delta_(projected, cache, *params[1:5], kept, config, settings)


def counts_of(tokens, batch):
    """Every count of kept tokens, each row beginning with another one; nothing is pending before the first step."""
    counts = [[(step * (row + 1) + row) % (tokens + 1) for row in range(batch)] for step in range(tokens + 1)]
    return [[0] * batch, *counts]


# Each step costs half a second in the interpreter.
CASES = [("odd", 2, WHOLE), ("odd", 3, WHOLE), ("three", 4, WHOLE), ("three", 2, PARTS), ("alone", 2, WHOLE)]
CASES += [("single", 3, WHOLE), ("taps", 3, WHOLE)]
CASES += [("powers", 2, LANES), ("powers", 3, LANES), ("powers", 3, replace(LANES, heads=1))]
CASES = [(*case, torch.float32) for case in CASES] + [
    ("odd", 2, WHOLE, torch.float16),
    ("taps", 2, PARTS, torch.float16),
    ("powers", 2, LANES, torch.float16),
]


@pytest.mark.parametrize(("name", "tokens", "settings", "dtype"), CASES, ids=str)
def test_consecutive_steps_equal_the_reference(name, tokens, settings, dtype, rng):
    config, batch = CONFIGS[name], 2
    params, whole = make_layer(config, rng, dtype), make_cache(config, batch, rng, dtype)
    expected_whole = copy(whole)
    cache, expected_cache = select_pending(whole, tokens), select_pending(expected_whole, tokens)

    for kept in counts_of(tokens, batch):
        projected, kept_B = project(config, batch, tokens, rng, dtype), torch.tensor(kept)
        y = run_kernel(projected, cache, params, config, kept_B, settings)
        expected = delta_verify(projected, expected_cache, params, config, kept_B)
        assert_near(y, expected, TOLERANCES[dtype])
        # nearly all elements agree to the bit only if both round at the same points
        assert dtype == torch.float32 or (y == expected).float().mean() > 0.9
        assert_caches_agree(cache, expected_cache, TOLERANCES[dtype])
    assert all(part[:, tokens:].isnan().all() for part in whole[2:])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of infinities
@pytest.mark.parametrize("kept", [0, 1])
def test_what_was_dropped_leaves_no_trace(kept, rng):
    """Whatever the dropped tokens were, infinities too, all is as if they had not been."""
    config, dtype = CONFIGS["taps"], torch.float32
    params, cache = make_layer(config, rng, dtype), make_cache(config, 1, rng, dtype, room=2)
    first, second = project(config, 1, 2, rng, dtype), project(config, 1, 2, rng, dtype)
    broken, other = first.clone(), copy(cache)
    broken[:, kept:] = torch.inf
    results = []
    for before, mine in ((first, cache), (broken, other)):
        run_kernel(before, mine, params, config, torch.tensor([0]))
        results.append(run_kernel(second, mine, params, config, torch.tensor([kept])))
    assert torch.equal(*results)
    assert results[0].isfinite().all()
    assert all(map(torch.equal, cache, other))


def test_rows_do_not_see_each_other(rng):
    config, dtype = CONFIGS["three"], torch.float32
    params, together = make_layer(config, rng, dtype), make_cache(config, 3, rng, dtype, room=2)
    steps, counts = [project(config, 3, 2, rng, dtype) for _ in range(2)], torch.tensor([[0, 0, 0], [2, 0, 1]])
    rows = [PendingDelta(*(part[row : row + 1].clone() for part in together)) for row in range(3)]
    for projected, kept in zip(steps, counts, strict=True):
        y = run_kernel(projected, together, params, config, kept)
        for row, cache in enumerate(rows):
            alone = run_kernel(projected[row : row + 1], cache, params, config, kept[row : row + 1])
            assert torch.equal(alone[0], y[row])
    for row, cache in enumerate(rows):
        assert all(torch.equal(part[0], whole[row]) for part, whole in zip(cache, together, strict=True))


def test_a_view_of_a_larger_cache_writes_its_rows_alone(rng):
    config, dtype = CONFIGS["three"], torch.float32
    params, whole = make_layer(config, rng, dtype), make_cache(config, 4, rng, dtype)
    before, projected, kept = copy(whole), project(config, 2, 2, rng, dtype), torch.tensor([0, 0])
    view = select_pending(PendingDelta(*(part[1:3] for part in whole)), 2)

    y = run_kernel(projected, view, params, config, kept)

    rows = select_pending(PendingDelta(*(part[1:3].clone() for part in before)), 2)
    assert_near(y, delta_verify(projected, rows, params, config, kept), 1e-5)
    assert_caches_agree(view, rows, 1e-5)
    for part, old in zip(whole, before, strict=True):
        assert torch.equal(part[[0, 3]].nan_to_num(7.0), old[[0, 3]].nan_to_num(7.0))


@pytest.mark.parametrize("size", [-80.0, -17.0, 21.0])
def test_extreme_gates(size, rng):
    """Half of the softplus's inputs lie past where it is the identity, or below where 1 + exp(x) is 1."""
    config, dtype = CONFIGS["odd"], torch.float32
    params, cache = make_layer(config, rng, dtype), make_cache(config, 1, rng, dtype, room=2)
    params = params._replace(decay_H=params.decay_H * 1e5 if size == -17 else params.decay_H)
    expected_cache = copy(cache)
    for kept in (torch.tensor([0]), torch.tensor([2])):
        projected = project(config, 1, 2, rng, dtype)
        projected[..., -2 * config.value_heads :] += size
        y = run_kernel(projected, cache, params, config, kept)
        assert_near(y, delta_verify(projected, expected_cache, params, config, kept), 1e-5)
        assert_caches_agree(cache, expected_cache, 1e-5)


def test_a_float32_norm_weight_keeps_its_rounding(rng):
    config, dtype = CONFIGS["odd"], torch.float16
    params = make_layer(config, rng, dtype, norm_dtype=torch.float32)
    cache, projected, kept = (
        make_cache(config, 1, rng, dtype, room=2),
        project(config, 1, 2, rng, dtype),
        torch.tensor([0]),
    )

    expected = delta_verify(projected, copy(cache), params, config, kept)

    assert_near(run_kernel(projected, cache, params, config, kept), expected, 2e-3)


def test_no_sequences(rng):
    config, dtype = CONFIGS["odd"], torch.float32
    cache, params = make_cache(config, 0, rng, dtype, room=2), make_layer(config, rng, dtype)
    y = run_kernel(torch.empty(0, 2, sum(config.split_sizes)), cache, params, config, torch.empty(0, dtype=torch.int64))
    assert y.shape == (0, 2, 60)


def test_eager_and_compiled_graphs_equal_the_reference(rng):
    """The compiled graph is one for all counts; a step that the kernel does not take runs the reference."""
    config, dtype = CONFIGS["taps"], torch.float32
    params, start = make_layer(config, rng, dtype), make_cache(config, 2, rng, dtype, room=2)
    caches = [copy(start) for _ in range(3)]
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph

    compiled = torch.compile(lambda *args: 2 * delta_verify_any(*args), fullgraph=True, backend=backend)
    for kept in ([0, 0], [2, 1], [0, 2]):
        projected, kept_B = project(config, 2, 2, rng, dtype), torch.tensor(kept)
        expected = delta_verify(projected, caches[0], params, config, kept_B)
        assert_near(delta_verify_any(projected, caches[1], params, config, kept_B), expected, 1e-5)
        assert_near(compiled(projected, caches[2], params, config, kept_B), 2 * expected, 1e-5)
        assert_caches_agree(caches[1], caches[0], 1e-5)
        assert_caches_agree(caches[2], caches[0], 1e-5)
    assert len(compiles) == 1
    assert [node.target for node in compiles[0].graph.nodes if "delta_verify" in str(node.target)]


def test_functionalized_graphs_write_the_cache(rng):
    config, dtype = CONFIGS["taps"], torch.float32
    params, start = make_layer(config, rng, dtype), make_cache(config, 2, rng, dtype)
    cache, expected_cache = select_pending(copy(start), 3), select_pending(copy(start), 3)
    graph = torch.compile(lambda *args: 2 * delta_verify_op(*args), fullgraph=True, backend="aot_eager")
    for kept in ([0, 0], [1, 3]):
        projected, kept_B = project(config, 2, 3, rng, dtype), torch.tensor(kept)
        expected = delta_verify(projected, expected_cache, params, config, kept_B)
        assert_near(graph(projected, cache, params, config, kept_B), 2 * expected, 1e-5)
        assert_caches_agree(cache, expected_cache, 1e-5)


@pytest.mark.parametrize("settings", [[], [1, 2, 0, 0, 0]], ids=["rule", "parts"])
def test_the_op_names_what_it_writes(settings, rng):
    config, dtype = CONFIGS["taps"], torch.float32
    params, cache = make_layer(config, rng, dtype), make_cache(config, 2, rng, dtype, room=2)
    for part in cache[2:]:
        part.zero_()
    projected, kept = project(config, 2, 2, rng, dtype), torch.tensor([1, 0])
    opcheck(torch.ops.fmoe.delta_verify_.default, (projected, *cache, *params[1:5], kept, config.eps, settings))
