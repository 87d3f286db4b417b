"""Reading config.json: typed values or an error that names the key. Both generations of key names."""

from collections.abc import Mapping
from typing import Any

from fmoe.functional.rotary import RopeConfig, yarn_mscale

Raw = Mapping[str, Any]

KNOWN_ROPE = ("default", "yarn")


def read_int(raw: Raw, key: str, default: int | None = None) -> int:
    """Return an integer >= 0, or ``default`` where the key is absent or null."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"config.json: {key} must be an integer >= 0, got {value!r}")
    return value


def read_float(raw: Raw, key: str, default: float | None = None) -> float:
    """Return a number, or ``default`` where the key is absent or null."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.json: {key} must be a number, got {value!r}")
    return float(value)


def read_bool(raw: Raw, key: str, default: bool) -> bool:
    """Return a boolean, or ``default`` where the key is absent or null."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key} must be true or false, got {value!r}")
    return value


def read_ints(raw: Raw, key: str) -> tuple[int, ...]:
    """Return a list of integers; absent or null is empty."""
    value = raw.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
        raise ValueError(f"config.json: {key} must be a list of integers, got {value!r}")
    return tuple(value)


def read_layer_types(raw: Raw, layers: int, known: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return ``layer_types``, the kind of each layer, or None where the key is absent or null."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"config.json: layer_types must list num_hidden_layers={layers} kinds, got {kinds!r}")
    unknown = sorted({str(kind) for kind in kinds} - set(known))
    if unknown:
        raise NotImplementedError(f"config.json: layer_types {unknown} are unknown; known: {', '.join(known)}")
    return tuple(kinds)


def require(raw: Raw, expected: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse values that are not implemented; each key may be absent or null or one of the values given."""
    for key, values in expected.items():
        value = raw.get(key)
        if value is not None and value not in values:
            known = ", ".join(repr(known) for known in values)
            raise NotImplementedError(f"config.json: {key}={value!r} is not implemented; implemented: {known}")


def read_rope(raw: Raw, rotary_size: int, *, theta: float | None = None, apply_mscale: bool = False) -> RopeConfig:
    """Read the rotary parameters from ``rope_parameters`` or from ``rope_theta`` and ``rope_scaling``.

    Args:
        raw: config.json.
        rotary_size: R, rotated channels.
        theta: default of rope_theta.
        apply_mscale: the family multiplies cos and sin by the ratio of ``mscale`` and ``mscale_all_dim``.
    """
    new, scaling = raw.get("rope_parameters"), raw.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"config.json: {key} must be an object, got {value!r}")
    rope: Raw = {**(scaling or {}), **(new or {})}
    base = read_float(raw if rope.get("rope_theta") is None else rope, "rope_theta", theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in KNOWN_ROPE:
        raise NotImplementedError(f"config.json: rope type {kind!r} is unknown; known: {', '.join(KNOWN_ROPE)}")
    if kind == "default":
        return RopeConfig(rotary_size, base)
    factor = read_float(rope, "factor")
    mscale, mscale_all = read_float(rope, "mscale", 0.0), read_float(rope, "mscale_all_dim", 0.0)
    if apply_mscale and mscale and mscale_all:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    else:
        attention_factor = yarn_mscale(factor)
    return RopeConfig(
        rotary_size,
        base,
        factor=factor,
        original_context=read_int(rope, "original_max_position_embeddings", read_int(raw, "max_position_embeddings")),
        beta_fast=read_float(rope, "beta_fast", 32.0),
        beta_slow=read_float(rope, "beta_slow", 1.0),
        truncate=read_bool(rope, "truncate", True),
        attention_factor=read_float(rope, "attention_factor", attention_factor),
    )


def read_whole_rope(raw: Raw, rotary_size: int, *, theta: float) -> RopeConfig:
    """Read the rotary parameters of a family that rotates whole heads, YaRN's temperature as transformers reads it."""
    rope = raw.get("rope_parameters")
    for keys in (raw, rope if isinstance(rope, Mapping) else {}):
        require(keys, {"partial_rotary_factor": (1.0,)})
    return read_rope(raw, rotary_size, theta=theta, apply_mscale=True)
