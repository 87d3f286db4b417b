"""A loaded model, one frozen value, and how it is loaded."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch

from fmoe.compile.select import choose
from fmoe.compile.step import Steps, compile_steps
from fmoe.functional.moe import SharedExperts, SharedPlan

from .architectures import Architecture, FamilyConfig, Params, compute_logits, find_architecture, ignored_tensors
from .checkpoint import open_checkpoint, stored_dtype
from .loading import check_params, load_params
from .options import Defaults, read_defaults
from .placing import resolve_device, resolve_dtype
from .text import Text, load_text

LOG = logging.getLogger("fmoe")

Compile = bool | Literal["auto"]

# On a CPU, compiling costs a minute or more once and saves about a third of each step after.
CPU_COMPILE_TOKENS = 30_000


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Model:
    """Everything needed to generate; nothing in it changes after loading."""

    folder: Path
    architecture: Architecture
    config: FamilyConfig
    params: Params
    dtype: torch.dtype
    device: torch.device
    eager: Steps
    graphs: Steps
    compile: Compile
    text: Text | None
    defaults: Defaults

    def __repr__(self) -> str:
        """Name the model in one line; its tensors would fill screens."""
        family = self.architecture.MODEL_TYPES[0]
        return f"Model({family}, {str(self.folder)!r}, {self.dtype}, device={str(self.device)!r})"


def resolve_folder(path: str | os.PathLike[str], /) -> Path:
    """Turn ``"demo"`` into the checkpoint inside the package, anything else into a path."""
    return Path(str(files("fmoe"))) / "demo" if path == "demo" else Path(path).expanduser()


def text_config(raw: Mapping[str, Any], /) -> Mapping[str, Any]:
    """The language model's part of a config.json: ``text_config`` where the file nests it, else the file."""
    nested = raw.get("text_config")
    return nested if isinstance(nested, Mapping) and "hidden_size" not in raw else raw


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    shared_experts: SharedExperts = "auto",
    compile: Compile = "auto",
    progress: bool | None = None,
) -> Model:
    """Load a checkpoint folder: config.json, *.safetensors and, for text, tokenizer.json.

    Args:
        path: the folder, or ``"demo"`` for the small model inside the package.
        device: ``auto`` is the GPU if there is one, else the CPU.
        dtype: ``auto`` is the checkpoint's on a GPU, and float32 on a CPU if memory allows.
        shared_experts: ``auto`` fuses them into the routed set where their widths allow it, ``fused`` raises where
            they do not, ``separate`` keeps them apart. The logits are the same.
        compile: ``auto`` compiles on a GPU and for long work; True and False force it.
        progress: show a bar when loading takes over two seconds; None does so on a terminal.

    Raises:
        ValueError, NotImplementedError: the checkpoint is not what config.json promises, or not supported.
        FileNotFoundError: a file is missing.
    """
    if compile not in (True, False, "auto"):
        raise ValueError(f"compile={compile!r} must be True, False or 'auto'")
    folder = resolve_folder(path)
    checkpoint = open_checkpoint(folder)
    architecture = find_architecture(checkpoint.config)
    raw = text_config(checkpoint.config)
    config = architecture.parse_config(raw, shared_experts=shared_experts)
    text = load_text(folder)
    defaults = read_defaults(checkpoint.generation_config, checkpoint.config, text)
    resolved_device = resolve_device(device)
    build = partial(_build, architecture, config)
    ignore = ignored_tensors(config.decoder)
    stored = stored_dtype(checkpoint)
    report = check_params(build, checkpoint, dtype=stored, ignore=ignore)
    resolved_dtype = resolve_dtype(dtype, stored=stored, num_params=report.num_params, device=resolved_device)
    params = load_params(
        build, checkpoint, dtype=resolved_dtype, device=resolved_device, ignore=ignore, progress=progress
    )
    if shared_experts == "auto":
        _log_separate_experts(config)
    head = partial(compute_logits, eps=config.decoder.eps)
    return Model(
        folder=folder,
        architecture=architecture,
        config=config,
        params=params,
        dtype=resolved_dtype,
        device=resolved_device,
        eager=Steps(architecture.make_layers(config, choose(resolved_device, compiled=False)), head, compiled=False),
        graphs=compile_steps(
            architecture.make_layers(config, choose(resolved_device, compiled=True)), head, device=resolved_device
        ),
        compile=compile,
        text=text,
        defaults=defaults,
    )


def _build(architecture: Architecture, config: FamilyConfig, fill: Any) -> Params:
    return architecture.build_params(fill, config)


def _log_separate_experts(config: FamilyConfig) -> None:
    """Say why shared experts are not fused, once per load."""
    plan = getattr(config, "shared", None)
    if isinstance(plan, SharedPlan) and plan.width and not plan.slots:
        LOG.info("shared experts: %s", plan.reason)


def choose_steps(model: Model, tokens: int, /) -> Steps:
    """Take the compiled graphs or the plain functions, by ``model.compile`` and the work ahead.

    Args:
        model: as loaded.
        tokens: an upper bound of the tokens that will be processed.
    """
    if model.compile == "auto":
        compiled = model.device.type != "cpu" or tokens >= CPU_COMPILE_TOKENS
    else:
        compiled = bool(model.compile)
    return model.graphs if compiled else model.eager
