"""What the tests of next-token choice share: settings, and loops over Python numbers."""

import math

import torch

from fmoe.functional.sampling import count_candidates

INF = math.inf
MODES = ["eager", "aot_eager", "inductor"]
FAST_MODES = MODES[:2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# the slow compiler runs once
DTYPES_AND_MODES = [*((dtype, mode) for dtype in DTYPES for mode in FAST_MODES), (torch.bfloat16, "inductor")]
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 3},
    {"temperature": 1.7, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 0.5, "top_k": 100, "top_p": 0.95},
]


def in_mode(fn, mode):
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=mode)


def candidates(settings):
    return count_candidates(top_k=settings.get("top_k", 0), top_p=settings.get("top_p", 1.0))


def filters(params):
    return params.temperature_B, params.top_k_B, params.top_p_B, params.min_p_B


def probabilities_by_loop(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Filter one row of Python floats; the dropped tokens get probability 0."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    if top_k:
        order = order[:top_k]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        mass += weights[i] / total
        if mass >= top_p:
            break
    if top_p == 1:
        kept = order
    kept = [i for i in kept if weights[i] >= min_p]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]
