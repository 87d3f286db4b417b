"""Ops of decode attention: one op, one fake, one typed wrapper each.

``attend_decode`` is functional. ``attend_step`` writes the cache, and its schema names what it writes.

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
    from .kernels.attend_decode import attend_one_token
    from .kernels.attend_project import attend_projected_token_

LIBRARY = torch.library.Library("fmoe", "FRAGMENT")
LIBRARY.define(
    "attend_decode(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? lengths, Tensor? gate, float scale, int window, "
    "int[] settings) -> Tensor"
)
LIBRARY.define(
    "attend_step(Tensor projected, Tensor? norm, Tensor cos, Tensor sin, Tensor positions, Tensor(a!) k, Tensor(b!) v, "
    "Tensor? mask, int heads, float eps, float scale, int window, int[] settings) -> Tensor"
)


def _settings(values: Sequence[int], heads: int, k: Tensor, *, own: bool) -> AttendSettings:
    """Read settings, or where none came, choose by rule."""
    if values:
        return attend_settings_from_ints(values)
    batch, kv_heads, slots, size = k.shape
    return default_attend_settings(batch, heads, kv_heads, size, slots, k.dtype, target=target_of(k.device), own=own)


def _attend_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    gate: Tensor | None,
    scale: float,
    window: int,
    settings: Sequence[int],
) -> Tensor:
    chosen = _settings(settings, q.shape[2], k, own=False)
    return attend_one_token(q, k, v, mask, lengths, gate, chosen, scale=scale, window=window)


def _attend_decode_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _attend_step(
    projected: Tensor,
    norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    heads: int,
    eps: float,
    scale: float,
    window: int,
    settings: Sequence[int],
) -> Tensor:
    cos, sin, chosen = cos[:, 0].contiguous(), sin[:, 0].contiguous(), _settings(settings, heads, k, own=True)
    return attend_projected_token_(
        projected[:, 0], norm, cos, sin, positions[:, 0], k, v, mask, chosen,
        heads=heads, eps=eps, scale=scale, window=window,
    ).flatten(2)  # fmt: skip


def _attend_step_fake(
    projected: Tensor,
    norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    heads: int,
    *_: object,
) -> Tensor:
    return projected.new_empty(projected.shape[0], 1, heads * k.shape[3])


LIBRARY.impl("attend_decode", _attend_decode, "CompositeExplicitAutograd")
LIBRARY.impl("attend_step", _attend_step, "CompositeExplicitAutograd")
torch.library.register_fake("fmoe::attend_decode", _attend_decode_fake, lib=LIBRARY)
torch.library.register_fake("fmoe::attend_step", _attend_step_fake, lib=LIBRARY)


def _check_single(tokens: int) -> None:
    if tokens != 1:
        raise ValueError(f"T={tokens} tokens came; decode attention takes 1 of each sequence, use attend for more")


def _ints(settings: AttendSettings | None) -> list[int]:
    return [] if settings is None else decode_settings_to_ints(settings)


def attend_op(
    q_BTHC: Tensor,
    k_BJMC: Tensor,
    v_BJMC: Tensor,
    mask_BTM: Tensor,
    /,
    *,
    scale: float | None = None,
    settings: AttendSettings | None = None,
) -> Tensor:
    """``attend`` for T = 1, with the slots of a kv head split among programs.

    A latent cache, whose values are the first channels of its keys, is read once.

    Args:
        q_BTHC: as for ``attend``, as are the next three.
        k_BJMC: keys.
        v_BJMC: values.
        mask_BTM: a row without one True gives zeros.
        scale: None is C^-0.5.
        settings: None chooses by rule.

    Returns:
        As ``attend``.
    """
    _check_single(q_BTHC.shape[1])
    scale = q_BTHC.shape[-1] ** -0.5 if scale is None else scale
    y: Tensor = torch.ops.fmoe.attend_decode(q_BTHC, k_BJMC, v_BJMC, mask_BTM, None, None, scale, 0, _ints(settings))
    return y


def attend_lengths_op(
    q_BTHC: Tensor,
    k_BJMC: Tensor,
    v_BJMC: Tensor,
    lengths_B: Tensor,
    /,
    *,
    gate_BTN: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    settings: AttendSettings | None = None,
) -> Tensor:
    """``attend`` for T = 1 to the first ``length`` slots of each row, times ``sigmoid(gate)``.

    The programs share the slots that are there, not all M, so that a cache may be much longer than its content. The
    host never reads the lengths.

    Args:
        q_BTHC: queries, T = 1.
        k_BJMC: keys, all slots.
        v_BJMC: values.
        lengths_B: int64, the token itself included; 0 gives zeros.
        gate_BTN: [B, 1, H * U], or None.
        scale: None is C^-0.5.
        window: only the last ``window`` slots, or None.
        settings: None chooses by rule.

    Returns:
        [B, 1, H, U], dtype of q.
    """
    _check_single(q_BTHC.shape[1])
    scale = q_BTHC.shape[-1] ** -0.5 if scale is None else scale
    gate = None if gate_BTN is None else gate_BTN[:, 0]
    y: Tensor = torch.ops.fmoe.attend_decode(
        q_BTHC, k_BJMC, v_BJMC, None, lengths_B, gate, scale, window or 0, _ints(settings)
    )
    return y


def attend_step_op_(
    projected_BTN: Tensor,
    norm_HC: Tensor | None,
    cache: KVCache,
    placement: Placement,
    /,
    *,
    heads: int,
    eps: float,
    window: int | None = None,
    mask_BTM: Tensor | None = None,
    settings: AttendSettings | None = None,
) -> Tensor:
    """Do all that stands between the two projections of an attention layer, for T = 1; the cache is written in place.

    Norm q and k, rotate them, write k and v at their positions, attend to the slots up to there, multiply by
    ``sigmoid(gate)``. The whole cache is given, not the visible slots; of the placement, positions, cos and sin are
    read.

    Args:
        projected_BTN: [q | k | v] of all heads, and behind them the gate where there is one.
        norm_HC: weights of the q and then of the k heads' norms, or None.
        cache: written.
        placement: of the step.
        heads: H.
        eps: of the norm.
        window: the token sees itself and ``window - 1`` before; None is all.
        mask_BTM: False where the token may not look, over the first slots of the cache; or None.
        settings: None chooses by rule.

    Returns:
        [B, 1, H * C], dtype of the projection.
    """
    _check_single(projected_BTN.shape[1])
    y: Tensor = torch.ops.fmoe.attend_step(
        projected_BTN, norm_HC, placement.cos_BTR, placement.sin_BTR, placement.positions_BT, *cache, mask_BTM, heads,
        eps, cache.k_BJMC.shape[-1] ** -0.5, window or 0, _ints(settings),
    )  # fmt: skip
    return y
