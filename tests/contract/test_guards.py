"""What could corrupt memory raises before any kernel is called."""

import pytest
import torch

from fmoe.compile.aiter_kernels import fused_experts, grouped_topk_, topk_softmax_

T, EXPERTS, TOP_K = 5, 8, 2


def topk_arguments(**changes):
    arguments = {
        "weights": torch.zeros(T, TOP_K + 1),
        "ids": torch.zeros(T, TOP_K, dtype=torch.int32),
        "logits": torch.zeros(T, EXPERTS + 1),
        "slots": 1,
    }
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": torch.zeros(T, 2, dtype=torch.int64)}, "int32 ids, got torch.float32, torch.int64"),
        ({"weights": torch.zeros(T, 3, dtype=torch.bfloat16)}, "float32 weights and int32 ids, got torch.bfloat16"),
        ({"logits": torch.zeros(T, 11), "slots": 3, "weights": torch.zeros(T, 5)}, "3 shared slots need"),
        ({"ids": torch.zeros(T, 9, dtype=torch.int32), "weights": torch.zeros(T, 10)}, "top_k=9 must be in 1..num_exp"),
        ({"ids": torch.zeros(T, 0, dtype=torch.int32)}, "top_k=0 must be in 1..num_experts=8"),
        ({"weights": torch.zeros(T, 2)}, r"weights must be \[5, at least 3\], got \[5, 2\]"),
        ({"weights": torch.zeros(4, 3)}, r"weights must be \[5, at least 3\], got \[4, 3\]"),
        ({"weights": torch.zeros(3, T).T}, r"a row of weights must be contiguous, got stride \(1, 5\)"),
        ({"ids": torch.zeros(2, T, dtype=torch.int32).T}, r"a row of ids must be contiguous, got stride \(1, 5\)"),
        ({"logits": torch.zeros(9, T).T}, r"a row of logits must be contiguous, got stride \(1, 5\)"),
        ({"logits": torch.zeros(4, 9)}, r"logits must be \[5, experts\] like the ids, got \[4, 9\]"),
        ({"logits": torch.zeros(T, 9, dtype=torch.float64)}, "float32, bfloat16 or float16, got torch.float64"),
    ],
)
def test_topk(changes, message, make_backend):
    backend, before = make_backend(), len(make_backend().calls)
    weights, ids, logits, slots = topk_arguments(**changes).values()
    with pytest.raises(ValueError, match=message):
        topk_softmax_(backend.module, backend.record, weights, ids, logits, renormalize=False, slots=slots)
    assert len(backend.calls) == before
    assert not weights.any()


def test_shared_slots_need_seven_arguments(make_backend):
    backend = make_backend("v0.1.11")
    weights, ids, logits, slots = topk_arguments().values()
    with pytest.raises(ValueError, match="1 shared slots need topk_softmax of 7 arguments"):
        topk_softmax_(backend.module, backend.record, weights, ids, logits, renormalize=False, slots=slots)


@pytest.mark.parametrize("version", ["v0.1.9", "v0.1.20"])
def test_a_single_row_may_have_any_stride(version, make_backend):
    backend = make_backend(version)
    weights, ids = torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int32)
    logits = torch.arange(20.0).view(1, 20)[:, :8]
    topk_softmax_(backend.module, backend.record, weights, ids, logits, renormalize=True)
    assert ids.tolist() == [[7, 6]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 3}, "groups=3 must be 1, 2, 4 or 8 and divide 8 experts"),
        ({"groups_kept": 5}, "groups_kept=5 be in 1..groups"),
        ({"weights": torch.zeros(T, 3)[:, :2]}, "takes weights in adjacent rows of 2, got row stride 3"),
        ({"ids": torch.zeros(T, 3, dtype=torch.int32)[:, :2]}, "takes experts in adjacent rows of 2, got row stride 3"),
        ({"logits": torch.zeros(T, 9)[:, :8]}, "takes logits in adjacent rows of 8, got row stride 9"),
        ({"bias": torch.zeros(8, dtype=torch.bfloat16)}, r"bias must be contiguous torch\.float32 \[8\]"),
        ({"bias": torch.zeros(9)}, r"bias must be contiguous torch\.float32 \[8\] .* got torch\.float32 \[9\]"),
        ({"bias": torch.zeros(16)[::2]}, "bias must be contiguous"),
        ({"ids": torch.zeros(T, 2)}, "float32 weights and int32 ids"),
    ],
)
def test_grouped(changes, message, make_backend):
    backend, before = make_backend(), len(make_backend().calls)
    arguments = {
        "weights": torch.zeros(T, 2),
        "ids": torch.zeros(T, 2, dtype=torch.int32),
        "logits": torch.zeros(T, 8),
        "bias": torch.zeros(8),
        "groups": 4,
        "groups_kept": 2,
    } | changes
    tensors = [arguments.pop(name) for name in ("weights", "ids", "logits", "bias")]
    with pytest.raises(ValueError, match=message):
        grouped_topk_(backend.module, *tensors, softmax=False, renormalize=True, **arguments)
    assert len(backend.calls) == before


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(T, 32)}, "all be bfloat16 or all float16, got torch.float32, torch.bfloat16"),
        ({"w_down": bf16(4, 32, 64).half()}, "all be bfloat16 or all float16"),
        ({"weights": bf16(T, 2)}, "float32 weights and int32 ids, got torch.bfloat16"),
        (
            {"ids": torch.zeros(T, 2, dtype=torch.int64)},
            "float32 weights and int32 ids, got torch.float32, torch.int64",
        ),
        ({"weights": torch.zeros(T, 3)}, r"weights and ids must be \[5, at most 127\], got \[5, 3\], \[5, 2\]"),
        (
            {"weights": torch.zeros(T, 128), "ids": torch.zeros(T, 128, dtype=torch.int32)},
            r"must be \[5, at most 127\], got \[5, 128\]",
        ),
        ({"w_gate_up": bf16(4, 64, 32)}, r"must be \[E, 2F, 32\] and \[E, 32, F\], got \[4, 64, 32\]"),
        ({"w_gate_up": bf16(3, 128, 32)}, r"must be \[E, 2F, 32\]"),
        ({"w_gate_up": bf16(4, 96, 32), "w_down": bf16(4, 32, 48)}, "expert width 48 must be 64"),
        (
            {"x": bf16(T, 24), "w_gate_up": bf16(4, 128, 24), "w_down": bf16(4, 24, 64)},
            "hidden 24 a multiple of 32",
        ),
        ({"w_down": bf16(4, 64, 32).transpose(1, 2)}, r"takes contiguous tensors, got \[4, 32, 64\] of strides"),
        ({"x": bf16(T, 64)[:, ::2]}, r"takes contiguous tensors, got \[5, 32\]"),
    ],
)
def test_experts(changes, message, make_backend):
    backend, before = make_backend(), len(make_backend().calls)
    arguments = {
        "x": bf16(T, 32),
        "weights": torch.zeros(T, 2),
        "ids": torch.zeros(T, 2, dtype=torch.int32),
        "w_gate_up": bf16(4, 128, 32),
        "w_down": bf16(4, 32, 64),
    } | changes
    with pytest.raises(ValueError, match=message):
        fused_experts(backend.module, backend.record, *arguments.values(), shuffled=True)
    assert len(backend.calls) == before


def test_more_tokens_than_24_bits_hold(make_backend):
    tokens = 2**24
    with pytest.raises(ValueError, match="at most 16777215 tokens at once, got 16777216; prefill in chunks"):
        fused_experts(
            make_backend().module,
            make_backend().record,
            bf16(1, 32).expand(tokens, 32),
            torch.zeros(1, 2).expand(tokens, 2),
            torch.zeros(1, 2, dtype=torch.int32).expand(tokens, 2),
            bf16(4, 128, 32),
            bf16(4, 32, 64),
            shuffled=True,
        )
