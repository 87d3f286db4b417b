"""Rows that decode together with drafts: each step runs the newest token and its drafts, keeps those that are right,
and drafts anew, all on the device. The rows get what they get without drafts, in fewer steps.

What a step leaves behind is a value: attention's caches are as long as their rows say, so a wrong draft's slots are
written again, and DeltaNet's states stand before the last step, whose tokens are settled by the next one. Rows keep
different numbers of drafts; a row at its limit stands still.

Letters: B rows, N drafts, T = N + 1 tokens of a step, D hidden, V vocabulary.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmoe.compile.step import DraftSteps, Verdict, cache_slots, visible_slots
from fmoe.functional.attention import Placement, see_all
from fmoe.functional.cache import Cache, DeltaCache, PendingDelta
from fmoe.functional.delta_drafts import pend_delta, select_pending, settle_delta_
from fmoe.functional.norm import rms_norm
from fmoe.functional.quant import Weight
from fmoe.functional.sampling import mark_seen_, penalize_repetition, sample, sample_greedy, token_logprobs
from fmoe.functional.speculate import mark_drafts, number_tokens, repeat_sampling

from .architectures import Following, Layers, State, Stream, place_step, run_layers, start_step, state_row
from .batches import Batch, IsActive, Token, Turn
from .capture import Launcher, Machine, Outputs, Read
from .chunks import attends_causally
from .drafting import DraftHead
from .model import Model
from .options import Options
from .pace import Pace

NOTHING = Token(0, None, ())  # for a row that nobody waits for


class _Launched(NamedTuple):
    drafts: int
    warm: bool  # nothing was compiled or captured for it
    began_s: float
    read: Read


class SpeculativeBatch:
    """A batch whose steps draft; ``base`` has what batches have, and its state is a view of this one's.

    Args:
        base: a batch of a kind with drafts, and with room for them, which nobody else runs.
        model: whose functions are taken.
        head: of the model.
    """

    def __init__(self, base: Batch, model: Model, head: DraftHead) -> None:
        self.base, self.head, self.most, self.adapts = base, head, base.kind.drafts, base.kind.adapts
        self.kind, self.params, self.steps, self.capacity = base.kind, base.params, base.steps, base.capacity
        self.state, self.launcher = base.state, base.launcher
        self.eager_layers: Layers = model.eager.layers
        self.eager_masked = model.eager.masked
        self.causal = attends_causally(model)
        self.drafts: DraftSteps = head.graphs if base.steps.compiled else head.eager
        config, decoder, rows = model.config, model.config.decoder, base.state.lengths_B.shape[0]
        delta: Any = getattr(config, "delta", None)

        def pend(cache: Cache) -> Cache:
            return pend_delta(cache, delta, self.most + 1) if isinstance(cache, DeltaCache) else cache

        self.caches = tuple(pend(cache) for cache in base.state.caches)
        single = replace(config, decoder=replace(decoder, layer_kinds=(head.kind,)))  # type: ignore[type-var]
        own = head.params.head_VD if rows == 1 else None
        self.draft_head_VD: Weight = self.params.head_VD if own is None else own
        slots = cache_slots(base.capacity)
        self.draft: State = model.architecture.init_state(single, rows, slots, dtype=model.dtype, device=model.device)
        ints = torch.zeros(2, rows, dtype=torch.int64, device=model.device)
        self.drafts_BN = torch.zeros(rows, self.most, dtype=torch.int64, device=model.device)
        self.verdict = Verdict(ints[0].clone(), ints[1].clone(), self.drafts_BN)
        self.hidden_BD = torch.zeros(rows, decoder.hidden_size, dtype=model.dtype, device=model.device)
        self.launchers: dict[tuple[int, bool], Launcher] = {}  # by drafts, and whether placements are shared
        self.shares = False  # the draft layer has seen what the others have, so its tokens stand where theirs do
        self.placement: Placement | None = None  # of the step's tokens
        self.running = 0  # drafts of the steps that were launched last
        self.visible = 0
        self.count = 0
        self.told: list[list[int]] = []
        self.reads: deque[_Launched] = deque()

    def begin(self, prompts: Sequence[Sequence[int]], options: Options, first_row: int, /) -> None:
        """Forget what was there, and take the settings; as ``Batch.begin``."""
        self.base.begin(prompts, options, first_row)
        self.drafts.forget()
        kept = (*self.draft.caches[0], self.draft.lengths_B, self.hidden_BD, *self.verdict)
        for part in kept:
            part.zero_()
        self.count, self.running = options.max_new_tokens, self.most
        self.reads.clear()

    def watch(self, first: int, tokens_BT: Tensor, start: int, x_BTD: Tensor, /) -> None:
        """Let the draft layer see a chunk of prompts.

        Args:
            first: the first of the rows.
            tokens_BT: their whole prompts, or what follows an origin.
            start: place of the chunk in them.
            x_BTD: hidden states of the chunk before the final norm.
        """
        rows, tokens = x_BTD.shape[:2]
        hidden_BTD = rms_norm(x_BTD, self.params.norm_D, eps=self.base.decoder.eps)
        following_BT = tokens_BT[:, start + 1 : start + tokens + 1]
        if following_BT.shape[1] < tokens:
            # What follows the last token is not known yet: ``_prime`` writes its slot again.
            self.hidden_BD[first : first + rows] = hidden_BTD[:, -1]
            following_BT = torch.cat((following_BT, torch.zeros_like(tokens_BT[:, :1])), 1)
        state = state_row(self.draft, first, count=rows)
        state = state._replace(lengths_B=torch.full_like(state.lengths_B, start))
        layers = self.steps.layers if tokens > 1 else self.eager_layers
        following = Following(following_BT, self.params.embed_VD)
        visible = start + tokens
        if tokens > 1 and self.causal:
            self._run_draft(hidden_BTD, following, state, self.head.eager, layers, None, visible=visible)
        else:
            self._run_draft(hidden_BTD, following, state, self.head.eager, layers, visible_slots(visible))

    def place(self, lengths: Sequence[int], seen: int, /) -> None:
        """Say how long the prompts are, and how many of their tokens the draft layer was not shown."""
        self.base.place(lengths, seen)
        device = self.verdict.limits_B.device
        limits = [length + self.count - 1 for length in lengths]
        self.verdict.limits_B.copy_(torch.tensor(limits, dtype=torch.int64, device=device))
        shown = [max(length - seen - 1, 0) for length in lengths]
        self.draft.lengths_B.copy_(torch.tensor(shown, dtype=torch.int64, device=device))
        self.shares = not (seen or self.adapts)

    def choose(self, logits_BV: Tensor, /) -> Outputs:
        """Choose the first tokens; as ``Batch.choose``."""
        return self.base.choose(logits_BV)

    def run(self, first: Outputs, lengths: Sequence[int], count: int, is_active: IsActive, /) -> Iterator[Turn]:
        """Give ``count`` tokens of each row, as ``Batch.run``; rows whose drafts are right are ahead of the others."""
        tokens, broken = self.base.read(first)
        queues: list[deque[tuple[Token, bool]]] = [deque([(token, row in broken)]) for row, token in enumerate(tokens)]
        self.told = [[token.id] for token in tokens]
        pace = self.head.find_pace(self.kind.rows, self.steps.compiled)
        self._prime(max(lengths))
        for _ in range(count):
            while any(not queue and is_active(row) for row, queue in enumerate(queues)):
                self._launch(lengths, count, pace, is_active)
                self._receive(queues, pace)
            turn = [queue.popleft() if queue else (NOTHING, False) for queue in queues]
            yield [token for token, _ in turn], [row for row, (_, wrong) in enumerate(turn) if wrong]

    def list_seen(self, prompts: Sequence[Sequence[int]], generated: Sequence[Sequence[int]], /) -> list[list[int]]:
        """List what the layers have seen, once the state is where the tokens that were given end, or near behind.

        No step may be launched after this one.
        """
        while self.reads:
            self._receive([deque() for _ in prompts], None)
        kept_B, lengths_B = self.verdict.kept_B, self.state.lengths_B
        if self.running:
            ends = [len(ids) + len(more) for ids, more in zip(prompts, generated, strict=True)]
            ends_B = torch.tensor(ends, dtype=torch.int64, device=kept_B.device)
            fewer_B = kept_B.minimum((ends_B - (lengths_B - kept_B)).clamp(min=0))
            lengths_B.sub_(kept_B - fewer_B)
            kept_B.copy_(fewer_B)
            self._settle()
        seen = [length - len(ids) for length, ids in zip(lengths_B.tolist(), prompts, strict=True)]
        return [[*ids, *told[:n]] for ids, told, n in zip(prompts, self.told, seen, strict=True)]

    def _launch(self, lengths: Sequence[int], count: int, pace: Pace, is_active: IsActive) -> None:
        """Launch the next step, and the one behind it where the machine runs ahead and it will be needed."""
        machine: Machine = self.launcher.machine
        drafts = pace.choose(self.most) if self.adapts else self.most
        launcher = self.launchers.setdefault((drafts, self.shares), Launcher(machine))
        ends = [length + len(told) for length, told in zip(lengths, self.told, strict=True)]
        shortest = min((len(told) for row, told in enumerate(self.told) if is_active(row)), default=count)
        while len(self.reads) <= (machine.ahead if launcher.warm else 0):
            if self.reads and shortest + len(self.reads) >= count:
                return
            ahead = sum(launched.drafts + 1 for launched in self.reads)
            self.visible = min(max(ends) + ahead + 2 * (drafts + 1), self.capacity)
            warm, began_s = launcher.warm, perf_counter()
            if drafts != self.running:
                self._switch(drafts)
            remaining = -(-(count - shortest) // (drafts + 1))
            outputs = launcher.launch(lambda: self.step(drafts), remaining=remaining)
            self.reads.append(_Launched(drafts, warm, began_s, machine.fetch(outputs)))

    def _receive(self, queues: Sequence[deque[tuple[Token, bool]]], pace: Pace | None) -> None:
        """Read a step's tokens and put them behind those that wait."""
        launched = self.reads.popleft()
        codes, *logprobs = [output.tolist() for output in launched.read()]
        given = 0
        for row, (queue, told) in enumerate(zip(queues, self.told, strict=True)):
            *row_codes, kept = codes[row]
            proposed = min(launched.drafts, self.count - len(told) - 1)
            for t, code in enumerate(row_codes[:kept]):
                id_ = code if code >= 0 else -1 - code
                own, top_ids, top = (part[row][t] for part in logprobs) if logprobs else (None, (), ())
                top = tuple(zip(top_ids, top, strict=True))
                token = Token(id_, own, top, drafted=0 if t else proposed, accepted=t < kept - 1)
                queue.append((token, code < 0))
                told.append(id_)
            given += kept
        if pace is not None:
            pace.note(launched.drafts, given, perf_counter(), began_s=launched.began_s, warm=launched.warm)

    def _switch(self, drafts: int) -> None:
        """Settle what is pending, so that steps of another number of drafts find states that are up to date."""
        if self.running:
            self._settle()
        self.verdict.kept_B.zero_()
        self.running = drafts

    def _settle(self) -> None:
        for cache in self.caches:
            if isinstance(cache, PendingDelta):
                settle_delta_(select_pending(cache, self.running + 1), self.verdict.kept_B)

    def step(self, drafts: int) -> Outputs:
        """Run the newest token of each row and its drafts, keep what is right, and draft anew; on the device alone."""
        if not drafts:
            return self._step_plainly()
        steps, params = self.drafts, self.params
        drafts_BN = self.drafts_BN[:, :drafts]
        tokens_BT = torch.cat((self.base.cursor.tokens_B[:, None], drafts_BN), 1)
        caches = tuple(select_pending(c, drafts + 1) if isinstance(c, PendingDelta) else c for c in self.caches)
        state = self.state._replace(caches=caches)
        stream = run_layers(
            tokens_BT, params, state, self.base.decoder, steps.layers, slots=None, start=self._start_verifying
        )
        normed_BTD, outputs = self._verify(stream, self.verdict._replace(drafts_BN=drafts_BN))
        self._draft_next(normed_BTD, outputs[1], drafts)
        return (outputs[0], *outputs[2:])

    def _start_verifying(self, tokens_BT: Tensor, embed_VD: Tensor, state: State) -> tuple[Stream, Placement]:
        steps, slots = self.drafts, self._slots(self.drafts.masked)
        if slots is None and steps.start is not None:
            stream, placement = steps.start(tokens_BT, embed_VD, state)
        else:
            stream, placement = start_step(tokens_BT, embed_VD, state, config=self.base.decoder, slots=slots)
        self.placement = placement._replace(kept_B=self.verdict.kept_B)
        return stream, self.placement

    def _slots(self, masked: bool) -> int | None:
        """Give the slots that a mask covers: a captured step looks at all of them, for their number must not change."""
        if not masked:
            return None
        return visible_slots(self.visible if self.launcher.machine.least is None else self.capacity)

    def _verify(self, stream: Stream, verdict: Verdict) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Choose behind each token: normed hidden states, then codes, the tokens chosen, and log-probabilities."""
        steps, params, base = self.drafts, self.params, self.base
        if steps.choose is not None and base.choice.is_plain:
            normed_BTD, chosen_BT, check_BT = steps.choose(stream, params.norm_D, params.head_VD)
            return normed_BTD, (steps.accept(chosen_BT, check_BT, base.cursor, verdict), chosen_BT)
        if steps.finish is not None and base.choice.is_plain:
            normed_BTD, *outputs = steps.finish(stream, params.norm_D, params.head_VD, base.cursor, verdict)
            return normed_BTD, tuple(outputs)
        normed_BTD, raw_BTV = steps.head(stream, params.norm_D, params.head_VD)
        chosen_BT = self._choose_many(raw_BTV, verdict.drafts_BN)
        codes = steps.accept(chosen_BT, raw_BTV.sum(-1), base.cursor, verdict)
        if base.seen_BV is not None:
            places = torch.arange(chosen_BT.shape[1], device=chosen_BT.device)
            mark_seen_(base.seen_BV, torch.where(places < verdict.kept_B[:, None], chosen_BT, -1))
        if base.choice.logprobs is None:
            return normed_BTD, (codes, chosen_BT)
        logprobs = token_logprobs(raw_BTV.flatten(0, 1), chosen_BT.flatten(), n=base.choice.logprobs)
        return normed_BTD, (codes, chosen_BT, *(part.unflatten(0, chosen_BT.shape) for part in logprobs))

    def _choose_many(self, logits_BTV: Tensor, drafts_BN: Tensor) -> Tensor:
        """Choose what comes behind each token, as ``Batch.choose`` would with that token the newest."""
        base, choice, tokens = self.base, self.base.choice, logits_BTV.shape[1]
        logits_NV = logits_BTV.flatten(0, 1)
        if choice.greedy and base.seen_BV is None:
            return sample_greedy(logits_NV).view(-1, tokens)
        params = repeat_sampling(base.sampling, tokens)
        if base.seen_BV is not None:
            seen_NV = mark_drafts(base.seen_BV, drafts_BN).flatten(0, 1)
            logits_NV = penalize_repetition(logits_NV, seen_NV, params.repetition_penalty_B)
        if choice.greedy:
            return sample_greedy(logits_NV).view(-1, tokens)
        counters_N = number_tokens(base.cursor.counters_B, tokens)
        return sample(logits_NV, params, counters_N, num_candidates=choice.candidates).view(-1, tokens)

    def _draft_next(self, normed_BTD: Tensor, chosen_BT: Tensor, drafts: int) -> None:
        """Show the draft layer what was kept, and draft behind it."""
        steps, kept_B = self.drafts, self.verdict.kept_B
        following = Following(chosen_BT, self.params.embed_VD)
        if steps.draft is not None and self.base.choice.is_plain:
            placement = self._place_drafts(normed_BTD)
            head, cache = self.head.params, self.draft.caches[0]
            last, first_B = steps.draft(normed_BTD, head, following, cache, placement, self.params.head_VD)
            self.draft.lengths_B.add_(kept_B)
            self.drafts_BN[:, 0] = first_B
            self._draft_on(last, 1, drafts, steps, self.steps.layers, self._slots(self.steps.masked))
            return
        stream = steps.join(normed_BTD, self.head.params, following)
        placement = self._place_drafts(normed_BTD)
        stream = steps.layers[self.head.kind](stream, self.head.params.layer, self.draft.caches[0], placement)
        self.draft.lengths_B.add_(kept_B)
        normed_B1D = self._draft_once(steps.take(stream, kept_B), 0, steps)
        self._draft_on(normed_B1D, 1, drafts, steps, self.steps.layers, self._slots(self.steps.masked))

    def _place_drafts(self, normed_BTD: Tensor) -> Placement:
        """Place a step's tokens in the draft layer's cache: where they stand in the others, if it has seen as many."""
        if self.shares and self.placement is not None:
            return self.placement
        slots = self._slots(self.drafts.masked)
        placement = place_step(normed_BTD, self.draft, config=self.base.decoder, slots=slots)
        return placement._replace(kept_B=self.verdict.kept_B)

    def _prime(self, longest: int) -> None:
        """Draft behind the first tokens, from the last hidden states of the prompts."""
        self.visible = min(longest + 2 * (self.most + 1), self.capacity)
        slots = visible_slots(self.visible) if self.eager_masked else None
        eager, layers = self.head.eager, self.eager_layers
        following = Following(self.base.cursor.tokens_B[:, None], self.params.embed_VD)
        last = self._run_draft(self.hidden_BD[:, None], following, self.draft, eager, layers, slots)
        self.draft.lengths_B.add_(1)
        self._draft_on(self._draft_once(last, 0, eager), 1, 1 if self.adapts else self.most, eager, layers, slots)

    def _draft_once(self, last: Stream, n: int, steps: DraftSteps) -> Tensor:
        """Choose draft n from the draft layer's output behind the token before it; gives what the next one reads."""
        norm_D, head_VD = self.head.params.norm_D, self.params.head_VD
        if steps.choose is not None and self.base.choice.is_plain:
            normed_B1D, drafts_B1, _ = steps.choose(last, norm_D, self.draft_head_VD)
            self.drafts_BN[:, n] = drafts_B1[:, 0]
        else:
            normed_B1D, logits_B1V = steps.head(last, norm_D, head_VD)
            self.drafts_BN[:, n] = self._pick_draft(logits_B1V[:, 0], n)
        return normed_B1D

    def _draft_on(
        self, normed_B1D: Tensor, known: int, drafts: int, steps: DraftSteps, layers: Layers, slots: int | None
    ) -> None:
        """Draft behind the drafts that are known, one after another; the slots that this writes are not kept."""
        for n in range(known, drafts):
            state = self.draft._replace(lengths_B=self.draft.lengths_B + (n - 1))
            following = Following(self.drafts_BN[:, n - 1 : n], self.params.embed_VD)
            last = self._run_draft(normed_B1D, following, state, steps, layers, slots)
            normed_B1D = self._draft_once(last, n, steps)

    def _pick_draft(self, logits_BV: Tensor, n: int) -> Tensor:
        """Choose draft n as the token that it stands for will be chosen, with the same random number."""
        base, choice = self.base, self.base.choice
        if base.seen_BV is not None:
            logits_BV = penalize_repetition(logits_BV, base.seen_BV, base.sampling.repetition_penalty_B)
        if choice.greedy:
            return sample_greedy(logits_BV)
        return sample(logits_BV, base.sampling, base.cursor.counters_B + n, num_candidates=choice.candidates)

    def _run_draft(
        self,
        hidden_BTD: Tensor,
        following: Following,
        state: State,
        steps: DraftSteps,
        layers: Layers,
        slots: int | None,
        *,
        visible: int | None = None,
    ) -> Stream:
        """Run the draft layer behind what its state holds; tokens that need no mask see so many, as ``see_all``."""
        stream: Stream = steps.join(hidden_BTD, self.head.params, following)
        placement: Placement = place_step(stream.total_BTD, state, config=self.base.decoder, slots=slots)
        placement = placement if visible is None else see_all(placement, visible)
        return layers[self.head.kind](stream, self.head.params.layer, state.caches[0], placement)

    def _step_plainly(self) -> Outputs:
        """Run the newest token of each row alone, as ``Batch.step``, but leave rows at their limits where they are."""
        base, steps, params = self.base, self.steps, self.params
        tokens_B1 = base.cursor.tokens_B[:, None]
        start, slots = (None, self._slots(True)) if steps.masked else (steps.start, None)
        stream = run_layers(tokens_B1, params, self.state, base.decoder, steps.layers, slots=slots, start=start)
        _, outputs = self._verify(stream, self.verdict._replace(drafts_BN=self.drafts_BN[:, :0]))
        return (outputs[0], *outputs[2:])
