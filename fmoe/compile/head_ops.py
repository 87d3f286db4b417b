"""Ops of the head: one op, one fake, one typed wrapper each. Functional.

Letters: B sequences, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from fmoe.functional.quant import Fp8

from .decode_settings import (
    HeadSettings,
    decode_settings_to_ints,
    default_head_settings,
    default_quantized_head_settings,
    head_settings_from_ints,
)
from .device import target_of

if find_spec("triton"):
    from .kernels.head import MOST_ROWS, choose_tokens
    from .kernels.head_quantized import choose_token_quantized
else:
    MOST_ROWS = 16

LIBRARY = torch.library.Library("fmoe", "FRAGMENT")
LIBRARY.define("head_greedy(Tensor x, Tensor head, int[] settings) -> (Tensor, Tensor)")
LIBRARY.define("head_quantized(Tensor x, Tensor head, Tensor scale) -> (Tensor, Tensor)")
LIBRARY.define("head_logits(Tensor x, Tensor head, int[] settings) -> (Tensor, Tensor, Tensor)")


def _settings(values: Sequence[int], x: Tensor) -> HeadSettings:
    """Read settings, or where none came, choose by rule; a matrix-vector product serves a single row only."""
    settings = head_settings_from_ints(values) if values else None
    if settings is None or (x.shape[0] > 1 and not settings.dot):
        return default_head_settings(x.shape[0], x.dtype, target=target_of(x.device))
    return settings


def _head_greedy(x: Tensor, head: Tensor, settings: Sequence[int]) -> tuple[Tensor, Tensor]:
    tokens, best, _ = choose_tokens(x, head.contiguous(), _settings(settings, x))
    return tokens, best


def _head_greedy_fake(x: Tensor, head: Tensor, settings: Sequence[int]) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], dtype=torch.int64), x.new_empty(x.shape[0], dtype=torch.float32)


def _head_logits(x: Tensor, head: Tensor, settings: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    tokens, best, logits = choose_tokens(x, head.contiguous(), _settings(settings, x), with_logits=True)
    assert logits is not None
    return tokens, best, logits


def _head_logits_fake(x: Tensor, head: Tensor, settings: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.new_empty(x.shape[0], head.shape[0], dtype=torch.float32)
    return *_head_greedy_fake(x, head, settings), logits


def _head_quantized(x: Tensor, head: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    settings = default_quantized_head_settings(x.shape[1], target=target_of(x.device))
    return choose_token_quantized(x, Fp8(head, scale), settings)


def _head_quantized_fake(x: Tensor, head: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _head_greedy_fake(x, head, ())


LIBRARY.impl("head_greedy", _head_greedy, "CompositeExplicitAutograd")
LIBRARY.impl("head_quantized", _head_quantized, "CompositeExplicitAutograd")
LIBRARY.impl("head_logits", _head_logits, "CompositeExplicitAutograd")
torch.library.register_fake("fmoe::head_greedy", _head_greedy_fake, lib=LIBRARY)
torch.library.register_fake("fmoe::head_quantized", _head_quantized_fake, lib=LIBRARY)
torch.library.register_fake("fmoe::head_logits", _head_logits_fake, lib=LIBRARY)


def _ints(x_BD: Tensor, settings: HeadSettings | None) -> list[int]:
    if x_BD.dim() != 2 or not 1 <= x_BD.shape[0] <= MOST_ROWS:
        raise ValueError(
            f"x of shape {list(x_BD.shape)} came; the head takes [B, D] with 1..{MOST_ROWS} rows, split larger batches"
        )
    return [] if settings is None else decode_settings_to_ints(settings)


def choose_tokens_op(
    x_BD: Tensor, head_VD: Tensor, /, *, settings: HeadSettings | None = None
) -> tuple[Tensor, Tensor]:
    """Choose each row's token greedily; no logit is written to memory.

    ``argmax(x head^T)``, logits rounded to the dtype of x, equal ones to the lowest id: what ``sample_greedy`` gives
    for ``F.linear``.

    Args:
        x_BD: normed hidden states, 1 <= B <= 16.
        head_VD: output embedding.
        settings: None chooses by rule.

    Returns:
        tokens_B int64, and best_B float32, the logit of each; it is NaN where any logit of the row is, and infinite
        where the largest is.
    """
    tokens_B, best_B = torch.ops.fmoe.head_greedy(x_BD, head_VD, _ints(x_BD, settings))
    return tokens_B, best_B


def choose_token_quantized_op(x_1D: Tensor, head_VD: Fp8, /) -> tuple[Tensor, Tensor]:
    """``choose_tokens_op`` for a single row, by a head in FP8 blocks that is read as it is.

    Args:
        x_1D: normed hidden state.
        head_VD: output embedding, D whole blocks.

    Returns:
        As there.
    """
    tokens_1, best_1 = torch.ops.fmoe.head_quantized(x_1D, head_VD.w, head_VD.scale)
    return tokens_1, best_1


def compute_logits_op(
    x_BD: Tensor, head_VD: Tensor, /, *, settings: HeadSettings | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``choose_tokens_op`` that also writes the logits, for ``sample`` and ``token_logprobs``.

    Returns:
        tokens_B and best_B as there, and float32 logits_BV, whose values are those of the dtype of x.
    """
    tokens_B, best_B, logits_BV = torch.ops.fmoe.head_logits(x_BD, head_VD, _ints(x_BD, settings))
    return tokens_B, best_B, logits_BV
