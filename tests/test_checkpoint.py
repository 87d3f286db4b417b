"""fmoe/checkpoint.py: every accepted layout opens, and every broken one says what is wrong with which file."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fmoe.checkpoint
from fmoe.checkpoint import (
    INDEX,
    Checkpoint,
    check_quantization,
    config_dtype,
    list_names,
    open_checkpoint,
    read_config,
    read_header,
    stored_dtype,
)

DEMO = Path(fmoe.checkpoint.__file__).parent / "demo"
FIRST = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
SECOND = {"c": torch.zeros(1, 2, 3, dtype=torch.float16), "d": torch.tensor(3)}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards and an index."""
    (tmp_path / "config.json").write_text('{"model_type": "tiny", "dtype": "bfloat16"}')
    placed = {}
    for name, tensors in zip(SHARDS, (FIRST, SECOND), strict=True):
        save_file(tensors, tmp_path / name)
        placed.update(dict.fromkeys(tensors, name))
    write_index(tmp_path, placed)
    return tmp_path


def write_index(folder: Path, placed: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": placed}))


def write_raw(file: Path, header: bytes, data: bytes = b"") -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def shapes_of(checkpoint: Checkpoint) -> dict[str, tuple[object, ...]]:
    return {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}


EXPECTED = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in (FIRST | SECOND).items()}


def test_open_checkpoint_with_index(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')

    checkpoint = open_checkpoint(folder)

    assert checkpoint.folder == folder
    assert checkpoint.config == {"model_type": "tiny", "dtype": "bfloat16"}
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert shapes_of(checkpoint) == EXPECTED
    assert checkpoint.tensors["c"].file == folder / SHARDS[1]
    assert checkpoint.tensors["a"].nbytes == 24


def test_tensor_info_offset_points_at_the_bytes(folder):
    for name, info in open_checkpoint(folder).tensors.items():
        raw = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
        tensor = (FIRST | SECOND)[name]
        assert raw == bytes(tensor.reshape(-1).view(torch.uint8).tolist()), name


@pytest.mark.parametrize(
    "names",
    [
        SHARDS,
        ("model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors"),
        ("model-1-of-2.safetensors", "model-2-of-2.safetensors"),
    ],
    ids=["usual", "doubled-suffix", "unpadded"],
)
def test_open_checkpoint_without_index(folder, names):
    (folder / INDEX).unlink()
    for old, new in zip(SHARDS, names, strict=True):
        (folder / old).rename(folder / new)

    assert shapes_of(open_checkpoint(folder)) == EXPECTED


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_open_checkpoint_with_a_single_file(folder, name):
    for file in (INDEX, *SHARDS):
        (folder / file).unlink()
    save_file(FIRST, folder / name)

    checkpoint = open_checkpoint(folder)

    assert checkpoint.tensors.keys() == FIRST.keys()
    assert checkpoint.generation_config is None


def test_open_checkpoint_demo():
    checkpoint = open_checkpoint(DEMO)

    placed = json.loads((DEMO / INDEX).read_text())["weight_map"]
    assert {name: info.file.name for name, info in checkpoint.tensors.items()} == placed
    assert len({info.file for info in checkpoint.tensors.values()}) == 3
    assert stored_dtype(checkpoint) == torch.bfloat16


def test_folder_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere; give one with config.json"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty is empty; expected config.json and"):
        open_checkpoint(tmp_path / "empty")
    save_file(FIRST, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors is a file; give the folder"):
        open_checkpoint(tmp_path / "model.safetensors")
    (tmp_path / "empty").rmdir()
    with pytest.raises(FileNotFoundError, match=r"no config.json in .*, which has model.safetensors"):
        open_checkpoint(tmp_path)


def test_read_config_needs_no_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "tiny"}')
    assert read_config(tmp_path) == {"model_type": "tiny"}
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors in .*; add the weights"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_json_errors(folder, name):
    (folder / name).write_text('{"model_type": ')
    with pytest.raises(ValueError, match=rf"{name} is not JSON: Expecting value"):
        open_checkpoint(folder)
    (folder / name).write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=rf"{name} is not UTF-8 "):
        open_checkpoint(folder)
    (folder / name).write_text("[1]")
    with pytest.raises(ValueError, match=rf"{name} holds a JSON list; an object was expected"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_refused(folder, name):
    for file in (INDEX, *SHARDS):
        (folder / file).unlink()
    torch.save(FIRST, folder / name)
    with pytest.raises(ValueError, match=rf"holds pickles only \({name}\); reading a pickle runs whatever code"):
        open_checkpoint(folder)


def test_pickle_under_another_name(folder):
    torch.save(FIRST, folder / SHARDS[0])
    with pytest.raises(ValueError, match=rf"{SHARDS[0]} is no safetensors file: it is a torch.save archive"):
        open_checkpoint(folder)
    torch.save(FIRST, folder / SHARDS[0], _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=rf"{SHARDS[0]} is no safetensors file: it is a pickle"):
        open_checkpoint(folder)


def test_missing_shard(folder):
    (folder / SHARDS[1]).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{INDEX} names files that are not there: {SHARDS[1]}; finish"):
        open_checkpoint(folder)
    (folder / INDEX).unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks {SHARDS[1]}; finish the download"):
        open_checkpoint(folder)


def test_folder_named_like_a_shard(folder):
    (folder / "x.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"x.safetensors is a folder; a safetensors file was expected"):
        open_checkpoint(folder)


def test_several_sets_without_index(folder):
    (folder / INDEX).unlink()
    save_file(FIRST, folder / "other.safetensors")
    with pytest.raises(ValueError, match=r"several sets of weights: model-\*-of-00002.safetensors, other.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("cut", [1, 40, 10_000], ids=["last-byte", "data-gone", "all-but-four"])
def test_truncated_shard(folder, cut):
    raw = (folder / SHARDS[0]).read_bytes()
    (folder / SHARDS[0]).write_bytes(raw[: max(len(raw) - cut, 4)])
    with pytest.raises(ValueError, match=rf"{SHARDS[0]} is truncated.*download it again"):
        open_checkpoint(folder)


def test_truncated_inside_the_header(folder):
    (folder / SHARDS[0]).write_bytes((folder / SHARDS[0]).read_bytes()[:50])
    with pytest.raises(ValueError, match=r"is truncated or no safetensors file: it has 50 bytes and announces"):
        open_checkpoint(folder)


def test_too_long_shard(folder):
    with (folder / SHARDS[0]).open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(ValueError, match=rf"{SHARDS[0]} is too long: it has \d+ bytes, its header says"):
        open_checkpoint(folder)


HEADERS = {
    "not-json": (b"{nonsense}", "Expecting property name"),
    "a-list": (b"[1, 2]", "corrupt header"),
    "no-offsets": (b'{"a": {"dtype": "F32", "shape": [1]}}', "data_offsets"),
    "unknown-dtype": (b'{"a": {"dtype": "F6", "shape": [1], "data_offsets": [0, 4]}}', "a has dtype F6; known are F64"),
    "wrong-size": (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 3]}}', "offsets 0 to 3"),
    "gap": (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "offsets 4 to 8, after byte 0"),
    "negative": (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}', r"a has shape \[-1\]"),
    "metadata-list": (b'{"__metadata__": [1]}', r"__metadata__ must be an object of strings, got \[1\]"),
    "metadata-int": (b'{"__metadata__": {"a": 1}}', r"__metadata__ must be an object of strings, got {'a': 1}"),
    "metadata-null": (b'{"__metadata__": null}', "__metadata__ must be an object of strings, got None"),
    "twice": (
        b'{"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}, "a": {"dtype": "U8"}}',
        "the key 'a' stands there twice",
    ),
    "twice-inside": (b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [8]}}', "the key 'dtype' stands there twice"),
    "bool-shape": (b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', r"a has shape \[True\]"),
    "float-offset": (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4]}}', "a has offsets 0.0 to 4"),
    "deep": (b"[" * 100_000, "recursion"),
    "not-utf8": (b'{"\xff": 1}', "utf-8"),
}


@pytest.mark.parametrize(("header", "message"), HEADERS.values(), ids=HEADERS)
def test_corrupt_header(folder, header, message):
    write_raw(folder / SHARDS[0], header, bytes(8))
    with pytest.raises(ValueError, match=rf"{SHARDS[0]} has a corrupt header.*; download it again") as caught:
        open_checkpoint(folder)
    assert caught.match(message)


def test_lookalikes(folder):
    (folder / SHARDS[0]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(ValueError, match="it is a git-lfs pointer; fetch the file itself"):
        open_checkpoint(folder)
    (folder / SHARDS[0]).write_text("<!DOCTYPE html><html>not found</html>")
    with pytest.raises(ValueError, match="it is a web page; download the file again"):
        open_checkpoint(folder)


@pytest.mark.parametrize("length", [0x80, 0x3C, 0x180])
def test_header_length_that_looks_like_a_pickle(tmp_path, length):
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(length)
    write_raw(tmp_path / "m.safetensors", header, bytes(4))
    assert read_header(tmp_path / "m.safetensors").keys() == {"a"}


def test_stale_shard(folder):
    save_file({"e": torch.ones(1)}, folder / SHARDS[1])
    with pytest.raises(ValueError, match=r"the shards of .* disagree") as caught:
        open_checkpoint(folder)
    assert caught.match(rf"does not list: e \(in {SHARDS[1]}\)")
    assert caught.match(rf"renamed or stale shard perhaps: c \(not in {SHARDS[1]}\), d \(not in {SHARDS[1]}\)")


def test_swapped_shards(folder):
    for old, new in ((SHARDS[0], "kept"), (SHARDS[1], SHARDS[0]), ("kept", SHARDS[1])):
        (folder / old).rename(folder / new)
    with pytest.raises(ValueError, match=r"renamed or stale shard perhaps: a .*, b .*, c .*, d "):
        open_checkpoint(folder)


def test_unlisted_tensor(folder):
    save_file(SECOND | {"extra": torch.ones(1)}, folder / SHARDS[1])
    with pytest.raises(ValueError, match=rf"tensors that {INDEX} does not list: extra \(in {SHARDS[1]}\)"):
        open_checkpoint(folder)


def test_tensor_in_two_shards(folder):
    save_file(SECOND | FIRST, folder / SHARDS[1])
    message = rf"two files, a duplicated shard perhaps: [ab] \(in {SHARDS[0]} and {SHARDS[1]}\), "
    with pytest.raises(ValueError, match=message):
        open_checkpoint(folder)
    (folder / INDEX).unlink()
    with pytest.raises(ValueError, match=message):
        open_checkpoint(folder)


def test_shard_copied_beside_the_index(folder):
    shutil.copy(folder / SHARDS[0], folder / "copy.safetensors")
    with pytest.raises(ValueError, match=rf"holds tensors twice: copy.safetensors, which {INDEX} .* repeats a, b; rem"):
        open_checkpoint(folder)


def test_foreign_file_beside_the_index_is_named_and_left_alone(folder, caplog):
    save_file({"other": torch.ones(1)}, folder / "consolidated.safetensors")
    with caplog.at_level(logging.WARNING, "fmoe"):
        assert shapes_of(open_checkpoint(folder)) == EXPECTED
    assert "consolidated.safetensors is not read" in caplog.text


@pytest.mark.parametrize("placed", [None, [], {}, {"a": 1}], ids=str)
def test_index_without_weight_map(folder, placed):
    write_index(folder, placed)
    with pytest.raises(ValueError, match=rf"{INDEX} has no usable weight_map"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../other.safetensors", "sub/m.safetensors", "pytorch_model.bin"])
def test_index_that_names_other_files(folder, name):
    write_index(folder, {"a": name})
    with pytest.raises(ValueError, match=r"names .*; only \*.safetensors of the same folder are read"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, None),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"torch_dtype": "torch.float32"}, torch.float32),
        ({"text_config": {"dtype": "bfloat16"}}, torch.bfloat16),
        ({"text_config": {"torch_dtype": "bfloat16"}, "dtype": "float32"}, torch.bfloat16),
        ({"text_config": None, "dtype": "float32"}, torch.float32),
    ],
    ids=str,
)
def test_config_dtype(config, dtype):
    assert config_dtype(config) == dtype


def test_config_dtype_error():
    with pytest.raises(ValueError, match="dtype 'int8'; known are float32, bfloat16, float16"):
        config_dtype({"dtype": "int8"})


def test_stored_dtype_without_a_word_in_the_config(folder):
    (folder / "config.json").write_text("{}")
    save_file(FIRST | {"b": torch.ones(40, dtype=torch.bfloat16)}, folder / SHARDS[0])
    assert stored_dtype(open_checkpoint(folder)) == torch.bfloat16


def test_check_quantization():
    check_quantization({"quantization_config": None, "text_config": {}})
    with pytest.raises(ValueError, match=r"unknown quant_method 'awq'; known are 'fp8', 'mxfp4'; use the un"):
        check_quantization({"text_config": {"quantization_config": {"quant_method": "awq"}}})
    with pytest.raises(ValueError, match="unknown quant_method None"):
        check_quantization({"quantization_config": {}})


def test_check_quantization_of_mxfp4():
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4"}}
    check_quantization(mxfp4 | {"model_type": "gpt_oss"})
    for other in ({"model_type": "qwen3_moe"}, {}):
        match = f"'mxfp4' with model_type {other.get('model_type')!r}; implemented is 'gpt_oss'; use the unquantised"
        with pytest.raises(NotImplementedError, match=match):
            check_quantization(mxfp4 | other)


@pytest.mark.parametrize(
    ("key", "value"),
    [("weight_block_size", [64, 128]), ("weight_block_size", None), ("fmt", "e5m2"), ("activation_scheme", "static")],
)
def test_check_quantization_of_fp8(key, value):
    config = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
    published = config | {"fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    check_quantization({"quantization_config": config})
    check_quantization({"quantization_config": published})
    with pytest.raises(NotImplementedError, match=rf"'fp8' with {key} {re.escape(repr(value))}; implemented is .*"):
        check_quantization({"text_config": {"quantization_config": published | {key: value}}})


def test_list_names():
    assert list_names([]) == ""
    assert list_names("abc", limit=3) == "a, b, c"
    assert list_names("abcde", limit=3) == "a, b, c and 2 more"
