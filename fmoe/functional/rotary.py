"""Rotary position embedding, half-split and interleaved, with YaRN.

Letters: B sequences, T tokens, H heads, C head channels, R rotated channels (R <= C).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Frequencies of one model: ``rotary_size`` R channels rotate, base ``theta``; YaRN where ``factor`` is not 1."""

    rotary_size: int
    theta: float
    factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies cos and sin

    def __post_init__(self) -> None:
        if self.rotary_size < 2 or self.rotary_size % 2:
            raise ValueError(
                f"rotary_size={self.rotary_size} must be even and at least 2; check head_dim and partial_rotary_factor "
                "(an absent head_dim is hidden_size / num_attention_heads)"
            )
        for key, value in (("rope_theta", self.theta), ("attention_factor", self.attention_factor)):
            if not 0 < value < math.inf:
                raise ValueError(f"{key}={value} must be a finite number above 0; check the rope parameters")
        if self.factor != 1.0:
            self._check_yarn()

    def _check_yarn(self) -> None:
        """Refuse what has no logarithm or would divide by zero."""
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor={self.factor} of yarn must be a finite number of at least 1")
        if self.original_context < 1:
            raise ValueError("yarn needs original_max_position_embeddings >= 1 in the rope parameters")
        if self.theta <= 1:
            raise ValueError(f"rope_theta={self.theta} must be above 1 with yarn; check the rope parameters")
        for key, value in (("beta_fast", self.beta_fast), ("beta_slow", self.beta_slow)):
            if not 0 < value < math.inf:
                raise ValueError(f"{key}={value} of yarn must be a finite number above 0")


def rotary_frequencies(config: RopeConfig, /) -> Tensor:
    """Compute the R/2 angular frequencies in float32, radians per position.

    ``theta^(-2j/R)``; with YaRN each is blended with ``1/factor`` of itself along a ramp between the dimensions that
    turn ``beta_fast`` and ``beta_slow`` times over the original context.

    Returns:
        float32 [R/2], on the CPU.

    Source: arXiv:2104.09864; YaRN arXiv:2309.00071, section 3.2.
    """
    exponents_R = torch.arange(0, config.rotary_size, 2, dtype=torch.int64, device="cpu").float() / config.rotary_size
    plain_R = 1.0 / (config.theta**exponents_R)
    if config.factor == 1.0:
        return plain_R
    low, high = _yarn_range(config)
    ramp_R = ((torch.arange(config.rotary_size // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(
        0, 1
    )
    return plain_R / config.factor * ramp_R + plain_R * (1 - ramp_R)


def _yarn_range(config: RopeConfig) -> tuple[float, float]:
    def dimension(turns: float) -> float:
        return (
            config.rotary_size
            * math.log(config.original_context / (turns * 2 * math.pi))
            / (2 * math.log(config.theta))
        )

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_size - 1)
    return low, high + 0.001 if low == high else high


def yarn_mscale(factor: float, mscale: float = 1.0, /) -> float:
    """Give YaRN's attention temperature ``0.1 * mscale * ln(factor) + 1`` (1 for factors up to 1).

    Source: arXiv:2309.00071, section 3.4.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_tables(
    positions_BT: Tensor, inv_freq_R: Tensor, /, *, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of every position and frequency in float32, then cast.

    Args:
        positions_BT: integer positions, 0 the first token.
        inv_freq_R: float32 [R/2].
        dtype: dtype of the results; the model's, or float32 where a family rotates in float32.
        scale: multiplies both (YaRN's attention factor).

    Returns:
        (cos, sin), each [B, T, R/2].
    """
    angles_BTR = positions_BT[..., None].float() * inv_freq_R
    if scale == 1.0:
        return angles_BTR.cos().to(dtype), angles_BTR.sin().to(dtype)
    return (angles_BTR.cos() * scale).to(dtype), (angles_BTR.sin() * scale).to(dtype)


def apply_rotary(x_BTHC: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, /) -> Tensor:
    """Rotate channel pairs ``(j, j + R/2)`` of the first R channels; the others pass through.

    Args:
        x_BTHC: queries or keys.
        cos_BTR: [B, T, R/2].
        sin_BTR: [B, T, R/2].

    Returns:
        A tensor like x.

    Source: arXiv:2104.09864, eq. 34, in the half-split layout.
    """
    half = cos_BTR.shape[-1]
    cos_BTHR, sin_BTHR = cos_BTR[:, :, None], sin_BTR[:, :, None]
    first_BTHR, second_BTHR, rest_BTHC = x_BTHC.split_with_sizes([half, half, x_BTHC.shape[-1] - 2 * half], -1)
    rotated = (
        first_BTHR * cos_BTHR - second_BTHR * sin_BTHR,
        second_BTHR * cos_BTHR + first_BTHR * sin_BTHR,
    )
    return torch.cat((*rotated, rest_BTHC), -1).to(x_BTHC.dtype)


def apply_rotary_interleaved(x_BTHC: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, /) -> Tensor:
    """Rotate channel pairs ``(2j, 2j + 1)`` of all channels; each pair keeps its place.

    Args:
        x_BTHC: queries or keys, C = R.
        cos_BTR: [B, T, C/2]; float32 tables rotate in float32.
        sin_BTR: [B, T, C/2].

    Returns:
        A tensor like x.

    Source: arXiv:2104.09864, eq. 34.
    """
    cos_BTHR, sin_BTHR = cos_BTR[:, :, None], sin_BTR[:, :, None]
    even_BTHR, odd_BTHR = x_BTHC[..., 0::2], x_BTHC[..., 1::2]
    pairs = (even_BTHR * cos_BTHR - odd_BTHR * sin_BTHR, odd_BTHR * cos_BTHR + even_BTHR * sin_BTHR)
    return torch.stack(pairs, -1).flatten(-2).to(x_BTHC.dtype)
