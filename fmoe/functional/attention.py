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


class Placement(NamedTuple):
    """Positions of a step's tokens and what follows from them; the same for all layers."""

    positions_BT: Tensor  # int64
    cos_BTR: Tensor
    sin_BTR: Tensor
    mask_BTM: Tensor | None  # bool, True where the token may look; its width is the number of visible slots
    window_mask_BTM: Tensor | None = None  # the same within the sliding window, where the model has one
    lengths_B: Tensor | None = None  # int64, slots that the last token may look at; where there is no mask
    kept_B: Tensor | None = None  # int64, tokens of the step before that stay; where drafts are verified


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
    q_BTHC: Tensor, k_BJMC: Tensor, v_BJMC: Tensor, mask_BTM: Tensor, /, *, scale: float | None = None
) -> Tensor:
    """Compute softmax attention; kv head j serves query heads ``j * H/J`` to ``(j+1) * H/J - 1``.

    ``softmax(q k^T * scale + mask) v`` with the softmax in float32.

    Args:
        q_BTHC: queries.
        k_BJMC: keys of the visible slots.
        v_BJMC: values; their channels may differ in number from the keys'.
        mask_BTM: True where a query may look; every row needs one True.
        scale: None is C^-0.5.

    Returns:
        [B, T, H, channels of v], dtype of q.

    Source: arXiv:1706.03762, eq. 1; grouped heads arXiv:2305.13245.
    """
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


def attend_rows(
    q_BTHC: Tensor, k_BJMC: Tensor, v_BJMC: Tensor, mask_BTM: Tensor, /, *, scale: float | None = None
) -> Tensor:
    """``attend`` for a few tokens: tokens and heads that share a kv head become rows of one product.

    Keys and values are read once, and never repeated for their query heads.
    """
    kv_heads = k_BJMC.shape[1]
    q_BJNC = rearrange(q_BTHC, "b t (j g) c -> b j (t g) c", j=kv_heads)
    mask_B1NM = mask_BTM.repeat_interleave(q_BTHC.shape[2] // kv_heads, 1)[:, None]
    out_BJNC = F.scaled_dot_product_attention(q_BJNC, k_BJMC, v_BJMC, attn_mask=mask_B1NM, scale=scale)
    return rearrange(out_BJNC, "b j (t g) c -> b t (j g) c", t=q_BTHC.shape[1])
