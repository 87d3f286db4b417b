"""What the tests of Gated DeltaNet share: sizes, and float64 loops over tokens and heads."""

import math

import torch

B, T, G, H, K, V, W = 2, 5, 3, 6, 8, 10, 4
N = 2 * G * K + H * V  # mixed channels
MODES = ["eager", "aot_eager", "inductor"]
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
TOLERANCES = {F32: 1e-5, BF16: 4e-2, F16: 4e-3}


def in_mode(fn, mode):
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=mode)


def assert_near(actual, expected, tolerance):
    assert actual.isfinite().all()
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def silu(x):
    return x / (1 + math.exp(-x)) if x > -700 else 0.0


def conv_by_loop(x, window, weight):
    """Sum the taps channel by channel in Python floats."""
    taps, history = weight.shape[0], torch.cat((window, x), 1).double().tolist()
    out = torch.zeros(x.shape, dtype=F64)
    for b, t, n in ((b, t, n) for b in range(x.shape[0]) for t in range(x.shape[1]) for n in range(x.shape[2])):
        total = math.fsum(weight[w, n].item() * history[b][t + w][n] for w in range(taps))
        out[b, t, n] = silu(total)
    return out


def recur(q, k, v, g, beta, state):
    """Run the recurrence in float64, one head of one sequence after the other."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    state, out = state.double().clone(), torch.zeros(v.shape, dtype=F64)
    for b, h in ((b, h) for b in range(v.shape[0]) for h in range(v.shape[2])):
        memory = state[b, h]
        for t in range(v.shape[1]):
            memory = memory * math.exp(g[b, t, h])
            read = (memory * k[b, t, h][:, None]).sum(0)
            memory = memory + k[b, t, h][:, None] * ((v[b, t, h] - read) * beta[b, t, h])[None, :]
            out[b, t, h] = (memory * q[b, t, h][:, None]).sum(0)
        state[b, h] = memory
    return out, state
