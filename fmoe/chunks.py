"""How many tokens of a prompt run at once, what that takes, and whether they attend without a mask.

Experts read their weights once a chunk, so that longer chunks cost less; 512 experts of which a token takes 10 have 40
rows each of 2,048 tokens. The choice depends on the model and its device alone, never on what is free: prompts that are
run again are cut where they were before.

Letters: T tokens, D hidden, E experts, S shared slots.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from fmoe.functional.mlp import MLPParams
from fmoe.functional.moe import MoEParams
from fmoe.functional.quant import Fp8

from .model import Model

PREFILL_CHUNK = 2048  # at least, and on a CPU
CHUNKS = (16384, 8192, 4096)  # on a GPU, the first whose rows are a small part of its memory
MASKED_CHUNK = 4096  # at most where attention reads a mask, which has a row of all slots for each token
PART = 16  # of a GPU's memory, which a chunk's rows may take


def attends_causally(model: Model, /) -> bool:
    """Tell whether chunks of a prompt attend without a mask: grouped-query attention to all slots, on a GPU."""
    grouped = hasattr(getattr(model.config, "attention", None), "kv_heads")
    return model.device.type == "cuda" and grouped and model.config.decoder.window is None


def choose_chunk(model: Model, /) -> int:
    """Choose how many tokens of a prompt run at once."""
    if model.device.type != "cuda":
        return PREFILL_CHUNK
    total = int(torch.cuda.get_device_properties(model.device).total_memory)
    return fit_chunk(token_bytes(model), total, masked=not attends_causally(model))


def fit_chunk(bytes_of_token: int, total_bytes: int, /, *, masked: bool) -> int:
    """Give the largest chunk whose rows take at most a ``PART`` of the device's memory."""
    most = MASKED_CHUNK if masked else max(CHUNKS)
    fitting = (chunk for chunk in CHUNKS if chunk <= most and chunk * bytes_of_token <= total_bytes // PART)
    return next(fitting, PREFILL_CHUNK)


def chunk_bytes(model: Model, tokens: int, /) -> int:
    """Count what one chunk of a prompt of so many tokens takes beside the caches.

    On a GPU the rows of a layer and, where one is read, the mask with what attention adds for it; on a CPU the latter.
    """
    chunk = min(tokens, choose_chunk(model))
    rows = chunk * token_bytes(model) if model.device.type == "cuda" else 0
    mask: int = 0 if attends_causally(model) else chunk * tokens * (1 + model.dtype.itemsize)
    return rows + mask


def token_bytes(model: Model, /) -> int:
    """Estimate what one token takes within a layer: what its products give, and as much again that is made of it."""
    slots = model.config.router.top_k
    outputs = max(
        sum(map(_count_rows, _matrices(layer.mixer))) + _count_mlp(layer.mlp, slots) for layer in model.params.layers
    )
    return 2 * (outputs + 4 * model.config.decoder.hidden_size) * model.dtype.itemsize


def _count_mlp(mlp: MLPParams | MoEParams, top_k: int) -> int:
    if isinstance(mlp, MLPParams):
        return sum(map(_count_rows, _matrices(mlp)))
    stacks = [weight.w if isinstance(weight, Fp8) else weight for weight in (mlp.w_gate_up_EPD, mlp.w_down_EDF)]
    gate_rows = 1  # of the router, of which fused shared experts have a slot each
    slots = top_k + max(stacks[0].shape[0] - mlp.w_router_ED.shape[0] + gate_rows, 0)
    shared = sum(map(_count_rows, _matrices(mlp.shared))) if mlp.shared is not None else 0
    return mlp.w_router_ED.shape[0] + slots * sum(stack.shape[1] for stack in stacks) + shared


def _matrices(params: object) -> Iterable[Tensor]:
    if isinstance(params, Fp8):
        yield params.w
    elif isinstance(params, Tensor):
        if params.dim() > 1:
            yield params
    elif isinstance(params, tuple):
        for part in params:
            yield from _matrices(part)


def _count_rows(weight: Tensor) -> int:
    return weight.numel() // max(weight.shape[-1], 1)
