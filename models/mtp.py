"""Multi-token prediction: one more layer that drafts the token after next from a hidden state and the next token.

``u_i = w_join [norm_e(embedding of token i+1) | norm_h(h_i)]``, one decoder layer of the family with a cache of its
own, a norm, and the model's own head: the logits of token i+2. ``h_i`` is the hidden state behind the final norm, and
where another token is to be drafted, the draft's own normed output. Slot i of the draft's cache belongs to ``h_i``.

Letters: B sequences, T tokens, D hidden. Source: arXiv:2412.19437, section 2.2.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fmoe.functional.attention import Placement
from fmoe.functional.cache import Cache
from fmoe.functional.kernels import Kernels
from fmoe.functional.norm import rms_norm
from fmoe.functional.quant import Weight
from fmoe.functional.sampling import sample_greedy
from fmoe.functional.speculate import take_last

from .decoder import DecoderConfig, LayerParams, Stream
from .weights import Fill, matrix, plain


class DraftParams(NamedTuple):
    """The draft layer and what stands around it; the embedding is the model's."""

    embed_norm_D: Tensor
    hidden_norm_D: Tensor
    w_join_DN: Weight  # [D, 2 D]: columns of the embedding, then of the hidden state
    layer: LayerParams
    norm_D: Tensor
    head_VD: Weight | None = None  # by which a single row's drafts are chosen greedily; None is the model's


class DraftNames(NamedTuple):
    """Names of a family's draft tensors, the layer's aside."""

    embed_norm: str
    hidden_norm: str
    join: str
    norm: str


class DraftConfig(Protocol):
    """What every family's Config has."""

    @property
    def decoder(self) -> DecoderConfig:
        """The frame."""
        ...


def draft_names(config: DraftConfig, /) -> DraftNames:
    """Name the tensors of a draft layer that is stored behind the others, as one more of them."""
    prefix = f"model.layers.{len(config.decoder.layer_kinds)}"
    return DraftNames(*(f"{prefix}.{end}.weight" for end in ("enorm", "hnorm", "eh_proj", "shared_head.norm")))


def plain_norm(fill: Fill, name: str, size: int, /) -> Tensor:
    """The weight of a standard norm."""
    return plain(fill, name, (size,))


def draft_params(
    fill: Fill,
    names: DraftNames,
    layer: LayerParams,
    hidden: int,
    /,
    *,
    norm: Callable[[Fill, str, int], Tensor] = plain_norm,
) -> DraftParams:
    """Put the norms and the projection around a draft layer.

    Args:
        fill: makes parameters.
        names: of the tensors.
        layer: as the family describes it.
        hidden: D.
        norm: describes a norm of the family, ``(fill, name, size)``.
    """
    return DraftParams(
        embed_norm_D=norm(fill, names.embed_norm, hidden),
        hidden_norm_D=norm(fill, names.hidden_norm, hidden),
        w_join_DN=matrix(fill, names.join, (hidden, 2 * hidden)),
        layer=layer,
        norm_D=norm(fill, names.norm, hidden),
    )


class Following(NamedTuple):
    """The tokens behind hidden states, and where to look them up."""

    tokens_BT: Tensor
    embed_VD: Tensor


def join_hidden(
    hidden_BTD: Tensor, params: DraftParams, following: Following, /, *, config: DecoderConfig, kernels: Kernels
) -> Stream:
    """Join each hidden state with the token behind it: what the draft layer reads.

    Args:
        hidden_BTD: normed hidden states.
        params: of the draft.
        following: the token that follows each of them, in the model's embedding.
        config: the frame.
        kernels: ``linear`` is called.
    """
    embedded_BTD = F.embedding(*following)
    if config.embedding_scale != 1.0:
        embedded_BTD = embedded_BTD * config.embedding_scale
    norm = partial(rms_norm, eps=config.eps)
    pair_BTN = torch.cat((norm(embedded_BTD, params.embed_norm_D), norm(hidden_BTD, params.hidden_norm_D)), -1)
    x_BTD = kernels.linear(pair_BTN, params.w_join_DN)
    return Stream(x_BTD, torch.zeros_like(x_BTD))


def norm_and_head(
    stream: Stream, norm_D: Tensor, head_VD: Tensor, /, *, eps: float, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """Norm, then head: the normed hidden states, which the next draft reads, and float32 logits [B, T, V]."""
    normed_BTD, _ = kernels.add_norm(*stream, norm_D, eps=eps)
    return normed_BTD, kernels.linear(normed_BTD, head_VD).float()


def norm_and_choose(
    stream: Stream, norm_D: Tensor, head_VD: Weight, /, *, eps: float, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, then ``Kernels.choose_tokens`` behind each token.

    Returns:
        The normed hidden states, the tokens [B, T] and their logits.
    """
    assert kernels.choose_tokens is not None
    normed_BTD, _ = kernels.add_norm(*stream, norm_D, eps=eps)
    tokens_N, best_N = kernels.choose_tokens(normed_BTD.flatten(0, 1), head_VD)
    return normed_BTD, tokens_N.view(normed_BTD.shape[:2]), best_N.view(normed_BTD.shape[:2])


def take_last_of_stream(stream: Stream, kept_B: Tensor, /) -> Stream:
    """Take what stands behind the last token of each row that was kept, as ``take_last``: parts [B, 1, D]."""
    return Stream(*(take_last(kept_B, part) for part in stream))


def draft_greedily(
    hidden_BTD: Tensor,
    params: DraftParams,
    following: Following,
    cache: Cache,
    placement: Placement,
    head_VD: Tensor,
    /,
    *,
    layer: Callable[..., Stream],
    config: DecoderConfig,
    kernels: Kernels,
) -> tuple[Tensor, Tensor]:
    """Run the draft layer over a step's tokens, and draft behind the last that was kept, all in one.

    Args:
        hidden_BTD: normed hidden states.
        params: of the draft.
        following: the tokens that were chosen behind them.
        cache: of the draft layer.
        placement: of the tokens, with the number that was kept.
        head_VD: output embedding.
        layer: of the draft's kind.
        config: the frame.
        kernels: as in a layer.

    Returns:
        The draft's normed output behind that token [B, 1, D], and the draft [B].
    """
    assert placement.kept_B is not None
    stream = join_hidden(hidden_BTD, params, following, config=config, kernels=kernels)
    stream = layer(stream, params.layer, cache, placement)
    last = take_last_of_stream(stream, placement.kept_B)
    normed_B1D, logits_B1V = norm_and_head(last, params.norm_D, head_VD, eps=config.eps, kernels=kernels)
    return normed_B1D, sample_greedy(logits_B1V[:, 0])
