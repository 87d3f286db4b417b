"""Decode with drafts is measured by steps: what they give and how many drafts stay."""

import pytest
import torch

import fmoe
from fmoe.benchmark import Settings, run_benchmark
from fmoe.benchmark_drafts import measure_drafts
from fmoe.benchmark_report import format_benchmark, make_record
from fmoe.options import Options

from .forced_drafts import force_drafts


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", device="cpu", compile=False, speculate=True)


def make_options(tokens, speculate):
    return Options(tokens, 0.0, 1.0, 0, 0.0, 1.0, 0, (), (), None, speculate)


@pytest.mark.parametrize(("right", "per_step"), [(True, 3.0), (False, 1.0)])
def test_counts_of_steps_and_drafts(demo, right, per_step):
    prompts, tokens = [[5, 6, 7], [8, 9, 10]], 25
    plain = fmoe.generate(demo, prompts, max_new_tokens=tokens, ignore_eos=True)
    model, _ = force_drafts(demo, [row.token_ids for row in plain], lambda row, place, n: right)
    with torch.inference_mode():
        case = measure_drafts(
            model, prompts, make_options(tokens, 2), new_tokens=9, repetitions=2, warm_ups=3, plain=100.0
        )
    assert (case.batch, case.context, case.speculate, len(case.samples_ms)) == (2, 3, 2, 2)
    assert case.tokens_per_step == per_step and case.acceptance == float(right)
    assert case.accepted == (case.drafted if right else 0) and case.drafted > 0
    assert case.speedup == case.tokens_per_s / 100.0
    assert case.ms_per_step == pytest.approx(per_step * 2e3 / case.tokens_per_s)


def test_bench_reports_acceptance_and_tokens_per_step(demo):
    settings = Settings((1,), context=8, prefill_tokens=(), new_tokens=4, repetitions=2, speculate=1)
    done = run_benchmark(demo, settings)
    [case] = done.drafts
    assert case.speedup == pytest.approx(case.tokens_per_s / done.decode[0].tokens_per_s)
    assert make_record(done)["drafts"][0]["acceptance"] == case.acceptance
    lines = [line.split() for line in format_benchmark(done).splitlines()]
    head = next(line for line in lines if line[:1] == ["drafts"])
    row = dict(zip(head[1:], lines[lines.index(head) + 1], strict=False))
    assert row["drafts"] == "1" and row["tok/step"] == f"{case.tokens_per_step:.2f}"
    assert row["accepted"] == f"{case.acceptance:.3f}"


def test_what_cannot_be_measured(demo):
    with pytest.raises(ValueError, match=r"speculate=-1 must be 'auto' or an int in 0\.\.8"):
        Settings(speculate=-1)
