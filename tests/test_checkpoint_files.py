"""fmoe/checkpoint.py: what stands in a file's place (links, folders, pipes) and names that no file can bear."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fmoe.checkpoint import (
    INDEX,
    check_quantization,
    config_dtype,
    is_present,
    open_checkpoint,
    read_config,
    read_header,
    read_json,
)

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards and an index."""
    (tmp_path / "config.json").write_text("{}")
    placed = dict(zip("ab", SHARDS, strict=True))
    for tensor, name in placed.items():
        save_file({tensor: torch.ones(2)}, tmp_path / name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": placed}))
    return tmp_path


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, *SHARDS, "extra.safetensors"])
def test_broken_links_folders_and_pipes(folder, name):
    file = folder / name
    file.unlink(missing_ok=True)
    file.symlink_to("../blobs/abc")
    with pytest.raises(FileNotFoundError, match=rf"{name} is a link to ../blobs/abc, which is not there; finish"):
        open_checkpoint(folder)
    file.unlink()
    file.symlink_to(file)
    with pytest.raises(ValueError, match=rf"{name} cannot be opened \(.*; correct the name or its rights"):
        open_checkpoint(folder)
    file.unlink()
    file.mkdir()
    with pytest.raises(ValueError, match=rf"{name} is a folder; a .*file was expected"):
        open_checkpoint(folder)
    file.rmdir()
    os.mkfifo(file)
    with pytest.raises(ValueError, match=rf"{name} is a named pipe; a file was expected"):
        open_checkpoint(folder)


def test_links_to_files_are_read(folder, tmp_path_factory):
    blobs = tmp_path_factory.mktemp("blobs")
    for name in ("config.json", INDEX, *SHARDS):
        (folder / name).rename(blobs / name)
        (folder / name).symlink_to(blobs / name)
    assert open_checkpoint(folder).tensors.keys() == {"a", "b"}


def test_read_helpers_name_an_absent_file(tmp_path):
    assert not is_present(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match=r"no file .*none.json; add it"):
        read_json(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match=r"no file .*none.safetensors; finish the download"):
        read_header(tmp_path / "none.safetensors")


@pytest.mark.parametrize("name", ["x" * 300 + ".safetensors", "x\0.safetensors"], ids=["long", "null"])
def test_index_with_impossible_names(folder, name):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=r"cannot be opened \((File name too long|embedded null byte)\); correct"):
        open_checkpoint(folder)


def test_folder_with_an_impossible_name(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be opened \(File name too long\); give another folder"):
        open_checkpoint(tmp_path / ("x" * 300))


def test_deep_json(folder):
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config.json is not JSON: .*recursion.*; fetch the file again"):
        open_checkpoint(folder)


@pytest.mark.parametrize("value", ["x", 5, True, [1], False, ""], ids=repr)
def test_text_config_must_be_an_object(folder, value):
    config = {"text_config": value}
    (folder / "config.json").write_text(json.dumps(config))
    for function in (lambda: read_config(folder), lambda: config_dtype(config), lambda: check_quantization(config)):
        with pytest.raises(ValueError, match=r"text_config in config.json must be an object, got .*; correct the file"):
            function()
