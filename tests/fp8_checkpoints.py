"""Tensors in FP8 blocks for tests: made, taken apart and written, block by block and with no code of fmoe."""

import json
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

LARGEST = 448.0  # of float8_e4m3fn


def each_block(rows: int, columns: int) -> list[tuple[tuple[int, int], tuple[slice, slice]]]:
    """List the blocks of a matrix: their index, and the values that they are."""
    blocks = product(range(-(-rows // 128)), range(-(-columns // 128)))
    return [((i, j), (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))) for i, j in blocks]


def quantize_blocks(w: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Give a matrix or stack as float8_e4m3fn with factors of ``dtype``, each block's largest value near 448."""
    if w.dim() > 2:
        values, factors = zip(*(quantize_blocks(part, dtype) for part in w), strict=True)
        return torch.stack(values), torch.stack(factors)
    rows, columns = w.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    factors = torch.empty(-(-rows // 128), -(-columns // 128), dtype=dtype)
    for index, place in each_block(rows, columns):
        factors[index] = w[place].float().abs().max() / LARGEST
        values[place] = (w[place].float() / factors[index].float()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values, factors


def dequantize_blocks(values: Tensor, factors: Tensor) -> Tensor:
    """Multiply out, block by block; float32."""
    if values.dim() > 2:
        return torch.stack([dequantize_blocks(*pair) for pair in zip(values, factors, strict=True)])
    w = torch.empty(values.shape)
    for index, place in each_block(*values.shape):
        w[place] = values[place].float() * factors[index].float()
    return w


def quantize_tensors(
    tensors: Mapping[str, Tensor], chosen: Callable[[str], bool], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Put the chosen tensors into FP8 blocks; the factors come last."""
    quantised, factors = dict(tensors), {}
    for name in filter(chosen, tensors):
        quantised[name], factors[f"{name}_scale_inv"] = quantize_blocks(tensors[name], dtype)
    return quantised | factors


def dequantize_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo ``quantize_tensors``, in float32."""
    return {
        name: dequantize_blocks(tensor, tensors[f"{name}_scale_inv"]) if f"{name}_scale_inv" in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> Path:
    """Write two shards: the second has every factor, and so none that belongs to its own weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    second = {name for name in tensors if name.endswith("_scale_inv")} or {next(iter(tensors))}
    placed = {name: f"model-0000{1 + (name in second)}-of-00002.safetensors" for name in tensors}
    for file in set(placed.values()):
        save_file({name: tensors[name].contiguous() for name in placed if placed[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder
