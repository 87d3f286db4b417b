"""AITER's names and layouts; the only file that knows them. AITER is never imported here: it comes as an argument.

Guards raise before a kernel could read or write memory that is not its own, since AITER itself checks next to nothing:
from 0.1.19 on it takes any tensor for float32 or int32. A kernel that fails raises RuntimeError with the way out.
Letters: T tokens, E routed experts, S shared slots, K experts per token, D hidden, F expert width, P = 2F.
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .capabilities import AiterRecord


class Generation(NamedTuple):
    """Positional parameters of a function from one release on; ``last`` is None where it still stands."""

    first: str
    last: str | None
    parameters: tuple[str, ...]


class Symbol(NamedTuple):
    """Where a name of AITER is defined, below the package, and how its parameters changed; of a class none."""

    file: str
    generations: tuple[Generation, ...]


TOPK_SOFTMAX = "aiter.topk_softmax"
BIASED_GROUPED_TOPK = "aiter.biased_grouped_topk_hip"
GROUPED_TOPK = "aiter.grouped_topk"
FUSED_MOE = "aiter.fused_moe.fused_moe"
ACTIVATION = "aiter.ActivationType"
QUANTIZATION = "aiter.QuantType"

_TOPK = ("topk_weights", "topk_indices", "token_expert_indices", "gating_output", "need_renorm")
_BIASED = ("gating_output", "correction_bias", "topk_weights", "topk_ids", "num_expert_group", "topk_grp")
_GROUPED = ("gating_output", "topk_weights", "topk_ids", "num_expert_group", "topk_group", "need_renorm", "is_softmax")
_FUSED_MOE = ("hidden_states", "w1", "w2", "topk_weight", "topk_ids", "expert_mask", "activation", "quant_type")

# Every symbol of AITER that fmoe uses, with the releases that have it. Arguments are passed by position, since 0.1.5 to
# 0.1.5.post2 called those of topk_softmax arg0 to arg4; those of fused_moe are the ones whose places never changed.
SYMBOLS: dict[str, Symbol] = {
    TOPK_SOFTMAX: Symbol(
        "ops/moe_op.py",
        (
            Generation("0.1.1", "0.1.11.post1", _TOPK),
            Generation("0.1.12", None, (*_TOPK, "num_shared_experts", "shared_expert_scoring_func")),
        ),
    ),
    BIASED_GROUPED_TOPK: Symbol(
        "ops/topk.py", (Generation("0.1.7", None, (*_BIASED, "need_renorm", "routed_scaling_factor")),)
    ),
    GROUPED_TOPK: Symbol("ops/topk.py", (Generation("0.1.7", None, (*_GROUPED, "routed_scaling_factor")),)),
    FUSED_MOE: Symbol("fused_moe.py", (Generation("0.1.5", None, _FUSED_MOE),)),
    ACTIVATION: Symbol("ops/enum.py", (Generation("0.1.5", None, ()),)),
    QUANTIZATION: Symbol("ops/enum.py", (Generation("0.1.5", None, ()),)),
}

FAST_EXPERTS = 512  # powers of two up to this have a softmax of one kernel; every other E takes the slow path
FUSED_SLOTS = (1, 2, 4, 8)
GROUPS = (1, 2, 4, 8)
MOST_GROUPED = 64  # columns that the grouped kernels can choose
MOST_COLUMNS = 127  # the sorting kernel packs the column into seven bits beside the token
MOST_TOKENS = 2**24 - 1  # and the token into 24
WAY_OUT = "load with kernels='reference' (--kernels reference) to do without AITER"


def find_symbol(module: ModuleType, name: str, /) -> Any:
    """Return what one entry of SYMBOLS stands for, or None; submodules have to be imported already."""
    value: Any = module
    for part in name.split(".")[1:]:
        value = getattr(value, part, None)
    return value


def missing_symbols(module: ModuleType, /) -> tuple[str, ...]:
    """List the entries of SYMBOLS that an imported AITER does not have."""
    return tuple(name for name in SYMBOLS if find_symbol(module, name) is None)


def is_fast(num_experts: int, /) -> bool:
    """Tell whether E takes the fast path of ``topk_softmax``."""
    return 1 <= num_experts <= FAST_EXPERTS and num_experts & (num_experts - 1) == 0


def reads_shuffled(record: AiterRecord, /) -> bool:
    """Tell whether ``fused_moe`` looks for the layout of its weights; until 0.1.10 it took all to be shuffled.

    The form of seven arguments came after that, and unlike a version it cannot be wrong.
    """
    return record.topk_arity == 7


def topk_softmax_(
    module: ModuleType,
    record: AiterRecord,
    weights_TK: Tensor,
    experts_TK: Tensor,
    logits_TE: Tensor,
    /,
    *,
    renormalize: bool,
    slots: int = 0,
) -> None:
    """Write the K most probable experts of each row, and with ``slots`` the sigmoids of its last S logits.

    ``p = softmax(logits[:, :E])`` in float32; equal logits go to the lowest id. Shared columns are not renormalised.
    Nothing else is written: no ids of shared columns, no columns behind K + S.

    Args:
        module: AITER.
        record: the same installation.
        weights_TK: out, float32 [T, at least K + S]; exactly K columns where AITER is older than 0.1.12.
        experts_TK: out, int32 [T, K].
        logits_TE: float32, bfloat16 or float16 [T, E + S].
        renormalize: divide the routed weights by their sum.
        slots: S; not 0 calls the form of seven arguments.
    """
    tokens, top_k = experts_TK.shape
    num_experts = logits_TE.shape[1] - slots
    _check_logits(logits_TE, tokens)
    _check_outputs(weights_TK, experts_TK, tokens, columns=top_k + slots, num_experts=num_experts)
    fast = is_fast(num_experts)
    if slots and (record.topk_arity != 7 or slots not in FUSED_SLOTS):
        raise ValueError(f"{slots} shared slots need topk_softmax of 7 arguments and to be one of 1, 2, 4, 8")
    if not (record.gating_stride_safe if fast else record.slow_path_stride_safe):
        _check_adjacent("logits", logits_TE, num_experts)
    if record.topk_arity != 7 or not (fast or record.slow_path_stride_safe):
        _check_adjacent("weights", weights_TK, top_k)
        _check_adjacent("experts", experts_TK, top_k)
    if tokens == 0:
        return
    scratch_N = torch.empty(tokens * top_k, dtype=torch.int32, device=logits_TE.device)
    arguments = (weights_TK, experts_TK, scratch_N, logits_TE, renormalize)
    _launch(module, TOPK_SOFTMAX, *arguments, *((slots, "sigmoid") if slots else ()))


def grouped_topk_(
    module: ModuleType,
    weights_TK: Tensor,
    experts_TK: Tensor,
    logits_TE: Tensor,
    bias_E: Tensor | None,
    /,
    *,
    groups: int,
    groups_kept: int,
    softmax: bool,
    renormalize: bool,
) -> None:
    """Write the K best experts of the best groups of each row.

    With a bias: scores are sigmoids, chosen with the bias, groups scored by the sum of their two best, weights without
    the bias. Without: groups scored by their best. The factor of the kernels is left at 1: the one function that
    scales weights is ``weigh_chosen``, and AITER's own choice of kernel by T loses the factor for many tokens.

    Args:
        module: AITER.
        weights_TK: out, float32 [T, K].
        experts_TK: out, int32 [T, K].
        logits_TE: float32, bfloat16 or float16 [T, E], rows adjacent.
        bias_E: of the dtype of the logits, as the kernel takes it for that; or None.
        groups: G, one of 1, 2, 4, 8.
        groups_kept: 1..G.
        softmax: scores without a bias are softmax instead of sigmoid.
        renormalize: divide the weights by their sum.
    """
    tokens, top_k = experts_TK.shape
    num_experts = logits_TE.shape[1]
    _check_logits(logits_TE, tokens)
    _check_outputs(weights_TK, experts_TK, tokens, columns=top_k, num_experts=num_experts)
    for name, tensor, columns in (
        ("logits", logits_TE, num_experts),
        ("weights", weights_TK, top_k),
        ("experts", experts_TK, top_k),
    ):
        _check_adjacent(name, tensor, columns)
    if groups not in GROUPS or num_experts % groups or not 1 <= groups_kept <= groups or top_k > MOST_GROUPED:
        raise ValueError(
            f"groups={groups} must be 1, 2, 4 or 8 and divide {num_experts} experts, "
            f"groups_kept={groups_kept} be in 1..groups and top_k={top_k} at most {MOST_GROUPED}"
        )
    if bias_E is not None and (
        bias_E.dtype != logits_TE.dtype or bias_E.shape != (num_experts,) or not bias_E.is_contiguous()
    ):
        raise ValueError(
            f"bias must be contiguous {logits_TE.dtype} [{num_experts}] like the logits, "
            f"got {bias_E.dtype} {list(bias_E.shape)}; upcast the logits rather than rounding the bias"
        )
    if tokens == 0:
        return
    outputs, rule = (weights_TK, experts_TK), (groups, groups_kept, renormalize)
    if bias_E is None:
        _launch(module, GROUPED_TOPK, logits_TE, *outputs, *rule, softmax, 1.0)
    else:
        _launch(module, BIASED_GROUPED_TOPK, logits_TE, bias_E, *outputs, *rule, 1.0)


def fused_experts(
    module: ModuleType,
    record: AiterRecord,
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w_gate_up_EPD: Tensor,
    w_down_EDF: Tensor,
    /,
    *,
    shuffled: bool,
) -> Tensor:
    """Compute the weighted sum of expert outputs: silu(gate) * up, then down, as ``compute_experts_grouped``.

    The number of experts is that of the weights' rows, shared slots included. AITER reads the layout from an attribute
    of the tensors, which views and parameters lose; it is set here on aliases, so the caller's tensors keep theirs.

    Args:
        module: AITER.
        record: the same installation.
        x_TD: bfloat16 or float16.
        weights_TK: float32.
        experts_TK: int32, in 0..E+S-1.
        w_gate_up_EPD: of the dtype of x, gate rows then up rows.
        w_down_EDF: of the dtype of x.
        shuffled: both went through ``shuffle_weights``.

    Returns:
        A tensor like x.
    """
    _check_experts(x_TD, weights_TK, experts_TK, w_gate_up_EPD, w_down_EDF)
    if not shuffled and not reads_shuffled(record):
        raise ValueError(f"AITER {record.version} takes all weights to be shuffled; pass them through shuffle_weights")
    if x_TD.shape[0] == 0:
        return torch.empty_like(x_TD)
    stacks = [w_gate_up_EPD.detach(), w_down_EDF.detach()]
    for stack in stacks:
        stack.is_shuffled = shuffled  # type: ignore[attr-defined]
    # Members, not numbers: AITER reads their value. No expert mask: every id is a row of the stacks.
    formula = (_resolve(module, ACTIVATION).Silu, _resolve(module, QUANTIZATION).No)
    y_TD = _launch(module, FUSED_MOE, x_TD, *stacks, weights_TK, experts_TK, None, *formula)
    if not isinstance(y_TD, Tensor) or y_TD.shape != x_TD.shape or y_TD.dtype != x_TD.dtype:
        got = f"{y_TD.dtype} {list(y_TD.shape)}" if isinstance(y_TD, Tensor) else type(y_TD).__name__
        raise RuntimeError(f"AITER's fused_moe must return {x_TD.dtype} {list(x_TD.shape)}, got {got}; {WAY_OUT}")
    return y_TD


def shuffle_weights(w_ENK: Tensor, /) -> Tensor:
    """Reorder each matrix into AITER's (16, 16) layout: tiles of 16 rows by 32 columns, 16 bytes of a row at a time.

    Args:
        w_ENK: a stack of matrices; N a multiple of 16 and K of 32.

    Returns:
        A new tensor like w.
    """
    *_, rows, columns = w_ENK.shape
    if rows % 16 or columns % 32:
        raise ValueError(f"AITER's layout takes multiples of 16 rows and 32 columns, got {rows} x {columns}; pad first")
    piece = 16 // w_ENK.element_size()
    tiles = w_ENK.reshape(-1, rows // 16, 16, columns // 32, 32 // piece, piece)
    return tiles.permute(0, 1, 3, 4, 2, 5).reshape(w_ENK.shape).contiguous()


def padded_width(width: int, /) -> int:
    """Give the least width at which AITER's unquantised products run: a multiple of 64 up to 192, else of 128."""
    step = 64 if width <= 192 else 128
    return -(-width // step) * step


def pad_experts(w_gate_up_EPD: Tensor, w_down_EDF: Tensor, /) -> tuple[Tensor, Tensor]:
    """Widen the experts to ``padded_width`` by zeros: rows behind gate and behind up, and columns of down.

    AITER's own padding argument is ignored on the unquantised path, and what lies there would be read.
    """
    width = w_down_EDF.shape[2]
    extra = padded_width(width) - width
    if extra == 0:
        return w_gate_up_EPD, w_down_EDF
    halves_EGFD = F.pad(w_gate_up_EPD.unflatten(1, (2, width)), (0, 0, 0, extra))
    return halves_EGFD.flatten(1, 2), F.pad(w_down_EDF, (0, extra))


def prepare_experts(w_gate_up_EPD: Tensor, w_down_EDF: Tensor, /) -> tuple[Tensor, Tensor]:
    """Pad and shuffle both stacks, once at loading."""
    w_gate_up_EPD, w_down_EDF = pad_experts(w_gate_up_EPD, w_down_EDF)
    return shuffle_weights(w_gate_up_EPD), shuffle_weights(w_down_EDF)


def _resolve(module: ModuleType, name: str) -> Any:
    value = find_symbol(module, name)
    if value is None:
        raise RuntimeError(f"this AITER has no {name}, which its {SYMBOLS[name].file} should define; {WAY_OUT}")
    return value


def _launch(module: ModuleType, name: str, /, *arguments: Any) -> Any:
    """Call a kernel once; whatever it raises, also the SystemExit of a failed build, ends with the way out."""
    function = _resolve(module, name)
    try:
        return function(*arguments)
    except (Exception, SystemExit) as fault:
        raise RuntimeError(f"{name} failed ({type(fault).__name__}: {fault}); {WAY_OUT}") from fault


def _check_logits(logits_TE: Tensor, tokens: int) -> None:
    if logits_TE.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"logits must be float32, bfloat16 or float16, got {logits_TE.dtype}")
    if logits_TE.dim() != 2 or logits_TE.shape[0] != tokens:
        raise ValueError(f"logits must be [{tokens}, experts] like the ids, got {list(logits_TE.shape)}")
    if logits_TE.shape[1] > 1 and logits_TE.stride(1) != 1:
        raise ValueError(f"a row of logits must be contiguous, got stride {logits_TE.stride()}; call contiguous()")


def _check_outputs(weights_TK: Tensor, experts_TK: Tensor, tokens: int, /, *, columns: int, num_experts: int) -> None:
    top_k = experts_TK.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} must be in 1..num_experts={num_experts}")
    if weights_TK.dtype != torch.float32 or experts_TK.dtype != torch.int32:
        raise ValueError(f"outputs must be float32 weights and int32 ids, got {weights_TK.dtype}, {experts_TK.dtype}")
    if weights_TK.dim() != 2 or weights_TK.shape[0] != tokens or weights_TK.shape[1] < columns:
        raise ValueError(f"weights must be [{tokens}, at least {columns}], got {list(weights_TK.shape)}")
    for name, tensor in (("weights", weights_TK), ("ids", experts_TK)):
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(f"a row of {name} must be contiguous, got stride {tensor.stride()}")


def _check_adjacent(name: str, tensor: Tensor, columns: int) -> None:
    if tensor.shape[0] > 1 and tensor.stride(0) != columns:
        raise ValueError(
            f"this AITER takes {name} in adjacent rows of {columns}, got row stride {tensor.stride(0)}; "
            "make them contiguous"
        )


def _check_experts(
    x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, w_gate_up_EPD: Tensor, w_down_EDF: Tensor
) -> None:
    tokens, hidden = x_TD.shape
    stacked, _, width = w_down_EDF.shape
    if x_TD.dtype not in (torch.bfloat16, torch.float16) or {w_gate_up_EPD.dtype, w_down_EDF.dtype} != {x_TD.dtype}:
        dtypes = f"{x_TD.dtype}, {w_gate_up_EPD.dtype}, {w_down_EDF.dtype}"
        raise ValueError(f"rows and expert weights must all be bfloat16 or all float16, got {dtypes}")
    if weights_TK.dtype != torch.float32 or experts_TK.dtype != torch.int32:
        raise ValueError(f"routing must be float32 weights and int32 ids, got {weights_TK.dtype}, {experts_TK.dtype}")
    if weights_TK.shape != experts_TK.shape or weights_TK.shape[0] != tokens or weights_TK.shape[1] > MOST_COLUMNS:
        shapes = f"{list(weights_TK.shape)}, {list(experts_TK.shape)}"
        raise ValueError(f"weights and ids must be [{tokens}, at most {MOST_COLUMNS}], got {shapes}")
    if w_gate_up_EPD.shape != (stacked, 2 * width, hidden) or w_down_EDF.shape[1] != hidden:
        shapes = f"{list(w_gate_up_EPD.shape)}, {list(w_down_EDF.shape)}"
        raise ValueError(f"expert weights must be [E, 2F, {hidden}] and [E, {hidden}, F], got {shapes}")
    if width != padded_width(width) or hidden % 32:
        raise ValueError(
            f"expert width {width} must be {padded_width(width)} (see pad_experts) and hidden {hidden} a multiple of 32"
        )
    if tokens > MOST_TOKENS:
        raise ValueError(f"AITER takes at most {MOST_TOKENS} tokens at once, got {tokens}; prefill in chunks")
    for tensor in (x_TD, weights_TK, experts_TK, w_gate_up_EPD, w_down_EDF):
        if not tensor.is_contiguous():
            raise ValueError(f"AITER takes contiguous tensors, got {list(tensor.shape)} of strides {tensor.stride()}")
