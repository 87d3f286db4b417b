"""Which kernels run one token of each sequence, or a few: attention, DeltaNet, residual with norm, choice of a token.

DeltaNet's chunk rule is chosen here as well, by the same conditions.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fmoe.functional.cache import PendingDelta
from fmoe.functional.delta_drafts import delta_verify
from fmoe.functional.deltanet import DeltaConfig, DeltaParams
from fmoe.functional.kernels import Kernels
from fmoe.functional.norm import add_rms_norm
from fmoe.functional.quant import BLOCK, Fp8, Weight, quantize_blocks
from fmoe.functional.sampling import sample_greedy

from .attend_few_ops import MOST_TOKENS, attend_few_lengths_op, attend_few_step_op_
from .attend_ops import attend_lengths_op, attend_step_op_
from .chunk_ops import delta_prefill_kernels
from .delta_ops import add_rms_norm_any, delta_decode_op, delta_verify_op
from .delta_settings import why_not_verify
from .device import target_of
from .head_ops import choose_token_quantized_op, choose_tokens_op
from .normed_ops import add_normed_kernels
from .probing import probe_triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_ROWS = 16  # that one launch of the head takes


def add_decode_kernels(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, requested: str, /, *, sinks: bool = False
) -> Kernels:
    """Put Triton's kernels for T = 1, for drafts and the chunk rule in the place of the references, wherever they run.

    Args:
        kernels: the rest of the choice, which stays.
        device: where the parameters are.
        dtype: of the model.
        requested: kernels asked for by name, or ``auto``; on a CPU, where Triton interprets, only ``triton`` does.
        sinks: the attention has sinks, which its kernels do not read.

    Returns:
        Kernels.
    """
    if not _runs_triton(device, dtype, requested):
        return kernels
    if not sinks:
        kernels = replace(
            kernels,
            attend_step=attend_step_op_,
            attend_lengths=attend_lengths_op,
            attend_few_step=attend_few_step_op_,
            attend_few_lengths=attend_few_lengths_op,
        )
    return replace(
        add_normed_kernels(kernels),
        delta_prefill=delta_prefill_kernels,
        delta_decode=delta_decode_op,
        delta_verify=delta_verify_any,
        add_norm=add_norm_single,
        choose_tokens=choose_tokens_any,
    )


def _runs_triton(device: torch.device, dtype: torch.dtype, requested: str) -> bool:
    unwanted = requested == "reference" or (device.type == "cpu" and requested != "triton")
    return not unwanted and dtype in DTYPES and probe_triton(device).can_run


def quantize_draft_head(head_VD: Tensor, requested: str, /) -> Fp8 | None:
    """Give the head in FP8 blocks for the choice of drafts, where a kernel reads it so: half the bytes, and a draft may
    be any token. None where there is no such kernel.

    Args:
        head_VD: of the model.
        requested: as in ``add_decode_kernels``.
    """
    device, dtype = head_VD.device, head_VD.dtype
    takes = dtype == torch.bfloat16 and target_of(device) == "hopper" and head_VD.shape[1] % BLOCK == 0
    return quantize_blocks(head_VD) if takes and _runs_triton(device, dtype, requested) else None


def delta_verify_any(
    projected_BTN: Tensor, cache: PendingDelta, params: DeltaParams, config: DeltaConfig, kept_B: Tensor, /
) -> Tensor:
    """``delta_verify``, in one launch where the kernel takes the layer, the step and the dtype of the state."""
    if cache.state_BHKV.dtype == torch.float32 and not why_not_verify(config, projected_BTN.shape[1]):
        return delta_verify_op(projected_BTN, cache, params, config, kept_B)
    return delta_verify(projected_BTN, cache, params, config, kept_B)


def add_norm_single(x_BTD: Tensor, branch_BTD: Tensor, weight_D: Tensor, /, *, eps: float) -> tuple[Tensor, Tensor]:
    """``add_rms_norm``, in one launch for T = 1; several tokens keep the reference, which the compiler fuses."""
    if x_BTD.shape[1] == 1:
        return add_rms_norm_any(x_BTD, branch_BTD, weight_D, eps=eps)
    return add_rms_norm(x_BTD, branch_BTD, weight_D, eps=eps)


def add_norm_few(x_BTD: Tensor, branch_BTD: Tensor, weight_D: Tensor, /, *, eps: float) -> tuple[Tensor, Tensor]:
    """``add_norm_single`` that takes the newest token with its drafts in one launch, too."""
    if x_BTD.shape[1] <= MOST_TOKENS:
        return add_rms_norm_any(x_BTD, branch_BTD, weight_D, eps=eps)
    return add_rms_norm(x_BTD, branch_BTD, weight_D, eps=eps)


def choose_draft_kernels(kernels: Kernels, /) -> Kernels:
    """Give the kernels of steps with drafts, whose number of tokens is a constant of their graphs.

    Elsewhere, to ask for a few tokens would give prompts of so few a graph of their own.
    """
    if kernels.add_norm is not add_norm_single:
        return kernels
    return replace(kernels, add_norm=add_norm_few, normed_tokens=MOST_TOKENS)


def choose_tokens_any(x_BD: Tensor, head_VD: Weight, /) -> tuple[Tensor, Tensor]:
    """``choose_tokens_op``, and for more rows than it takes the same from logits; in FP8 blocks for a single row."""
    if isinstance(head_VD, Fp8):
        return choose_token_quantized_op(x_BD, head_VD)
    if x_BD.shape[0] <= MOST_ROWS:
        return choose_tokens_op(x_BD, head_VD)
    logits_BV = F.linear(x_BD, head_VD).float()
    return sample_greedy(logits_BV), logits_BV.amax(-1)
