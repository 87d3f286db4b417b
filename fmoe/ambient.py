"""What surrounds a call: whether this process may run the model, and the caller's torch contexts, kept out of it."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from .model import Model

CPU = torch.device("cpu")


def check_model(model: object, function: str, /) -> None:
    """Refuse whatever is no loaded model, and a model of a process that was forked since.

    Raises:
        ValueError: ``model`` is something else; the message says how ``function`` is called.
        RuntimeError: as ``undisturbed``.
    """
    if not isinstance(model, Model):
        raise ValueError(
            f"model must come from fmoe.load, got {type(model).__name__}; write fmoe.{function}(fmoe.load('demo'), ...)"
        )
    _check_process(model)


@contextmanager
def undisturbed(model: Model, /) -> Iterator[None]:
    """Run without gradients, and without the caller's autocast and default device: a model knows its dtypes and place.

    Raises:
        RuntimeError: this process was forked after the model was loaded.
    """
    _check_process(model)
    with torch.inference_mode(), torch.autocast(model.device.type, enabled=False), _plain_device():
        yield


def _plain_device() -> AbstractContextManager[object]:
    # Entered only where it changes something: it makes each call of torch slower.
    return nullcontext() if torch.get_default_device() == CPU else CPU


def _check_process(model: Model) -> None:
    # Neither OpenMP's threads nor a GPU's context live on in a forked process: what waits for them waits for ever.
    if os.getpid() != model.process:
        raise RuntimeError(
            "this process was forked after fmoe was loaded; start workers with 'spawn' and load the model in each"
        )
