"""What the tuner tries: the default first, never more than its number, and only what a device can hold."""

import pytest
import torch

from fmoe.compile.candidates import MOST, Candidate, list_candidates, list_neighbours, list_starts
from fmoe.compile.cost import Block, distinct_experts, estimate_s, expert_block, fits, linear_block, shared_limit
from fmoe.compile.linear_settings import LinearSettings, linear_from_ints, linear_to_ints
from fmoe.compile.plan import BUCKETS, KERNELS, LINEAR_BUCKETS, Device, Entry, Key, default_choice, linear_key, moe_key
from fmoe.compile.settings import Tile, settings_from_ints, settings_to_ints
from fmoe.functional.quant import FP8

CPU = Device("cpu", "a CPU", "x86_64", 2, "v")
H200 = Device("cuda", "NVIDIA H200", "sm_90", 132, "v")
A100 = Device("cuda", "NVIDIA A100", "sm_80", 108, "v")
MI300 = Device("hip", "AMD MI300X", "gfx942", 304, "v")
MI350 = Device("hip", "AMD MI350X", "gfx950", 256, "v")
FUNCTIONS = ("per_slot", "loop", "dense", "grouped")
ALL = ("triton", "apart", "beside", *FUNCTIONS)
SHAPES = {
    "qwen3next": moe_key(512, 10, 1, 1, 2048, 512, torch.bfloat16),
    "mixtral": moe_key(8, 2, 0, 0, 4096, 14336, torch.bfloat16),
    "odd": moe_key(60, 4, 3, 0, 96, 40, torch.float32),
}


@pytest.mark.parametrize("device", [H200, A100, MI300], ids=lambda device: device.arch)
@pytest.mark.parametrize("tokens", BUCKETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_candidates_of_a_gpu(shape: str, tokens: int, device: Device) -> None:
    key = SHAPES[shape]
    found = list_candidates(key, device, tokens, ALL)
    assert (found[0].implementation, found[0].settings) == default_choice(key, device, tokens, ALL)
    assert len(found) == len(set(found)) <= MOST
    assert len([c for c in found if c.implementation == "triton"]) >= 10
    assert "loop" not in [c.implementation for c in found]  # it reads ids on the host
    assert ("apart" in {c.implementation for c in found}) == (key.sizes[2] > 0 and tokens <= 512)
    for candidate in found[1:]:
        if candidate.implementation in KERNELS:
            settings = settings_from_ints(candidate.settings)
            assert settings.path == "sorted" or (tokens <= 512 and settings.path in ("slots", "grouped"))
            assert not (settings.pdl and device is not H200)
            assert not (settings.descriptors and device is not H200)


@pytest.mark.parametrize("tokens", [1, 8, 256, 4096])
def test_neighbours_fit_and_differ(tokens: int) -> None:
    for device in (H200, MI300):
        for key in SHAPES.values():
            for start in list_starts(key, device, tokens):
                neighbours = list_neighbours(start, key, device, tokens)
                assert start not in neighbours
                for settings in neighbours:
                    for part in ("gate_up", "down"):
                        tile = getattr(settings, part)
                        kind = "token" if part == "down" and settings.token_down else settings.path
                        changed = tile != getattr(start, part)
                        forced = settings.token_down != start.token_down
                        linked = settings.path == "sorted" and part == "down" and settings.gate_up != start.gate_up
                        if changed and not forced and not linked:
                            assert fits(expert_block(key, kind, part, tile, tokens), device)


@pytest.mark.parametrize("tokens", [1, 8, 256, 4096])
def test_candidates_of_a_cpu(tokens: int) -> None:
    key = moe_key(16, 4, 1, 1, 256, 64, torch.float32)
    found = list_candidates(key, CPU, tokens, FUNCTIONS)
    names = {1: set(FUNCTIONS), 8: set(FUNCTIONS), 256: {"loop", "dense", "grouped"}, 4096: {"grouped"}}
    assert {c.implementation for c in found} == names[tokens]
    assert all(c.settings == () for c in found)
    assert list_candidates(key, CPU, tokens, ("grouped",)) == [Candidate("grouped", ())]


def test_what_was_best_nearby_comes_next_and_its_neighbours_are_tried() -> None:
    key = SHAPES["qwen3next"]
    default = list_candidates(key, H200, 8, ALL)[0]
    tuned = (1, 16, 16, 128, 2, 3, 16, 64, 128, 4, 5, 16, 64, 128, 4, 2, 4, 0, 0, 1, 1024, 0, 8, 0, 1)
    near = [Entry("triton", tuned, 1.0), Entry("aiter", (), 1.0), Entry("grouped", (), 1.0)]
    found = list_candidates(key, H200, 8, ALL, near=near)
    assert found[:3] == [default, Candidate("triton", tuned), Candidate("grouped", ())]
    paths = [settings_from_ints(c.settings).path for c in found if c.implementation == "triton"]
    assert paths.count("grouped") > paths.count("slots")
    apart = list_candidates(key, H200, 8, ALL, near=[Entry("apart", tuned, 1.0)])
    assert len([c for c in apart if c.implementation == "apart"]) > 10


def test_what_cannot_take_the_tokens_is_left_out() -> None:
    key = SHAPES["qwen3next"]
    slots = default_choice(key, H200, 1, ALL)[1]
    assert Candidate("triton", slots) not in list_candidates(key, H200, 16384, ALL, near=[Entry("triton", slots, 1.0)])


@pytest.mark.parametrize("device", [H200, MI300], ids=lambda device: device.arch)
@pytest.mark.parametrize("tokens", LINEAR_BUCKETS)
def test_candidates_of_a_projection(tokens: int, device: Device) -> None:
    key = linear_key(4096, 2048, torch.bfloat16)
    found = list_candidates(key, device, tokens, ("library", "triton"))
    assert found[0] == Candidate("library", ())
    assert len(found) == len(set(found)) == MOST
    for candidate in found[1:]:
        settings = linear_from_ints(candidate.settings)
        assert fits(linear_block(key, settings, tokens), device)
        assert not (settings.pdl and device is MI300)
    assert list_candidates(key, CPU, tokens, ("library",)) == [Candidate("library", ())]


def test_distinct_experts() -> None:
    key = Key("moe", (8, 2, 1, 0, 4, 4), "float32")
    assert distinct_experts(key, 1) == pytest.approx(2 + 1)
    assert distinct_experts(key, 10**4) == pytest.approx(8 + 1)
    # 1 - (3/4)^2 of eight experts after two tokens
    assert distinct_experts(key, 2) == pytest.approx(3.5 + 1)


def test_the_model_knows_memory_and_matrix_units() -> None:
    key = SHAPES["mixtral"]
    few = expert_block(key, "slots", "gate_up", Tile(1, 16, 256, 4, 4), 1)
    # two experts of 2 x 14336 x 4096 bf16 values at 33 GB/s on each of 132 units
    assert estimate_s(few, H200) == pytest.approx(2 * 2 * 14336 * 4096 * 2 / (33e9 * 132), rel=0.2)
    many = expert_block(key, "sorted", "gate_up", Tile(128, 128, 64, 8, 3), 16384)
    assert estimate_s(many, H200) == pytest.approx(2 * 32768 * 2 * 14336 * 4096 / (5e12 * 132), rel=0.1)
    padded = expert_block(key, "sorted", "gate_up", Tile(64, 128, 64, 8, 3), 8)
    assert estimate_s(padded, H200) >= estimate_s(
        expert_block(key, "grouped", "gate_up", Tile(16, 128, 64, 8, 3), 8), H200
    )


def test_what_does_not_fit() -> None:
    assert shared_limit(H200) == 227 * 1024
    assert shared_limit(MI300) == 64 * 1024
    assert shared_limit(Device("cuda", "", "sm_120", 1, "")) == 99 * 1024
    block = Block(1, 128 * 128, 1, 1, 4, 1000, 1.0, 1.0)
    assert fits(block, H200)
    assert not fits(Block(1, 128 * 129, 1, 1, 4, 1000, 1.0, 1.0), H200)
    assert fits(Block(1, 128 * 256, 1, 1, 4, 1000, 1.0, 1.0), MI300)  # 64 threads to a warp
    assert not fits(Block(1, 1, 1, 1, 4, 64 * 1024 + 1, 1.0, 1.0), MI300)
    key = linear_key(64, 64, torch.float16)
    dot = linear_block(key, LinearSettings(16, 64, 4, 3, 1, dot=True, pdl=False), 2)
    assert dot.shared == (16 + 16) * 64 * 2 * 3


NARROW = {
    "qwen3next": moe_key(512, 10, 1, 1, 2048, 512, FP8),
    "odd": moe_key(60, 4, 3, 0, 200, 136, FP8),
}


@pytest.mark.parametrize("device", [H200, MI350], ids=lambda device: device.arch)
@pytest.mark.parametrize("tokens", BUCKETS)
@pytest.mark.parametrize("shape", NARROW)
def test_candidates_of_layers_in_fp8_blocks(shape: str, tokens: int, device: Device) -> None:
    key = NARROW[shape]
    found = list_candidates(key, device, tokens, ("triton",), limit=60)
    assert (found[0].implementation, found[0].settings) == default_choice(key, device, tokens, ("triton",))
    assert len(found) == len(set(found)) > MOST // 2
    paths = set()
    for candidate in found[1:]:
        settings = settings_from_ints(candidate.settings)
        paths.add(settings.path)
        assert not settings.descriptors
        for part in ("gate_up", "down"):
            tile = getattr(settings, part)
            vectors = settings.path == "slots" or (part == "down" and settings.token_down)
            assert tile.rows <= 128
            assert vectors or tile.depth <= 128
    assert paths >= ({"slots"} if tokens < 16 else {"grouped"} if tokens < 512 else {"sorted"})


def test_one_token_in_fp8_blocks_is_tried_in_all_launches() -> None:
    key = NARROW["qwen3next"]
    found = [settings_from_ints(c.settings) for c in list_candidates(key, H200, 1, ("triton",))]
    known = (Tile(0, 1, 2048, 4, 2), Tile(1, 8, 256, 2, 4), Tile(1, 8, 512, 4, 4))
    launches = {(s.fuse_choice, s.pdl) for s in found if (s.router, s.gate_up, s.down) == known}
    assert launches == {(False, False), (False, True), (True, False), (True, True)}
    assert len({s.gate_up for s in found}) >= 4 and len({s.down for s in found}) >= 4
    assert not any(settings_from_ints(c.settings).pdl for c in list_candidates(key, MI350, 1, ("triton",)))
    every = [settings_from_ints(c.settings) for c in list_candidates(key, H200, 1, ("triton",), limit=400)]
    assert {s.gate_up.stages for s in every if s.gate_up.depth >= 2048} == {1}  # a row at once has no steps
    assert max(s.gate_up.depth for s in every) == 2048
    assert {s.down.stages for s in every if s.down.depth == 8192} == {1}  # all columns of eleven experts
    assert len({s.down.stages for s in every if s.down.depth == 2048}) > 1
    turned = tuple(settings_to_ints(found[0]))
    near = list_candidates(key, H200, 2, ("triton",), near=[Entry("triton", turned, 1.0)])
    assert near[1].settings == turned or near[0].settings == turned


@pytest.mark.parametrize("sizes", [(12352, 2048), (9216, 2048), (2048, 4096)], ids=str)
def test_what_is_known_of_projections_in_fp8_blocks_is_tried(sizes: tuple[int, int]) -> None:
    key = linear_key(*sizes, FP8)
    found = [c.settings for c in list_candidates(key, H200, 1, ("library", "triton"))]
    assert len(found) == len(set(found)) == MOST
    for blocks in ((8, 256, 2, 5), (16, 128, 2, 5), (4, 2048, 8, 1)):
        for pdl, ahead in ((0, 0), (1, 0), (1, 4)):
            assert ((*blocks, 1, 0, pdl, ahead, 0) in found) == (not ahead or blocks[1] < sizes[1])
    assert {s[-2] for s in found if s} >= {0, 1, 2, 4}
    every = [linear_from_ints(c.settings) for c in list_candidates(key, H200, 1, ("triton",), limit=400)]
    assert {s.stages for s in every if s.depth >= sizes[1]} == {1}  # a row at once has no steps
    assert len([s for s in found if s and s[1] >= sizes[1]]) >= 3
    base = LinearSettings(8, 512, 4, 3, 1, dot=False, pdl=True, ahead=2)
    entry = Entry("triton", tuple(linear_to_ints(base)), 1.0)
    near = [linear_from_ints(c.settings) for c in list_candidates(key, H200, 1, ("triton",), near=[entry])]
    assert near[1] == base
    assert {(s.pdl, s.ahead) for s in near[-6:]} <= {(True, 2), (True, 0)}  # neighbours are launched as what was best


@pytest.mark.parametrize("device", [H200, MI350], ids=lambda device: device.arch)
@pytest.mark.parametrize("tokens", LINEAR_BUCKETS)
@pytest.mark.parametrize("sizes", [(12352, 2048), (40, 100)], ids=str)
def test_candidates_of_projections_in_fp8_blocks(sizes: tuple[int, int], tokens: int, device: Device) -> None:
    key = linear_key(*sizes, FP8)
    for candidate in list_candidates(key, device, tokens, ("library", "triton"), limit=200):
        if candidate.implementation == "triton":
            settings = linear_from_ints(candidate.settings)
            assert settings.rows <= 128
            in_steps = settings.dot and not settings.programs  # programs that keep x take any depth
            assert not in_steps or settings.depth <= 128
            assert not (settings.pdl and device is MI350)
            assert not in_steps or fits(linear_block(key, settings, tokens), device)


def test_rows_are_wider_than_fp8_weights() -> None:
    key = NARROW["qwen3next"]
    block = expert_block(key, "grouped", "gate_up", Tile(16, 64, 128, 4, 3), 8)
    assert block.stage_bytes == (2 * 64 * 1 + 16 * 2) * 128
    dot = linear_block(linear_key(64, 256, FP8), LinearSettings(16, 64, 4, 3, 1, dot=True, pdl=False), 2)
    assert dot.shared == (16 * 1 + 16 * 2) * 64 * 3
    assert "per_slot" in [c.implementation for c in list_candidates(NARROW["odd"], CPU, 8, FUNCTIONS)]
    large = moe_key(8, 2, 0, 0, 4096, 14336, FP8)  # multiplied out, two of these are more than a gibibyte
    assert "per_slot" not in [c.implementation for c in list_candidates(large, CPU, 1, FUNCTIONS)]
