"""Rows that decode together: what of them stays at one address, and the step that moves each on by one token.

Letters: B rows, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fmoe.compile.step import Cursor, Steps, cache_slots, visible_slots
from fmoe.functional.sampling import (
    count_candidates,
    mark_seen_,
    penalize_repetition,
    sample,
    sample_greedy,
    sampling_params,
    token_logprobs,
)

from .architectures import State as State
from .architectures import run_layers
from .capture import Launcher, Machine, Outputs
from .model import Model
from .options import Options

ROOM = 512  # positions by which caches grow where steps do not depend on their size

IsActive = Callable[[int], bool]
Turn = tuple[list["Token"], list[int]]  # a token of each row, and the rows whose logits were broken


class Token(NamedTuple):
    """One generated token; the log-probabilities are those of the model's own distribution."""

    id: int
    logprob: float | None  # None unless asked for
    top: tuple[tuple[int, float], ...]  # the most probable (id, log-probability), as many as asked for
    drafted: int = 0  # drafts of the step whose first token it is
    accepted: bool = False  # it was one of the drafts


def new_state(model: Model, batch: int, tokens: int, /) -> State:
    """Make an empty state of ``batch`` rows with room for ``tokens`` positions."""
    return model.architecture.init_state(
        model.config, batch, cache_slots(tokens), dtype=model.dtype, device=model.device
    )


def batch_capacity(steps: Steps, tokens: int, /) -> int:
    """Give the positions of a batch; where nothing depends on their number, more of them serve longer prompts."""
    return tokens if steps.masked else -(-tokens // ROOM) * ROOM


class Choice(NamedTuple):
    """What of the options decides which operations choose a token."""

    greedy: bool
    candidates: int | None
    penalized: bool
    logprobs: int | None

    @property
    def is_plain(self) -> bool:
        """The most probable token and nothing else."""
        return self.greedy and not self.penalized and self.logprobs is None

    @classmethod
    def of(cls, options: Options, /) -> "Choice":
        candidates = count_candidates(top_k=options.top_k, top_p=options.top_p)
        return cls(options.temperature == 0, candidates, options.repetition_penalty != 1.0, options.logprobs)


class Kind(NamedTuple):
    """What must be equal for a batch to be used again."""

    machine: type
    rows: int
    choice: Choice
    drafts: int  # of the longest step
    adapts: bool  # to the number of drafts that pays


class Batch:
    """Rows that decode together: their state, what sampling needs, and the step, all at addresses that do not change.

    It knows nothing of the model that may keep it.
    """

    def __init__(self, model: Model, steps: Steps, kind: Kind, tokens: int, machine: Machine) -> None:
        self.kind, rows, self.choice = kind, kind.rows, kind.choice
        self.params, self.steps, self.decoder = model.params, steps, model.config.decoder
        self.launcher = Launcher(machine)
        self.capacity = batch_capacity(steps, tokens)
        self.state = new_state(model, rows, self.capacity)
        tokens_B, counters_B = torch.zeros(2, rows, dtype=torch.int64, device=model.device).unbind()
        self.cursor = Cursor(tokens_B.clone(), self.state.lengths_B, counters_B.clone())
        self.sampling = sampling_params(rows, temperature=0.0, device=model.device)
        self.seen_BV: Tensor | None = None
        if self.choice.penalized:
            self.seen_BV = torch.zeros(rows, self.decoder.vocab_size, dtype=torch.bool, device=model.device)
        self.visible = 0
        self.launched = 0
        self.used = False

    def begin(self, prompts: Sequence[Sequence[int]], options: Options, first_row: int, /) -> None:
        """Forget what was there, and take the settings and the tokens that count as seen."""
        written = [part for cache in self.state.caches for part in cache]
        for part in [*(written if self.used else []), *self.cursor]:
            part.zero_()
        self.used = True
        device = self.state.lengths_B.device
        fresh = sampling_params(
            len(prompts),
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            seed=options.seed,
            device=device,
        )
        fresh = fresh._replace(seeds_B=fresh.seeds_B + first_row)
        for kept_B, fresh_B in zip(self.sampling, fresh, strict=True):
            kept_B.copy_(fresh_B)
        if self.seen_BV is not None:
            self.seen_BV.zero_()
            for row, ids in enumerate(prompts):
                self.seen_BV[row, torch.tensor(ids, device=device)] = True

    def place(self, lengths: Sequence[int], seen: int, /) -> None:
        """Say how long the prompts are; choosing the first token moves on by one, though no layer has seen it."""
        lengths_B = self.state.lengths_B
        lengths_B.copy_(torch.tensor([length - 1 for length in lengths], dtype=torch.int64, device=lengths_B.device))

    def run(
        self, first: Outputs, lengths: Sequence[int], count: int, is_active: IsActive, /
    ) -> Iterator[tuple[list[Token], list[int]]]:
        """Give the tokens of ``count`` steps, of which the first is done, and the rows whose logits were broken."""
        machine, longest = self.launcher.machine, max(lengths)
        self.launched = 1
        reads = deque([machine.fetch(first)])
        for n in range(count):
            # What compiles does not run ahead: the token before it is there already.
            while self.launched < min(n + 1 + (machine.ahead if self.launcher.warm else 0), count):
                self.visible = longest + self.launched
                reads.append(machine.fetch(self.launcher.launch(self.step, remaining=count - self.launched)))
                self.launched += 1
            yield self.read(reads.popleft()())

    def list_seen(self, prompts: Sequence[Sequence[int]], generated: Sequence[Sequence[int]], /) -> list[list[int]]:
        """List the tokens that the layers have seen of each row: no step has run with the newest one yet."""
        return [[*ids, *more[: self.launched - 1]] for ids, more in zip(prompts, generated, strict=True)]

    def step(self) -> Outputs:
        """Run the newest token of each row and choose the next, on the device alone."""
        steps, params = self.steps, self.params
        slots = visible_slots(self.visible) if steps.masked else None
        tokens_B1 = self.cursor.tokens_B[:, None]
        start = None if steps.masked else steps.start
        stream = run_layers(tokens_B1, params, self.state, self.decoder, steps.layers, slots=slots, start=start)
        if steps.choose is not None and self.choice.is_plain:
            tokens_B, best_B = steps.choose(stream, params.norm_D, params.head_VD)
            return (steps.advance(tokens_B, best_B, self.cursor),)
        x_B1D = stream.total_BTD + stream.branch_BTD
        return self.choose(steps.logits(x_B1D[:, -1], params.norm_D, params.head_VD))

    def choose(self, logits_BV: Tensor, /) -> Outputs:
        """Choose from logits: codes of ``advance_``, and log-probabilities where they are asked for."""
        raw_BV, choice = logits_BV, self.choice
        if self.seen_BV is not None:
            logits_BV = penalize_repetition(logits_BV, self.seen_BV, self.sampling.repetition_penalty_B)
        if choice.greedy:
            tokens_B = sample_greedy(logits_BV)
        else:
            tokens_B = sample(logits_BV, self.sampling, self.cursor.counters_B, num_candidates=choice.candidates)
        if self.seen_BV is not None:
            mark_seen_(self.seen_BV, tokens_B)
        # NaN and infinity show in the sum
        codes_B = self.steps.advance(tokens_B, raw_BV.sum(-1), self.cursor)
        if choice.logprobs is None:
            return (codes_B,)
        return codes_B, *token_logprobs(raw_BV, tokens_B, n=choice.logprobs)

    def read(self, outputs: Sequence[Tensor], /) -> tuple[list[Token], list[int]]:
        """Turn a step's outputs into a token of each row; also the rows whose logits were broken."""
        codes = outputs[0].tolist()
        ids = [code if code >= 0 else -1 - code for code in codes]
        broken = [row for row, code in enumerate(codes) if code < 0]
        if self.choice.logprobs is None:
            return [Token(i, None, ()) for i in ids], broken
        own_B, top_ids_Bn, top_Bn = outputs[1:]
        rows = zip(ids, own_B.tolist(), top_ids_Bn.tolist(), top_Bn.tolist(), strict=True)
        return [Token(i, own, tuple(zip(top_ids, top, strict=True))) for i, own, top_ids, top in rows], broken
