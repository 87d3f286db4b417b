"""Choose the next token: penalty, filters and draw as pure functions of plain tensors.

Letters: B sequences, V vocabulary, T tokens of history, W candidates kept in sorted order.
Nothing here synchronises with the device or keeps a generator: a draw is a function of (seed, counter).
"""

from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor

# A probability relative to the largest one of its row is a whole number of 2**-40, so that sums over the vocabulary
# are exact: no order of summation, batch size or device can then move a draw. 2**22 tokens still fit in int64.
_ONE = 2.0**40
_FLOAT32 = torch.finfo(torch.float32)
_INT64 = torch.iinfo(torch.int64)
# splitmix64's increment and multipliers, as signed int64 (Source: Steele, Lea and Flood, OOPSLA 2014)
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


class SamplingParams(NamedTuple):
    """How each row of a batch picks its next token."""

    temperature_B: Tensor  # float32; 0 is greedy
    top_k_B: Tensor  # int64; 0 keeps all
    top_p_B: Tensor  # float32 in (0, 1]; 1 keeps all
    min_p_B: Tensor  # float32 in [0, 1]; 0 keeps all
    repetition_penalty_B: Tensor  # float32; 1 changes nothing
    seeds_B: Tensor  # int64


def sampling_params(
    batch: int,
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> SamplingParams:
    """Give ``batch`` rows the same settings and row ``i`` the seed ``seed + i``.

    The settings are checked by ``check_sampling``. Seeds past the end of int64 wrap around.
    """
    check_sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    seeds = [(int(seed) + i - _INT64.min) % 2**64 + _INT64.min for i in range(batch)]
    floats = (temperature, top_p, min_p, repetition_penalty)
    temperature_B, top_p_B, min_p_B, repetition_penalty_B = (
        torch.full((batch,), float(value), dtype=torch.float32, device=device) for value in floats
    )
    return SamplingParams(
        temperature_B=temperature_B,
        top_k_B=torch.full((batch,), int(top_k), dtype=torch.int64, device=device),
        top_p_B=top_p_B,
        min_p_B=min_p_B,
        repetition_penalty_B=repetition_penalty_B,
        seeds_B=torch.tensor(seeds, dtype=torch.int64, device=device),
    )


def check_sampling(
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
) -> None:
    """Raise ValueError, naming the argument, unless every setting can be sampled with."""
    if not (_is_real(temperature) and 0 <= temperature <= _FLOAT32.max):
        raise ValueError(f"temperature={temperature!r} must be a finite number >= 0; pass 0 for greedy")
    if not (_is_real(top_p) and 0 < top_p <= 1):
        raise ValueError(f"top_p={top_p!r} must be a number in (0, 1]; pass 1 to switch it off")
    if not (_is_integer(top_k) and 0 <= top_k <= _INT64.max):
        raise ValueError(f"top_k={top_k!r} must be an int >= 0; pass 0 to switch it off")
    if not (_is_real(min_p) and 0 <= min_p <= 1):
        raise ValueError(f"min_p={min_p!r} must be a number in [0, 1]; pass 0 to switch it off")
    if not (_is_real(repetition_penalty) and _FLOAT32.tiny <= repetition_penalty <= _FLOAT32.max):
        raise ValueError(
            f"repetition_penalty={repetition_penalty!r} must be a finite number > 0; pass 1 to switch it off"
        )
    if not (_is_integer(seed) and _INT64.min <= seed <= _INT64.max):
        raise ValueError(f"seed={seed!r} must be an int in -2**63..2**63-1; pass 0 for a fixed default")


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def count_candidates(*, top_k: int, top_p: float) -> int | None:
    """Say how many of a row's largest logits the filters must see in order: the ``num_candidates`` of ``sample``.

    Returns:
        0 when top_k and top_p are off (nothing is sorted), ``top_k`` when it is on, else None: the whole vocabulary.
    """
    if top_k > 0:
        return top_k
    return 0 if top_p >= 1 else None


def penalize_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty_B: Tensor, /) -> Tensor:
    """Make tokens that already occurred less likely (penalty above 1) or more likely (below 1).

    Where ``seen``: a positive logit is divided by its row's penalty, any other is multiplied by it.

    Args:
        logits_BV: any float dtype; the result is float32.
        seen_BV: bool, true where the token occurs in the row's prompt or output.
        penalty_B: float32, > 0.

    Source: arXiv:1909.05858, section 4.1, with the sign rule of transformers.
    """
    logits_BV = logits_BV.float()
    penalty_B1 = penalty_B[:, None]
    penalized_BV = torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    return torch.where(seen_BV, penalized_BV, logits_BV)


def mark_seen_(seen_BV: Tensor, tokens: Tensor, /) -> Tensor:
    """Set ``seen_BV`` in place where a token occurs in ``tokens``, and return it.

    Args:
        seen_BV: bool.
        tokens: int ids, [B] or [B, T]; negative ids (padding) are ignored.
    """
    tokens_BT = (tokens[:, None] if tokens.dim() == 1 else tokens).long()
    # An ignored id is written to column 0 with the value that column ends with, so that all writes to it agree.
    first_B1 = seen_BV[:, :1] | (tokens_BT == 0).any(dim=1, keepdim=True)
    return seen_BV.scatter_(1, tokens_BT.clamp(min=0), (tokens_BT >= 0) | first_B1)


def filter_logits(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    /,
    *,
    num_candidates: int | None = None,
) -> Tensor:
    """Scale by the temperature, then keep top_k, top_p and min_p of each row, in this order.

    ``scaled = (logits - max) / temperature``, whose softmax is that of ``logits / temperature``. Tokens stand in
    descending order, equal ones by id, lowest first. top_k keeps the first k; top_p the fewest of these whose
    share is at least p (so the token that crosses p stays); min_p those at least min_p times as probable as the
    first. The first token always stays. A row with NaN becomes all NaN; a row of only -inf counts as all equal.

    Args:
        logits_BV: any float dtype, V < 2**22.
        temperature_B: float32; rows of temperature 0 are scaled by 1.
        top_k_B: int64, 0 keeps all.
        top_p_B: float32, 1 keeps all.
        min_p_B: float32, 0 keeps all.
        num_candidates: from ``count_candidates``. Promises that no row needs more tokens in order: with 0, every
            top_k is 0 and every top_p is 1; with W > 0, every top_k is in 1..W. None promises nothing.

    Returns:
        float32 [B, V], -inf where a token is dropped.
    """
    scaled_BV = _scale(logits_BV, temperature_B)
    dropped_BV = scaled_BV < min_p_B.log()[:, None]
    if num_candidates is None or num_candidates > 0:
        sorted_BW = _sort_largest(scaled_BV, num_candidates)
        size_B1 = _count_kept(sorted_BW, top_k_B, top_p_B)
        dropped_BV = dropped_BV | _is_after(scaled_BV, sorted_BW, size_B1)
    return scaled_BV.masked_fill(dropped_BV, -torch.inf)


def _scale(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """Subtract the largest logit before dividing, so that no temperature overflows."""
    logits_BV = logits_BV.float()
    max_B1 = logits_BV.amax(dim=-1, keepdim=True)
    divisor_B1 = torch.where(_is_greedy(temperature_B), 1.0, temperature_B)[:, None]
    # inf - inf is NaN: an infinite maximum gets the 0 that any maximum has
    return ((logits_BV - max_B1) / divisor_B1).masked_fill(logits_BV == max_B1, 0.0)


def _is_greedy(temperature_B: Tensor) -> Tensor:
    # subnormal temperatures are greedy too: some devices flush them to 0
    return temperature_B < _FLOAT32.tiny


def _sort_largest(scaled_BV: Tensor, num_candidates: int | None) -> Tensor:
    """Return the ``num_candidates`` largest of each row, or all, in descending order."""
    B, V = scaled_BV.shape
    if num_candidates is not None and num_candidates < V:
        return scaled_BV.topk(num_candidates, dim=-1).values
    # One flat sort of integers (row number above the bits of |scaled|) is many times faster than one float sort a row;
    # the bits of non-negative floats, NaN included, are in the floats' order.
    bits_BV = scaled_BV.abs().view(torch.int32).long()
    rows_B1 = torch.arange(B, device=scaled_BV.device)[:, None]
    sorted_BV = ((rows_B1 << 32) | bits_BV).flatten().sort().values.view(B, V)
    return -(sorted_BV & 0xFFFFFFFF).int().view(torch.float32)


def _count_kept(sorted_BW: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Count the leading candidates that top_k and top_p keep, at least one; int64 [B, 1]."""
    W = sorted_BW.shape[1]
    top_k_B1 = torch.where(top_k_B == 0, W, top_k_B)[:, None]
    top_p_B1 = top_p_B[:, None].double()
    in_top_k_BW = torch.arange(W, device=sorted_BW.device) < top_k_B1
    weights_BW = _weigh(sorted_BW).masked_fill(~in_top_k_BW, 0)
    sums_BW = weights_BW.cumsum(dim=-1)
    wanted_B1 = (top_p_B1 * sums_BW[:, -1:]).ceil().long()
    in_top_p_BW = (sums_BW - weights_BW < wanted_B1) | (top_p_B1 >= 1)
    return (in_top_k_BW & in_top_p_BW).sum(dim=-1, keepdim=True).clamp(min=1)


def _is_after(scaled_BV: Tensor, sorted_BW: Tensor, size_B1: Tensor) -> Tensor:
    """Tell which tokens come after the first ``size`` ones in descending order, equal ones by id."""
    last_B1 = sorted_BW.gather(1, size_B1 - 1)
    spare_B1 = size_B1 - (sorted_BW > last_B1).sum(dim=-1, keepdim=True)
    tied_BV = scaled_BV == last_B1
    return (scaled_BV < last_B1) | (tied_BV & (tied_BV.cumsum(dim=-1) > spare_B1))


def _weigh(scaled_BV: Tensor) -> Tensor:
    """Turn logits whose maximum is 0 into int64 weights in proportion to their probabilities."""
    return (scaled_BV.exp() * _ONE).long()


def random_uniform(seeds_B: Tensor, counters_B: Tensor, /) -> Tensor:
    """Hash each (seed, counter) to a float64 in [0, 1), the same number on every device.

    ``mix(mix(seed + gamma) + (counter + 1) * gamma) >> 11``, times 2**-53, where ``mix`` and ``gamma`` are
    splitmix64's, modulo 2**64: the counter-th output of a splitmix64 that starts from a hash of the seed.

    Args:
        seeds_B: int64.
        counters_B: int64, for a draw the number of tokens that the row has generated.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    mixed_B = _mix(_mix(seeds_B + _GAMMA) + (counters_B + 1) * _GAMMA)
    return ((mixed_B >> 11) & (2**53 - 1)).double() * 2.0**-53


def _mix(bits_B: Tensor) -> Tensor:
    # >> copies the sign bit, so each mask makes a logical shift of it
    bits_B = (bits_B ^ ((bits_B >> 30) & (2**34 - 1))) * _MIX_1
    bits_B = (bits_B ^ ((bits_B >> 27) & (2**37 - 1))) * _MIX_2
    return bits_B ^ ((bits_B >> 31) & (2**33 - 1))


def sample(
    logits_BV: Tensor, params: SamplingParams, counters_B: Tensor, /, *, num_candidates: int | None = None
) -> Tensor:
    """Pick the next token of each row: the most probable at temperature 0, else one drawn after ``filter_logits``.

    A draw inverts the cumulative distribution, over ids in ascending order, at ``random_uniform(seed, counter)``:
    the first id whose cumulated weight exceeds ``u * total``. Weights are probabilities relative to the row's
    largest in whole 2**-40ths, so sums are exact and a row's token does not depend on its neighbours; what is rarer
    than 2**-40 of the largest, or filtered out, is never drawn. A row with NaN gets some id below V.

    Args:
        logits_BV: any float dtype; apply ``penalize_repetition`` before, ``params.repetition_penalty_B`` is not
            used here.
        params: per row.
        counters_B: int64, how many tokens the row has generated.
        num_candidates: as for ``filter_logits``.

    Returns:
        int64 [B].
    """
    filtered_BV = filter_logits(
        logits_BV, params.temperature_B, params.top_k_B, params.top_p_B, params.min_p_B, num_candidates=num_candidates
    )
    sums_BV = _weigh(filtered_BV).cumsum(dim=-1)
    # u <= 1 - 2**-53 and float64 rounds to nearest, so the target stays below the total, where a token is found
    target_B = (random_uniform(params.seeds_B, counters_B) * sums_BV[:, -1]).long()
    drawn_B = torch.searchsorted(sums_BV, target_B[:, None], right=True)[:, 0]
    # only a row with NaN can end past the vocabulary
    drawn_B = drawn_B.clamp(max=logits_BV.shape[1] - 1)
    return torch.where(_is_greedy(params.temperature_B), sample_greedy(logits_BV), drawn_B)


def sample_greedy(logits_BV: Tensor, /) -> Tensor:
    """Pick the most probable token of each row, int64 [B]. Equal logits go to the lowest id."""
    return logits_BV.argmax(dim=-1)


def token_logprobs(logits_BV: Tensor, tokens_B: Tensor, /, *, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give the log-probability of each row's token and the ``n`` most probable tokens.

    ``logprobs = log_softmax(logits)`` over V in float32, without temperature or filters. Equal logits are listed by
    id, lowest first.

    Args:
        logits_BV: any float dtype.
        tokens_B: int ids.
        n: how many tokens to list, 0 <= n <= V.

    Returns:
        logprob_B float32, top_ids_Bn int64, top_logprobs_Bn float32, most probable first.
    """
    logits_BV = logits_BV.float()
    logprobs_BV = logits_BV.log_softmax(dim=-1)
    logprob_B = logprobs_BV.gather(1, tokens_B.long()[:, None])[:, 0]
    top_ids_Bn = _order_key(logits_BV).topk(n, dim=-1).indices
    return logprob_B, top_ids_Bn, logprobs_BV.gather(1, top_ids_Bn)


def _order_key(logits_BV: Tensor) -> Tensor:
    """Number a row's logits so that a larger int64 is a larger logit or, of equal ones, a lower id."""
    V = logits_BV.shape[1]
    bits_BV = logits_BV.masked_fill(logits_BV == 0, 0.0).view(torch.int32).long()
    # negative floats order backwards by their bits
    ordered_BV = torch.where(bits_BV < 0, bits_BV ^ 0x7FFFFFFF, bits_BV)
    return (ordered_BV << 32) | (V - 1 - torch.arange(V, device=logits_BV.device))
