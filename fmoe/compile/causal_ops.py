"""Attention of a prompt's chunk as an op: which of PyTorch's kernels is best depends on sizes that no graph must see.

Letters: as in fmoe/functional/attention.py.
"""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from fmoe.functional.attention import attend_causal

HALF = (torch.bfloat16, torch.float16)
LIBRARY = torch.library.Library("fmoe", "FRAGMENT")
LIBRARY.define("attend_causal(Tensor q, Tensor k, Tensor v, float? scale=None) -> Tensor")


def _attend_causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    if q.device.type != "cuda" or q.shape[1] == k.shape[2] or not takes_flash(q, k, v):
        return attend_causal(q, k, v, scale=scale).contiguous()
    return attend_flash(q, k, v, scale=scale)


def _attend_causal_fake(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


LIBRARY.impl("attend_causal", _attend_causal, "CompositeExplicitAutograd")
torch.library.register_fake("fmoe::attend_causal", _attend_causal_fake, lib=LIBRARY)


def takes_flash(q_BTHC: Tensor, k_BJMC: Tensor, v_BJMC: Tensor, /) -> bool:
    """Tell whether PyTorch's own flash attention runs here for these heads."""
    if q_BTHC.dtype not in HALF or q_BTHC.shape[-1] != v_BJMC.shape[-1] or q_BTHC.shape[-1] % 8:
        return False
    grouped = q_BTHC.shape[2] != k_BJMC.shape[1]
    return bool(can_use_flash_attention(SDPAParams(q_BTHC.transpose(1, 2), k_BJMC, v_BJMC, None, 0.0, True, grouped)))


def attend_flash(q_BTHC: Tensor, k_BJMC: Tensor, v_BJMC: Tensor, /, *, scale: float | None = None) -> Tensor:
    """``attend_causal`` by flash attention, which lays the last query at the last key and reads shared keys once."""
    out_BHTC = torch.ops.aten._scaled_dot_product_flash_attention(
        q_BTHC.transpose(1, 2), k_BJMC, v_BJMC, 0.0, True, False, scale=scale
    )[0]
    out_BTHC: Tensor = out_BHTC.transpose(1, 2)
    return out_BTHC.contiguous()


def attend_causal_op(q_BTHC: Tensor, k_BJMC: Tensor, v_BJMC: Tensor, /, *, scale: float | None = None) -> Tensor:
    """``attend_causal`` behind ``fmoe::attend_causal``."""
    out_BTHC: Tensor = torch.ops.fmoe.attend_causal(q_BTHC, k_BJMC, v_BJMC, scale)
    return out_BTHC
