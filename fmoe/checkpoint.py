"""What lies in a checkpoint folder, learnt from config.json and the shards' headers alone.

A safetensors file is 8 bytes (little-endian length of the header), a JSON header and the data; only the
first two are read here, so that opening tens of shards with tens of thousands of tensors stays quick.
Source: https://github.com/huggingface/safetensors#format
"""

import json
import logging
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MODEL_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MXFP4_FAMILIES = ("gpt_oss",)  # whose experts are read in MXFP4
FP8_KEYS = {"fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")
# how files begin that people find under a .safetensors name, and what they are
LOOKALIKES = {
    b"version ": "it is a git-lfs pointer; fetch the file itself",
    b"PK\x03\x04": "it is a torch.save archive, that is a pickle; convert it to safetensors",
    b"\x80": "it is a pickle; convert it to safetensors",
    b"<": "it is a web page; download the file again",
}

logger = logging.getLogger("fmoe")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and what it is."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        """Return the bytes it takes on disk."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose parts were found to agree with each other; no weight has been read."""

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tensors: dict[str, TensorInfo]


def list_names(names: Iterable[str], *, limit: int = 20) -> str:
    """Join ``names`` with commas; past ``limit`` of them only their count is given."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def is_present(path: Path, /) -> bool:
    """Tell whether a file is there; a link into the void, a folder or a pipe in its place is an error, not absence."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        if not path.is_symlink():
            return False
        raise FileNotFoundError(
            f"{path} is a link to {path.readlink()}, which is not there; finish the download"
        ) from error
    except (OSError, ValueError) as error:  # a name too long or with a null byte, links in a circle, no permission
        raise ValueError(
            f"{path!s:.300} cannot be opened ({_reason(error)}); correct the name or its rights"
        ) from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a named pipe" if stat.S_ISFIFO(mode) else "a device or socket"
        raise ValueError(f"{path} is {kind}; a file was expected; remove it or fetch the file")
    return True


def read_text(path: Path, /) -> str:
    """Read a file in UTF-8."""
    if not is_present(path):
        raise FileNotFoundError(f"no file {path}; add it")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}); fetch the file again") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({_reason(error)}); check its rights") from error


def read_json(path: Path, /) -> dict[str, Any]:
    """Read a JSON object."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}; an object was expected; fetch the file again")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json; the folder needs no weights."""
    try:
        is_there = folder.exists()
    except OSError as error:
        raise ValueError(f"{folder!s:.300} cannot be opened ({_reason(error)}); give another folder") from error
    if not is_there:
        raise FileNotFoundError(f"no folder {folder}; give one with config.json and *.safetensors")
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the folder that holds config.json and *.safetensors")
    if not any(folder.iterdir()):
        raise FileNotFoundError(f"folder {folder} is empty; expected config.json and *.safetensors")
    path = folder / "config.json"
    if not is_present(path):
        found = list_names(sorted(entry.name for entry in folder.iterdir()), limit=8)
        raise FileNotFoundError(f"no config.json in {folder}, which has {found}; add the model's config.json")
    config = read_json(path)
    _text_config(config)
    return config


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the configs, the index and the headers, and check that they agree.

    Accepted are model.safetensors.index.json with its shards, one safetensors file of any name, or without
    an index one complete set NAME-00001-of-0000N.safetensors.
    """
    config = read_config(folder)
    path = folder / "generation_config.json"
    generation_config = read_json(path) if is_present(path) else None
    files = sorted(folder.glob("*.safetensors"))
    if folders := [file.name for file in files if file.is_dir()]:
        raise ValueError(f"in {folder}, {list_names(folders)} is a folder; a safetensors file was expected")
    index = folder / INDEX
    if not is_present(index):
        headers = {file.name: read_header(file) for file in _complete_set(folder, files)}
        tensors = _merge(folder, headers, None)
    else:
        placed = _read_index(index)
        headers = {name: read_header(folder / name) for name in sorted(set(placed.values()))}
        _check_extra_files(folder, [file for file in files if file.name not in headers], placed)
        tensors = _merge(folder, headers, placed)
    return Checkpoint(folder, config, generation_config, tensors)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Read which tensors a safetensors file holds; the file's size must be what its header says."""
    if not is_present(file):
        raise FileNotFoundError(f"no file {file}; finish the download")
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if reason := next((why for magic, why in LOOKALIKES.items() if start.startswith(magic)), None):
            # a header of 0x80 or 0x3c bytes is possible; one that a JSON object follows is no lookalike
            if stream.read(1) != b"{":
                raise ValueError(f"{file} is no safetensors file: {reason}")
            stream.seek(8)
        if len(start) < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
            raise ValueError(
                f"{file} is truncated or no safetensors file: it has {size} bytes and announces a header of "
                f"{length}; download it again"
            )
        text = stream.read(length)
    try:
        tensors = _parse_header(file, json.loads(text, object_pairs_hook=_unique_keys), 8 + length)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} has a corrupt header ({error}); download it again") from error
    end = max((info.offset + info.nbytes for info in tensors.values()), default=8 + length)
    if size != end:
        what = "is truncated" if size < end else "is too long"
        raise ValueError(f"{file} {what}: it has {size} bytes, its header says {end}; download it again")
    return tensors


def config_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that the config names as ``dtype`` or ``torch_dtype``, its ``text_config`` first, or None."""
    name: Any = None
    for part in (_text_config(config), config):
        name = name or part.get("dtype") or part.get("torch_dtype")
    if name is None:
        return None
    dtype = MODEL_DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"config.json has dtype {name!r}; known are {', '.join(MODEL_DTYPES)}")
    return dtype


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the config's dtype, or where it names none that of most of the weights' bytes."""
    if dtype := config_dtype(checkpoint.config):
        return dtype
    totals = dict.fromkeys(MODEL_DTYPES.values(), 0)
    for info in checkpoint.tensors.values():
        if info.dtype in totals:
            totals[info.dtype] += info.nbytes
    return max(totals, key=totals.__getitem__)


def check_quantization(config: Mapping[str, Any]) -> None:
    """Refuse quantisations that cannot be read: all but FP8 in blocks of 128 x 128, and MXFP4 of some families.

    Which tensors are quantised is not asked here: the names of the factors beside them tell.
    """
    for part in (config, _text_config(config)):
        quantization = part.get("quantization_config")
        if quantization is None:
            continue
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        if method == "mxfp4":
            family = part.get("model_type")
            if family not in MXFP4_FAMILIES:
                raise NotImplementedError(
                    f"config.json has quant_method 'mxfp4' with model_type {family!r:.80}; implemented is "
                    f"{', '.join(map(repr, MXFP4_FAMILIES))}; use the unquantised checkpoint"
                )
            continue
        if method != "fp8":
            raise ValueError(
                f"config.json has the unknown quant_method {method!r}; known are 'fp8', 'mxfp4'; "
                "use the unquantised checkpoint"
            )
        for key, known in FP8_KEYS.items():
            if isinstance(quantization, dict) and quantization.get(key, known) != known:
                raise NotImplementedError(
                    f"config.json has quant_method 'fp8' with {key} {quantization[key]!r:.80}; implemented is "
                    f"{known!r}; use the unquantised checkpoint"
                )


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the nested config, empty where there is none."""
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise ValueError(f"text_config in config.json must be an object, got {nested!r:.80}; correct the file")
    return nested or {}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object; of a repeated key json would keep the last value, and other readers may keep the first."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r:.200} stands there twice")
        found[key] = value
    return found


def _read_index(path: Path) -> dict[str, str]:
    """Return the index's tensor name -> file name; all the files exist."""
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(name, str) for name in placed.values()):
        raise ValueError(f"{path} has no usable weight_map; an object of tensor name -> file name was expected")
    names = sorted(set(placed.values()))
    if outside := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise ValueError(f"{path} names {list_names(outside)}; only *.safetensors of the same folder are read")
    if absent := [name for name in names if not is_present(path.parent / name)]:
        raise FileNotFoundError(
            f"{path} names files that are not there: {list_names(absent)}; finish the download or restore them"
        )
    return placed


def _complete_set(folder: Path, files: list[Path]) -> list[Path]:
    """Return the files of the one set that ``files`` are; raise where there is none, several or a part of one."""
    if not files:
        pickles = sorted({file.name for pattern in PICKLES for file in folder.glob(pattern)})
        if pickles:
            raise ValueError(
                f"{folder} holds pickles only ({list_names(pickles)}); reading a pickle runs whatever code it "
                "holds, so only *.safetensors are read: convert the weights"
            )
        raise FileNotFoundError(f"no *.safetensors in {folder}; add the weights")
    sets: dict[str, set[int]] = {}
    for file in files:
        match = SHARD_NAME.fullmatch(file.name)
        key = f"{match['stem']}-{{}}-of-{match['total']}.safetensors" if match else file.name
        sets.setdefault(key, set()).add(int(match["number"]) if match else 1)
    if len(sets) > 1:
        raise ValueError(
            f"{folder} has no {INDEX} and several sets of weights: "
            f"{list_names(key.format('*') for key in sets)}; add the index or keep one set"
        )
    match = SHARD_NAME.fullmatch(files[0].name)
    if match:
        template, numbers = next(iter(sets.items()))
        width = len(match["number"])
        absent = [template.format(f"{n:0{width}}") for n in range(1, int(match["total"]) + 1) if n not in numbers]
        if absent:
            raise FileNotFoundError(f"{folder} lacks {list_names(absent)}; finish the download or restore them")
    return files


def _check_extra_files(folder: Path, files: list[Path], placed: Mapping[str, str]) -> None:
    """Refuse a file beside the index that repeats its tensors; others are not part of the checkpoint."""
    for file in files:
        if repeated := sorted(placed.keys() & read_header(file).keys()):
            raise ValueError(
                f"{folder} holds tensors twice: {file.name}, which {INDEX} does not name, repeats "
                f"{list_names(repeated)}; remove it"
            )
        logger.warning("%s is not read: %s does not name it", file, INDEX)


def _merge(
    folder: Path, headers: Mapping[str, dict[str, TensorInfo]], placed: Mapping[str, str] | None
) -> dict[str, TensorInfo]:
    """Join the shards' tensors; each must lie in one file, the one where the index places it."""
    tensors: dict[str, TensorInfo] = {}
    twice: list[str] = []
    for header in headers.values():
        for name, info in header.items():
            if name in tensors:
                twice.append(f"{name} (in {tensors[name].file.name} and {info.file.name})")
            tensors[name] = info
    problems = []
    if twice:
        problems.append(f"tensors in two files, a duplicated shard perhaps: {list_names(twice)}")
    elif placed is not None:
        unlisted = [f"{name} (in {info.file.name})" for name, info in tensors.items() if name not in placed]
        if unlisted:
            problems.append(f"tensors that {INDEX} does not list: {list_names(unlisted)}")
    if placed is not None:
        absent = [f"{name} (not in {file})" for name, file in placed.items() if name not in headers[file]]
        if absent:
            problems.append(
                f"tensors not where {INDEX} places them, a renamed or stale shard perhaps: {list_names(absent)}"
            )
    if problems:
        raise ValueError(f"the shards of {folder} disagree; " + "; ".join(problems) + "; download them again")
    return tensors


def _parse_header(file: Path, header: dict[str, Any], data_start: int) -> dict[str, TensorInfo]:
    """Return the tensors in the order of their bytes, which must follow each other without a gap."""
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"__metadata__ must be an object of strings, got {metadata!r:.80}")
    tensors: dict[str, TensorInfo] = {}
    position = 0
    for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} has dtype {entry['dtype']}; known are {', '.join(DTYPES)}")
        begin, end = entry["data_offsets"]
        if type(begin) is not int or type(end) is not int:
            raise ValueError(f"{name} has offsets {begin!r} to {end!r}")
        shape = tuple(entry["shape"])
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name} has shape {entry['shape']}")
        info = TensorInfo(file, DTYPES[entry["dtype"]], shape, data_start + begin)
        if begin != position or end - begin != info.nbytes:
            raise ValueError(f"{name} of {info.nbytes} bytes has offsets {begin} to {end}, after byte {position}")
        tensors[name] = info
        position = end
    return tensors
