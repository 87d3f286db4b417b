"""What the DeltaNet kernels of one and of a few tokens share."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc, assignment"
# ruff: noqa: RUF005

import triton
import triton.language as tl


@triton.jit
def add_pair(a0, a1, b0, b1):
    """Add two sums side by side."""
    return a0 + b0, a1 + b1


@triton.jit
def add_triple(a0, a1, a2, b0, b1, b2):
    """Add three sums side by side."""
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def silu(v):
    """v sigmoid(v)."""
    return v / (1.0 + tl.exp(-v))


@triton.jit
def softplus(v):
    """log(1 + exp(v)); the quotient keeps what 1 + exp(v) rounds away."""
    e = tl.exp(tl.minimum(v, 20.0))
    u = 1.0 + e
    exact = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(v > 20.0, v, exact)


@triton.jit
def load_rows(p, at, inside, COUNT: tl.constexpr, N: tl.constexpr):
    """Load the first rows of [.., N] at the channels ``at``, a tuple."""
    rows = ()
    for w in tl.static_range(COUNT):
        rows += (tl.load(p + w * N + at, mask=inside, other=0.0),)
    return rows


@triton.jit
def move_on(xs, x, W: tl.constexpr):
    """Drop the oldest of W inputs."""
    moved = ()
    for w in tl.static_range(1, W):
        moved += (xs[w],)
    return moved + (x,)
