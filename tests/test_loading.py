"""fmoe/loading.py: a tiny family goes to disk and comes back byte for byte; every disagreement is named."""

import json
import os
from pathlib import Path
from typing import NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fmoe.loading
from fmoe.architectures import Fill, Piece
from fmoe.checkpoint import INDEX, open_checkpoint
from fmoe.loading import (
    check_params,
    count_params,
    load_params,
    make_meta_params,
    named_tensors,
)

V, D, E, F = 11, 6, 3, 4
P = 2 * F
CPU = torch.device("cpu")
ROWS = (3, 0, 4, 1, 5, 2)


class Layer(NamedTuple):
    norm_D: Tensor
    mixer_DD: Tensor  # rows in the order ROWS
    router_ED: Tensor  # experts, then the shared gate
    bias_E: Tensor  # float32
    w_in_EPD: Tensor  # gate rows then up rows; slot E is the shared expert
    w_out_EDF: Tensor


class Tiny(NamedTuple):
    embed_VD: Tensor
    layers: tuple[Layer, ...]


def build_layer(fill: Fill, prefix: str) -> Layer:
    def expert(e: int, proj: str, shape: tuple[int, int], *into: int | slice) -> Piece:
        owner = f"experts.{e}" if e < E else "shared"
        return Piece(f"{prefix}.{owner}.{proj}", shape, into)

    slots = range(E + 1)
    w_in = [expert(e, "gate", (F, D), e, slice(F)) for e in slots]
    w_in += [expert(e, "up", (F, D), e, slice(F, P)) for e in slots]
    w_out = [expert(e, "down", (D, F), e) for e in slots]
    if f"{prefix}.experts.gate_up" in fill.names:
        routed = slice(E)
        w_in = [Piece(f"{prefix}.experts.gate_up", (E, P, D), (routed,)), w_in[E], w_in[-1]]
        w_out = [Piece(f"{prefix}.experts.down", (E, D, F), (routed,)), w_out[E]]
    return Layer(
        norm_D=fill([D], [Piece(f"{prefix}.norm", (D,), take=lambda w_D: 1 + w_D)]),
        mixer_DD=fill([D, D], [Piece(f"{prefix}.mixer", (D, 1, D), take=lambda w: w[:, 0][list(ROWS)])]),
        router_ED=fill(
            [E + 1, D],
            [Piece(f"{prefix}.router", (E, D), (slice(E),)), Piece(f"{prefix}.shared_gate", (1, D), (slice(E, None),))],
        ),
        bias_E=fill([E], [Piece(f"{prefix}.bias", (E,))], dtype=torch.float32),
        w_in_EPD=fill([E + 1, P, D], w_in),
        w_out_EDF=fill([E + 1, D, F], w_out),
    )


def build_tiny(fill: Fill, layers: int = 2) -> Tiny:
    embed_VD = fill([V, D], [Piece("embed", (V, D))])
    return Tiny(embed_VD, tuple(build_layer(fill, f"layers.{i}") for i in range(layers)))


def make_tensors(*, stacked: tuple[bool, bool], rng: torch.Generator) -> dict[str, Tensor]:
    """Draw the checkpoint's tensors: bfloat16, but float32 biases."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).bfloat16()

    tensors = {"embed": draw(V, D)}
    for i, stack in enumerate(stacked):
        prefix = f"layers.{i}"
        tensors |= {f"{prefix}.norm": draw(D), f"{prefix}.mixer": draw(D, 1, D), f"{prefix}.router": draw(E, D)}
        tensors |= {f"{prefix}.shared_gate": draw(1, D), f"{prefix}.bias": torch.randn(E, generator=rng)}
        for owner in ["shared", *([] if stack else [f"experts.{e}" for e in range(E)])]:
            tensors |= {f"{prefix}.{owner}.{name}": draw(F, D) for name in ("gate", "up")}
            tensors[f"{prefix}.{owner}.down"] = draw(D, F)
        if stack:
            tensors |= {f"{prefix}.experts.gate_up": draw(E, P, D), f"{prefix}.experts.down": draw(E, D, F)}
    return tensors


def expect_layer(tensors: dict[str, Tensor], i: int) -> Layer:
    """Assemble a layer by hand, from lists of rows."""
    own = {name.removeprefix(f"layers.{i}."): tensor for name, tensor in tensors.items()}
    if "experts.down" in own:
        w_in, w_out = list(own["experts.gate_up"]), list(own["experts.down"])
    else:
        w_in = [torch.cat([own[f"experts.{e}.gate"], own[f"experts.{e}.up"]]) for e in range(E)]
        w_out = [own[f"experts.{e}.down"] for e in range(E)]
    return Layer(
        norm_D=torch.tensor([1.0 + x for x in own["norm"].tolist()]).bfloat16(),
        mixer_DD=torch.stack([own["mixer"][row, 0] for row in ROWS]),
        router_ED=torch.cat([own["router"], own["shared_gate"]]),
        bias_E=own["bias"],
        w_in_EPD=torch.stack([*w_in, torch.cat([own["shared.gate"], own["shared.up"]])]),
        w_out_EDF=torch.stack([*w_out, own["shared.down"]]),
    )


def write(folder: Path, tensors: dict[str, Tensor], *, shards: int = 2, config: str = '{"dtype": "bfloat16"}') -> Path:
    """Deal the tensors out to the shards in turn, so that every expert straddles them."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    placed = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(placed.values()):
        save_file({name: tensors[name] for name in placed if placed[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    return folder


def nothing(name: str) -> bool:
    return False


def load(folder: Path, **options: object) -> Tiny:
    options = {"dtype": torch.bfloat16, "device": CPU, "ignore": nothing} | options
    return load_params(build_tiny, open_checkpoint(folder), **options)


def check(folder: Path, build: object = build_tiny, **options: object) -> object:
    options = {"dtype": torch.bfloat16, "ignore": nothing} | options
    return check_params(build, open_checkpoint(folder), **options)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return make_tensors(stacked=(False, True), rng=torch.Generator().manual_seed(5))


@pytest.fixture
def no_reading(monkeypatch) -> None:
    """Fail a test in which memory is taken or a shard opened."""

    def meta_only(*args: object, device: object, **options: object) -> Tensor:
        assert torch.device(device).type == "meta"
        return original(*args, device=device, **options)

    original = torch.empty
    monkeypatch.setattr(torch, "empty", meta_only)
    monkeypatch.setattr(fmoe.loading, "safe_open", None)


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("stacked", [(False, False), (True, True), (False, True)], ids=str)
def test_round_trip(tmp_path, stacked, shards):
    tensors = make_tensors(stacked=stacked, rng=torch.Generator().manual_seed(1))

    params = load(write(tmp_path, tensors, shards=shards))

    expected = Tiny(tensors["embed"], tuple(expect_layer(tensors, i) for i in range(2)))
    found = dict(named_tensors(params))
    assert [*found] == [path for path, _ in named_tensors(expected)]
    for path, tensor in named_tensors(expected):
        assert found[path].dtype == tensor.dtype, path
        assert torch.equal(found[path].view(torch.uint8), tensor.view(torch.uint8)), path
        assert isinstance(found[path], nn.Parameter) and not found[path].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dtype_is_converted(tmp_path, tensors, dtype):
    params = load(write(tmp_path, tensors), dtype=dtype)

    assert torch.equal(params.layers[0].w_out_EDF, expect_layer(tensors, 0).w_out_EDF.to(dtype))
    assert params.layers[0].bias_E.dtype == torch.float32


def test_float32_tensor_in_a_bfloat16_checkpoint(tmp_path, tensors):
    tensors["layers.0.router"] = tensors["layers.0.router"].float() + 1e-4

    params = load(write(tmp_path, tensors), dtype=torch.float32)

    assert torch.equal(params.layers[0].router_ED[:E], tensors["layers.0.router"])


@pytest.mark.parametrize("value", [65520.0, -1e30])
def test_float16_does_not_become_infinite(tmp_path, tensors, value):
    tensors["layers.0.experts.1.up"][2, 3] = value
    folder = write(tmp_path, tensors)
    message = r"layers.0.experts.1.up in .*safetensors has 1 values beyond 65504, the largest of float16; load with"
    with pytest.raises(ValueError, match=message):
        load(folder, dtype=torch.float16)
    load(folder)


def test_float16_keeps_what_fits_and_what_is_infinite_on_disk(tmp_path, tensors):
    tensors["layers.0.experts.1.up"][2] = torch.tensor([65280.0, -torch.inf, torch.inf, torch.nan, 0, 1])
    params = load(write(tmp_path, tensors), dtype=torch.float16)
    expected = expect_layer(tensors, 0).w_in_EPD.half()
    assert torch.allclose(params.layers[0].w_in_EPD, expected, rtol=0, atol=0, equal_nan=True)


def test_a_shard_that_the_library_refuses_is_named(tmp_path, tensors):
    folder = write(tmp_path, tensors)
    checkpoint = open_checkpoint(folder)
    next(iter(checkpoint.tensors.values())).file.write_bytes(b"x" * 50)
    with pytest.raises(ValueError, match=r"model-00001-of-00002.safetensors cannot be read \(.*; download it again"):
        load_params(build_tiny, checkpoint, dtype=torch.bfloat16, device=CPU, ignore=nothing)


def test_no_second_copy(tmp_path, tensors):
    params = load(write(tmp_path, tensors))

    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in named_tensors(params)}
    assert sum(storages.values()) == count_params(params)[1]
    # and none of them is the mapped file
    for file in tmp_path.glob("*.safetensors"):
        with file.open("r+b") as stream:
            stream.seek(-64, os.SEEK_END)
            stream.write(bytes(64))
    assert torch.equal(params.layers[1].w_in_EPD, expect_layer(tensors, 1).w_in_EPD)


def test_one_shard_is_open_at_a_time_and_each_once(tmp_path, tensors, monkeypatch):
    open_now, opened, most = set(), [], []

    class Shard:
        def __init__(self, file: Path, framework: str) -> None:
            self.file, self.inner = file, original(file, framework=framework)

        def __enter__(self):
            open_now.add(self.file)
            opened.append(self.file.name)
            most.append(len(open_now))
            return self.inner.__enter__()

        def __exit__(self, *error):
            open_now.remove(self.file)
            return self.inner.__exit__(*error)

    original = fmoe.loading.safe_open
    monkeypatch.setattr(fmoe.loading, "safe_open", Shard)
    load(write(tmp_path, tensors, shards=4))

    assert opened == [f"model-{i + 1:05}-of-00004.safetensors" for i in range(4)]
    assert max(most) == 1


def test_tensors_are_read_in_the_order_of_their_bytes(tmp_path, tensors, monkeypatch):
    folder, bar = write(tmp_path, tensors, shards=1), MagicMock()
    monkeypatch.setattr(fmoe.loading, "tqdm", bar)

    load(folder)

    in_file = sorted(open_checkpoint(folder).tensors.values(), key=lambda info: info.offset)
    sizes = [call.args[0] for call in bar.return_value.__enter__.return_value.update.call_args_list]
    assert sizes == [info.nbytes for info in in_file]
    assert bar.call_args.kwargs["total"] == sum(sizes)


def test_check_params_report(tmp_path, tensors):
    folder = write(tmp_path, tensors | {"mtp.x": torch.ones(2), "mtp.y": torch.ones(3)})

    report = check(folder, ignore=lambda name: name.startswith("mtp."))

    params = load(folder, ignore=lambda name: name.startswith("mtp."))
    assert (report.num_params, report.param_bytes) == count_params(params)
    assert report.read == len(tensors)
    assert report.read_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert report.ignored == ("mtp.x", "mtp.y")


def test_missing_and_unknown_tensors_are_all_named(tmp_path, tensors, no_reading):
    del tensors["embed"], tensors["layers.0.experts.1.up"]
    tensors |= {"odd": torch.ones(1), "layers.2.norm": torch.ones(1)}
    folder = write(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"are not those that its config.json asks for") as caught:
        load(folder)
    assert caught.match(r"missing tensors \(2\): embed, layers.0.experts.1.up")
    assert caught.match(r"unknown tensors \(2\): odd, layers.2.norm|unknown tensors \(2\): layers.2.norm, odd")
    assert caught.match("weights that belong together; nothing was loaded")


def test_stacked_and_per_expert_at_once(tmp_path, tensors):
    tensors["layers.1.experts.0.gate"] = torch.ones(F, D).bfloat16()
    with pytest.raises(ValueError, match=r"unknown tensors \(1\): layers.1.experts.0.gate"):
        check(write(tmp_path, tensors))


def test_many_names_are_counted(tmp_path, no_reading):
    folder = write(tmp_path, {f"odd{i:03}": torch.ones(1, dtype=torch.bfloat16) for i in range(100)})
    with pytest.raises(ValueError, match=r"unknown tensors \(100\): .* and 90 more") as caught:
        load(folder)
    assert len(str(caught.value).split(", ")) < 25
    assert caught.match(r"missing tensors \(35\): .* and 25 more")


def test_wrong_shape(tmp_path, tensors, no_reading):
    tensors["layers.1.experts.down"] = torch.ones(E, F, D).bfloat16()
    with pytest.raises(
        ValueError, match=r"shapes \(1\): layers.1.experts.down \(expected \[3, 6, 4\], got \[3, 4, 6\]"
    ):
        load(write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.float16, r"expected bfloat16 or float32, got float16"),
        (torch.float64, r"expected bfloat16 or float32, got float64"),
        (torch.float8_e4m3fn, r"float8_e4m3fn without its factors, layers.0.mixer_scale_inv"),
        (torch.float8_e5m2, r"float8_e5m2: an unsupported quantisation; of FP8, float8_e4m3fn is read"),
        (torch.int8, r"int8: an unsupported quantisation; take the unquantised checkpoint"),
        (torch.uint8, r"uint8: an unsupported quantisation; take the unquantised checkpoint"),
    ],
    ids=str,
)
def test_wrong_dtype(tmp_path, tensors, dtype, message, no_reading):
    tensors["layers.0.mixer"] = torch.ones(D, 1, D).to(dtype)
    with pytest.raises(ValueError, match=rf"wrong dtypes \(1\): layers.0.mixer \({message}\)"):
        load(write(tmp_path, tensors))


def test_nested_and_old_dtype_keys(tmp_path, tensors):
    check(write(tmp_path, tensors, config='{"text_config": {"torch_dtype": "bfloat16"}, "torch_dtype": "float32"}'))
    with pytest.raises(ValueError, match=r"expected float32, got bfloat16"):
        check(write(tmp_path, tensors, config='{"torch_dtype": "float32"}'))


def test_quantised_config(tmp_path, tensors, no_reading):
    config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": None}}
    with pytest.raises(NotImplementedError, match=r"'fp8' with weight_block_size None; implemented is \[128, 128\]"):
        load(write(tmp_path, tensors, config=json.dumps(config)))
    config["quantization_config"]["quant_method"] = "gptq"
    with pytest.raises(ValueError, match="unknown quant_method 'gptq'; known are"):
        load(write(tmp_path, tensors, config=json.dumps(config)))


def test_make_meta_params_and_count(tensors):
    params = make_meta_params(build_tiny, dtype=torch.bfloat16)

    assert all(tensor.is_meta for _, tensor in named_tensors(params))
    elements = sum(tensor.numel() for tensor in tensors.values())
    assert count_params(params) == (elements, 2 * elements + 2 * 2 * E)  # the biases are float32
    assert count_params(make_meta_params(build_tiny, dtype=torch.float32, names=tensors.keys())) == (
        elements,
        4 * elements,
    )


def test_count_params_counts_a_tied_tensor_once():
    tied = torch.ones(2, 3)
    assert count_params((tied, [tied, None, (torch.ones(1, dtype=torch.bfloat16),)])) == (7, 26)


def test_named_tensors():
    params = Tiny(torch.ones(1), ((torch.ones(2), None), torch.ones(3)))
    assert [(path, len(tensor)) for path, tensor in named_tensors(params)] == [
        ("embed_VD", 1),
        ("layers.0.0", 2),
        ("layers.1", 3),
    ]


def test_progress(tmp_path, tensors, capsys, monkeypatch):
    folder = write(tmp_path, tensors)
    load(folder, progress=True)
    assert capsys.readouterr() == ("", "")  # it was over at once
    monkeypatch.setattr(fmoe.loading, "PROGRESS_DELAY_S", 0)
    load(folder, progress=False)
    load(folder, progress=None)  # standard error is no terminal here
    assert capsys.readouterr() == ("", "")
    load(folder, progress=True)
    out, err = capsys.readouterr()
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert out == "" and "loading: 100%" in err and f"{total / 1024:.2f}k/" in err
