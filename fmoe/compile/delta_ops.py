"""Ops of one decode step between the projections: DeltaNet, and residual with norm. They exist where Triton does.

``delta_decode_`` and ``delta_verify_`` write the cache, and their schemas say so. The wrappers have the signatures of
the functions in fmoe/functional that they replace.

Letters: B sequences, T tokens, D hidden, W taps, N channels, G key heads, H value heads, K key and V value channels.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from fmoe.functional.cache import DeltaCache, PendingDelta
from fmoe.functional.deltanet import DeltaConfig, DeltaParams
from fmoe.functional.norm import add_rms_norm

from .delta_settings import (
    DeltaSettings,
    VerifySettings,
    default_delta_settings,
    default_verify_settings,
    delta_settings_from_ints,
    delta_settings_to_ints,
    verify_settings_from_ints,
    verify_settings_to_ints,
)
from .device import target_of

MOST_CHANNELS = 16384  # of a row that one program normalises
LIBRARY = torch.library.Library("fmoe", "FRAGMENT")

if find_spec("triton"):
    from .kernels.add_norm import add_rms_norm_rows, rms_norm_rows
    from .kernels.delta_decode import decode_delta_
    from .kernels.delta_verify import verify_delta_

    LIBRARY.define(
        "delta_decode_(Tensor projected, Tensor(a!) window, Tensor(b!) state, Tensor w_conv, Tensor decay, "
        "Tensor dt_bias, Tensor norm, Tensor(c!)? arrivals, int key_heads, float eps, int[] settings) -> Tensor"
    )
    LIBRARY.define(
        "delta_verify_(Tensor projected, Tensor(a!) window, Tensor(b!) state, Tensor(c!) inputs, Tensor(d!) k, "
        "Tensor(e!) written, Tensor(f!) g, Tensor w_conv, Tensor decay, Tensor dt_bias, Tensor norm, Tensor kept, "
        "float eps, int[] settings) -> Tensor"
    )
    LIBRARY.define(
        "add_rms_norm(Tensor x, Tensor branch, Tensor weight, float eps, bool? pdl=None) -> (Tensor, Tensor)"
    )
    LIBRARY.define("rms_norm(Tensor x, Tensor weight, float eps, bool? pdl=None) -> Tensor")

    def _delta_decode_(
        projected: Tensor,
        window: Tensor,
        state: Tensor,
        w_conv: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        arrivals: Tensor | None,
        key_heads: int,
        eps: float,
        settings: list[int],
    ) -> Tensor:
        _, heads, key_size, value_size = state.shape
        config = DeltaConfig(key_heads, heads, key_size, value_size, w_conv.shape[0], eps)
        if settings:
            chosen = delta_settings_from_ints(settings)
        else:
            # here and not where the op is called: a graph of any batch must not ask how large this one is
            chosen = default_delta_settings(config, projected.shape[0], target=target_of(projected.device))
        return decode_delta_(
            projected, window, state, w_conv, decay, dt_bias, norm, config, chosen, arrivals_BG=arrivals
        )

    def _delta_decode_fake(projected: Tensor, window: Tensor, state: Tensor, *_: object) -> Tensor:
        return projected.new_empty(projected.shape[0], 1, state.shape[1] * state.shape[3])

    def _delta_verify_(
        projected: Tensor,
        window: Tensor,
        state: Tensor,
        inputs: Tensor,
        k: Tensor,
        written: Tensor,
        g: Tensor,
        w_conv: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        kept: Tensor,
        eps: float,
        settings: list[int],
    ) -> Tensor:
        _, heads, key_size, value_size = state.shape
        config = DeltaConfig(k.shape[2], heads, key_size, value_size, w_conv.shape[0], eps)
        if settings:
            chosen = verify_settings_from_ints(settings)
        else:
            chosen = default_verify_settings(config, target=target_of(projected.device))
        cache = PendingDelta(window, state, inputs, k, written, g)
        return verify_delta_(projected, cache, w_conv, decay, dt_bias, norm, kept, config, chosen)

    def _delta_verify_fake(projected: Tensor, window: Tensor, state: Tensor, *_: object) -> Tensor:
        return projected.new_empty(*projected.shape[:2], state.shape[1] * state.shape[3])

    def _launch_early(x: Tensor, pdl: bool | None) -> bool:
        return target_of(x.device) == "hopper" if pdl is None else pdl

    def _add_rms_norm(
        x: Tensor, branch: Tensor, weight: Tensor, eps: float, pdl: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm_rows(x, branch, weight, eps=eps, pdl=_launch_early(x, pdl))

    def _add_rms_norm_fake(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), x.new_empty(x.shape)

    def _rms_norm(x: Tensor, weight: Tensor, eps: float, pdl: bool | None = None) -> Tensor:
        return rms_norm_rows(x, weight, eps=eps, pdl=_launch_early(x, pdl))

    def _rms_norm_fake(x: Tensor, *_: object) -> Tensor:
        return x.new_empty(x.shape)

    LIBRARY.impl("delta_decode_", _delta_decode_, "CompositeExplicitAutograd")
    LIBRARY.impl("delta_verify_", _delta_verify_, "CompositeExplicitAutograd")
    LIBRARY.impl("add_rms_norm", _add_rms_norm, "CompositeExplicitAutograd")
    LIBRARY.impl("rms_norm", _rms_norm, "CompositeExplicitAutograd")
    torch.library.register_fake("fmoe::delta_decode_", _delta_decode_fake, lib=LIBRARY)
    torch.library.register_fake("fmoe::delta_verify_", _delta_verify_fake, lib=LIBRARY)
    torch.library.register_fake("fmoe::add_rms_norm", _add_rms_norm_fake, lib=LIBRARY)
    torch.library.register_fake("fmoe::rms_norm", _rms_norm_fake, lib=LIBRARY)


def delta_decode_op(
    projected_BTN: Tensor,
    cache: DeltaCache,
    params: DeltaParams,
    config: DeltaConfig,
    /,
    *,
    settings: DeltaSettings | None = None,
    arrivals_BG: Tensor | None = None,
) -> Tensor:
    """``delta_mix`` for one token of each sequence, in one launch that writes the cache.

    Args:
        projected_BTN: T = 1.
        cache: read and written.
        params: weights of the layer.
        config: sizes.
        settings: value heads and columns of a program; None takes the rule.
        arrivals_BG: int32 zeros, for settings that divide a key head's value heads.

    Returns:
        [B, 1, H * V], the dtype of the projection.
    """
    y_BTN: Tensor = torch.ops.fmoe.delta_decode_(
        projected_BTN,
        *cache,
        params.w_conv_WN,
        params.decay_H,
        params.dt_bias_H,
        params.norm_V,
        arrivals_BG,
        config.key_heads,
        config.eps,
        [] if settings is None else delta_settings_to_ints(settings),
    )
    return y_BTN


def delta_verify_op(
    projected_BTN: Tensor,
    cache: PendingDelta,
    params: DeltaParams,
    config: DeltaConfig,
    kept_B: Tensor,
    /,
    *,
    settings: VerifySettings | None = None,
) -> Tensor:
    """``delta_verify`` in one launch that writes the cache, where ``why_not_verify`` has nothing against it.

    Args:
        projected_BTN: of the newest token of each sequence and its drafts.
        cache: of as many tokens, read and written; the state is float32.
        params: weights of the layer.
        config: sizes.
        kept_B: int64, how many of the last step's tokens stay.
        settings: value heads of a program; None takes the rule.

    Returns:
        [B, T, H * V], the dtype of the projection.
    """
    y_BTN: Tensor = torch.ops.fmoe.delta_verify_(
        projected_BTN,
        *cache,
        params.w_conv_WN,
        params.decay_H,
        params.dt_bias_H,
        params.norm_V,
        kept_B,
        config.eps,
        [] if settings is None else verify_settings_to_ints(settings),
    )
    return y_BTN


def add_rms_norm_op(
    x_D: Tensor, branch_D: Tensor, weight_D: Tensor, /, *, eps: float, pdl: bool | None = None
) -> tuple[Tensor, Tensor]:
    """``add_rms_norm`` in one launch; None chooses by rule whether it is a dependent one."""
    y_D, total_D = torch.ops.fmoe.add_rms_norm(x_D, branch_D, weight_D, eps, pdl)
    return y_D, total_D


def add_rms_norm_any(x_D: Tensor, branch_D: Tensor, weight_D: Tensor, /, *, eps: float) -> tuple[Tensor, Tensor]:
    """``add_rms_norm``, in one launch where a program holds the rows."""
    if x_D.shape[-1] <= MOST_CHANNELS:
        return add_rms_norm_op(x_D, branch_D, weight_D, eps=eps)
    return add_rms_norm(x_D, branch_D, weight_D, eps=eps)


def rms_norm_op(x_D: Tensor, weight_D: Tensor, /, *, eps: float, pdl: bool | None = None) -> Tensor:
    """``rms_norm`` over a weight of one dimension, in one launch; ``pdl`` as in ``add_rms_norm_op``."""
    y_D: Tensor = torch.ops.fmoe.rms_norm(x_D, weight_D, eps, pdl)
    return y_D
