"""The kernels of the stand-in: AITER's contract in plain torch and numpy, memory behaviour included.

Tensors are written the way a kernel does it: through their memory, from the first element on, by the strides and
dtypes that the release believes in. A write past the end raises OutOfBounds where a GPU would corrupt something.
This file is copied into every stand-in package; it imports nothing of fmoe or of the tests.
"""

import os
import re

import numpy as np
import torch
import torch.nn.functional as F

# What the releases did, by the defect's name: the first release that was free of it, or that has it.
UNTIL = {
    "always_shuffled": (0, 1, 10, 3),  # fused_moe takes every weight for shuffled
    "gating_stride_ignored": (0, 1, 11, 0),
    "k_from_weights": (0, 1, 12, 0),  # K is the width of the weights, not of the ids
    "slow_path_strides_ignored": (0, 1, 19, 1),
    "grouped_stride_ignored": (0, 1, 19, 0),
}
SINCE = {"dtype_blind": (0, 1, 19, 0)}

# These are in no release; a test switches them on.
INJECTED = ("wrong_ids", "wrong_weights", "rubbish_shared_ids", "kernel_raises", "kernel_exits", "wrong_output")


class OutOfBounds(RuntimeError):
    """A kernel wrote where it must not."""


def release_key(version: str) -> tuple[int, int, int, int]:
    numbers = re.match(r"v?(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", version).groups()
    return tuple(int(number or 0) for number in numbers)


def defects_of(version: str) -> frozenset[str]:
    key = release_key(version)
    old = {name for name, first in UNTIL.items() if key < first}
    return frozenset(old | {name for name, first in SINCE.items() if key >= first})


def memory_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View everything from a tensor's first element to the end of its storage, as ``dtype``."""
    storage = tensor.untyped_storage()
    first = (tensor.data_ptr() - storage.data_ptr()) // dtype.itemsize
    count = storage.nbytes() // dtype.itemsize - first
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, first, (count,), (1,))


def places(rows: int, columns: int, stride: int) -> torch.Tensor:
    return (torch.arange(rows)[:, None] * stride + torch.arange(columns)).flatten()


def write(tensor: torch.Tensor, values: torch.Tensor, stride: int) -> None:
    memory, index = memory_of(tensor, values.dtype), places(*values.shape, stride)
    if len(index) and int(index[-1]) >= len(memory):
        raise OutOfBounds(f"wrote element {int(index[-1])} of {len(memory)}")
    memory[index.to(memory.device)] = values.flatten().to(memory.device)


def read(tensor: torch.Tensor, rows: int, columns: int, stride: int) -> torch.Tensor:
    memory, index = memory_of(tensor, tensor.dtype), places(rows, columns, stride)
    if len(index) and int(index[-1]) >= len(memory):
        raise OutOfBounds(f"read element {int(index[-1])} of {len(memory)}")
    return memory[index.to(memory.device)].view(rows, columns).float().cpu()


def largest(values: torch.Tensor, k: int, taken: float) -> torch.Tensor:
    """Take the largest k times, the lowest index among equals; a taken one becomes ``taken``."""
    left, rows = values.numpy().copy(), np.arange(len(values))
    chosen = np.empty((len(values), k), dtype=np.int64)
    for j in range(k):
        chosen[:, j] = left.argmax(1)
        left[rows, chosen[:, j]] = taken
    return torch.from_numpy(chosen)


class Machine:
    """One release: its version and the defects that are on."""

    def __init__(self, version: str, defects: tuple[str, ...]) -> None:
        self.version = version
        more = tuple(name for name in os.environ.get("AITER_STANDIN_DEFECTS", "").split(",") if name)
        self.defects = defects_of(version) | {*defects, *more}
        self.calls: list[str] = []  # what was called, for tests to look at

    def begin(self, name: str, rows: int) -> None:
        self.calls.append(name)
        if "kernel_raises" in self.defects:
            raise RuntimeError("HIP error: invalid device function")
        if "kernel_exits" in self.defects:
            raise SystemExit(f"[aiter] build [{name}] failed !!!!!!")
        if rows == 0:
            raise RuntimeError("HIP error: invalid configuration argument")  # a grid of no blocks

    def check_dtypes(self, weights: torch.Tensor, ids: torch.Tensor) -> None:
        if "dtype_blind" not in self.defects and (weights.dtype, ids.dtype) != (torch.float32, torch.int32):
            raise RuntimeError(f"expected scalar types Float and Int but found {weights.dtype} and {ids.dtype}")

    def spoil(self, weights: torch.Tensor, ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        if "wrong_ids" in self.defects:
            ids = (ids + 1) % experts
        return (weights * 1.01 if "wrong_weights" in self.defects else weights), ids

    def topk_softmax(
        self, topk_weights, topk_indices, token_expert_indices, gating_output, need_renorm, shared=0, scoring=""
    ):
        rows, experts = gating_output.shape[0], gating_output.shape[1] - shared
        self.begin("topk_softmax", rows)
        self.calls[-1] += str(7 if shared else 5)
        k = (topk_weights if "k_from_weights" in self.defects else topk_indices).shape[-1]
        self.check_dtypes(topk_weights, topk_indices)
        fast = experts <= 512 and experts & (experts - 1) == 0
        if fast and shared and (shared not in (1, 2, 4, 8) or scoring != "sigmoid"):
            raise RuntimeError(f"[AITER_CHECK] num_shared_experts={shared}, Unsupported scoring function '{scoring}'")
        blind = "slow_path_strides_ignored" in self.defects and not fast
        stride = gating_output.stride(0) if rows > 1 else gating_output.shape[1]
        stride = experts if blind or "gating_stride_ignored" in self.defects else stride
        logits = read(gating_output, rows, experts, stride)
        probs = logits.softmax(-1)
        ids = largest(logits, k, -np.inf) if fast else largest(probs, k, -1.0)
        weights = probs.gather(1, ids)
        if fast and torch.isneginf(logits).any():
            # A taken slot becomes -inf as well, so that it may be taken again, with the weight of -inf.
            again = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(-1)
            weights = weights.masked_fill(again, 0.0)
        if need_renorm:
            weights = weights / weights.sum(-1, keepdim=True)
        weights, ids = self.spoil(weights, ids, experts)
        write(topk_weights, weights, k if blind else topk_weights.stride(0))
        write(topk_indices, ids.int(), k if blind else topk_indices.stride(0))
        write(token_expert_indices, (torch.arange(k) * rows + torch.arange(rows)[:, None]).int(), k)
        if shared and (fast or scoring == "sigmoid"):
            gates = 1 / (1 + torch.exp(-gating_output[:, experts:].float().cpu()))
            write(topk_weights[:, k:], gates, topk_weights.stride(0))
        if "rubbish_shared_ids" in self.defects and shared:
            write(topk_indices, torch.cat((ids.int(), ids.new_full((rows, shared), 12345).int()), 1), k + shared)

    def grouped(self, gating, bias, topk_weights, topk_ids, groups, kept, renormalize, softmax, scale):
        rows, experts = gating.shape
        if groups not in (1, 2, 4, 8) or topk_ids.shape[1] > 64:
            raise RuntimeError("[AITER_CHECK] num_expert_group and topk")
        self.check_dtypes(topk_weights, topk_ids)
        k = topk_ids.shape[1]
        stride = gating.stride(0) if rows > 1 and "grouped_stride_ignored" not in self.defects else experts
        logits = read(gating, rows, experts, stride)
        scores = logits.softmax(-1) if softmax else logits.sigmoid()
        choice = scores
        if bias is not None:  # read as if it were of the dtype of the logits
            choice = scores + memory_of(bias, gating.dtype)[:experts].float().cpu()
        grouped = choice.view(rows, groups, -1)
        best = grouped.amax(-1) if bias is None else grouped.topk(min(2, experts // groups), -1).values.sum(-1)
        keep = torch.zeros(rows, groups, dtype=torch.bool).scatter(1, largest(best, kept, -np.inf), True)
        ids = largest(grouped.masked_fill(~keep[..., None], -torch.inf).flatten(1), k, -np.inf)
        weights = scores.gather(1, ids)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        weights, ids = self.spoil(weights * scale, ids, experts)
        write(topk_weights, weights, topk_ids.stride(0))  # the stride of the ids serves both
        write(topk_ids, ids.int(), topk_ids.stride(0))

    def biased_grouped_topk_hip(
        self, gating_output, correction_bias, topk_weights, topk_ids, groups, kept, need_renorm, scale=1.0
    ):
        self.begin("biased_grouped_topk_hip", len(gating_output))
        self.grouped(gating_output, correction_bias, topk_weights, topk_ids, groups, kept, need_renorm, False, scale)

    def moe_fused_gate(
        self, gating_output, correction_bias, topk_weights, topk_ids, groups, kept, topk, shared=0, scale=1.0
    ):
        self.begin("moe_fused_gate", len(gating_output))
        experts = gating_output.shape[1]
        if experts % groups or experts // groups > 32:
            raise RuntimeError("[AITER_CHECK] more than 32 experts per group")
        # The scale is accepted and never multiplied.
        self.grouped(gating_output, correction_bias, topk_weights, topk_ids, groups, kept, True, False, 1.0)
        return topk_weights, topk_ids

    def biased_grouped_topk(
        self, gating_output, correction_bias, topk_weights, topk_ids, groups, kept, need_renorm, scale=1.0
    ):
        tokens, experts = gating_output.shape
        arguments = (gating_output, correction_bias, topk_weights, topk_ids, groups, kept)
        if tokens <= 212 * int(os.environ.get("CU_NUM", "304")) or experts // groups > 32:
            return self.biased_grouped_topk_hip(*arguments, need_renorm, scale)
        assert need_renorm, "Renormalization is required for moe_fused_gate."
        return self.moe_fused_gate(*arguments, topk_ids.shape[1], 0, scale)

    def grouped_topk(
        self, gating_output, topk_weights, topk_ids, groups, kept, need_renorm, is_softmax=True, scale=1.0
    ):
        self.begin("grouped_topk", len(gating_output))
        self.grouped(gating_output, None, topk_weights, topk_ids, groups, kept, need_renorm, is_softmax, scale)

    def fused_moe(self, hidden_states, w1, w2, topk_weight, topk_ids, expert_mask, activation, quant_type, dtype=None):
        rows, hidden = hidden_states.shape
        self.begin("fused_moe", rows)
        if (activation.value, quant_type.value) != (0, 0) or expert_mask is not None:
            raise RuntimeError("the stand-in computes Silu, unquantised, on one rank only")
        assert (dtype or hidden_states.dtype) in (torch.float16, torch.bfloat16), "Not support output dtype"
        if (topk_weight.dtype, topk_ids.dtype) != (torch.float32, torch.int32) or topk_ids.shape[1] >= 128:
            raise RuntimeError("moe_sorting: unsupported topk")
        width = w2.shape[2]
        if width % (64 if width <= 192 else 128) or hidden % 32:
            raise RuntimeError(
                "device_gemm with the specified compilation parameters does not support this GEMM problem"
            )
        if int(topk_ids.max()) >= w1.shape[0] or int(topk_ids.min()) < 0:
            raise OutOfBounds(f"read expert {int(topk_ids.max())} of {w1.shape[0]}")
        tagged = getattr(w1, "is_shuffled", False) or getattr(w2, "is_shuffled", False)
        if tagged or "always_shuffled" in self.defects:
            w1, w2 = unshuffle(w1), unshuffle(w2)
        output = compute(hidden_states, w1, w2, topk_weight, topk_ids)
        return output.float() if "wrong_output" in self.defects else output


def unshuffle(w: torch.Tensor) -> torch.Tensor:
    """Undo the (16, 16) layout: 16 rows by 32 columns, in pieces of 16 bytes."""
    piece = 16 // w.element_size()
    tiles = w.reshape(-1, w.shape[-2] // 16, w.shape[-1] // 32, 32 // piece, 16, piece)
    return tiles.permute(0, 1, 4, 2, 3, 5).reshape(w.shape)


def compute(x, w1, w2, weights, ids):
    """Round after each product as a kernel of two stages does; sum the weighted rows of a token in float32."""
    rows = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        tokens, columns = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], w1[expert]).chunk(2, -1)
        rows[tokens, columns] = F.linear(F.silu(gate) * up, w2[expert]).float()
    return (rows * weights[..., None]).sum(1).to(x.dtype)
