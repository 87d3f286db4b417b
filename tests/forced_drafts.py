"""A drafter that is right, wrong, or right up to some draft, as a test says; everything else is the model's."""

from dataclasses import replace

import torch

from fmoe.drafting import DraftShelf


class Forced:
    """Drafts of rows whose tokens are known: draft n of a row is right while ``is_right(row, token, n)`` says so.

    It stands in the place of the draft's head, and follows ``accept`` to know how many tokens each row has.
    """

    def __init__(self, head, tokens, is_right):
        self.norm_D, self.tokens, self.is_right = head.params.norm_D, tokens, is_right
        self.counts, self.drafted = [1] * len(tokens), 0
        self.kept = []  # by step, of each row
        self.head = replace(head, eager=self.force(head.eager), graphs=self.force(head.graphs))

    def force(self, steps):
        def accept(chosen_BT, check_BT, cursor, verdict):
            codes = steps.accept(chosen_BT, check_BT, cursor, verdict)
            self.counts, self.drafted = cursor.counters_B.tolist(), 0
            self.kept.append(verdict.kept_B.tolist())
            return codes

        def head(stream, norm_D, head_VD):
            normed_BTD, logits_BTV = steps.head(stream, norm_D, head_VD)
            if norm_D is self.norm_D:
                logits_BTV = torch.zeros_like(logits_BTV)
                for row, count in enumerate(self.counts):
                    logits_BTV[row, 0, self.draft(row, count + self.drafted) % logits_BTV.shape[-1]] = 1.0
                self.drafted += 1
            return normed_BTD, logits_BTV

        return replace(steps, accept=accept, head=head, finish=None, draft=None)

    def draft(self, row, place):
        known = self.tokens[row]
        right = known[place] if place < len(known) else 0
        return right if self.is_right(row, place, self.drafted) else right + 1


def force_drafts(model, tokens, is_right):
    """Give a model whose drafts are forced, and what forces them."""
    forced = Forced(model.drafts.get(), tokens, is_right)
    shelf = DraftShelf(lambda: forced.head.params, lambda params: forced.head)
    return replace(model, drafts=shelf), forced
