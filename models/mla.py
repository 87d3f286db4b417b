"""Multi-head latent attention: keys and values of all heads come from one small latent, and only that is remembered.

Letters: B sequences, T tokens, M visible cache slots, D hidden, H heads, N projected columns, Q channels of the query
latent, R channels of the key-value latent (in a cache, the rotated key behind them), C key channels of a head,
V value channels of a head. Source: arXiv:2405.04434, section 2.1 and appendix C.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fmoe.functional.attention import Placement
from fmoe.functional.cache import LatentCache, append_latent_
from fmoe.functional.kernels import Kernels
from fmoe.functional.norm import rms_norm
from fmoe.functional.quant import Weight
from fmoe.functional.rotary import RopeConfig, apply_rotary, apply_rotary_interleaved, yarn_mscale

from .settings import Raw, read_float, read_int, require, rope_keys
from .weights import Fill, Piece, matrix, matrix_rows, plain

LATENT_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps says


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of one layer. A key has ``plain_size`` channels of its head, then ``rotary_size`` that all heads share."""

    heads: int
    query_rank: int | None  # channels of the query latent; None projects queries directly
    latent_size: int
    plain_size: int
    rotary_size: int
    value_size: int
    scale: float  # of the scores before the softmax
    interleaved: bool = True  # rotates channel pairs (2j, 2j + 1), not (j, j + R/2)

    def __post_init__(self) -> None:
        for key, value in (
            ("num_attention_heads", self.heads),
            ("q_lora_rank", self.query_rank),
            ("kv_lora_rank", self.latent_size),
            ("qk_nope_head_dim", self.plain_size),
            ("v_head_dim", self.value_size),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{key}={value} must be at least 1; check config.json")

    @property
    def key_size(self) -> int:
        """Channels of a head's query and key."""
        return self.plain_size + self.rotary_size

    @property
    def split_sizes(self) -> list[int]:
        """Columns of the input projection: queries or their latent, key-value latent, rotary key."""
        queries = self.heads * self.key_size if self.query_rank is None else self.query_rank
        return [queries, self.latent_size, self.rotary_size]


class LatentParams(NamedTuple):
    """One layer; what reads x is one matrix, its rows in the order of ``LatentConfig.split_sizes``."""

    w_in_ND: Weight
    q_norm_Q: Tensor | None
    w_q_NQ: Weight | None  # None where w_in gives the queries themselves
    norm_R: Tensor
    w_kv_HCR: Tensor  # each head's plain_size key rows, then its value_size value rows
    w_out_DN: Weight


def latent_config(raw: Raw, rope: RopeConfig, /, *, interleaved: bool = True) -> LatentConfig:
    """Read the sizes; YaRN with ``mscale_all_dim`` multiplies the scores by the square of its temperature.

    Args:
        raw: config.json.
        rope: of ``qk_rope_head_dim`` channels.
        interleaved: as in LatentConfig.
    """
    if "q_lora_rank" not in raw:
        raise ValueError("config.json: q_lora_rank is missing; expected an integer, or null for a single q_proj")
    rope_raw = rope_keys(raw)
    heads, plain = read_int(raw, "num_attention_heads", minimum=1), read_int(raw, "qk_nope_head_dim", minimum=1)
    require(raw, {"attention_bias": (False,)})
    kv_heads = read_int(raw, "num_key_value_heads", heads, minimum=1)
    if kv_heads != heads:
        raise NotImplementedError(
            f"config.json: num_key_value_heads={kv_heads} is not implemented; implemented: {heads}, "
            "which is num_attention_heads"
        )
    require(rope_raw, {"partial_rotary_factor": (1.0,)})
    temperature = yarn_mscale(rope.factor, read_float(rope_raw, "mscale_all_dim", 0.0))
    return LatentConfig(
        heads=heads,
        query_rank=None if raw["q_lora_rank"] is None else read_int(raw, "q_lora_rank", minimum=1),
        latent_size=read_int(raw, "kv_lora_rank", minimum=1),
        plain_size=plain,
        rotary_size=rope.rotary_size,
        value_size=read_int(raw, "v_head_dim", minimum=1),
        scale=(plain + rope.rotary_size) ** -0.5 * temperature**2,
        interleaved=interleaved,
    )


def latent_params(fill: Fill, prefix: str, config: LatentConfig, hidden: int, /) -> LatentParams:
    """Describe one layer's parameters below ``prefix``, such as ``model.layers.0.self_attn``."""
    heads, latent, rank = config.heads, config.latent_size, config.query_rank
    queries, head_rows = heads * config.key_size, config.plain_size + config.value_size
    first, *_ = config.split_sizes
    parts = [
        Piece(f"{prefix}.{'q_proj' if rank is None else 'q_a_proj'}.weight", (first, hidden)),
        Piece(f"{prefix}.kv_a_proj_with_mqa.weight", (latent + config.rotary_size, hidden)),
    ]
    kv = Piece(
        f"{prefix}.kv_b_proj.weight", (heads * head_rows, latent), take=lambda w: w.unflatten(0, (heads, head_rows))
    )
    return LatentParams(
        w_in_ND=matrix_rows(fill, parts, hidden),
        q_norm_Q=None if rank is None else plain(fill, f"{prefix}.q_a_layernorm.weight", (rank,)),
        w_q_NQ=None if rank is None else matrix(fill, f"{prefix}.q_b_proj.weight", (queries, rank)),
        norm_R=plain(fill, f"{prefix}.kv_a_layernorm.weight", (latent,)),
        w_kv_HCR=fill((heads, head_rows, latent), [kv]),
        w_out_DN=matrix(fill, f"{prefix}.o_proj.weight", (hidden, heads * config.value_size)),
    )


def latent_mixer(
    projected_BTN: Tensor,
    params: LatentParams,
    cache: LatentCache,
    placement: Placement,
    /,
    *,
    config: LatentConfig,
    kernels: Kernels,
) -> Tensor:
    """Split into queries and latents, rotate, remember, attend, project back.

    Several tokens expand the visible latents to keys and values; one token, or a few to verify, attend to the latents
    themselves.

    Returns:
        [B, T, D].
    """
    q_BTN, latent_BTR, key_BTC = projected_BTN.split(config.split_sizes, -1)
    if params.w_q_NQ is not None:
        assert params.q_norm_Q is not None
        q_BTN = kernels.linear(rms_norm(q_BTN, params.q_norm_Q, eps=LATENT_EPS), params.w_q_NQ)
    plain_BTHC, rotary_BTHC = q_BTN.unflatten(-1, (config.heads, config.key_size)).split(
        [config.plain_size, config.rotary_size], -1
    )
    rotate = apply_rotary_interleaved if config.interleaved else apply_rotary
    rotary_BTHC = rotate(rotary_BTHC, placement.cos_BTR, placement.sin_BTR)
    key_BTC = rotate(key_BTC[:, :, None], placement.cos_BTR, placement.sin_BTR)[:, :, 0]
    latent_BTR = torch.cat((rms_norm(latent_BTR, params.norm_R, eps=LATENT_EPS), key_BTC), -1)
    if placement.kept_B is not None:  # a weight of zero would not keep a draft's NaN from the tokens before it
        latent_BTR = torch.nan_to_num(latent_BTR, 0.0, 0.0, 0.0)
    append_latent_(cache, latent_BTR, placement.positions_BT)
    visible_BMR, limit = cache.latent_BMR, placement.lengths_B
    if placement.mask_BTM is not None:
        visible_BMR, limit = visible_BMR[:, : placement.mask_BTM.shape[-1]], placement.mask_BTM
    assert limit is not None
    absorbed = projected_BTN.shape[1] == 1 or placement.kept_B is not None
    attend = attend_absorbed if absorbed else attend_expanded
    out_BTHV = attend(plain_BTHC, rotary_BTHC, visible_BMR, limit, params.w_kv_HCR, config=config, kernels=kernels)
    return kernels.linear(out_BTHV.flatten(-2), params.w_out_DN)


def attend_expanded(
    plain_BTHC: Tensor,
    rotary_BTHC: Tensor,
    latent_BMR: Tensor,
    mask_BTM: Tensor,
    w_kv_HCR: Tensor,
    /,
    *,
    config: LatentConfig,
    kernels: Kernels,
) -> Tensor:
    """Compute keys and values of every head from the latents, then attend to them.

    Args:
        plain_BTHC: unrotated part of the queries.
        rotary_BTHC: rotated part.
        latent_BMR: visible slots of the cache, the rotated key last.
        mask_BTM: True where a query may look.
        w_kv_HCR: as in LatentParams.
        config: sizes.
        kernels: ``attend_prefill`` and ``linear`` are called.

    Returns:
        [B, T, H, V].
    """
    values_BMR, key_BMC = latent_BMR.split([config.latent_size, config.rotary_size], -1)
    kv_BMHC = kernels.linear(values_BMR, w_kv_HCR.flatten(0, 1)).unflatten(-1, w_kv_HCR.shape[:2])
    k_BMHC, v_BMHV = kv_BMHC.split([config.plain_size, config.value_size], -1)
    k_BMHC = torch.cat((k_BMHC, key_BMC[:, :, None].expand(-1, -1, config.heads, -1)), -1)
    q_BTHC = torch.cat((plain_BTHC, rotary_BTHC), -1)
    out_BTHV: Tensor = kernels.attend_prefill(
        q_BTHC, k_BMHC.transpose(1, 2), v_BMHV.transpose(1, 2), mask_BTM, scale=config.scale
    )
    return out_BTHV


def attend_absorbed(
    plain_BTHC: Tensor,
    rotary_BTHC: Tensor,
    latent_BMR: Tensor,
    limit: Tensor,
    w_kv_HCR: Tensor,
    /,
    *,
    config: LatentConfig,
    kernels: Kernels,
) -> Tensor:
    """Attend to the latents as one key head that all queries share: what ``attend_expanded`` gives, reordered.

    ``q (W_k c) = (q W_k) c`` and ``sum_m p_m W_v c_m = W_v sum_m p_m c_m``, so keys and values are never made.

    Arguments are those of ``attend_expanded``; of the kernels, ``attend_decode`` is called, and ``attend_few`` for a
    few tokens. Where ``limit`` is not the mask but lengths [B], the latents are the whole cache, and ``attend_lengths``
    or ``attend_few_lengths`` is called.

    Returns:
        [B, T, H, V].
    """
    w_k_HCR, w_v_HVR = w_kv_HCR.split([config.plain_size, config.value_size], 1)
    q_BTHR = torch.cat((torch.einsum("bthc,hcr->bthr", plain_BTHC, w_k_HCR), rotary_BTHC), -1)
    k_B1MR = latent_BMR[:, None]
    few = plain_BTHC.shape[1] > 1
    attend: Callable[..., Tensor] | None
    if limit.dim() == 3:
        attend = kernels.attend_few if few else kernels.attend_decode
    else:
        attend = kernels.attend_few_lengths if few else kernels.attend_lengths
    assert attend is not None
    out_BTHR = attend(q_BTHR, k_B1MR, k_B1MR[..., : config.latent_size], limit, scale=config.scale)
    return torch.einsum("bthr,hvr->bthv", out_BTHR, w_v_HVR)


def latent_cache(
    config: LatentConfig, batch: int, slots: int, /, *, dtype: torch.dtype, device: torch.device
) -> LatentCache:
    """Make an empty cache of ``slots`` positions for each of ``batch`` sequences."""
    shape = (batch, slots, config.latent_size + config.rotary_size)
    return LatentCache(torch.zeros(shape, dtype=dtype, device=device))
