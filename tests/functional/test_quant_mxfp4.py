"""MXFP4 as numbers, against its definition bit by bit."""

import math

import pytest
import torch

from fmoe.functional.quant import dequantize_mxfp4


def fp4_by_bits(code):
    """One sign bit, two bits of exponent with bias 1, one bit of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


def by_loop(codes, exponents):
    """Value 2i of a block has the low half of byte i, value 2i + 1 the high one."""
    rows = []
    for row, factors in zip(codes.tolist(), exponents.tolist(), strict=True):
        values = []
        for block, exponent in zip(row, factors, strict=True):
            for byte in block:
                values += [fp4_by_bits(code) * 2.0 ** (exponent - 127) for code in (byte & 15, byte >> 4)]
        rows.append(values)
    return torch.tensor(rows, dtype=torch.float64)


def draw(rng, rows, blocks, *, least=0, most=255):
    codes = torch.randint(256, (rows, blocks, 16), generator=rng, dtype=torch.uint8)
    return codes, torch.randint(least, most, (rows, blocks), generator=rng, dtype=torch.uint8)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_number_is_exact(dtype, compiled, rng):
    fn = torch.compile(dequantize_mxfp4, fullgraph=True, backend="aot_eager") if compiled else dequantize_mxfp4
    codes, exponents = draw(rng, 9, 5)
    exponents.view(-1)[:4] = torch.tensor([0, 1, 126, 254])
    exponents[exponents > 252] -= 4  # 6 * 2^126 is the largest that float32 holds

    w = fn(codes, exponents, dtype)

    assert (w.shape, w.dtype) == ((9, 160), dtype)
    assert torch.equal(w.double(), by_loop(codes, exponents))


def test_all_codes_and_factors():
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    for exponent in (0, 100, 127, 130, 252):
        exponents = torch.full((1, 16), exponent, dtype=torch.uint8)
        assert torch.equal(dequantize_mxfp4(codes, exponents, torch.float32).double(), by_loop(codes, exponents))
    nan = dequantize_mxfp4(codes, torch.full((1, 16), 255, dtype=torch.uint8), torch.float32)
    assert nan.isnan().all()
    assert (
        math.copysign(
            1, dequantize_mxfp4(torch.tensor([[8] * 16], dtype=torch.uint8), exponents[0, :1], torch.float32)[0]
        )
        == -1
    )


def test_stacks(rng):
    parts = [draw(rng, 6, 2, least=110, most=140) for _ in range(3)]
    codes, exponents = (torch.stack(part) for part in zip(*parts, strict=True))
    w = dequantize_mxfp4(codes, exponents, torch.bfloat16)
    assert w.shape == (3, 6, 64)
    assert all(torch.equal(w[e].double(), by_loop(*parts[e])) for e in range(3))


def test_beyond_float16_is_infinite():
    codes = torch.full((1, 16), 0x77, dtype=torch.uint8)
    assert dequantize_mxfp4(codes, torch.tensor([150], dtype=torch.uint8), torch.float16).isinf().all()
