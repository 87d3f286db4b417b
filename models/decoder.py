"""The frame that all families share: embedding, a stack of layers, final norm, head; and the state between steps.

Letters: B sequences, T tokens, D hidden, V vocabulary, M cache slots, R rotary frequencies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fmoe.functional.attention import Placement, place_tokens
from fmoe.functional.cache import Cache, select_row
from fmoe.functional.kernels import Kernels
from fmoe.functional.mlp import SWIGLU, Activation, MLPParams, mlp_layer
from fmoe.functional.moe import MoEParams
from fmoe.functional.norm import rms_norm
from fmoe.functional.normed import add_norm_linear, add_norm_moe
from fmoe.functional.rotary import RopeConfig, rotary_frequencies
from fmoe.functional.routing import RouterConfig

from .settings import MOST_LAYERS, Raw, read_bool, read_eps, read_int
from .weights import Fill, Piece, plain

Layer = Callable[..., "Stream"]
Layers = Mapping[str, Layer]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What every family has; a family's own Config holds one as ``decoder``."""

    hidden_size: int
    vocab_size: int
    max_context: int
    layer_kinds: tuple[str, ...]
    eps: float
    rope: RopeConfig
    tied: bool
    window: int | None = None  # tokens that layers with a sliding window see, the token itself included
    rotate_float32: bool = False  # cos and sin stay float32 instead of the model's dtype
    draft_layers: int = 0  # stored behind the others, not read
    embedding_scale: float = 1.0  # multiplies the embedding's rows
    logits_divisor: float = 1.0  # of the logits, which the weight of the final norm holds


class LayerParams(NamedTuple):
    """One pre-norm layer."""

    input_norm_D: Tensor
    mixer: Any  # the family's NamedTuple for this kind of layer
    post_norm_D: Tensor
    mlp: MLPParams | MoEParams


class Params(NamedTuple):
    """A whole model."""

    embed_VD: Tensor
    layers: tuple[LayerParams, ...]
    norm_D: Tensor
    head_VD: Tensor  # the embedding itself where tied


class Stream(NamedTuple):
    """The residual stream between two layers; the sum is left to the norm behind it, which does both in one kernel."""

    total_BTD: Tensor
    branch_BTD: Tensor  # what the last block adds


class State(NamedTuple):
    """Everything a sequence carries from step to step."""

    caches: tuple[Cache, ...]  # one per layer
    lengths_B: Tensor  # int64, tokens seen
    inv_freq_R: Tensor  # float32


def decoder_config(
    raw: Raw,
    layer_kinds: tuple[str, ...],
    rope: RopeConfig,
    /,
    *,
    tied: bool = False,
    window: int | None = None,
    rotate_float32: bool = False,
    drafts: int = 0,
    eps: float = 1e-6,
) -> DecoderConfig:
    """Read the keys that all families share.

    Args:
        raw: config.json.
        layer_kinds: layer by layer.
        rope: rotation.
        tied: default of ``tie_word_embeddings``.
        window, rotate_float32: as in DecoderConfig.
        drafts: default of ``num_nextn_predict_layers``, which is also ``num_mtp_layers``.
        eps: default of ``rms_norm_eps``.
    """
    drafts = read_int(raw, "num_mtp_layers", drafts, maximum=MOST_LAYERS)
    return DecoderConfig(
        hidden_size=read_int(raw, "hidden_size", minimum=1),
        vocab_size=read_int(raw, "vocab_size", minimum=1),
        max_context=read_int(raw, "max_position_embeddings", minimum=1),
        layer_kinds=layer_kinds,
        eps=read_eps(raw, eps),
        rope=rope,
        tied=read_bool(raw, "tie_word_embeddings", tied),
        window=window,
        rotate_float32=rotate_float32,
        draft_layers=read_int(raw, "num_nextn_predict_layers", drafts, maximum=MOST_LAYERS),
    )


def frame_params(
    fill: Fill, config: DecoderConfig, layers: tuple[LayerParams, ...], norm_D: Tensor, /, *, prefix: str = "model"
) -> Params:
    """Add embedding and head to the layers; a tied head is the embedding."""
    shape = (config.vocab_size, config.hidden_size)
    embed_VD = plain(fill, f"{prefix}.embed_tokens.weight", shape)
    head_VD = embed_VD if config.tied else fill(shape, [Piece("lm_head.weight", shape)], by_columns=True)
    return Params(embed_VD, layers, norm_D, head_VD)


def make_state(caches: tuple[Cache, ...], batch: int, rope: RopeConfig, /, *, device: torch.device) -> State:
    """Put empty caches together with lengths of zero."""
    lengths_B = torch.zeros(batch, dtype=torch.int64, device=device)
    return State(caches, lengths_B, rotary_frequencies(rope).to(device))


def state_row(state: State, row: int, /, *, count: int = 1) -> State:
    """View ``count`` sequences of a state, from ``row`` on, as a state; writing to its caches writes the rows."""
    caches = tuple(select_row(cache, row, count=count) for cache in state.caches)
    return State(caches, state.lengths_B[row : row + count], state.inv_freq_R)


def residual_layer(
    stream: Stream,
    params: LayerParams,
    cache: Cache,
    placement: Placement,
    /,
    *,
    mixer: Callable[..., Tensor],
    router: RouterConfig,
    eps: float,
    kernels: Kernels,
    activation: Activation = SWIGLU,
) -> Stream:
    """``x += mixer(w_in norm(x)); x += mlp(norm(x))``, the MLP dense or of experts by its parameters."""
    w_in = params.mixer.w_in_ND, getattr(params.mixer, "bias_N", None)
    x_BTD, projected_BTN = add_norm_linear(*stream, params.input_norm_D, *w_in, eps=eps, kernels=kernels)
    stream = Stream(x_BTD, mixer(projected_BTN, params.mixer, cache, placement))
    if isinstance(params.mlp, MLPParams):
        normed_BTD, x_BTD = kernels.add_norm(*stream, params.post_norm_D, eps=eps)
        return Stream(x_BTD, mlp_layer(normed_BTD, params.mlp, linear=kernels.linear))
    decode = x_BTD.shape[1] == 1 or placement.kept_B is not None
    add_moe = partial(add_norm_moe, eps=eps, kernels=kernels, decode=decode, activation=activation)
    return Stream(*add_moe(*stream, params.post_norm_D, params.mlp, router))


def start_step(
    tokens_BT: Tensor, embed_VD: Tensor, state: State, /, *, config: DecoderConfig, slots: int | None
) -> tuple[Stream, Placement]:
    """Look the tokens up and place them behind what the state holds; ``slots`` is that of ``place_tokens``."""
    x_BTD = F.embedding(tokens_BT, embed_VD)
    if config.embedding_scale != 1.0:
        x_BTD = x_BTD * config.embedding_scale
    return Stream(x_BTD, torch.zeros_like(x_BTD)), place_step(x_BTD, state, config=config, slots=slots)


def place_step(x_BTD: Tensor, state: State, /, *, config: DecoderConfig, slots: int | None) -> Placement:
    """Place T tokens of each row behind what the state holds; ``slots`` is that of ``place_tokens``."""
    return place_tokens(
        state.lengths_B,
        state.inv_freq_R,
        tokens=x_BTD.shape[1],
        slots=slots,
        dtype=torch.float32 if config.rotate_float32 else x_BTD.dtype,
        window=config.window,
        scale=config.rope.attention_factor,
    )


def run_layers(
    tokens_BT: Tensor,
    params: Params,
    state: State,
    config: DecoderConfig,
    layers: Layers,
    /,
    *,
    slots: int | None,
    start: Callable[..., tuple[Stream, Placement]] | None = None,
) -> Stream:
    """Run T more tokens of each sequence through all layers.

    Args:
        tokens_BT: token ids.
        params: the model.
        state: caches are written in place; the lengths stay.
        config: the frame.
        layers: one function per layer kind, ``(stream, params, cache, placement) -> stream``.
        slots: visible cache slots, at least the largest length + T; None where the kernels read no mask.
        start: ``start_step`` with these config and slots; None is that.
    """
    start = start or partial(start_step, config=config, slots=slots)
    stream, placement = start(tokens_BT, params.embed_VD, state)
    for kind, layer, cache in zip(config.layer_kinds, params.layers, state.caches, strict=True):
        stream = layers[kind](stream, layer, cache, placement)
    return stream


def forward(
    tokens_BT: Tensor,
    params: Params,
    state: State,
    config: DecoderConfig,
    layers: Layers,
    /,
    *,
    slots: int | None,
    start: Callable[..., tuple[Stream, Placement]] | None = None,
) -> tuple[Tensor, State]:
    """Run T more tokens, as ``run_layers``: hidden [B, T, D] before the final norm, and the state T tokens later."""
    total_BTD, branch_BTD = run_layers(tokens_BT, params, state, config, layers, slots=slots, start=start)
    return total_BTD + branch_BTD, state._replace(lengths_B=state.lengths_B + tokens_BT.shape[1])


def compute_logits(
    x_BD: Tensor, norm_D: Tensor, head_VD: Tensor, /, *, eps: float, linear: Callable[..., Tensor] = F.linear
) -> Tensor:
    """Final norm and head of hidden states [..., D]: logits, float32 [..., V]; ``linear`` is that of ``Kernels``."""
    return linear(rms_norm(x_BD, norm_D, eps=eps), head_VD).float()


def choose_tokens(
    stream: Stream, norm_D: Tensor, head_VD: Tensor, /, *, eps: float, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """Norm, then ``Kernels.choose_tokens``, behind one token of each sequence."""
    assert kernels.choose_tokens is not None
    normed_B1D, _ = kernels.add_norm(*stream, norm_D, eps=eps)
    return kernels.choose_tokens(normed_B1D[:, 0], head_VD)
