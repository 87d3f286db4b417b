"""Attention over a cache, and where the tokens of a step stand in it.

Letters: B sequences, T tokens of the step, M visible cache slots, H query heads, J kv heads, C head channels,
R rotated channel pairs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from .rotary import rotary_tables

SINK_CHANNELS = 8  # that queries and keys get where a slot stands for the sinks; one is used, but kernels want eighths


class Placement(NamedTuple):
    """Positions of a step's tokens and what follows from them; the same for all layers."""

    positions_BT: Tensor  # int64
    cos_BTR: Tensor
    sin_BTR: Tensor
    mask_BTM: Tensor | None  # bool, True where the token may look; its width is the number of visible slots
    window_mask_BTM: Tensor | None = None  # the same within the sliding window, where the model has one
    lengths_B: Tensor | None = None  # int64, slots that the last token may look at; where there is no mask
    kept_B: Tensor | None = None  # int64, tokens of the step before that stay; where drafts are verified
    visible_M: Tensor | None = None  # no values; its size is what the last token sees; where there is no mask


def see_all(placement: Placement, visible: int, /) -> Placement:
    """Let each token see all before it without a mask, where all rows begin at one place.

    Args:
        placement: of ``place_tokens`` without slots.
        visible: tokens of each row behind the step.
    """
    return placement._replace(lengths_B=None, visible_M=placement.positions_BT.new_empty(visible, dtype=torch.bool))


def place_tokens(
    lengths_B: Tensor,
    inv_freq_R: Tensor,
    /,
    *,
    tokens: int,
    slots: int | None,
    dtype: torch.dtype,
    window: int | None = None,
    scale: float = 1.0,
) -> Placement:
    """Place ``tokens`` new tokens behind the ``lengths`` that each row already has.

    A token at position p may see slots [0, p], and in layers with a sliding window slots (p - window, p].

    Args:
        lengths_B: int64, tokens already in the cache.
        inv_freq_R: float32 rotary frequencies.
        tokens: T.
        slots: M, at least the largest length + T; None makes no mask, for kernels that read positions or lengths.
        dtype: dtype of cos and sin.
        window: W tokens including the token itself, or None.
        scale: YaRN's attention factor.

    Returns:
        Placement.
    """
    positions_BT = lengths_B[:, None] + torch.arange(tokens, device=lengths_B.device)
    cos_BTR, sin_BTR = rotary_tables(positions_BT, inv_freq_R, dtype=dtype, scale=scale)
    if slots is None:
        return Placement(positions_BT, cos_BTR, sin_BTR, None, lengths_B=lengths_B + tokens)
    slots_M = torch.arange(slots, device=lengths_B.device)
    mask_BTM = slots_M <= positions_BT[..., None]
    window_mask_BTM = None
    if window is not None:
        window_mask_BTM = mask_BTM & (slots_M > positions_BT[..., None] - window)
    return Placement(positions_BT, cos_BTR, sin_BTR, mask_BTM, window_mask_BTM)


def attend(
    q_BTHC: Tensor,
    k_BJMC: Tensor,
    v_BJMC: Tensor,
    mask_BTM: Tensor,
    sinks_H: Tensor | None = None,
    /,
    *,
    scale: float | None = None,
) -> Tensor:
    """Compute softmax attention; kv head j serves query heads ``j * H/J`` to ``(j+1) * H/J - 1``.

    ``softmax(q k^T * scale + mask) v`` with the softmax in float32. A sink is one more score of its head, whose value
    is zero: it takes a part of the softmax and gives nothing.

    Args:
        q_BTHC: queries.
        k_BJMC: keys of the visible slots.
        v_BJMC: values; their channels may differ in number from the keys'.
        mask_BTM: True where a query may look; without sinks every row needs one True.
        sinks_H: a score of each head, not multiplied by ``scale``; or None.
        scale: None is C^-0.5.

    Returns:
        [B, T, H, channels of v], dtype of q.

    Source: arXiv:1706.03762, eq. 1; grouped heads arXiv:2305.13245; sinks arXiv:2508.10925, section 2.3.
    """
    if sinks_H is not None:
        if q_BTHC.shape[1] == 1:
            return attend_rows(q_BTHC, k_BJMC, v_BJMC, mask_BTM, sinks_H, scale=scale)
        scale = q_BTHC.shape[-1] ** -0.5 if scale is None else scale
        wide = _add_sink_slot(q_BTHC, k_BJMC, v_BJMC, mask_BTM, sinks_H / scale)
        return attend(*wide, scale=scale)[..., : v_BJMC.shape[-1]]
    if q_BTHC.shape[1] == 1:
        # The heads of one kv head become rows of one product; with enable_gqa, torch copies keys once per head.
        q_BJNC = q_BTHC.squeeze(1).unflatten(1, (k_BJMC.shape[1], -1))
        out_BJNC = F.scaled_dot_product_attention(q_BJNC, k_BJMC, v_BJMC, attn_mask=mask_BTM[:, None], scale=scale)
        return out_BJNC.flatten(1, 2)[:, None]
    out_BHTC = F.scaled_dot_product_attention(
        q_BTHC.transpose(1, 2),
        k_BJMC,
        v_BJMC,
        attn_mask=mask_BTM[:, None],
        scale=scale,
        enable_gqa=q_BTHC.shape[2] != k_BJMC.shape[1],
    )
    return out_BHTC.transpose(1, 2)


def attend_causal(q_BTHC: Tensor, k_BJMC: Tensor, v_BJMC: Tensor, /, *, scale: float | None = None) -> Tensor:
    """``attend`` for tokens that stand in the last T slots, each of which sees its own slot and all before.

    Args:
        q_BTHC: queries, 1 <= T <= M.
        k_BJMC: keys.
        v_BJMC: values.
        scale: None is C^-0.5.

    Returns:
        [B, T, H, channels of v], dtype of q.
    """
    tokens, slots = q_BTHC.shape[1], k_BJMC.shape[2]
    if tokens != slots:
        return attend(q_BTHC, k_BJMC, v_BJMC, causal_mask(q_BTHC, slots), scale=scale)
    out_BHTC = F.scaled_dot_product_attention(
        q_BTHC.transpose(1, 2),
        k_BJMC,
        v_BJMC,
        is_causal=True,
        scale=scale,
        enable_gqa=q_BTHC.shape[2] != k_BJMC.shape[1],
    )
    return out_BHTC.transpose(1, 2)


def causal_mask(q_BTHC: Tensor, slots: int, /) -> Tensor:
    """Make the mask [1, T, slots] of tokens that stand in the last T slots and see all before."""
    tokens = q_BTHC.shape[1]
    positions_T = torch.arange(tokens, device=q_BTHC.device) + (slots - tokens)
    return (torch.arange(slots, device=q_BTHC.device) <= positions_T[:, None])[None]


def _add_sink_slot(
    q_BTHC: Tensor, k_BJMC: Tensor, v_BJMC: Tensor, mask_BTM: Tensor, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Append a slot that every query sees, so that one product makes the scores of the sinks too.

    Keys and values are copied, scores and masks never kept apart for each head: for many tokens that is less. Queries
    hold their head's sink in a channel of its own, where the slot's key is 1 and all other keys are 0.
    """
    size, pad = k_BJMC.shape[-1], SINK_CHANNELS
    sinks_BTH1 = sinks_H.to(q_BTHC.dtype)[:, None].expand(*q_BTHC.shape[:3], 1)
    q_BTHC = F.pad(torch.cat((q_BTHC, sinks_BTH1), -1), (0, pad - 1))
    slot_C = (torch.arange(size + pad, device=k_BJMC.device) == size).to(k_BJMC.dtype)
    k_BJMC = torch.cat((F.pad(k_BJMC, (0, pad)), slot_C.expand(*k_BJMC.shape[:2], 1, -1)), 2)
    # Values as wide as keys: some kernels take no others.
    v_BJMC = F.pad(v_BJMC, (0, max(size + pad - v_BJMC.shape[-1], 0), 0, 1))
    return q_BTHC, k_BJMC, v_BJMC, F.pad(mask_BTM, (0, 1), value=True)


def attend_rows(
    q_BTHC: Tensor,
    k_BJMC: Tensor,
    v_BJMC: Tensor,
    mask_BTM: Tensor,
    sinks_H: Tensor | None = None,
    /,
    *,
    scale: float | None = None,
) -> Tensor:
    """``attend`` for a few tokens: tokens and heads that share a kv head become rows of one product.

    Keys and values are read once, and never repeated for their query heads. With sinks, the scores are rounded to the
    dtype of q before the softmax.
    """
    kv_heads = k_BJMC.shape[1]
    q_BJNC = rearrange(q_BTHC, "b t (j g) c -> b j (t g) c", j=kv_heads)
    mask_B1NM = mask_BTM.repeat_interleave(q_BTHC.shape[2] // kv_heads, 1)[:, None]
    if sinks_H is None:
        out_BJNC = F.scaled_dot_product_attention(q_BJNC, k_BJMC, v_BJMC, attn_mask=mask_B1NM, scale=scale)
    else:
        scale = q_BTHC.shape[-1] ** -0.5 if scale is None else scale
        scores_BJNM = (q_BJNC @ k_BJMC.transpose(-1, -2)).float() * scale
        scores_BJNM = scores_BJNM.masked_fill(~mask_B1NM, -torch.inf)
        sinks_JN1 = sinks_H.float().unflatten(0, (kv_heads, -1)).repeat(1, q_BTHC.shape[1])[..., None]
        scores_BJNM = torch.cat((scores_BJNM, sinks_JN1.expand(len(q_BTHC), -1, -1, 1)), -1)
        out_BJNC = scores_BJNM.softmax(-1)[..., :-1].to(v_BJMC.dtype) @ v_BJMC
    return rearrange(out_BJNC, "b j (t g) c -> b t (j g) c", t=q_BTHC.shape[1])
