"""Residual and RMS norm of each row in one launch. Letters: T rows, D the normalised channels."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch_options, next_power_of_2, start_next, wait_alone
from .normed import sum_squares, weigh_normed
from .split_rows import SplitRows, empty_pairs, store_pairs

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_CHANNELS = 16384  # of a row, that one program holds


@triton.jit
def norm_row(
    x, branch, weight, y, total, pairs, power, D: tl.constexpr, BD: tl.constexpr, EPS: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row; grid (T,). Each step is rounded where the reference rounds.

    Where there is a place for it, the norm as it is rounded is stored as ``SplitRows``, too.
    """
    start_next(PDL)
    t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    inside = o_d < D
    w = tl.load(weight + o_d, mask=inside, other=0.0)
    wait_alone(PDL)
    v = tl.load(x + t * D + o_d, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        v += tl.load(branch + t * D + o_d, mask=inside, other=0.0).to(tl.float32)
        rounded = v.to(total.dtype.element_ty)
        tl.store(total + t * D + o_d, rounded, mask=inside)
        v = rounded.to(tl.float32)
    scale = tl.rsqrt(sum_squares(v, x.dtype.element_ty == tl.float32) / D + EPS)
    normed = weigh_normed(v, scale, w, y)
    tl.store(y + t * D + o_d, normed, mask=inside)
    if pairs is not None:
        store_pairs(normed.to(tl.float32), pairs, power, t, tl.num_programs(0), o_d, D)


def check_rows(x_D: Tensor, weight_D: Tensor, /) -> None:
    """Refuse what the kernel would read wrongly.

    Raises:
        ValueError: a weight that does not fit the rows.
        NotImplementedError: a dtype or a width without a kernel.
    """
    if weight_D.shape != x_D.shape[-1:]:
        raise ValueError(f"weight must be [D] for rows [..., D], got {tuple(weight_D.shape)} and {tuple(x_D.shape)}")
    if x_D.dtype not in DTYPES or weight_D.dtype not in DTYPES:
        raise NotImplementedError(
            f"no norm kernel reads {x_D.dtype} with a weight of {weight_D.dtype}; use bfloat16, float16 or float32"
        )
    if x_D.shape[-1] > MAX_CHANNELS:
        raise NotImplementedError(f"rows of {x_D.shape[-1]} are longer than {MAX_CHANNELS}; use rms_norm")


def check_branch(x_D: Tensor, branch_D: Tensor, /) -> None:
    """Refuse a branch that is not like x with a ``ValueError``."""
    if branch_D.shape != x_D.shape or branch_D.dtype != x_D.dtype:
        raise ValueError(
            f"the branch must be like x, {tuple(x_D.shape)} {x_D.dtype}, got {tuple(branch_D.shape)} {branch_D.dtype}"
        )


def _launch(
    x_D: Tensor, branch_D: Tensor | None, weight_D: Tensor, eps: float, pdl: bool, split: SplitRows | None = None
) -> tuple[Tensor, Tensor]:
    size = x_D.shape[-1]
    y_D = torch.empty(x_D.shape, dtype=x_D.dtype, device=x_D.device)
    total_D = y_D if branch_D is None else torch.empty_like(y_D)
    if x_D.numel() == 0:
        return y_D, total_D
    block = next_power_of_2(size)
    norm_row[(x_D.numel() // size,)](
        x_D.contiguous(), branch_D if branch_D is None else branch_D.contiguous(), weight_D.contiguous(), y_D,
        None if branch_D is None else total_D, *(split or (None, None)), D=size, BD=block, EPS=eps,
        ADD=branch_D is not None, PDL=pdl, num_warps=min(max(block // 256, 1), 16), **launch_options(pdl),
    )  # fmt: skip
    return y_D, total_D


def add_rms_norm_rows(
    x_D: Tensor, branch_D: Tensor, weight_D: Tensor, /, *, eps: float, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """Add a branch to the residual stream and normalise the sum; ``add_rms_norm``.

    Args:
        x_D: [..., D].
        branch_D: like x.
        weight_D: [D]; its dtype chooses the rounding, as in ``rms_norm``.
        eps: added to the mean square.
        pdl: programmatic dependent launch, on CUDA devices of capability 9.0 and later.

    Returns:
        (the normalised sum, the sum), both like x.
    """
    check_rows(x_D, weight_D)
    check_branch(x_D, branch_D)
    return _launch(x_D, branch_D, weight_D, eps, pdl)


def add_rms_norm_split(
    x_TD: Tensor, branch_TD: Tensor, weight_D: Tensor, /, *, eps: float, pdl: bool = False
) -> tuple[Tensor, Tensor, SplitRows]:
    """Run ``add_rms_norm_rows``, and ``split_into_pairs`` of the normalised sum, in one launch.

    Args:
        x_TD, branch_TD, weight_D, eps, pdl: as there.

    Returns:
        (the normalised sum, the sum, the normalised sum split).
    """
    check_rows(x_TD, weight_D)
    check_branch(x_TD, branch_TD)
    split = empty_pairs(x_TD)
    return *_launch(x_TD, branch_TD, weight_D, eps, pdl, split), split


def rms_norm_rows(x_D: Tensor, weight_D: Tensor, /, *, eps: float, pdl: bool = False) -> Tensor:
    """Normalise each row; ``rms_norm`` with a weight of one dimension.

    Args:
        x_D: [..., D].
        weight_D: as for ``add_rms_norm_rows``.
        eps: added to the mean square.
        pdl: as for ``add_rms_norm_rows``.

    Returns:
        A tensor like x.
    """
    check_rows(x_D, weight_D)
    return _launch(x_D, None, weight_D, eps, pdl)[0]
