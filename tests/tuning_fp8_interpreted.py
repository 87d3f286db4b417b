"""The search over kernels that read FP8 blocks, in Triton's interpreter and with a clock that only counts.

test_tuning_fp8.py runs this file, in a process of its own: the interpreter is chosen when Triton is imported.
"""

import itertools

import pytest
import torch
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from bench.tune_layers import RandomLayer, RandomParams
from fmoe.compile import measure as measuring
from fmoe.compile import plan_tables
from fmoe.compile.autotune import Task, tune_keys
from fmoe.compile.candidates import list_candidates
from fmoe.compile.device import describe_device
from fmoe.compile.measure import make_measure
from fmoe.compile.plan import KERNELS, Device, linear_key, moe_key
from fmoe.compile.plan_tables import read_tables
from fmoe.compile.settings import settings_from_ints
from fmoe.functional import MoEParams, RouterConfig
from fmoe.functional.quant import FP8, Fp8
from fmoe.plan_search import Search, make_run, search_plans

# Triton's interpreter asks numpy for scalars of arrays; NaN and infinities are meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

CPU = torch.device("cpu")
A100 = Device("cuda", "", "sm_80", 108, "v")  # what it launches, the interpreter runs
E, K, S, D, F = 3, 1, 1, 136, 24
KEY = moe_key(E, K, S, 1, D, F, FP8)
ROUTER = RouterConfig(E, K, renormalize=True)


@pytest.fixture(autouse=True)
def few_sets(monkeypatch, tmp_path):
    """Keep to one weight set and one repetition: the interpreter takes a second for a layer."""
    monkeypatch.setenv("FMOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "ENOUGH_BYTES", 1)
    monkeypatch.setattr(measuring, "SETS", 1)
    monkeypatch.setattr(measuring, "time_calls", lambda call, cases, repetitions: 1e-6)
    plan_tables._log_once.cache_clear()


def quantise(*shape, rng, parts=1):
    *outer, rows, columns = shape
    blocks = (parts * -(-(rows // parts) // 128), -(-columns // 128))
    w = torch.randn(shape, generator=rng).to(FP8)
    return Fp8(w, 2.0 ** torch.randint(-2, 3, (*outer, *blocks), generator=rng) * columns**-0.5)


def make_layer(rng):
    stacks = quantise(E + S, 2 * F, D, rng=rng, parts=2), quantise(E + S, D, F, rng=rng)
    return MoEParams(torch.randn(E + 1, D, generator=rng) * D**-0.5, *stacks, None, None)


def all_timings(key, tokens, candidates, weights, reference):
    """Tune with a clock that stands still, so that no candidate is left out for lack of time."""

    def prepare(key, tokens):
        return make_measure(key, tokens, CPU, make_run(ROUTER), [weights], reference=reference)

    task = Task(key, tokens, tuple(candidates))
    found = tune_keys([task], prepare, lambda: 0.0, budget_s=1.0, key_budget_s=1.0)
    return found[key][tokens].timings


@pytest.mark.parametrize(("tokens", "paths"), [(1, {"slots"}), (16, {"slots", "grouped", "sorted"})], ids=str)
def test_every_candidate_of_a_layer_gives_what_the_weights_multiplied_out_give(tokens, paths, rng):
    candidates = list_candidates(KEY, A100, tokens, ("triton",), limit=5)
    assert {settings_from_ints(c.settings).path for c in candidates} == paths
    timings = all_timings(KEY, min(tokens, 2), candidates, make_layer(rng), "grouped")
    assert len(timings) == 5
    assert [value for _, value in timings] == [1.0] * 5, timings


@pytest.mark.parametrize("tokens", [1, 2])
def test_every_candidate_of_a_projection_does(tokens, rng):
    key = linear_key(133, 136, FP8)
    w = quantise(130, 136, rng=rng)._replace(rest_MD=torch.randn(3, 136, generator=rng))
    candidates = list_candidates(key, A100, tokens, ("library", "triton"), limit=8)
    timings = all_timings(key, tokens, candidates, w, "library")
    assert [value for _, value in timings] == [1.0] * len(candidates), timings
    assert sum(c.implementation in KERNELS for c in candidates) >= 7


def test_a_whole_search(rng):
    """All from the weights to the plan and the table, of a layer and a projection, kernels asked for by name."""
    w = quantise(130, D, rng=rng)._replace(rest_MD=torch.randn(3, D, generator=rng))
    params = RandomParams((RandomLayer(make_layer(rng)), RandomLayer(w)))
    keys = [KEY, linear_key(133, D, FP8)]
    search = Search((1,), 1, budget_s=1e6, key_budget_s=1e6, candidates=2)
    ticks = itertools.count()
    plans = search_plans(
        params, ROUTER, keys, CPU, requested="triton", search=search, progress=False, clock=lambda: float(next(ticks))
    )
    assert [plan.key for plan in plans] == keys
    for plan in plans:
        assert [row.source for row in plan.rows[:2]] == ["tuned", "tuned at 1"]
    tuned = read_tables(describe_device(CPU)).tuned
    assert set(tuned) == {str(key) for key in keys}
    for entries in tuned.values():
        for entry in entries.values():
            assert all(isinstance(value, float) for _, value in entry.timings), entry.timings
    assert any(name.startswith("triton") for name, _ in tuned[str(keys[1])][1].timings)
