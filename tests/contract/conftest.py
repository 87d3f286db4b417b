"""AITER for the contract suite: the installed one where it works, else the stand-in of a release."""

import importlib
from collections.abc import Callable, Iterator

import pytest

from fmoe.compile import aiter_ops

from .standin.backend import Backend, real_backend, standin_backend


@pytest.fixture(scope="session")
def make_backend(tmp_path_factory) -> Callable[..., Backend]:
    """Give the stand-in of a release with defects switched on; equal ones are written once."""
    made: dict[tuple[str, tuple[str, ...]], Backend] = {}

    def make(version: str = "v0.1.20", *defects: str) -> Backend:
        key = (version, defects)
        if key not in made:
            made[key] = standin_backend(tmp_path_factory.mktemp("aiter"), version=version, defects=defects)
        return made[key]

    return make


@pytest.fixture(scope="session")
def backend(make_backend) -> Backend:
    """Give the AITER under test."""
    return real_backend(importlib.import_module) or make_backend()


@pytest.fixture
def register() -> Iterator[Callable[[Backend], None]]:
    """Give the ops an AITER for the length of one test."""
    yield lambda backend: aiter_ops.register(backend.module, backend.record)
    aiter_ops.unregister()


@pytest.fixture
def registered(backend, register) -> Backend:
    """Give the ops the AITER under test."""
    register(backend)
    return backend
