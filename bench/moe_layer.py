"""Our MoE layer in the form that a comparison with peers loads: FUNCTION(w, s) gives f(x [M, D]) -> y [M, D].

``planned`` runs what a model on this machine would: tuned settings, else those that come with fmoe, else the rule.
``by_rule`` leaves both tables aside. w holds the plain weights of one layer (gate, w13, w2; s13, s2 and sg of a shared
expert), s its sizes (D, E, K, Fi, S, gated, renorm).
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Another script may load this file by its path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from fmoe.compile.ops import compute_moe_op, encode_plans, moe_sizes
from fmoe.compile.plan import moe_key
from fmoe.functional.mlp import MLPParams
from fmoe.functional.moe import MoEParams, SharedParams
from fmoe.functional.routing import RouterConfig
from fmoe.planning import Tune, plan_layers

Layer = Callable[[Tensor], Tensor]

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3next": {"D": 2048, "E": 512, "K": 10, "Fi": 512, "S": 512, "gated": True, "renorm": True},
    "qwen3": {"D": 2048, "E": 128, "K": 8, "Fi": 768, "S": 0, "gated": False, "renorm": True},
    "mixtral": {"D": 4096, "E": 8, "K": 2, "Fi": 14336, "S": 0, "gated": False, "renorm": True},
    "dsv2lite": {"D": 2048, "E": 64, "K": 6, "Fi": 1408, "S": 2816, "gated": False, "renorm": False},
}


def draw_weights(s: Mapping[str, Any], seed: int, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Draw one layer whose router spreads the tokens nearly evenly."""
    rng = torch.Generator(device=device).manual_seed(seed)

    def draw(*sizes: int, fan: float) -> Tensor:
        return (torch.randn(*sizes, generator=rng, device=device) * fan**-0.5).to(dtype)

    hidden, experts, width, shared = s["D"], s["E"], s["Fi"], s["S"]
    w = {
        "gate": draw(experts, hidden, fan=hidden / 4),
        "w13": draw(experts, 2 * width, hidden, fan=hidden),
        "w2": draw(experts, hidden, width, fan=width),
    }
    if shared:
        w |= {"s13": draw(2 * shared, hidden, fan=hidden), "s2": draw(hidden, shared, fan=shared)}
    return w | ({"sg": draw(1, hidden, fan=hidden)} if s["gated"] else {})


def router_config(s: Mapping[str, Any]) -> RouterConfig:
    """Read the routing rule: softmax, renormalised or not."""
    return RouterConfig(s["E"], s["K"], renormalize=s["renorm"])


def separate_params(w: Mapping[str, Tensor], s: Mapping[str, Any]) -> MoEParams:
    """Take the weights as they are, the shared expert apart."""
    shared = SharedParams(MLPParams(w["s13"], w["s2"]), w.get("sg")) if s["S"] else None
    return MoEParams(w["gate"], w["w13"], w["w2"], None, shared)


def fused_params(w: Mapping[str, Tensor], s: Mapping[str, Any]) -> MoEParams:
    """Stack the shared expert behind the routed ones, in slots of their width."""
    if not s["S"]:
        return separate_params(w, s)
    width, slots = s["Fi"], s["S"] // s["Fi"]
    gate, up = w["s13"].chunk(2)
    gate_up = torch.cat((gate.view(slots, width, -1), up.view(slots, width, -1)), 1)
    down = w["s2"].view(s["D"], slots, width).transpose(0, 1)
    router = torch.cat((w["gate"], w["sg"])) if "sg" in w else w["gate"]
    return MoEParams(router, torch.cat((w["w13"], gate_up)), torch.cat((w["w2"], down)), None, None)


def make_layer(w: Mapping[str, Tensor], s: Mapping[str, Any], tune: Tune) -> Layer:
    """Prepare one layer as ``fmoe.load`` does."""
    params, config = fused_params(w, s), router_config(s)
    key = moe_key(*moe_sizes(params.w_router_ED, params.w_down_EDF, config), params.w_down_EDF.dtype)
    plans = plan_layers([key], params.w_down_EDF.device, requested="auto", tune=tune)
    return partial(_run, params=params, config=config, plans=encode_plans(plans, "moe"))


def _run(x_TD: Tensor, *, params: MoEParams, config: RouterConfig, plans: Any) -> Tensor:
    return compute_moe_op(x_TD, params, config, plans=plans)


def planned(w: Mapping[str, Tensor], s: Mapping[str, Any]) -> Layer:
    """One layer by the tables."""
    return make_layer(w, s, "cached")


def by_rule(w: Mapping[str, Tensor], s: Mapping[str, Any]) -> Layer:
    """One layer by the rule."""
    return make_layer(w, s, "off")
