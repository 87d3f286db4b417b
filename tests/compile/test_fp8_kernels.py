"""The kernels over weights in FP8 blocks: interpreted, compiled for devices that are not here, refused, behind ops."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.library import opcheck

pytest.importorskip("triton", reason="triton is not installed; it is what runs and compiles the kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.kernels import Settings, Tile, default_settings, run_moe_layer
from fmoe.compile.kernels.linear import LinearSettings, default_linear_settings, run_linear
from fmoe.compile.kernels.offline import compile_launch, empty_weight, find_misfits, record_layer, recorded_launches
from fmoe.compile.linear_ops import linear_planned
from fmoe.compile.ops import compute_experts_op, compute_moe_op, encode_plans, rule_to_numbers
from fmoe.compile.plan import Device, Plan, Row, linear_key, make_plan, moe_key, select_implementation
from fmoe.compile.settings import why_not_fp8
from fmoe.functional import MoEParams, RouterConfig, Routing, compute_experts_grouped, route_and_compute
from fmoe.functional.quant import FP8, Fp8, dequantize, linear

FILE = Path(__file__).with_name("fp8_interpreted.py")
TARGETS = {"sm_90": "hopper", "gfx950": "hip"}
# experts, top_k, slots, hidden, width: two published models, and sizes with a partial block on every side
SHAPES = {"qwen3next": (512, 10, 1, 2048, 512), "dsv3": (256, 8, 1, 7168, 2048), "partial": (60, 4, 3, 160, 136)}


def test_the_kernels_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FILE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def rule_settings(shape, tokens, target, **options):
    return default_settings(tokens, *SHAPES[shape], FP8, target=TARGETS[target], **options)


def layer_launches(shape, tokens, target, settings=None, activations=torch.bfloat16):
    experts, top_k, slots, hidden, width = SHAPES[shape]
    settings = settings or rule_settings(shape, tokens, target)
    config = RouterConfig(experts, top_k)
    launches = record_layer(
        settings, config, tokens=tokens, slots=slots, hidden=hidden, width=width, dtype=FP8, activations=activations
    )
    return [launch for launch in launches if reads_fp8(launch)]


def reads_fp8(launch):
    return any(isinstance(value, torch.Tensor) and value.dtype == FP8 for value in launch.values.values())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_default_settings_of_layers_fit(shape, target):
    misfits, names = [], set()
    for tokens in (1, 2, 8, 64, 2048, 16384):
        settings = rule_settings(shape, tokens, target, quantize=False)
        launches = layer_launches(shape, tokens, target, settings)
        assert len(launches) == (4 if settings.path == "split" else 2)  # x and h are split before
        misfits += find_misfits(launches, target)
        names |= {launch.kernel.__name__ for launch in launches}
    assert misfits == []
    assert {"gate_up_slots", "down_token", "gate_up_sorted", "down_sorted"} <= names


@pytest.mark.parametrize(
    ("tokens", "gate_up"),
    [(1, (1, 8, 512, 4, 3)), (2, (1, 8, 256, 2, 3)), (3, (1, 8, 512, 2, 3)), (8, (1, 8, 512, 2, 3))],
)
def test_few_tokens_take_what_was_fastest_in_whole_models(tokens, gate_up):
    settings = rule_settings("qwen3next", tokens, "sm_90")
    assert (settings.path, settings.gate_up) == ("slots", Tile(*gate_up))
    assert (settings.router, settings.down) == (Tile(0, 2, 2048, 2, 1), Tile(1, 4, 8192, 4, 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_many_tokens_are_quantised_where_blocks_are_whole(shape):
    assert rule_settings(shape, 64, "sm_90").path != "quantized"
    assert rule_settings(shape, 16384, "gfx950").path == "sorted"
    settings = rule_settings(shape, 16384, "sm_90")
    assert settings.path == ("sorted" if shape == "partial" else "quantized")
    names = [launch.kernel.__name__ for launch in layer_launches(shape, 16384, "sm_90", settings)]
    assert ("quantize_blocks" in names) == (shape != "partial")
    # rows of another dtype run as they do on the sorted path
    launches = layer_launches(shape, 16384, "sm_90", settings, activations=torch.float16)
    assert [launch.kernel.__name__ for launch in launches] == ["gate_up_sorted", "down_sorted"]
    assert find_misfits(launches, "sm_90") == []


def linear_launches(tokens, outputs, hidden, settings, *, rest=0):
    w = empty_weight(outputs, hidden, dtype=FP8)
    if rest:
        w = w._replace(rest_MD=torch.empty(rest, hidden, dtype=torch.bfloat16, device="meta"))
    with recorded_launches() as launches:
        y = run_linear(torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta"), w, settings)
    assert y.shape == (tokens, outputs + rest)
    return launches


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(12288, 2048, 64), (2048, 4096, 0), (27, 100, 3), (513, 2064, 0)], ids=str)
def test_default_settings_of_projections_fit(shape, target):
    outputs, hidden, rest = shape
    for tokens in (1, 2, 16):
        settings = default_linear_settings(tokens, outputs, hidden, FP8, TARGETS[target])
        launches = linear_launches(tokens, outputs, hidden, settings, rest=rest)
        assert [launch.values["M"] for launch in launches if "M" in launch.values] == [rest]
        assert find_misfits(launches, target) == []


def test_many_rows_of_one_token_are_shared_by_programs_that_stay():
    settings = default_linear_settings(1, 12352, 2048, FP8, "hopper")
    (launch,) = linear_launches(1, 12288, 2048, settings, rest=64)
    assert (launch.kernel.__name__, settings.programs) == ("linear_streamed", 396)  # three for each multiprocessor
    assert find_misfits([launch], "sm_90") == []


@pytest.mark.parametrize("tokens", [1, 2])
def test_programs_that_stay_are_left_where_their_instructions_do_not_serve(tokens):
    settings = LinearSettings(16, 128, 4, 1, 1, dot=False, pdl=False, programs=3)
    w = empty_weight(48, 100, dtype=FP8)  # whose rows are no whole blocks
    with recorded_launches() as launches:
        run_linear(torch.empty(tokens, 100, dtype=torch.bfloat16, device="meta"), w, settings)
    assert [launch.kernel.__name__ for launch in launches] == ["linear_product"]


def test_dependent_launch_and_fetching_ahead_compile():
    settings = LinearSettings(8, 512, 4, 3, 2, dot=False, pdl=True, ahead=2)
    assert find_misfits(linear_launches(1, 300, 2048, settings, rest=40), "sm_90") == []


def test_a_device_with_another_fp8_is_refused_by_name():
    launch = layer_launches("partial", 1, "gfx950")[0]
    message = "gate_up_slots does not compile for gfx942: gfx942 reads FP8 of another form than float8_e4m3fn"
    with pytest.raises(NotImplementedError, match=message):
        compile_launch(launch, "gfx942")


@pytest.mark.parametrize(
    ("kind", "arch", "reason"),
    [
        ("hip", "gfx942", "gfx942 reads FP8 of another form than float8_e4m3fn, gfx950 is the first"),
        ("cuda", "sm_80", "sm_80 has no FP8, sm_89 is the first with it; dequantise on load"),
        ("hip", "gfx950", ""),
        ("hip", "gfx1201", ""),
        ("cuda", "sm_89", ""),
        ("cuda", "sm_120", ""),
        ("cpu", "", ""),
        ("cuda", "", ""),
    ],
)
def test_devices_with_this_fp8(kind, arch, reason):
    assert why_not_fp8(kind, arch).startswith(reason) and bool(reason) == bool(why_not_fp8(kind, arch))


def quantised(*shape, rng, parts=1):
    *outer, rows, columns = shape
    blocks = (parts * -(-(rows // parts) // 128), -(-columns // 128))
    w = torch.randn(shape, generator=rng).to(FP8)
    return Fp8(w, (torch.rand((*outer, *blocks), generator=rng) + 0.5) * columns**-0.5)


E, K, S, D, F = 5, 2, 1, 160, 136
CONFIG = RouterConfig(E, K, renormalize=True)


def layer(rng):
    gate_up, down = quantised(E + S, 2 * F, D, rng=rng, parts=2), quantised(E + S, D, F, rng=rng)
    return MoEParams(torch.randn(E + S, D, generator=rng), gate_up, down, None, None)


MV = Tile(1, 16, 128, 4, 2)
SLOTS = Settings("slots", Tile(0, 16, 64, 4, 2), MV, MV, token_down=True)
WIDE = Tile(16, 256, 64, 4, 2)
DEEP = Tile(16, 64, 256, 4, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings("sorted", DEEP, WIDE, DEEP), "gate_up: rows=256 and depth=64 must be at most 128"),
        (Settings("grouped", DEEP, MV, DEEP), "down: rows=64 and depth=256 must be at most 128"),
    ],
)
def test_blocks_with_several_factors_are_refused(settings, message, rng):
    params = layer(rng)
    with pytest.raises(ValueError, match=message):
        run_moe_layer(torch.ones(2, D), *params[:1], None, *params[1:3], CONFIG, settings)
    with pytest.raises(ValueError, match="linear: rows=16 and depth=256 must be at most 128"):
        run_linear(torch.ones(2, D), quantised(3, D, rng=rng), LinearSettings(16, 256, 4, 2, 1, dot=True, pdl=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w._replace(scale=w.scale[:, :-1]), r"w_gate_up .* scale float32 \(6, 4, 2\), got .*\(6, 3, 2\)"),
        (lambda w: w._replace(scale=w.scale.half()), "w_gate_up .* got torch.float8_e4m3fn and torch.float16"),
        (lambda w: w._replace(w=w.w.to(torch.float8_e5m2)), "must be torch.float8_e4m3fn .* got torch.float8_e5m2"),
        (lambda w: w._replace(w=w.w.mT.contiguous().mT), "w_gate_up and its scale must be contiguous; call"),
    ],
)
def test_what_the_kernels_cannot_read_is_refused(change, message, rng):
    params = layer(rng)
    with pytest.raises(ValueError, match=message):
        run_moe_layer(
            torch.ones(1, D), params.w_router_ED, None, change(params.w_gate_up_EPD), params.w_down_EDF, CONFIG, SLOTS
        )


def test_rows_behind_have_the_dtype_of_x(rng):
    w = quantised(3, D, rng=rng)._replace(rest_MD=torch.ones(2, D).half())
    with pytest.raises(ValueError, match=r"one dtype, got \['torch.float32', 'torch.float16'\]"):
        run_linear(torch.ones(2, D), w, LinearSettings(4, 64, 4, 2, 1, dot=False, pdl=False))


def plan_of_layer(name):
    key = moe_key(E, K, S, S, D, F, FP8)
    return encode_plans([Plan(key, (Row(-1, name, (), "tuned"),))], "moe")


@pytest.mark.parametrize("name", ["per_slot", "loop", "dense", "grouped"])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_ops_read_fp8(tokens, name, rng):
    params, x = layer(rng), torch.randn(tokens, D, generator=rng)
    y = compute_moe_op(x, params, CONFIG, plans=plan_of_layer(name))
    torch.testing.assert_close(y, route_and_compute(x, params, CONFIG), rtol=1e-4, atol=1e-5)

    routing = Routing(torch.rand(tokens, K, generator=rng), torch.randint(E, (tokens, K), generator=rng).int())
    stacks = params.w_gate_up_EPD, params.w_down_EDF
    plain = dequantize(stacks[0], torch.float32, parts=2), dequantize(stacks[1], torch.float32)
    y = compute_experts_op(x, routing, *stacks, plans=plan_of_layer(name))
    torch.testing.assert_close(y, compute_experts_grouped(x, routing, *plain), rtol=1e-4, atol=1e-5)


# The check of the schema itself compares inputs by arithmetic that torch has not for FP8.
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def test_opcheck_with_factors(rng):
    params, x = layer(rng), torch.randn(3, D, generator=rng)
    rule, scales = rule_to_numbers(CONFIG)
    ((_, _, rows),) = plan_of_layer("grouped")
    (w_gate_up, gate_up_scale, _), (w_down, down_scale, _) = params.w_gate_up_EPD, params.w_down_EDF
    tensors = (x, params.w_router_ED, None, w_gate_up, w_down)
    arguments = (*tensors, rule, scales, list(rows), gate_up_scale, down_scale)
    opcheck(torch.ops.fmoe.moe.default, arguments, test_utils=OPCHECKS)
    routing = torch.rand(3, K), torch.randint(E, (3, K), generator=rng).int()
    arguments = (x, *routing, w_gate_up, w_down, list(rows), 0, gate_up_scale, down_scale)
    opcheck(torch.ops.fmoe.experts.default, arguments, test_utils=OPCHECKS)
    w, scale, _ = quantised(7, D, rng=rng)
    key = linear_key(9, D, FP8)
    ((_, _, rows),) = encode_plans([Plan(key, (Row(-1, "library", (), "rule"),))], "linear")
    rest = torch.randn(2, D, generator=rng)
    arguments = (x.view(1, 3, D), w, torch.ones(9), list(rows), scale, rest)
    opcheck(torch.ops.fmoe.linear.default, arguments, test_utils=OPCHECKS)


@pytest.mark.parametrize("tokens", [1, 17])
def test_a_planned_projection_without_kernels_is_dequantised(tokens, rng):
    w = quantised(140, D, rng=rng)._replace(rest_MD=torch.randn(3, D, generator=rng))
    plans = encode_plans([Plan(linear_key(143, D, FP8), (Row(-1, "library", (), "rule"),))], "linear")
    x, bias = torch.randn(1, tokens, D, generator=rng), torch.randn(143, generator=rng)
    y = linear_planned(x, w, bias, plans=plans)
    torch.testing.assert_close(y, linear(x, w, bias))
    assert torch.equal(linear_planned(x, w, bias), y)
    # no kernel rounds rows on a CPU
    plans = encode_plans([Plan(linear_key(143, D, FP8), (Row(-1, "quantized", (), "rule"),))], "linear")
    assert torch.equal(linear_planned(x, w, bias, plans=plans), y)


def test_projections_in_fp8_are_planned_with_kernels_up_to_sixty_four_rows():
    device = Device("cuda", "x", "sm_90", 132, "")
    plan = make_plan(linear_key(2048, 4096, FP8), device, allowed=("library", "triton"))
    ((_, dtype, rows),) = encode_plans([plan], "linear")
    assert dtype == FP8
    assert [select_implementation(rows, tokens)[0] for tokens in (1, 8, 16, 17, 64)] == ["triton"] * 5
    assert [select_implementation(rows, tokens)[0] for tokens in (65, 511)] == ["library"] * 2
    assert [select_implementation(rows, tokens)[0] for tokens in (512, 16384)] == ["quantized"] * 2
    for hidden, arch in ((4000, "sm_90"), (4096, "sm_89")):
        other = make_plan(linear_key(2048, hidden, FP8), replace(device, arch=arch), allowed=("library", "triton"))
        assert (other.rows[-1].bound, other.rows[-1].implementation) == (-1, "library")
    plain = make_plan(linear_key(2048, 4096, torch.bfloat16), device, allowed=("library", "triton"))
    assert {row.implementation for row in plain.rows} == {"library"}
    assert {row.implementation for row in make_plan(plan.key, device, allowed=("library",)).rows} == {"library"}
