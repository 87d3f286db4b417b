"""Fixtures of the kernels' tests in Triton's interpreter, which run in processes of their own."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=INTERPRETED)
def fill_empty_tensors():
    """Fill torch.empty with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def round_as_devices_do(monkeypatch):
    """Let torch round: the interpreter cuts bfloat16 off; for FP8 it rounds halves up and loses what then goes over."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values, source, target, mode):
        if source == tl.float32 and target in (tl.float8e4nv, tl.bfloat16):
            floats = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
            if target == tl.bfloat16:
                return floats.bfloat16().view(torch.uint16).numpy().reshape(values.shape)
            return floats.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(values.shape)
        return convert(values, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
