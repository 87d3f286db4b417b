"""Which implementations are chosen where."""

import torch

from fmoe.compile.ops import compute_experts_cpu, compute_experts_few, compute_experts_op
from fmoe.compile.select import choose, delta_prefill_op
from fmoe.functional import Kernels


def test_a_cpu_without_compiling_runs_plain_functions():
    assert choose(torch.device("cpu"), compiled=False) == Kernels(
        compute_experts=compute_experts_cpu, compute_experts_decode=compute_experts_cpu
    )


def test_a_gpu_without_compiling_runs_the_references():
    assert choose(torch.device("cuda", 0), compiled=False) == Kernels()


def test_compiled_graphs_get_ops_where_they_must_not_look_inside():
    for device in ("cpu", "cuda"):
        kernels = choose(torch.device(device), compiled=True)
        assert kernels == Kernels(
            compute_experts=compute_experts_op,
            compute_experts_decode=compute_experts_few,
            delta_prefill=delta_prefill_op,
        )
