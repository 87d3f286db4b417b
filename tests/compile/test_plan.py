"""Plans: what is looked up where, what stands in for what was never measured, and how plans are written down."""

import json
import math
import random

import pytest
import torch

from fmoe.compile.plan import (
    BUCKETS,
    IMPLEMENTATIONS,
    LINEAR_BUCKETS,
    Device,
    Entry,
    Key,
    Plan,
    Row,
    bucket_bounds,
    default_choice,
    default_function,
    describe_choice,
    entries_from_json,
    entry_to_json,
    linear_key,
    make_plan,
    moe_key,
    plan_to_ints,
    rows_from_ints,
    runs_up_to,
    select_implementation,
)
from fmoe.compile.settings import default_settings, settings_to_ints

CPU = Device("cpu", "a CPU", "x86_64", 2, "v")
GPU = Device("cuda", "a GPU", "sm_90", 132, "v")
FUNCTIONS = ("per_slot", "loop", "dense", "grouped")
KEY = moe_key(60, 4, 1, 1, 96, 40, torch.float32)
SORTED = tuple(settings_to_ints(default_settings(4096, 60, 4, 1, 96, 40, torch.float32)))
SLOTS = tuple(settings_to_ints(default_settings(1, 60, 4, 1, 96, 40, torch.float32)))


def test_keys_name_sizes_and_dtype() -> None:
    assert str(KEY) == "moe E60 K4 S1 G1 D96 F40 float32"
    assert str(linear_key(7, 9, torch.bfloat16)) == "linear N7 D9 bfloat16"
    assert moe_key(60, 4, 1, 1, 96, 40, torch.float16) != KEY
    biased = moe_key(60, 4, 1, 1, 96, 40, torch.float32, variant="biased")
    assert biased != KEY and str(biased) == f"{KEY} biased"


def test_bounds_are_the_middles() -> None:
    bounds = bucket_bounds(BUCKETS)
    assert bounds[-1] == -1
    for low, high, bound in zip(BUCKETS, BUCKETS[1:], bounds, strict=False):
        assert low <= bound < high
        assert bound**2 <= low * high < (bound + 1) ** 2


def expected_source(tuned: dict, shipped: dict, bucket: int) -> tuple[str, Entry | None]:
    """Follow the docstring by hand: each level's exact entry, then its nearest within a factor of four."""
    for name, entries in (("tuned", tuned), ("shipped", shipped)):
        best = None
        for tokens in sorted(entries):
            ratio = max(tokens / bucket, bucket / tokens)
            if ratio <= 4 and entries[tokens].implementation in FUNCTIONS and (best is None or ratio < best[0]):
                best = (ratio, tokens)
        if best is not None:
            return (name if best[1] == bucket else f"{name} at {best[1]}"), entries[best[1]]
    return "rule", None


@pytest.mark.parametrize("seed", range(60))
def test_the_order_of_fallbacks(seed: int) -> None:
    rng = random.Random(seed)

    def draw() -> dict[int, Entry]:
        chosen = rng.sample(BUCKETS, rng.randint(0, 5))
        return {t: Entry(rng.choice([*FUNCTIONS, "aiter"]), (), 1.0) for t in chosen}

    tuned, shipped = draw(), draw()
    plan = make_plan(KEY, CPU, tuned=tuned, shipped=shipped, allowed=FUNCTIONS)
    assert [row.bound for row in plan.rows] == bucket_bounds(BUCKETS)
    for bucket, row in zip(BUCKETS[:-1], plan.rows, strict=False):
        source, entry = expected_source(tuned, shipped, bucket)
        assert row.source == source
        wanted = default_choice(KEY, CPU, bucket, FUNCTIONS) if entry is None else (entry.implementation, ())
        assert (row.implementation, row.settings) == wanted


def test_an_entry_stands_in_up_to_four_times_away() -> None:
    plan = make_plan(KEY, CPU, tuned={32: Entry("per_slot", (), 1.0)}, allowed=FUNCTIONS)
    sources = {bucket: row.source for bucket, row in zip(BUCKETS, plan.rows, strict=True)}
    near = {8: "tuned at 32", 16: "tuned at 32", 32: "tuned", 64: "tuned at 32", 128: "tuned at 32"}
    assert sources == {bucket: near.get(bucket, "rule") for bucket in BUCKETS}


def test_what_cannot_take_a_buckets_tokens_does_not_stand_in() -> None:
    big = moe_key(60, 30, 2, 0, 96, 40, torch.float32)
    tuned = {1024: Entry("triton", SLOTS, 1.0), 16384: Entry("dense", (), 1.0)}
    plan = make_plan(big, GPU, tuned=tuned, allowed=("triton", "dense"))
    rows = dict(zip(BUCKETS, plan.rows, strict=True))
    assert rows[1024].source == rows[256].source.split(" ")[0] == "tuned"
    assert rows[2048].source == "rule"  # 2,896 tokens have 92,672 pairs, more than a grid's rows
    assert rows[8192].source == "tuned at 16384"
    assert rows[16384].source == "rule"  # without end, and dense grows with the experts
    assert runs_up_to(big, "triton", SORTED, -1)
    assert not runs_up_to(big, "triton", SLOTS, -1)
    assert runs_up_to(linear_key(7, 9, torch.float32), "triton", (), -1)


def test_a_projection_of_many_rows_is_the_librarys() -> None:
    key = linear_key(64, 32, torch.bfloat16)
    tuned = {8: Entry("triton", (1, 2), 1.0)}
    plan = make_plan(key, GPU, tuned=tuned, allowed=("library", "triton"))
    assert plan.rows[-1] == Row(-1, "library", (), "rule")
    assert [row.bound for row in plan.rows] == [*bucket_bounds(LINEAR_BUCKETS)[:-1], 8, -1]
    assert select_implementation(plan_to_ints(plan), 8) == ("triton", (1, 2))
    assert select_implementation(plan_to_ints(plan), 9) == ("library", ())


def test_nothing_allowed_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no implementation of moe E60 .* is allowed; name at least one"):
        make_plan(KEY, CPU, allowed=())


def test_the_rule_takes_what_is_allowed() -> None:
    assert default_choice(KEY, GPU, 1, ("aiter", "triton", "grouped")) == ("aiter", ())
    assert default_choice(KEY, GPU, 1, ("triton", "grouped")) == ("triton", SLOTS)
    assert default_choice(KEY, CPU, 1, ("grouped", "loop")) == ("loop", ())
    assert default_choice(KEY, CPU, 1, ("per_slot", "grouped")) == ("grouped", ())
    assert {default_choice(KEY, GPU, tokens, FUNCTIONS) for tokens in BUCKETS} == {("grouped", ())}
    assert default_choice(linear_key(3, 4, torch.float32), GPU, 1, ("triton",)) == ("triton", ())
    assert [default_function(*sizes) for sizes in ((2, 5, 17), (7, 5, 17), (6, 5, 17), (33, 5, 17))] == [
        "loop", "dense", "grouped", "grouped",
    ]  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 6, 11, 12, 100, 16384, 10**6])
def test_integers_say_what_the_plan_says(tokens: int) -> None:
    tuned = {2: Entry("triton", SLOTS, 1.0), 64: Entry("grouped", (), 2.0)}
    plan = make_plan(KEY, GPU, tuned=tuned, allowed=("triton", "grouped"))
    row = next(row for row in plan.rows if tokens <= row.bound or row.bound == -1)
    assert select_implementation(plan_to_ints(plan), tokens) == (row.implementation, row.settings)


def test_equal_neighbours_become_one_row() -> None:
    rows = tuple(Row(bound, "grouped", (), "rule") for bound in (1, 2, -1))
    assert plan_to_ints(Plan(KEY, rows)) == (-1, IMPLEMENTATIONS.index("grouped"), 0)


@pytest.mark.parametrize("values", [(), (5, 0, 0), (-1, 0, 3, 1)])
def test_other_integers_are_refused(values: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"integers are no plan; write one with plan_to_ints"):
        rows_from_ints(values)


def test_entries_survive_json() -> None:
    timings = (("grouped", 3.25), ("triton:1,2", "ValueError: wrong result"))
    entries = {8: Entry("triton", (1, 2), 1.25, timings), 16: Entry("grouped", (), 2.0)}
    written = json.dumps({tokens: entry_to_json(entry) for tokens, entry in entries.items()})
    assert entries_from_json(json.loads(written)) == entries
    assert "timings" not in entry_to_json(entries[16])
    assert describe_choice("triton", (1, 2)) == "triton:1,2"
    assert describe_choice("loop", ()) == "loop"


GOOD = {"implementation": "grouped", "settings": [], "us": 1.0}
BROKEN = [
    None,
    [],
    {"x": GOOD},
    {"1": None},
    {"1": GOOD | {"implementation": "other"}},
    {"1": GOOD | {"settings": ["a"]}},
    {"1": GOOD | {"us": "fast"}},
    {"1": {"us": 1.0}},
    {"1": GOOD | {"timings": [1]}},
    {"1": GOOD | {"timings": {"a": None}}},
    {"0": GOOD},
]


@pytest.mark.parametrize("values", BROKEN, ids=repr)
def test_broken_entries_are_refused(values: object) -> None:
    with pytest.raises(ValueError, match=r"a tuned table holds .*: expected token counts with entries"):
        entries_from_json(values)


def test_a_time_that_is_no_number_does_no_harm() -> None:
    assert math.isnan(entries_from_json({"1": GOOD | {"us": math.nan}})[1].us)
    assert isinstance(hash(Key("moe", (1,) * 6, "float32")), int)
