"""What a machine can run, as plain values: they are compared, printed and kept, and hold no module or function."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether one thing can run here; if not, ``reason`` says why."""

    can_run: bool
    reason: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class AiterRecord:
    """What is known of AMD's AITER on this machine.

    present: it was found, read and passed its self-test; if not, ``reason`` says why.
    version: of the installation, "" where unknown.
    arch: the GPU it was tested on, as gfx942.
    topk_arity: arguments of ``topk_softmax``, 7 with shared experts, 5 without, 0 where unknown.
    gating_stride_safe: rows of the logits may lie apart, for a number of experts that is a power of two up to 512.
    slow_path_stride_safe: the same for every other number of experts, and for wide outputs.
    symbols: the names found, as ``aiter.fused_moe.fused_moe``.
    fused_moe_params: parameters of that function.
    """

    present: bool
    reason: str = ""
    version: str = ""
    arch: str = ""
    topk_arity: int = 0
    gating_stride_safe: bool = False
    slow_path_stride_safe: bool = False
    symbols: tuple[str, ...] = ()
    fused_moe_params: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """One device and what can run on it.

    arch: gfx942 (AMD), sm_90 (NVIDIA), or the processor's.
    units: compute units, multiprocessors or processors.
    torch: the version.
    """

    device_type: str
    device_name: str
    arch: str
    units: int
    torch: str
    triton: Availability
    aiter: AiterRecord
    grouped_mm: Availability
