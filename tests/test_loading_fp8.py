"""Loading tensors in FP8 blocks: kept or multiplied out, always the values that a loop over blocks gives."""

import logging
from functools import partial

import pytest
import torch
from torch import nn

from fmoe.checkpoint import open_checkpoint
from fmoe.functional.moe import plan_shared_experts
from fmoe.functional.quant import Fp8, dequantize, weight_shape
from fmoe.functional.routing import RouterConfig
from fmoe.loading import check_params, count_params, load_params, make_meta_params
from fmoe.models.weights import ExpertNames, Piece, expert_stacks, gate_and_up, matrix, matrix_rows

from .fp8_checkpoints import dequantize_tensors, quantize_tensors, write_checkpoint

CPU = torch.device("cpu")
SHAPES = [pytest.param(*s, id="N{}-D{}".format(*s)) for s in [(128, 256), (576, 200), (3, 130), (1, 1)]]


def draw(rng, **shapes):
    """Draw tensors whose size differs from place to place."""
    tensors = {}
    for name, shape in shapes.items():
        sizes = torch.linspace(0.1, 3.0, shape[-2])[:, None] * torch.linspace(1.0, 20.0, shape[-1])
        tensors[name.replace("__", ".")] = torch.randn(shape, generator=rng) * sizes
    return tensors


def nothing(name):
    return False


def load(folder, build, *, keep_fp8=True, dtype=torch.float32, ignore=nothing):
    checkpoint = open_checkpoint(folder)
    return load_params(build, checkpoint, dtype=dtype, device=CPU, ignore=ignore, keep_fp8=keep_fp8)


def check(folder, build, ignore=nothing):
    return check_params(build, open_checkpoint(folder), dtype=torch.float32, ignore=ignore)


def build_one(fill, *, name="w", shape):
    return (matrix(fill, name, shape),)


def build_rows(fill, *, columns, counts=None, **parts):
    pieces = [piece if isinstance(piece, Piece) else Piece(name, (piece, columns)) for name, piece in parts.items()]
    return (matrix_rows(fill, pieces, columns, counts=counts),)


def everything(name):
    return True


def check_kept(folder, build, expected, *, rest=0):
    """Load both ways: blocks that stand for ``expected`` exactly, and ``expected`` itself."""
    (w,) = load(folder, build)
    assert isinstance(w, Fp8)
    assert w.w.dtype == torch.float8_e4m3fn and w.w.is_contiguous() and w.scale.is_contiguous()
    assert all(isinstance(t, nn.Parameter) and not t.requires_grad for t in w if t is not None)
    assert (0 if w.rest_MD is None else len(w.rest_MD)) == rest
    assert torch.equal(dequantize(w, torch.float32), expected)
    (plain,) = load(folder, build, keep_fp8=False)
    assert torch.equal(plain, expected)
    return w


def check_torn(folder, build, expected, caplog, reason):
    """Load what cannot keep its blocks: ``expected`` either way, and one line that says why."""
    with caplog.at_level(logging.INFO, "fmoe"):
        (w,) = load(folder, build)
    assert torch.equal(w, expected)
    assert [record.message for record in caplog.records if "become" in record.message] == [reason]
    assert torch.equal(load(folder, build, keep_fp8=False)[0], expected)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("N", "D"), SHAPES)
def test_one_matrix(tmp_path, rng, N, D, scales):
    tensors = quantize_tensors(draw(rng, w=(N, D)), everything, scales)
    folder, expected = write_checkpoint(tmp_path, tensors, {}), dequantize_tensors(tensors)["w"]

    w = check_kept(folder, partial(build_one, shape=(N, D)), expected)

    assert torch.equal(w.w.view(torch.uint8), tensors["w"].view(torch.uint8))
    assert torch.equal(w.scale, tensors["w_scale_inv"].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dequantised_values_are_rounded_once(tmp_path, rng, dtype):
    tensors = quantize_tensors(draw(rng, w=(200, 130)), everything)
    folder = write_checkpoint(tmp_path, tensors, {})

    (w,) = load(folder, partial(build_one, shape=(200, 130)), keep_fp8=False, dtype=dtype)

    assert torch.equal(w, dequantize_tensors(tensors)["w"].to(dtype))


def test_a_block_beyond_float16(tmp_path):
    folder = write_checkpoint(tmp_path, quantize_tensors({"w": torch.full((2, 2), 7e4)}, everything), {})
    with pytest.raises(ValueError, match=r"w in .* has 4 values beyond 65504, the largest of float16; load with dtype"):
        load(folder, partial(build_one, shape=(2, 2)), keep_fp8=False, dtype=torch.float16)


def test_whatever_is_no_projection_becomes_plain(tmp_path, rng):
    tensors = quantize_tensors(draw(rng, w=(256, 128)), everything)
    piece = Piece("w", (256, 128), take=lambda w: w.unflatten(0, (2, 128)))

    (w,) = load(write_checkpoint(tmp_path, tensors, {}), lambda fill: (fill((2, 128, 128), [piece]),))

    assert torch.equal(w, dequantize_tensors(tensors)["w"].view(2, 128, 128))


def test_rows_of_several_tensors(tmp_path, rng):
    tensors = quantize_tensors(draw(rng, q=(256, 150), k=(128, 150), v=(130, 150)), everything)
    expected = torch.cat(list(dequantize_tensors(tensors).values()))

    w = check_kept(
        write_checkpoint(tmp_path, tensors, {}), partial(build_rows, columns=150, q=256, k=128, v=130), expected
    )

    assert w.scale.shape == (5, 2)


def test_unquantised_rows_at_the_end(tmp_path, rng):
    tensors = draw(rng, qkv=(200, 150), b=(3, 150), a=(2, 150))
    tensors = quantize_tensors(tensors, lambda name: name == "qkv")
    expected = torch.cat(list(dequantize_tensors(tensors).values()))

    w = check_kept(
        write_checkpoint(tmp_path, tensors, {}), partial(build_rows, columns=150, qkv=200, b=3, a=2), expected, rest=5
    )

    assert weight_shape(w) == (205, 150)


@pytest.mark.parametrize(
    ("plain", "rows", "reason"),
    [
        ("", (130, 128, 128), "its blocks are not whole blocks of what is stored"),
        ("q", (128, 128, 128), "it joins tensors in FP8 blocks with others"),
        ("k", (128, 128, 128), "it joins tensors in FP8 blocks with others"),
    ],
)
def test_rows_that_cannot_keep_their_blocks(tmp_path, rng, caplog, plain, rows, reason):
    counts = dict(zip("qkv", rows, strict=True))
    tensors = draw(rng, **{name: (count, 20) for name, count in counts.items()})
    tensors = quantize_tensors(tensors, lambda name: name != plain)
    expected = torch.cat(list(dequantize_tensors(tensors).values()))

    build = partial(build_rows, columns=20, **counts)
    line = f"weights in FP8 become float32, for {reason}: q"
    check_torn(write_checkpoint(tmp_path, tensors, {}), build, expected, caplog, line)


def halves(size, half, w):
    """Take the first or second half of each head of 2 * size rows."""
    return torch.cat([w[start + half * size : start + (half + 1) * size] for start in range(0, len(w), 2 * size)])


def build_halves(fill, *, size, heads):
    shape = (2 * size * heads, 140)
    pieces = [Piece("q", shape, take=partial(halves, size, half), shares=True) for half in (0, 1)]
    return build_rows(fill, columns=140, counts=[size * heads] * 2, first=pieces[0], second=pieces[1])


def test_rows_that_change_places_by_blocks(tmp_path, rng):
    tensors = quantize_tensors(draw(rng, q=(3 * 512, 140)), everything)
    dequantised = dequantize_tensors(tensors)["q"]
    expected = torch.cat([halves(256, 0, dequantised), halves(256, 1, dequantised)])
    check_kept(write_checkpoint(tmp_path, tensors, {}), partial(build_halves, size=256, heads=3), expected)


def test_rows_that_change_places_across_blocks(tmp_path, rng, caplog):
    tensors = quantize_tensors(draw(rng, q=(4 * 128, 140)), everything)
    dequantised = dequantize_tensors(tensors)["q"]
    expected = torch.cat([halves(64, 0, dequantised), halves(64, 1, dequantised)])
    line = "weights in FP8 become float32, for its blocks are not whole blocks of what is stored: q"
    build = partial(build_halves, size=64, heads=4)
    check_torn(write_checkpoint(tmp_path, tensors, {}), build, expected, caplog, line)


@pytest.mark.parametrize("N", [64, 128])
def test_rows_that_change_places_within_a_block(tmp_path, rng, N):
    tensors = quantize_tensors(draw(rng, w=(2 * N, 30)), everything)
    expected = dequantize_tensors(tensors)["w"].flip(0)
    folder = write_checkpoint(tmp_path, tensors, {})
    build = partial(build_rows, columns=30, w=Piece("w", (2 * N, 30), take=lambda w: w.flip(0)))
    # of one block, or of two that change places: all values of a block still share its factor
    assert check_kept(folder, build, expected).scale.shape == (2 * N // 128, 1)


def test_a_transposed_tensor(tmp_path, rng, caplog):
    tensors = quantize_tensors(draw(rng, w=(256, 130)), everything)
    folder, expected = write_checkpoint(tmp_path, tensors, {}), dequantize_tensors(tensors)["w"].T
    line = "weights in FP8 become float32, for its blocks are not whole blocks of what is stored: w"

    def build(fill):
        return (fill.weight((130, 256), [Piece("w", (256, 130), take=torch.t)]),)

    check_torn(folder, build, expected, caplog, line)


NAMES = ExpertNames()


def build_experts(fill, *, width, hidden, experts=3, slots=0):
    shared = plan_shared_experts(slots, width, width, requested="auto")
    return expert_stacks(fill, "m", RouterConfig(num_experts=experts, top_k=1), shared, width, hidden, NAMES)


def draw_experts(rng, *, width, hidden, experts=3, slots=0, stacked=False):
    if stacked:
        shapes = {"gate_up_proj": (experts, 2 * width, hidden), "down_proj": (experts, hidden, width)}
    else:
        sides = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        shapes = {f"{e}.{name}.weight": shape for e in range(experts) for name, shape in sides.items()}
    tensors = {f"m.experts.{name}": draw(rng, w=shape)["w"] for name, shape in shapes.items()}
    if slots:
        for name in ("gate_proj", "up_proj"):
            tensors[f"m.shared_expert.{name}.weight"] = draw(rng, w=(slots * width, hidden))["w"]
        tensors["m.shared_expert.down_proj.weight"] = draw(rng, w=(hidden, slots * width))["w"]
    return tensors


def expect_experts(tensors, *, width, slots=0, experts=3):
    """Put the stacks together by hand."""
    if "m.experts.down_proj" in tensors:
        gate_up, down = list(tensors["m.experts.gate_up_proj"]), list(tensors["m.experts.down_proj"])
    else:
        own = [{n: tensors[f"m.experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down")} for e in range(experts)]
        gate_up, down = [torch.cat([e["gate"], e["up"]]) for e in own], [e["down"] for e in own]
    for slot in range(slots):
        part = slice(slot * width, (slot + 1) * width)
        gate_up.append(torch.cat([tensors[f"m.shared_expert.{n}_proj.weight"][part] for n in ("gate", "up")]))
        down.append(tensors["m.shared_expert.down_proj.weight"][:, part])
    return torch.stack(gate_up), torch.stack(down)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("width", "hidden", "slots", "stacked"),
    [(128, 256, 0, False), (72, 130, 1, False), (256, 130, 2, False), (128, 256, 1, True), (130, 20, 1, False)],
)
def test_expert_stacks(tmp_path, rng, width, hidden, slots, stacked, scales):
    sizes = {"width": width, "slots": slots}
    tensors = quantize_tensors(draw_experts(rng, hidden=hidden, stacked=stacked, **sizes), everything, scales)
    folder = write_checkpoint(tmp_path, tensors, {})
    build = partial(build_experts, hidden=hidden, **sizes)

    gate_up, down = load(folder, build)
    plain_gate_up, plain_down = load(folder, build, keep_fp8=False)

    expected_gate_up, expected_down = expect_experts(dequantize_tensors(tensors), **sizes)
    blocks = -(-width // 128)
    assert gate_up.scale.shape == (3 + slots, 2 * blocks, -(-hidden // 128))
    assert down.scale.shape == (3 + slots, -(-hidden // 128), blocks)
    assert torch.equal(dequantize(gate_up, torch.float32, parts=2), expected_gate_up)
    assert torch.equal(dequantize(down, torch.float32), expected_down)
    assert torch.equal(plain_gate_up, expected_gate_up) and torch.equal(plain_down, expected_down)


@pytest.mark.parametrize(("slots", "stacked"), [(0, True), (2, False)], ids=["stacked", "wide-shared"])
def test_expert_stacks_that_cannot_keep_their_blocks(tmp_path, rng, caplog, slots, stacked):
    """Up rows of a stacked tensor, or a second shared slot, begin inside a stored block."""
    sizes = {"width": 72, "slots": slots}
    tensors = quantize_tensors(draw_experts(rng, hidden=20, stacked=stacked, **sizes), everything)
    with caplog.at_level(logging.INFO, "fmoe"):
        gate_up, down = load(write_checkpoint(tmp_path, tensors, {}), partial(build_experts, hidden=20, **sizes))
    expected_gate_up, expected_down = expect_experts(dequantize_tensors(tensors), **sizes)
    assert torch.equal(gate_up, expected_gate_up)
    assert torch.equal(dequantize(down, torch.float32) if stacked else down, expected_down)
    assert "not whole blocks of what is stored: m.experts." in caplog.text


def build_dense(fill, *, width, hidden):
    return gate_and_up(fill, "m", width, hidden)


def test_dense_block(tmp_path, rng):
    tensors = draw(rng, m__gate_proj__weight=(128, 130), m__up_proj__weight=(128, 130), m__down_proj__weight=(130, 128))
    tensors = quantize_tensors(tensors, everything)
    params = load(write_checkpoint(tmp_path, tensors, {}), partial(build_dense, width=128, hidden=130))
    gate, up, down = dequantize_tensors(tensors).values()
    assert torch.equal(dequantize(params.w_gate_up_PD, torch.float32), torch.cat([gate, up]))
    assert torch.equal(dequantize(params.w_down_DF, torch.float32), down)


def test_report_and_counts(tmp_path, rng):
    tensors = quantize_tensors(draw(rng, w=(200, 130)), everything)
    folder, build = write_checkpoint(tmp_path, tensors, {}), partial(build_one, shape=(200, 130))
    report = check(folder, build)
    assert (report.num_params, report.param_bytes) == count_params(load(folder, build)) == (26000, 26000 + 4 * 4)
    assert (report.read, report.read_bytes, report.ignored) == (2, 26000 + 16, ())
    assert count_params(load(folder, build, keep_fp8=False)) == (26000, 4 * 26000)


@pytest.mark.parametrize("keep_fp8", [False, True])
def test_meta_params_believe_in_factors(keep_fp8):
    build = partial(build_one, shape=(200, 130))
    (w,) = make_meta_params(build, dtype=torch.bfloat16, names={"w_scale_inv"}, keep_fp8=keep_fp8)
    assert weight_shape(w) == (200, 130) and isinstance(w, Fp8) == keep_fp8


def test_the_memory_is_said_first(tmp_path, rng, caplog):
    tensors = quantize_tensors(draw(rng, w=(256, 512)), everything)
    folder = write_checkpoint(tmp_path, tensors, {})
    with caplog.at_level(logging.INFO, "fmoe"):
        load(folder, partial(build_one, shape=(256, 512)), keep_fp8=None)
    said = "weights in FP8 become float32 (FP8 is kept on GPUs alone, this is 'cpu'): 0.0 GiB"
    assert [record.message for record in caplog.records] == [said]


ERRORS = {
    "no-factors": ({"w_scale_inv": None}, r"wrong dtypes \(1\): w \(float8_e4m3fn without its factors, w_scale_inv\)"),
    "no-tensor": (
        {"v_scale_inv": torch.ones(1, 1)},
        r"factors without their float8_e4m3fn tensor \(1\): v_scale_inv \(v is not there\)",
    ),
    "plain-tensor": (
        {"w": torch.ones(200, 130)},
        r"factors without their float8_e4m3fn tensor \(1\): w_scale_inv \(w is float32\)",
    ),
    "shape": (
        {"w_scale_inv": torch.ones(1, 2)},
        r"wrong shapes \(1\): w_scale_inv \(expected \[2, 2\] for \[200, 130\], got \[1, 2\]\)",
    ),
    "per-tensor": ({"w_scale_inv": torch.ones(1)}, r"w_scale_inv \(expected \[2, 2\] for \[200, 130\], got \[1\]\)"),
    "dtype": (
        {"w_scale_inv": torch.ones(2, 2, dtype=torch.float16)},
        r"wrong dtypes \(1\): w_scale_inv \(expected float32 or bfloat16, got float16\)",
    ),
}


@pytest.mark.parametrize(("change", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(tmp_path, rng, change, message):
    tensors = quantize_tensors(draw(rng, w=(200, 130)), everything) | change
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=message) as caught:
        check(write_checkpoint(tmp_path, tensors, {}), partial(build_one, shape=(200, 130)))
    assert "unknown tensors" not in str(caught.value)


def test_what_may_stay_unread_may_lack_its_half(tmp_path, rng):
    tensors = quantize_tensors(draw(rng, w=(200, 130)), everything)
    tensors |= {"mtp.a_scale_inv": torch.ones(1, 1), "mtp.b": torch.ones(2, 2).to(torch.float8_e4m3fn)}
    folder = write_checkpoint(tmp_path, tensors, {})
    report = check(folder, partial(build_one, shape=(200, 130)), ignore=lambda name: name.startswith("mtp."))
    assert set(report.ignored) == {"mtp.a_scale_inv", "mtp.b"}
