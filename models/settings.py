"""Reading config.json: typed values in their range, or an error that names the key. Both generations of key names."""

from collections.abc import Mapping
from reprlib import repr as brief
from typing import Any

from fmoe.functional.rotary import RopeConfig, yarn_mscale

Raw = Mapping[str, Any]

KNOWN_ROPE = ("default", "yarn")
MOST = 2**31 - 1  # of any integer
MOST_LAYERS, MOST_EXPERTS, MOST_SHARED = 10_000, 65_536, 1024  # more is a slip, and would be built one by one
SMALLEST, LARGEST = 1e-30, 1e30  # of a positive number, such that float32 holds it


def with_defaults(raw: Raw, defaults: Raw) -> Raw:
    """Put a family's defaults where a key is absent or null."""
    return {**raw, **{key: value for key, value in defaults.items() if raw.get(key) is None}}


def read_int(raw: Raw, key: str, default: int | None = None, *, minimum: int = 0, maximum: int = MOST) -> int:
    """Return an integer in ``minimum..maximum``, or ``default`` where the key is absent or null."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"config.json: {key} must be an integer >= {minimum}, got {brief(value)}")
    if value > maximum:
        raise ValueError(f"config.json: {key} must be an integer <= {maximum}, got {brief(value)}")
    return value


def read_float(
    raw: Raw, key: str, default: float | None = None, *, minimum: float = 0.0, maximum: float = LARGEST
) -> float:
    """Return a finite number in ``minimum..maximum``, or ``default`` where the key is absent or null."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.json: {key} must be a number, got {brief(value)}")
    if not minimum <= value <= maximum:
        raise ValueError(f"config.json: {key} must be in {minimum:g}..{maximum:g}, got {brief(value)}")
    return float(value)


def read_eps(raw: Raw, default: float) -> float:
    """Return ``rms_norm_eps``, which norms add to a mean square."""
    return read_float(raw, "rms_norm_eps", default, maximum=1.0)


def read_layers(raw: Raw) -> int:
    """Return ``num_hidden_layers``."""
    return read_int(raw, "num_hidden_layers", minimum=1, maximum=MOST_LAYERS)


def read_bool(raw: Raw, key: str, default: bool) -> bool:
    """Return a boolean, or ``default`` where the key is absent or null."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key} must be true or false, got {brief(value)}")
    return value


def read_ints(raw: Raw, key: str, *, minimum: int = 0, maximum: int = MOST) -> tuple[int, ...]:
    """Return a list of integers in ``minimum..maximum``; absent or null is empty."""
    value = raw.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
        raise ValueError(f"config.json: {key} must be a list of integers, got {brief(value)}")
    wrong = [x for x in value if not minimum <= x <= maximum]
    if wrong:
        raise ValueError(f"config.json: {key} must list integers in {minimum}..{maximum}, got {brief(wrong)}")
    return tuple(value)


def read_layer_types(raw: Raw, layers: int, known: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return ``layer_types``, the kind of each layer, or None where the key is absent or null."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"config.json: layer_types must list num_hidden_layers={layers} kinds, got {brief(kinds)}")
    unknown = sorted({str(kind) for kind in kinds} - set(known))
    if unknown:
        raise NotImplementedError(f"config.json: layer_types {unknown} are unknown; known: {', '.join(known)}")
    return tuple(kinds)


def require(raw: Raw, expected: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse values that are not implemented; each key may be absent or null or one of the values given."""
    for key, values in expected.items():
        value = raw.get(key)
        # 0 equals False, but is not what the key means
        if value is not None and not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values):
            known = ", ".join(repr(known) for known in values)
            raise NotImplementedError(f"config.json: {key}={brief(value)} is not implemented; implemented: {known}")


def read_top_k(raw: Raw, experts: int) -> int:
    """Return ``num_experts_per_tok``, at most the number of experts, by whatever key that was read."""
    top_k = read_int(raw, "num_experts_per_tok", minimum=1)
    if top_k > experts:
        keys = [key for key in ("n_routed_experts", "num_local_experts") if raw.get(key) is not None]
        key = (*keys, "num_experts")[0]
        raise ValueError(f"config.json: num_experts_per_tok={top_k} must be in 1..{key}={experts}")
    return top_k


def read_sparse_layers(raw: Raw, layers: int, experts: int) -> tuple[bool, ...]:
    """Tell which layers have experts: every ``decoder_sparse_step``-th from one, but those in ``mlp_only_layers``."""
    dense = read_ints(raw, "mlp_only_layers", maximum=layers - 1)
    step = read_int(raw, "decoder_sparse_step", 1, minimum=1)
    return tuple(experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(layers))


def read_expert_size(raw: Raw, experts: int) -> int:
    """Return ``moe_intermediate_size``, which is 0 only where no layer has experts."""
    return read_int(raw, "moe_intermediate_size", minimum=1 if experts else 0)


def read_shared_size(raw: Raw, expert_size: int, count: int | None = None) -> int:
    """Return ``shared_expert_intermediate_size``, 0 without experts: ``count`` of it are a bearable number of slots."""
    size = read_int(raw, "shared_expert_intermediate_size", 0)
    if not expert_size:
        return 0
    if size * (1 if count is None else count) > MOST_SHARED * expert_size:
        raise ValueError(
            f"config.json: shared_expert_intermediate_size={size} must be at most {MOST_SHARED} times "
            f"moe_intermediate_size={expert_size}, all shared experts taken together"
        )
    return size


def rope_keys(raw: Raw) -> Raw:
    """Join ``rope_scaling`` and ``rope_parameters``, of which the second is newer and wins."""
    joined: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = raw.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"config.json: {key} must be an object, got {brief(value)}")
        joined |= value or {}
    return joined


def read_rope(raw: Raw, rotary_size: int, *, theta: float | None = None, apply_mscale: bool = False) -> RopeConfig:
    """Read the rotary parameters from ``rope_parameters`` or from ``rope_theta`` and ``rope_scaling``.

    Args:
        raw: config.json.
        rotary_size: R, rotated channels.
        theta: default of rope_theta.
        apply_mscale: the family multiplies cos and sin by the ratio of ``mscale`` and ``mscale_all_dim``.
    """
    rope = rope_keys(raw)
    base = read_float(raw if rope.get("rope_theta") is None else rope, "rope_theta", theta, minimum=SMALLEST)
    given = [(key, rope[key]) for key in ("rope_type", "type") if rope.get(key) is not None]
    key, kind = (*given, ("rope_type", "default"))[0]
    if kind not in KNOWN_ROPE:
        raise NotImplementedError(
            f"config.json: {key}: rope type {brief(kind)} is unknown; known: {', '.join(KNOWN_ROPE)}"
        )
    if kind == "default":
        return RopeConfig(rotary_size, base)
    factor = read_float(rope, "factor", minimum=1.0)
    mscale, mscale_all = read_float(rope, "mscale", 0.0), read_float(rope, "mscale_all_dim", 0.0)
    if apply_mscale and mscale and mscale_all:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    else:
        attention_factor = yarn_mscale(factor)
    context = read_int(raw, "max_position_embeddings", minimum=1)
    return RopeConfig(
        rotary_size,
        base,
        factor=factor,
        original_context=read_int(rope, "original_max_position_embeddings", context, minimum=1),
        beta_fast=read_float(rope, "beta_fast", 32.0, minimum=SMALLEST),
        beta_slow=read_float(rope, "beta_slow", 1.0, minimum=SMALLEST),
        truncate=rope.get("truncate", True) is not None and read_bool(rope, "truncate", True),
        attention_factor=read_float(rope, "attention_factor", attention_factor, minimum=SMALLEST),
    )


def read_whole_rope(raw: Raw, rotary_size: int, *, theta: float) -> RopeConfig:
    """Read the rotary parameters of a family that rotates whole heads, YaRN's temperature as transformers reads it."""
    for keys in (raw, rope_keys(raw)):
        require(keys, {"partial_rotary_factor": (1.0,)})
    return read_rope(raw, rotary_size, theta=theta, apply_mscale=True)


def read_partial_rope(raw: Raw, head_size: int, *, part: float, theta: float) -> RopeConfig:
    """Read the rotary parameters of a family that rotates the first channels of each head.

    Args:
        raw: config.json.
        head_size: C.
        part: default of ``partial_rotary_factor``, the part of C that rotates.
        theta: default of rope_theta.
    """
    rope = rope_keys(raw)
    keys = raw if rope.get("partial_rotary_factor") is None else rope
    part = read_float(keys, "partial_rotary_factor", part, minimum=SMALLEST, maximum=1.0)
    return read_rope(raw, int(head_size * part), theta=theta, apply_mscale=True)
