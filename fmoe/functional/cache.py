"""What a model remembers between steps. The functions that end in ``_`` are the only writers.

PyTorch cannot donate an input, so a new cache per step would be copied whole; hence in place, and returned.
Letters: B sequences, T tokens, J kv heads, M cache slots, C head channels, W convolution taps, N mixed channels,
H value heads, G key heads, K key channels, V value channels of one head, R latent and rotary channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class KVCache(NamedTuple):
    """Keys and values of one attention layer; slot m holds the token at position m."""

    k_BJMC: Tensor
    v_BJMC: Tensor


class DeltaCache(NamedTuple):
    """Convolution window and recurrent state of one Gated DeltaNet layer."""

    window_BWN: Tensor  # the last W - 1 inputs of the convolution, oldest first, model dtype
    state_BHKV: Tensor  # float32, whatever the model's dtype, unless bfloat16 was asked for


class PendingDelta(NamedTuple):
    """A DeltaCache and the last step's T tokens, of which only the first ones may stay: they are not in it yet."""

    window_BWN: Tensor  # as in DeltaCache, before those tokens
    state_BHKV: Tensor  # likewise
    inputs_BTN: Tensor  # of the convolution, model dtype
    k_BTGK: Tensor  # float32, normalised keys
    written_BTHV: Tensor  # float32, what each token adds to the state beside its key
    g_BTH: Tensor  # float32, log decays


class LatentCache(NamedTuple):
    """What multi-head latent attention keeps: the normed latent, then the one rotated key that all heads share."""

    latent_BMR: Tensor


Cache = KVCache | DeltaCache | PendingDelta | LatentCache


def append_kv_(cache: KVCache, k_BTJC: Tensor, v_BTJC: Tensor, positions_BT: Tensor, /) -> KVCache:
    """Write keys and values at their positions, in place.

    Args:
        cache: written; slots at other positions keep their content.
        k_BTJC: new keys, already normalised and rotated.
        v_BTJC: new values.
        positions_BT: int64, 0 <= position < M, all different within a row.

    Returns:
        The same cache.
    """
    rows_B1 = torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]
    cache.k_BJMC.transpose(1, 2).index_put_((rows_B1, positions_BT), k_BTJC)
    cache.v_BJMC.transpose(1, 2).index_put_((rows_B1, positions_BT), v_BTJC)
    return cache


def append_latent_(cache: LatentCache, latent_BTR: Tensor, positions_BT: Tensor, /) -> LatentCache:
    """Write latents at their positions, in place; as ``append_kv_``.

    Returns:
        The same cache.
    """
    rows_B1 = torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]
    cache.latent_BMR.index_put_((rows_B1, positions_BT), latent_BTR)
    return cache


def write_delta_(cache: DeltaCache, window_BWN: Tensor, state_BHKV: Tensor, /) -> DeltaCache:
    """Replace the convolution window and the recurrent state, in place.

    Returns:
        The same cache.
    """
    cache.window_BWN.copy_(window_BWN)
    cache.state_BHKV.copy_(state_BHKV)
    return cache


def select_row(cache: Cache, row: int, /, *, count: int = 1) -> Cache:
    """View ``count`` sequences of a cache, from ``row`` on, as a cache; writing to the view writes the rows."""
    return type(cache)(*(part[row : row + count] for part in cache))


def select_slots(cache: Cache, count: int, /) -> Cache:
    """View the first ``count`` slots of a cache as a cache; what has no slots is given as it is."""
    if isinstance(cache, KVCache):
        return KVCache(*(part_BJMC[:, :, :count] for part_BJMC in cache))
    if isinstance(cache, LatentCache):
        return LatentCache(cache.latent_BMR[:, :count])
    return cache


def copy_row_(cache: Cache, row: Cache, count: int, /) -> Cache:
    """Give every sequence of a cache the first ``count`` slots and the state of a cache of one sequence, in place.

    Returns:
        The same cache.
    """
    for part, row_part in zip(select_slots(cache, count), select_slots(row, count), strict=True):
        part.copy_(row_part)
    return cache
