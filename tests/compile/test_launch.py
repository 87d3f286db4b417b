"""What launches share on the host."""

import pytest

pytest.importorskip("triton", reason="triton is not installed; its functions are the reference")

import triton

from fmoe.compile.kernels.launch import cdiv, next_power_of_2


@pytest.mark.parametrize("n", [1, 2, 3, 64, 65, 127, 128, 129, 2**31 - 1, 2**31])
def test_sizes_are_those_of_triton(n):
    assert next_power_of_2(n) == triton.next_power_of_2(n)
    assert [cdiv(n, d) for d in (1, 2, 127, 128)] == [triton.cdiv(n, d) for d in (1, 2, 127, 128)]


def test_nothing_gets_no_program_and_a_block_of_one():
    assert (cdiv(0, 128), next_power_of_2(0)) == (0, 1)
