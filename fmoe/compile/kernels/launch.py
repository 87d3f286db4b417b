"""What launches share: sizes on the host; and programmatic dependent launch, kernels that start before the one in front
of them is over, on CUDA devices of capability 9.0 and later, where PDL is set.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

from typing import Any

import triton
import triton.language as tl


def cdiv(a: int, b: int) -> int:
    """Divide and round up. Triton's own function takes 6 us on the host, as long as a small kernel on the device."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Give the least power of two that is at least n, 1 for n <= 1; as ``cdiv``, without Triton's cost."""
    return 1 << max(n - 1, 0).bit_length()


def launch_options(pdl: bool) -> dict[str, Any]:
    """Name the launch options of one kernel; the compiler of other devices does not know this one."""
    return {"launch_pdl": True} if pdl else {}


LINE = 128  # bytes that one prefetch brings


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for the kernel before; then let the kernel after start, whose own wait covers this one.

    Before its own wait, that one may read what was written before this one: all of that is there by now. Nobody may
    write before a wait what another launch of a step reads or writes.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the kernel after start at once, to ask for its weights; it may read nothing else before its own wait."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_alone(PDL: tl.constexpr):
    """Wait for the kernel before."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_ahead(w, o_r, first, D: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, LINE: tl.constexpr):
    """Ask for the first AHEAD steps of the rows' weights without waiting for them."""
    step: tl.constexpr = LINE * 8 // w.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = (AHEAD * BK + step - 1) // step
    o_k = tl.minimum(first + tl.arange(0, lines) * step, D - 1)
    at = (w + o_r[:, None] * D + o_k[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )
