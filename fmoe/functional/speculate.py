"""Which drafts stay, as pure functions.

A draft stays where it is the token that the model itself chooses there, so what comes out is what comes without drafts:
the greedy tokens, and in sampling the very draws, for a draw is a function of (seed, number of the token) and logits.
This is rejection sampling whose proposal is a single token: it stays with the probability that the model gives it,
and otherwise the draw is one of the others, in proportion. A sampled draft is drawn with the random number that the
token it stands for will be drawn with, so the two agree more often than two draws would.

Letters: B sequences, N drafts, T = N + 1 tokens of a step: the newest one and its drafts, V vocabulary.
"""

import torch
from torch import Tensor

from .sampling import SamplingParams, mark_seen_


def count_kept(chosen_BT: Tensor, drafts_BN: Tensor, room_B: Tensor, /) -> Tensor:
    """Count the tokens that a step gives: the drafts up to the first wrong one, and the model's own choice behind them.

    Args:
        chosen_BT: int64, the model's choice behind the newest token and behind each draft.
        drafts_BN: int64.
        room_B: int64, tokens that a row may still take.

    Returns:
        int64, 1 + right drafts, at most the room, so 0 where there is none. They are the first of ``chosen``.
    """
    right_BN = chosen_BT[:, :-1] == drafts_BN
    return (right_BN.long().cumprod(1).sum(1) + 1).minimum(room_B)


def take_last(kept_B: Tensor, rows_BT: Tensor, /) -> Tensor:
    """Take what stands at the last of the first ``kept`` places, or at the first where none is kept: [B, 1, ...].

    Args:
        kept_B: int64, 0..T.
        rows_BT: [B, T, ...].
    """
    index_B1 = (kept_B - 1).clamp(min=0)[:, None]
    more = rows_BT.shape[2:]
    return rows_BT.gather(1, index_B1.view(-1, 1, *(1 for _ in more)).expand(-1, 1, *more))


def repeat_sampling(params: SamplingParams, tokens: int, /) -> SamplingParams:
    """Give each of a row's T tokens the row's settings: [B * T], for logits [B, T, V] that are flattened."""
    return SamplingParams(*(part_B.repeat_interleave(tokens) for part_B in params))


def number_tokens(counters_B: Tensor, tokens: int, /) -> Tensor:
    """Number T tokens of each row from its counter on: [B * T]."""
    return (counters_B[:, None] + torch.arange(tokens, device=counters_B.device)).flatten()


def mark_drafts(seen_BV: Tensor, drafts_BN: Tensor, /) -> Tensor:
    """List what each of a step's tokens has seen: the row's own marks, and the drafts up to the token itself.

    Args:
        seen_BV: bool, the newest token included.
        drafts_BN: int64.

    Returns:
        bool [B, T, V].
    """
    marks = [seen_BV]
    for draft_B in drafts_BN.unbind(1):
        marks.append(mark_seen_(marks[-1].clone(), draft_B))
    return torch.stack(marks, 1)
