"""How the steps of a decode loop are launched: one call after the other, or as a captured graph that is replayed.

A captured step runs without Python and without the host knowing its tokens. It reads and writes what stays at one
address: caches, lengths, counters and tokens of the batch.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

LOG = logging.getLogger("fmoe")

Outputs = tuple[Tensor, ...]
Step = Callable[[], Outputs]
Read = Callable[[], Sequence[Tensor]]


class Machine(Protocol):
    """What launches steps.

    ahead: steps that are launched before the tokens of an earlier one are read.
    least: steps from which on a capture pays; None captures nothing.
    """

    ahead: int
    least: int | None

    def warm_up(self, step: Step, /) -> Outputs:
        """Run a step for the first time, which may compile."""
        ...

    def capture(self, step: Step, /) -> Step:
        """Record a step without running it, and return what runs it; its outputs are the same tensors each time."""
        ...

    def fetch(self, outputs: Outputs, /) -> Read:
        """Begin to bring outputs to the host before they are written again; the result waits for them."""
        ...


class DirectMachine:
    """Runs every step by its calls, and waits for its outputs."""

    ahead = 0
    least: int | None = None

    def warm_up(self, step: Step, /) -> Outputs:
        """Run it."""
        return step()

    def capture(self, step: Step, /) -> Step:
        """Never called."""
        raise NotImplementedError("steps that run by their calls are not captured; launch them")

    def fetch(self, outputs: Outputs, /) -> Read:
        """Return what is there: every step makes new outputs."""
        return lambda: outputs


class GraphMachine:
    """Captures steps as CUDA graphs, and reads the tokens of a step while the next one runs."""

    ahead = 1
    least: int | None = 16  # capturing takes about as long as that many steps save

    def __init__(self, device: torch.device, /) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device)

    def warm_up(self, step: Step, /) -> Outputs:
        """Run it on the stream that will capture, so that libraries make their workspaces there."""
        main = torch.cuda.current_stream(self.device)
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            outputs = step()
        main.wait_stream(self.side)
        return outputs

    def capture(self, step: Step, /) -> Step:
        """Record it with memory of its own, which is freed with the result."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may allocate meanwhile
        with torch.cuda.graph(graph, stream=self.side, capture_error_mode="thread_local"):
            outputs = step()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay

    def fetch(self, outputs: Outputs, /) -> Read:
        """Copy to pinned memory behind the step; the next one starts behind the copy."""
        host = [output.to("cpu", non_blocking=True) for output in outputs]
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))

        def read() -> Sequence[Tensor]:
            copied.synchronize()
            return host

        return read


class Launcher:
    """Launches the steps of one batch: the first one by its calls, the second one captured, then replays.

    A machine that cannot capture a step goes on without, and says so once. The step itself is not kept.
    """

    def __init__(self, machine: Machine, /) -> None:
        self.machine = machine
        self.warm = False
        self.replay: Step | None = None
        self.least = machine.least

    def launch(self, step: Step, /, *, remaining: int) -> Outputs:
        """Launch a step; ``remaining`` is the number of steps that will be asked for, this one included."""
        if not self.warm:
            outputs = self.machine.warm_up(step)
            self.warm = True
            return outputs
        if self.replay is None and self.least is not None and remaining >= self.least:
            self.replay = self._capture(step)
        return step() if self.replay is None else self.replay()

    def _capture(self, step: Step) -> Step | None:
        try:
            return self.machine.capture(step)
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            LOG.warning("decode steps run one call after the other, for they cannot be captured: %s", reason)
            self.least = None
            return None


class Shelf:
    """Keeps one batch between generations, with its graph: capturing anew would take longer than many steps."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def take(self, fits: Callable[[Any], bool], /) -> Any:
        """Give what is kept, or None where nothing fits; the shelf is empty then, and the memory free."""
        try:
            kept = self._kept.pop()
        except IndexError:
            return None
        return kept if fits(kept) else None

    def peek(self) -> Any:
        """Show what is kept, or None; it stays."""
        return next(iter(self._kept), None)

    def put(self, kept: object, /) -> None:
        """Keep this instead of what is there."""
        self._kept[:] = [kept]
