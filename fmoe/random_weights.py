"""Random weights of any shape, drawn where the model will run: for measuring a published model without its weights.

Each tensor is drawn with a generator of its own, from the seed and its place in the model, so that one seed gives
the same model each time on one kind of device. The scales keep every layer's output near one, and the router's logits
far enough apart that tokens spread over the experts.
"""

import zlib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .architectures import SCALE
from .checkpoint import Checkpoint, check_quantization, config_dtype, is_present, read_config, read_json
from .loading import Build, Params, count_params, make_empty_params, make_meta_params, named_tensors
from .placing import resolve_dtype, why_not_fp8

Weights = Literal["stored", "random"]

DRAWN_AT_ONCE = 1 << 26  # elements; what is not float32 is drawn in float32 first, so many at a time
EMBEDDING_STD = 0.02
ROUTER_STD = 2.0  # of router logits
BIAS_STD = 0.02
NORM_STD = 0.1  # about one
FP8_STD = 64.0  # of the stored values, whose largest is 448
MOST_SEED = 2**63 - 1
STACKED = (".experts.gate_up_proj", ".experts.down_proj")
UNQUANTISED = (
    "lm_head",
    "embed_tokens",
    "gate",
    "shared_expert_gate",
    "in_proj_ba",
    "in_proj_b",
    "in_proj_a",
    "conv1d",
)


@dataclass(frozen=True, slots=True)
class DrawnNames:
    """The tensor names to believe in besides those that every checkpoint holds.

    Experts are stacked, which makes a parameter of two pieces instead of a thousand. Every module that config.json
    calls quantised has its factors; ``kept`` are the modules that are not, by whole names or by the ends of names, and
    None says that none is quantised.
    """

    kept: tuple[str, ...] | None

    def __contains__(self, name: object) -> bool:
        """Tell whether the checkpoint would hold this tensor."""
        if not isinstance(name, str):
            return False
        if not name.endswith(SCALE):
            return name.endswith(STACKED)
        module = name.removesuffix(SCALE).removesuffix(".weight")
        if self.kept is None or module.rpartition(".")[2] in UNQUANTISED or module.endswith("norm"):
            return False
        return not any(module == kept or module.endswith(f".{kept}") for kept in self.kept)


def quantised_names(config: Mapping[str, Any], /) -> DrawnNames | frozenset[str]:
    """Read from config.json which tensors of a checkpoint in FP8 blocks have factors; empty where it is none."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "fp8":
        return frozenset()
    return DrawnNames(tuple(str(name) for name in quantization.get("modules_to_not_convert") or ()))


def check_weights(weights: object, seed: object, /) -> None:
    """Raise ValueError unless these are what load takes."""
    if weights not in get_args(Weights):
        raise ValueError(f"weights={weights!r} must be one of {', '.join(get_args(Weights))}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MOST_SEED:
        raise ValueError(f"seed={seed!r} must be an int in 0..{MOST_SEED}")


def open_config(folder: Path, /) -> Checkpoint:
    """Read what a folder says about a model, and none of the weights that it may hold."""
    config = read_config(folder)
    path = folder / "generation_config.json"
    check_quantization(config)
    return Checkpoint(folder, config, read_json(path) if is_present(path) else None, {})


def load_random(
    build: Build[Params],
    config: Mapping[str, Any],
    /,
    *,
    dtype: str | torch.dtype,
    device: torch.device,
    seed: int,
) -> tuple[Params, torch.dtype]:
    """Draw a model by its config.json, bfloat16 where it names no dtype, in FP8 blocks where those are kept.

    Returns:
        (the parameters, the dtype of those that name none themselves).
    """
    stored = config_dtype(config) or torch.bfloat16
    names = (not why_not_fp8(device) and quantised_names(config)) or DrawnNames(None)
    meta = make_meta_params(build, dtype=stored, names=names)
    resolved = resolve_dtype(dtype, stored=stored, num_params=count_params(meta)[0], device=device)
    return make_random_params(build, dtype=resolved, device=device, names=names, seed=seed), resolved


def make_random_params(
    build: Build[Params], *, dtype: torch.dtype, device: torch.device, names: Container[str], seed: int
) -> Params:
    """Allocate a model's parameters on a device, in the layout that a load would give them, and draw them there.

    Args:
        build: as in ``load_params``.
        dtype: of the parameters that name none themselves.
        device: where they are drawn; nothing passes through the host.
        names: checkpoint tensors to believe in, such as DrawnNames.
        seed: of the whole model.
    """
    return fill_params_(make_empty_params(build, dtype=dtype, device=device, names=names), seed=seed)


@torch.no_grad()
def fill_params_(params: Params, *, seed: int) -> Params:
    """Draw every tensor of a model in place, each once.

    Returns:
        The same parameters.
    """
    tensors = dict(named_tensors(params))
    drawn: set[int] = set()
    for path, tensor in tensors.items():
        if id(tensor) in drawn:  # a tied head is the embedding
            continue
        drawn.add(id(tensor))
        # the factors of FP8 blocks stand beside the values
        values = tensors[path.removesuffix("scale") + "w"] if path.endswith(".scale") else tensor
        draw_(tensor, path, seed=seed, fan_in=values.shape[-1])
    return params


def draw_(tensor: Tensor, path: str, /, *, seed: int, fan_in: int) -> Tensor:
    """Draw one tensor in place, in the manner that its field's name asks for.

    Args:
        tensor: a parameter, dense in memory in any order of its dimensions.
        path: as ``named_tensors`` gives it, such as ``layers.0.mlp.w_router_ED``.
        seed: of the whole model.
        fan_in: columns of the matrix that it belongs to.

    Returns:
        The same tensor.
    """
    generator = torch.Generator(tensor.device).manual_seed((seed * 1_000_003 + zlib.crc32(path.encode())) % 2**63)
    # in the order of memory: a matrix may lie column after column
    flat_N = tensor.as_strided((tensor.numel(),), (1,))
    field = path.rpartition(".")[2]
    if field == "decay_H":  # -exp(A_log), the range in which such models start
        flat_N.uniform_(-16.0, -1.0, generator=generator)
    elif field == "dt_bias_H":  # softplus of it lies in 0.001..0.1
        steps_N = torch.empty_like(flat_N, dtype=torch.float32).uniform_(-6.9, -2.3, generator=generator).exp()
        flat_N.copy_(steps_N + torch.log(-torch.expm1(-steps_N)))
    elif field == "scale":  # of FP8 blocks: factors that differ, mean square of the weights 1 / fan_in
        flat_N.uniform_(0.5, 1.5, generator=generator).mul_((13 / 12 * fan_in) ** -0.5 / FP8_STD)
    elif "norm" in field:
        _draw_normal_(flat_N, NORM_STD, 1.0, generator)
    elif field.startswith("bias"):
        _draw_normal_(flat_N, BIAS_STD, 0.0, generator)
    elif field == "embed_VD":
        _draw_normal_(flat_N, EMBEDDING_STD, 0.0, generator)
    elif field == "w_router_ED":
        _draw_normal_(flat_N, ROUTER_STD * fan_in**-0.5, 0.0, generator)
    elif field == "w_conv_WN":
        _draw_normal_(flat_N, tensor.shape[0] ** -0.5, 0.0, generator)
    elif tensor.dtype.itemsize == 1:
        _draw_normal_(flat_N, FP8_STD, 0.0, generator)
    else:
        _draw_normal_(flat_N, fan_in**-0.5, 0.0, generator)
    return tensor


def _draw_normal_(flat_N: Tensor, std: float, mean: float, generator: torch.Generator) -> None:
    if flat_N.dtype == torch.float32:
        flat_N.normal_(mean, std, generator=generator)
        return
    size = min(DRAWN_AT_ONCE, flat_N.numel())
    buffer_N = torch.empty(size, dtype=torch.float32, device=flat_N.device)
    for start in range(0, flat_N.numel(), DRAWN_AT_ONCE):
        part_N = flat_N[start : start + DRAWN_AT_ONCE]
        part_N.copy_(buffer_N[: part_N.numel()].normal_(mean, std, generator=generator))
