"""The head of a model with the greedy choice of a token, in one pass over the head's matrix.

Letters: B sequences, D hidden, V vocabulary, X programs, each with its own rows of the matrix.

A program leaves the best of its logits for each sequence as one integer that orders by logit and then by the lowest
id; a second launch takes the largest. Logits are rounded to the dtype of the model, as ``F.linear`` rounds them.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_settings import HeadSettings
from .launch import cdiv, launch_options, next_power_of_2, wait_for_previous
from .route import ROUNDINGS, ordered_key, round_to

MOST_ROWS = 16


@triton.jit
def head_gemv(
    x, w, keys, logits, X, D: tl.constexpr, V: tl.constexpr, ROUND: tl.constexpr, HAS_LOGITS: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BV rows of the matrix with a single sequence; grid (X,)."""
    pid = tl.program_id(0)
    o_v = pid * BV + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    even: tl.constexpr = (V % BV == 0) and (D % BK == 0)
    at = w + o_v[:, None].to(tl.int64) * D + o_k[None, :]
    wait_for_previous(PDL)
    acc = tl.zeros((BV, BK), tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        if even:
            a = tl.load(at + k)
            b = tl.load(x + k + o_k)
        else:
            a = tl.load(at + k, mask=(o_v[:, None] < V) & (k + o_k[None, :] < D), other=0.0)
            b = tl.load(x + k + o_k, mask=k + o_k < D, other=0.0)
        acc += a.to(tl.float32) * b.to(tl.float32)[None, :]
    v = round_to(tl.sum(acc, 1), ROUND)
    key = tl.where(o_v < V, ordered_key(v, o_v), -0x7FFFFFFFFFFFFFFF)
    tl.store(keys + pid, tl.max(key, 0))
    if HAS_LOGITS:
        tl.store(logits + o_v, v, mask=o_v < V)


@triton.jit
def head_dot(
    x, w, keys, logits, X, B, D: tl.constexpr, V: tl.constexpr, ROUND: tl.constexpr, HAS_LOGITS: tl.constexpr,
    BB: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BV rows of the matrix with all sequences; grid (X,)."""
    pid = tl.program_id(0)
    o_v = pid * BV + tl.arange(0, BV)
    o_b = tl.arange(0, BB)
    o_k = tl.arange(0, BK)
    even: tl.constexpr = (V % BV == 0) and (D % BK == 0)
    at = w + o_v[:, None].to(tl.int64) * D + o_k[None, :]
    wait_for_previous(PDL)
    acc = tl.zeros((BV, BB), tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        if even:
            a = tl.load(at + k)
            b = tl.load(x + o_b[None, :] * D + k + o_k[:, None], mask=o_b[None, :] < B, other=0.0)
        else:
            inside = k + o_k < D
            a = tl.load(at + k, mask=(o_v[:, None] < V) & inside[None, :], other=0.0)
            b = tl.load(x + o_b[None, :] * D + k + o_k[:, None], mask=(o_b[None, :] < B) & inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    v = round_to(acc, ROUND)
    key = tl.where(o_v[:, None] < V, ordered_key(v, o_v[:, None]), -0x7FFFFFFFFFFFFFFF)
    tl.store(keys + o_b * X + pid, tl.max(key, 0), mask=o_b < B)
    if HAS_LOGITS:
        at_logits = logits + o_b[None, :].to(tl.int64) * V + o_v[:, None]
        tl.store(at_logits, v, mask=(o_b[None, :] < B) & (o_v[:, None] < V))


@triton.jit
def pick_best(keys, tokens, best, X, BX: tl.constexpr, PDL: tl.constexpr):
    """Largest key of one sequence, taken apart into id and logit; grid (B,)."""
    b = tl.program_id(0)
    o_x = tl.arange(0, BX)
    wait_for_previous(PDL)
    largest = tl.full((BX,), -0x7FFFFFFFFFFFFFFF, tl.int64)
    for x in tl.range(0, X, BX):
        key = tl.load(keys + b * X + x + o_x, mask=x + o_x < X, other=-0x7FFFFFFFFFFFFFFF)
        largest = tl.maximum(largest, key)
    key = tl.max(largest, 0)
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    tl.store(tokens + b, 0x7FFFFFFF - (key & 0xFFFFFFFF))
    tl.store(best + b, bits.to(tl.float32, bitcast=True))


def choose_tokens(
    x_BD: Tensor, head_VD: Tensor, settings: HeadSettings, /, *, with_logits: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute ``logits = x head^T`` and choose the largest of each row, the lowest id of equal ones; two launches.

    Args:
        x_BD: normed hidden states, 1 <= B <= 16.
        head_VD: contiguous.
        settings: blocks.
        with_logits: write the logits, too.

    Returns:
        tokens_B int64; best_B float32, the logit of each, NaN where a row holds NaN; float32 logits_BV or None.
    """
    (batch, hidden), vocabulary = x_BD.shape, head_VD.shape[0]
    x_BD = x_BD.contiguous()
    programs = cdiv(vocabulary, settings.rows)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x_BD.device)

    keys_BX = empty(batch, programs, dtype=torch.int64)
    logits_BV = empty(batch, vocabulary, dtype=torch.float32) if with_logits else None
    options = launch_options(settings.pdl)
    shape = {"D": hidden, "V": vocabulary, "ROUND": ROUNDINGS.get(x_BD.dtype, 0), "HAS_LOGITS": with_logits}
    shape |= {"BV": settings.rows, "BK": settings.depth, "STAGES": settings.stages, "PDL": settings.pdl}
    if settings.dot:
        head_dot[(programs,)](
            x_BD, head_VD, keys_BX, logits_BV, programs, batch, **shape, BB=MOST_ROWS, num_warps=settings.warps,
            **options,
        )  # fmt: skip
    else:
        head_gemv[(programs,)](
            x_BD, head_VD, keys_BX, logits_BV, programs, **shape, num_warps=settings.warps, **options
        )
    tokens_B, best_B = empty(batch, dtype=torch.int64), empty(batch, dtype=torch.float32)
    block = min(next_power_of_2(programs), 2048)
    pick_best[(batch,)](keys_BX, tokens_B, best_B, programs, BX=block, PDL=settings.pdl, num_warps=8, **options)
    return tokens_B, best_B, logits_BV
