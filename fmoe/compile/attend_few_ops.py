"""Ops of attention for the newest token and its drafts: one op, one fake, one typed wrapper each.

``attend_few_step`` writes the cache, and its schema names what it writes. ``attend_few`` is functional.

Letters: as in fmoe/functional/attention.py; N projected columns, U channels of a value.
"""

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from fmoe.functional.attention import Placement
from fmoe.functional.cache import KVCache

from .decode_settings import (
    AttendSettings,
    attend_settings_from_ints,
    decode_settings_to_ints,
    default_attend_settings,
)
from .device import target_of

if find_spec("triton"):
    from .kernels.attend_few import attend_few_tokens, attend_projected_few_

MOST_TOKENS = 16  # of a sequence; more would want blocks of their own

LIBRARY = torch.library.Library("fmoe", "FRAGMENT")
LIBRARY.define("attend_few(Tensor q, Tensor k, Tensor v, Tensor lengths, float scale, int[] settings) -> Tensor")
LIBRARY.define(
    "attend_few_step(Tensor projected, Tensor? norm, Tensor cos, Tensor sin, Tensor positions, Tensor(a!) k, "
    "Tensor(b!) v, int heads, float eps, float scale, int window, int[] settings) -> Tensor"
)


def _settings(values: Sequence[int], tokens: int, heads: int, k: Tensor, *, own: bool) -> AttendSettings:
    """Read settings, or where none came, choose by rule."""
    if values:
        return attend_settings_from_ints(values)
    batch, kv_heads, slots, size = k.shape
    target = target_of(k.device)
    return default_attend_settings(batch, heads, kv_heads, size, slots, k.dtype, target=target, tokens=tokens, own=own)


def _attend_few(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, settings: Sequence[int]) -> Tensor:
    chosen = _settings(settings, q.shape[1], q.shape[2], k, own=False)
    return attend_few_tokens(q, k, v, lengths.contiguous(), chosen, scale=scale)


def _attend_few_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _attend_few_step(
    projected: Tensor,
    norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    eps: float,
    scale: float,
    window: int,
    settings: Sequence[int],
) -> Tensor:
    chosen = _settings(settings, projected.shape[1], heads, k, own=True)
    return attend_projected_few_(
        projected, norm, cos.contiguous(), sin.contiguous(), positions.contiguous(), k, v, chosen,
        heads=heads, eps=eps, scale=scale, window=window,
    ).flatten(2)  # fmt: skip


def _attend_few_step_fake(
    projected: Tensor,
    norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    *_: object,
) -> Tensor:
    return projected.new_empty(*projected.shape[:2], heads * k.shape[3])


LIBRARY.impl("attend_few", _attend_few, "CompositeExplicitAutograd")
LIBRARY.impl("attend_few_step", _attend_few_step, "CompositeExplicitAutograd")
torch.library.register_fake("fmoe::attend_few", _attend_few_fake, lib=LIBRARY)
torch.library.register_fake("fmoe::attend_few_step", _attend_few_step_fake, lib=LIBRARY)


def _check_few(tokens: int) -> None:
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(
            f"T={tokens} tokens came; attention of drafts takes 1..{MOST_TOKENS} of each sequence, use attend for more"
        )


def _ints(settings: AttendSettings | None) -> list[int]:
    return [] if settings is None else decode_settings_to_ints(settings)


def attend_few_lengths_op(
    q_BTHC: Tensor,
    k_BJMC: Tensor,
    v_BJMC: Tensor,
    lengths_B: Tensor,
    /,
    *,
    scale: float | None = None,
    settings: AttendSettings | None = None,
) -> Tensor:
    """``attend`` for T tokens at the end of each row; token t looks at the first ``length - (T - 1 - t)`` slots.

    The programs share the slots that are there, not all M, and the host never reads the lengths. A latent cache, whose
    values are the first channels of its keys, is read once.

    Args:
        q_BTHC: queries, T <= 16.
        k_BJMC: keys, all slots.
        v_BJMC: values.
        lengths_B: int64, what the last token looks at, itself included; a token that sees nothing gives zeros.
        scale: None is C^-0.5.
        settings: None chooses by rule.

    Returns:
        [B, T, H, U], dtype of q.
    """
    _check_few(q_BTHC.shape[1])
    scale = q_BTHC.shape[-1] ** -0.5 if scale is None else scale
    y: Tensor = torch.ops.fmoe.attend_few(q_BTHC, k_BJMC, v_BJMC, lengths_B, scale, _ints(settings))
    return y


def attend_few_step_op_(
    projected_BTN: Tensor,
    norm_HC: Tensor | None,
    cache: KVCache,
    placement: Placement,
    /,
    *,
    heads: int,
    eps: float,
    window: int | None = None,
    settings: AttendSettings | None = None,
) -> Tensor:
    """``attend_step_op_`` for T tokens that follow one another; the cache is written in place.

    Norm q and k, rotate them, write k and v at their positions, let each token look at the slots up to its own,
    multiply by ``sigmoid(gate)``. NaN and infinities of k and v become 0, so that those of a draft concern no token
    before it. The whole cache is given, not the visible slots; of the placement, positions, cos and sin are read.

    Args:
        projected_BTN: [q | k | v] of all heads, and behind them the gate where there is one; T <= 16.
        norm_HC: weights of the q and then of the k heads' norms, or None.
        cache: written.
        placement: of the step.
        heads: H.
        eps: of the norm.
        window: a token sees itself and ``window - 1`` before; None is all.
        settings: None chooses by rule.

    Returns:
        [B, T, H * C], dtype of the projection.
    """
    _check_few(projected_BTN.shape[1])
    y: Tensor = torch.ops.fmoe.attend_few_step(
        projected_BTN, norm_HC, placement.cos_BTR, placement.sin_BTR, placement.positions_BT, *cache, heads, eps,
        cache.k_BJMC.shape[-1] ** -0.5, window or 0, _ints(settings),
    )  # fmt: skip
    return y
