"""``fmoe.prefill``: run a prompt once and give what the model remembers of it as a value."""

from collections.abc import Sequence

from fmoe.compile.step import Steps

from .ambient import check_model, undisturbed
from .cache_size import check_room
from .chunks import choose_chunk
from .decoding import explain_nan, new_state
from .decoding import prefill as prefill_rows
from .model import Model, choose_steps
from .prompts import Prompt, encode_prompt
from .states import State, check_state, fingerprint_of


def prefill(model: Model, prompt: Prompt, *, state: State | None = None) -> State:
    """Run a prompt and give what the model remembers of it, from which any number of texts can go on.

    ``generate(model, "", state=prefill(model, prompt))`` gives what ``generate(model, prompt)`` does, bit for bit, and
    so does a prompt that is run part by part wherever the parts are multiples of ``chunks.choose_chunk`` tokens;
    other parts differ in rounding alone.

    Args:
        model: from ``fmoe.load``.
        prompt: what ``generate`` takes as one prompt.
        state: what the prompt goes on from; the prompt is then a continuation, as in ``generate``.

    Returns:
        The state behind the prompt; where nothing follows a state, that state itself.

    Raises:
        ValueError: the prompt or the state cannot be used, or the caches do not fit into memory.
        RuntimeError: the model's logits held NaN or infinity; the message names the layer.
    """
    check_model(model, "prefill")
    if state is not None:
        check_state(model, state)
    seen = None if state is None else state.token_ids
    ids = encode_prompt(model, prompt, max_new_tokens=0, seen=seen)
    new = len(ids) - len(seen or ())
    if state is not None and not new:
        return state
    steps = choose_steps(model, new)
    check_room(model, steps, 1, len(ids))
    with undisturbed(model):
        return run_prompt(model, steps, ids, state)


def run_prompt(model: Model, steps: Steps, ids: Sequence[int], origin: State | None, /) -> State:
    """Run the tokens behind those of an origin, with which the ids begin, into caches of their own."""
    rows = new_state(model, 1, len(ids))
    logits_1V = prefill_rows(model, steps, [ids], rows, origin=origin)
    if not logits_1V.isfinite().all():
        raise RuntimeError(explain_nan(model, ids, steps, chunk=choose_chunk(model)))
    return State(tuple(ids), rows.caches, logits_1V[0].clone(), fingerprint_of(model))
