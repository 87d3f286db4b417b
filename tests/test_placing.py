"""fmoe/placing.py: devices and dtypes by name and by "auto"; the memory is a stand-in's."""

import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import fmoe.placing
from fmoe.placing import available_bytes, resolve_device, resolve_dtype, why_not_fp8

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)  # never used, only named


def test_resolve_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == resolve_device(torch.device("cpu", 0)) == CPU
    for device in ("cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(RuntimeError, match=r"device 'cuda.*' was asked for, but torch finds no GPU; use 'cpu'"):
            resolve_device(device)
    for device in ("gpu", "mps", "meta", ""):
        with pytest.raises(ValueError, match=rf"unknown device '{device}'; known are auto, cpu, cuda, cuda:N"):
            resolve_device(device)


def test_resolve_device_with_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 1)
    assert resolve_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match="device 'cuda:2' was asked for, but there are 2 GPUs"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("requested", ["float32", "bfloat16", "float16"])
def test_resolve_dtype_by_name(requested):
    dtype = getattr(torch, requested)
    for asked in (requested, dtype):
        assert resolve_dtype(asked, stored=torch.float32, num_params=10**15, device=CPU) == dtype


def test_resolve_dtype_auto(monkeypatch, caplog):
    monkeypatch.setattr(fmoe.placing, "available_bytes", lambda: 4 * 2**30)
    auto = partial(resolve_dtype, "auto", stored=torch.bfloat16)
    with caplog.at_level(logging.INFO, "fmoe"):
        assert auto(num_params=2**30, device=CPU) == torch.float32
        assert auto(num_params=10**15, device=GPU) == torch.bfloat16
        assert auto(num_params=10**15, device=CPU, stored=torch.float32) == torch.float32
        assert caplog.text == ""
        assert auto(num_params=2**30 + 1, device=CPU) == torch.bfloat16
    assert [record.getMessage() for record in caplog.records] == [
        "dtype: torch.bfloat16 (float32 needs 4.0 GiB, 4.0 GiB are free)"
    ]
    monkeypatch.setattr(fmoe.placing, "available_bytes", lambda: None)
    assert auto(num_params=10**15, device=CPU) == torch.float32


@pytest.mark.parametrize("requested", ["int8", "half", torch.float64, torch.int8], ids=str)
def test_resolve_dtype_error(requested):
    with pytest.raises(ValueError, match=rf"unknown dtype '{requested}'; known are auto, float32, bfloat16, float16"):
        resolve_dtype(requested, stored=torch.bfloat16, num_params=1, device=CPU)


@pytest.fixture
def fake_memory(tmp_path, monkeypatch) -> Iterator[Path]:
    """Put a machine with 3,000 kB free and a control group in place of this one's."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    3000 kB\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    monkeypatch.setattr(fmoe.placing, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(fmoe.placing, "CONTROL_GROUP", tmp_path)
    return tmp_path


def test_available_bytes(fake_memory):
    assert available_bytes() == 3000 * 1024
    (fake_memory / "memory.max").write_text("1500000\n")
    assert available_bytes() == 700_000
    (fake_memory / "memory.max").write_text("99999999999\n")
    assert available_bytes() == 3000 * 1024
    for file in fake_memory.iterdir():
        file.unlink()
    assert available_bytes() is None


@pytest.mark.parametrize("requested", [None, 1.5, 0, True, [], b"cpu"], ids=repr)
def test_a_device_of_another_type(requested):
    with pytest.raises(
        ValueError, match=rf"device={re.escape(repr(requested))} must be a string or a torch.device; kno"
    ):
        resolve_device(requested)


@pytest.mark.parametrize(
    ("device", "capability", "hip", "reason"),
    [
        ("cpu", None, None, "FP8 is kept on GPUs alone, this is 'cpu'"),
        ("cuda:0", (8, 6), None, "FP8 needs a GPU of compute capability 8.9, this has 8.6"),
        ("cuda:0", (8, 9), None, ""),
        ("cuda:1", (9, 0), None, ""),
        ("cuda:0", (9, 4), "6.4", "on ROCm, FP8 is not kept yet"),
    ],
)
def test_why_not_fp8(monkeypatch, device, capability, hip, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert why_not_fp8(torch.device(device)) == reason
