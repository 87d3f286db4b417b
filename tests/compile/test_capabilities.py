"""The plain values of the probe: frozen, compared by value, and in no need of a device."""

import dataclasses
import pickle

import pytest

from fmoe.compile.capabilities import AiterRecord, Availability, Capabilities


def capabilities(**changes: object) -> Capabilities:
    values: dict[str, object] = {
        "device_type": "cuda",
        "device_name": "MI300X",
        "arch": "gfx942",
        "units": 304,
        "torch": "2.13",
        "triton": Availability(True),
        "aiter": AiterRecord(False, "not installed"),
        "grouped_mm": Availability(False, "too old", "2.13"),
    }
    return Capabilities(**{**values, **changes})  # type: ignore[arg-type]


def test_they_are_values() -> None:
    assert capabilities() == capabilities()
    assert hash(capabilities()) == hash(capabilities())
    assert capabilities(units=80) != capabilities()
    assert pickle.loads(pickle.dumps(capabilities())) == capabilities()


@pytest.mark.parametrize(
    "value", [Availability(True), AiterRecord(True), capabilities()], ids=lambda v: type(v).__name__
)
def test_they_do_not_change(value: object) -> None:
    name = dataclasses.fields(value)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
    assert not hasattr(value, "__dict__")


def test_what_is_not_known_promises_nothing() -> None:
    record = AiterRecord(False, "why")
    assert (record.topk_arity, record.symbols, record.fused_moe_params) == (0, (), ())
    assert not record.gating_stride_safe
    assert not record.slow_path_stride_safe
