"""Layouts for AITER and the rules that decide what of it runs; the kernels themselves are in tests/contract."""

import dataclasses
import itertools

import pytest
import torch

from fmoe.compile.aiter_kernels import SYMBOLS, is_fast, pad_experts, padded_width, prepare_experts, shuffle_weights
from fmoe.compile.aiter_rules import can_compute, can_route, decide_topk
from fmoe.compile.capabilities import AiterRecord
from fmoe.functional.routing import RouterConfig

MOE_PARAMS = (
    *("hidden_states", "w1", "w2", "topk_weight", "topk_ids", "expert_mask", "activation", "quant_type"),
    "doweight_stage1",
)
NEW = AiterRecord(True, "", "0.1.20", "gfx942", 7, True, True, tuple(SYMBOLS), MOE_PARAMS)
MIDDLE = dataclasses.replace(NEW, version="0.1.12", slow_path_stride_safe=False)
OLD = dataclasses.replace(MIDDLE, version="0.1.11", topk_arity=5)
BARE = AiterRecord(True, version="0.1.3")
RELEASES = (NEW, MIDDLE, OLD, BARE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8], ids=str)
def test_shuffled_weights_stand_in_tiles(dtype):
    experts, rows, columns = 3, 48, 96
    w = torch.randint(0, 250, (experts, rows, columns)).to(dtype)
    piece = 16 // dtype.itemsize
    expected = [
        w[e, tile_n * 16 + n, tile_k * 32 + part * piece + i].item()
        for e in range(experts)
        for tile_n in range(rows // 16)
        for tile_k in range(columns // 32)
        for part in range(32 // piece)
        for n in range(16)
        for i in range(piece)
    ]
    shuffled = shuffle_weights(w)
    assert shuffled.shape == w.shape
    assert shuffled.is_contiguous()
    assert shuffled.flatten().tolist() == expected


@pytest.mark.parametrize(("rows", "columns"), [(24, 32), (16, 48)])
def test_what_tiles_do_not_cover_is_not_shuffled(rows, columns):
    with pytest.raises(ValueError, match=f"multiples of 16 rows and 32 columns, got {rows} x {columns}; pad first"):
        shuffle_weights(torch.zeros(2, rows, columns, dtype=torch.bfloat16))


def test_padded_widths():
    widths = {1: 64, 64: 64, 65: 128, 128: 128, 129: 192, 192: 192, 193: 256, 256: 256, 257: 384, 1408: 1408, 700: 768}
    assert {width: padded_width(width) for width in widths} == widths


def test_padding_fills_rows_behind_gate_and_up_and_columns_of_down_with_zeros(rng):
    w_gate_up, w_down = torch.randn(3, 48, 32, generator=rng), torch.randn(3, 32, 24, generator=rng)
    wide_gate_up, wide_down = pad_experts(w_gate_up, w_down)
    assert wide_gate_up.shape == (3, 128, 32)
    assert wide_down.shape == (3, 32, 64)
    assert torch.equal(wide_gate_up[:, :24], w_gate_up[:, :24])
    assert torch.equal(wide_gate_up[:, 64:88], w_gate_up[:, 24:])
    assert torch.equal(wide_down[:, :, :24], w_down)
    for zeros in (wide_gate_up[:, 24:64], wide_gate_up[:, 88:], wide_down[:, :, 24:]):
        assert (zeros == 0).all()


def test_an_aligned_width_is_not_copied():
    stacks = torch.zeros(2, 128, 32), torch.zeros(2, 32, 64)
    assert all(a is b for a, b in zip(pad_experts(*stacks), stacks, strict=True))


def test_prepared_experts_are_padded_then_shuffled(rng):
    stacks = torch.randn(2, 80, 32, generator=rng).bfloat16(), torch.randn(2, 32, 40, generator=rng).bfloat16()
    expected = [shuffle_weights(w) for w in pad_experts(*stacks)]
    assert all(torch.equal(a, b) for a, b in zip(prepare_experts(*stacks), expected, strict=True))


def test_fast_are_powers_of_two_up_to_512():
    assert [n for n in range(1, 2000) if is_fast(n)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


@pytest.mark.parametrize(
    ("record", "experts", "slots", "gate_rows", "path", "reason"),
    [
        (NEW, 512, 1, 1, "fused", "one kernel"),
        (NEW, 60, 1, 1, "fused", "one kernel"),
        (NEW, 512, 8, None, "fused", "one kernel"),
        (NEW, 1024, 1, 1, "fused", "one kernel"),
        (NEW, 64, 0, 0, "split", "no shared slots"),
        (NEW, 64, 3, 3, "split", "3 shared slots are not one of 1, 2, 4, 8"),
        (NEW, 64, 4, 1, "split", "1 gate rows for 4 shared slots"),
        (NEW, 64, 2, 0, "split", "0 gate rows for 2 shared slots"),
        (MIDDLE, 512, 1, 1, "fused", "one kernel"),
        (MIDDLE, 60, 1, 1, "split", r"0\.1\.12 ignores strides at 60 experts"),
        (MIDDLE, 1024, 2, 2, "split", "ignores strides at 1024 experts"),
        (OLD, 512, 1, 1, "split", r"topk_softmax of AITER 0\.1\.11 has no shared columns"),
        (BARE, 512, 1, 1, "refused", "no topk_softmax of 5 or 7 arguments"),
    ],
)
def test_which_form_of_the_topk_runs(record, experts, slots, gate_rows, path, reason):
    choice = decide_topk(record, num_experts=experts, top_k=4, slots=slots, gate_rows=gate_rows)
    assert choice.path == path
    with pytest.raises(ValueError, match=reason):
        raise ValueError(choice.reason)


def test_more_experts_than_there_are_cannot_be_chosen():
    assert decide_topk(NEW, num_experts=8, top_k=9, slots=0) == ("refused", "top_k=9 is not in 1..num_experts=8")


V3 = {"scoring": "sigmoid", "groups": 8, "groups_kept": 4, "group_score": "top2"}


@pytest.mark.parametrize(
    ("config", "biased", "record", "can", "reason"),
    [
        (RouterConfig(8, 2), False, OLD, True, "topk_softmax, split"),
        (RouterConfig(8, 2), False, NEW, True, "topk_softmax, fused"),
        (RouterConfig(8, 2), False, BARE, False, "no topk_softmax"),
        (RouterConfig(8, 2), True, NEW, False, "no softmax top-k with a correction bias"),
        (RouterConfig(8, 2, scoring="chosen_softmax"), False, NEW, False, "no kernel for scoring='chosen_softmax'"),
        (RouterConfig(8, 2, scoring="chosen_sigmoid"), False, NEW, False, "no kernel for scoring='chosen_sigmoid'"),
        (RouterConfig(256, 8, **V3), True, OLD, True, "biased_grouped_topk_hip"),
        (RouterConfig(256, 8, **V3), True, BARE, False, "has no biased_grouped_topk_hip"),
        (RouterConfig(384, 8, scoring="sigmoid"), True, NEW, True, "biased_grouped_topk_hip"),
        (RouterConfig(160, 8, groups=8, groups_kept=3), False, NEW, True, "grouped_topk"),
        (RouterConfig(160, 8, groups=8, groups_kept=3), False, BARE, False, "has no grouped_topk"),
        (RouterConfig(160, 6, groups=8, groups_kept=3), False, NEW, False, "not known to choose top_k=6 of 8 groups"),
        (RouterConfig(160, 8, groups=8, groups_kept=3), True, NEW, False, "with a correction bias"),
        (RouterConfig(64, 8, groups=4, groups_kept=2, group_score="top2"), False, NEW, False, "no softmax top-k whose"),
        (RouterConfig(64, 8, scoring="sigmoid", groups=4, groups_kept=2), True, NEW, False, "scores groups by their"),
        (RouterConfig(160, 6, groups=5, groups_kept=3), False, NEW, False, "take 1, 2, 4 or 8 groups, not 5"),
        (RouterConfig(128, 65, scoring="sigmoid"), True, NEW, False, "choose at most 64 experts, not 65"),
    ],
)
def test_which_rules_can_be_routed(config, biased, record, can, reason):
    can_run, said = can_route(config, 1, record, biased=biased)
    assert can_run == can
    assert reason in said


def test_every_rule_gets_an_answer_with_a_reason():
    scorings = ("softmax", "sigmoid", "chosen_softmax", "chosen_sigmoid")
    groupings = ((1, 1), (2, 1), (4, 2), (8, 8), (3, 2))
    for scoring, (groups, kept), score in itertools.product(scorings, groupings, ("max", "top2")):
        if groups > 1 and scoring.startswith("chosen"):
            continue
        for renormalize, eps, floor in itertools.product((False, True), (0.0, 1e-20), (0.0, 1e-12)):
            rule = {"renormalize": renormalize, "sum_eps": eps, "sum_floor": floor}
            config = RouterConfig(
                48, 6, scoring=scoring, groups=groups, groups_kept=kept, group_score=score, scale=2.5, **rule
            )
            for slots, biased, record in itertools.product((0, 1, 3, 8), (False, True), RELEASES):
                can, reason = can_route(config, slots, record, biased=biased)
                assert isinstance(can, bool)
                assert reason


@pytest.mark.parametrize(
    ("changes", "record", "reason"),
    [
        ({}, NEW, None),
        ({"dtype": torch.float16}, OLD, None),
        ({}, BARE, "AITER 0.1.3 has no fused_moe"),
        ({}, dataclasses.replace(NEW, fused_moe_params=("x", *MOE_PARAMS)), "begins with other parameters"),
        ({"dtype": torch.float32}, NEW, "takes bfloat16 or float16, not torch.float32"),
        ({"hidden_size": 48}, NEW, "multiples of 32, not 48"),
        ({"columns": 128}, NEW, "at most 127 experts per token, not 128"),
        ({"shuffled": False}, NEW, None),
        ({"shuffled": False}, OLD, "takes all weights to be shuffled"),
    ],
)
def test_which_experts_can_be_computed(changes, record, reason):
    layer = {"columns": 11, "hidden_size": 2048, "dtype": torch.bfloat16} | changes
    can, said = can_compute(record, **layer)
    assert can == (reason is None)
    assert (reason or "fused_moe") in said
