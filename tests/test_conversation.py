"""A conversation: what each turn runs, and that it says what a run of the whole chat would."""

import logging
from dataclasses import replace

import pytest
import torch

import fmoe
from fmoe import cache_size, conversation
from fmoe.conversation import Conversation

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
GREEDY = {"max_new_tokens": 6, "temperature": 0.0}
FIRST = [{"role": "user", "content": "Who art thou, and whence comest thou?"}]


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", device="cpu", compile=False)


class Prompts:
    """A model that counts the tokens of each prompt's run, and the tokens that its steps run."""

    def __init__(self, demo, template):
        kind = demo.config.decoder.layer_kinds[0]
        layer, self.runs, self.steps, self.calls = demo.eager.layers[kind], [], 0, 0
        layers = demo.config.decoder.layer_kinds.count(kind)

        def counted(stream, *arguments):
            self.calls += 1
            if self.calls % layers == 1:
                self.runs.append(stream.total_BTD.shape[1])
            return layer(stream, *arguments)

        eager = replace(demo.eager, layers={**demo.eager.layers, kind: counted})
        self.model = replace(demo, eager=eager, text=replace(demo.text, chat_template=template))

    def take(self):
        """Give the lengths of the runs since the last time, decode steps left out."""
        runs, self.runs = [n for n in self.runs if n > 1], []
        return runs


def talk(chat, messages, **options):
    """Run a turn; (its tokens, the messages with the reply)."""
    tokens = list(chat.stream(messages, **{**GREEDY, **options}))
    reply = {"role": "assistant", "content": "".join(token.text for token in tokens)}
    return tokens, [*messages, reply]


def ask(messages, content="And what wouldst thou have of me?"):
    return [*messages, {"role": "user", "content": content}]


def rendered_ids(model, messages):
    return fmoe.encode(model, messages)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_second_turn_runs_its_own_tokens_alone(demo, ignore_eos):
    prompts = Prompts(demo, CHATML)
    model, chat = prompts.model, Conversation(prompts.model)

    first, messages = talk(chat, FIRST, ignore_eos=ignore_eos)
    assert prompts.take() == [len(rendered_ids(model, FIRST))]
    second, messages = talk(chat, ask(messages), ignore_eos=ignore_eos)

    # Behind what the first turn's steps saw: its newest token, the end of its turn, the question, the opening.
    ids = rendered_ids(model, messages[:-1])
    new = len(ids) - len(rendered_ids(model, FIRST)) - (len(first) - 1)
    assert prompts.take() == [new]
    assert 10 < new < 30 < len(ids)
    assert second == list(fmoe.stream_tokens(model, messages[:-1], **GREEDY, ignore_eos=ignore_eos))


def test_many_turns_say_what_whole_runs_say(demo):
    model = replace(demo, text=replace(demo.text, chat_template=CHATML))
    chat, messages = Conversation(model), FIRST
    for turn in range(4):
        messages = ask(messages, f"And the {turn} day?") if turn else messages
        tokens, longer = talk(chat, messages, logprobs=1)
        expected = list(fmoe.stream_tokens(model, messages, **GREEDY, logprobs=1))
        assert [token.token_id for token in tokens] == [token.token_id for token in expected]
        found = [token.logprobs.logprob for token in tokens]
        assert found == pytest.approx([token.logprobs.logprob for token in expected], abs=1e-3)
        messages = longer
    assert len(chat.states) == 3


def test_a_turn_is_bit_for_bit_what_its_parts_give(demo):
    """The same chunks: a prompt, single tokens, then the next turn's own."""
    model = replace(demo, text=replace(demo.text, chat_template=CHATML))
    chat = Conversation(model)
    first, messages = talk(chat, FIRST)
    reply = chat.states[-1]
    second, _ = talk(chat, ask(messages), logprobs=2)

    ids = rendered_ids(model, FIRST)
    state = fmoe.prefill(model, ids)
    for token in first[:-1]:
        state = fmoe.prefill(model, [token.token_id], state=state)
    assert state.token_ids == reply.token_ids
    rest = rendered_ids(model, ask(messages))[len(state) :]
    expected = list(fmoe.stream_tokens(model, rest, state=state, **GREEDY, logprobs=2))
    assert [token.logprobs for token in second] == [token.logprobs for token in expected]


def test_a_template_that_opens_replies_otherwise_costs_the_reply(demo, caplog):
    """Such as one that opens with <think> what it later renders without."""
    prompts = Prompts(demo, THINKING)
    model, chat = prompts.model, Conversation(prompts.model)
    first, messages = talk(chat, FIRST)
    asked = len(fmoe.encode(model, FIRST)) - len(fmoe.encode(model, "<|im_start|>assistant\n<think>\n"))
    runs = prompts.take()
    assert runs == [asked, len(rendered_ids(model, FIRST)) - asked]

    with caplog.at_level(logging.DEBUG, logger="fmoe"):
        second, _ = talk(chat, ask(messages))

    ids = rendered_ids(model, ask(messages))
    assert sum(prompts.take()) == len(ids) - asked
    assert caplog.messages == [
        f"chat: the prompt does not begin with the {len(rendered_ids(model, FIRST)) + len(first) - 1} tokens that were "
        "seen",
        f"chat: {asked} of {len(ids)} tokens were seen before",
    ]
    assert [token.token_id for token in second] == [
        token.token_id for token in fmoe.stream_tokens(model, ask(messages), **GREEDY)
    ]


def test_another_chat_runs_whole(demo, caplog):
    prompts = Prompts(demo, CHATML)
    chat = Conversation(prompts.model)
    talk(chat, FIRST)
    prompts.take()
    other = [{"role": "system", "content": "be brief"}, *FIRST]
    with caplog.at_level(logging.DEBUG, logger="fmoe"):
        tokens, _ = talk(chat, other)
    assert prompts.take() == [len(rendered_ids(prompts.model, other))]
    assert "chat: 0 of" in caplog.messages[-1]
    assert tokens == list(fmoe.stream_tokens(prompts.model, other, **GREEDY))


def test_a_reply_keeps_its_tokens_though_its_text_has_others(demo):
    """Sampled tokens are often not those that the tokenizer makes of their text."""
    prompts = Prompts(demo, CHATML)
    model = prompts.model
    for seed in range(40):
        chat = Conversation(model)
        prompts.take()
        first, messages = talk(chat, FIRST, temperature=2.0, max_new_tokens=12, seed=seed, ignore_eos=True)
        said = [token.token_id for token in first]
        if 0 in said or 1 in said or 2 in said or fmoe.encode(model, messages[-1]["content"]) == said:
            continue
        prompts.take()
        talk(chat, ask(messages))
        seen = chat.states[0]
        assert seen.token_ids == (*rendered_ids(model, FIRST), *said[:-1])
        assert sum(prompts.take()) < len(rendered_ids(model, ask(messages))) - len(rendered_ids(model, FIRST)) - 5
        return
    pytest.fail("no sample was tokenised otherwise")


@pytest.mark.parametrize("ending", ["stop", "interrupt"])
def test_a_reply_that_was_cut_is_run_again(demo, ending):
    """Its text is not that of all its tokens: the prompt alone is kept."""
    prompts = Prompts(demo, CHATML)
    model, chat = prompts.model, Conversation(prompts.model)
    if ending == "stop":
        full = "".join(token.text for token in fmoe.stream_tokens(model, FIRST, **GREEDY))
        _, messages = talk(chat, FIRST, stop=full[3:5])
    else:
        turns = chat.stream(FIRST, **GREEDY)
        said = "".join(next(turns).text for _ in range(3))
        turns.close()
        messages = [*FIRST, {"role": "assistant", "content": said}]
    prompts.take()
    second, _ = talk(chat, ask(messages))
    ids = rendered_ids(model, ask(messages))
    assert sum(prompts.take()) == len(ids) - len(rendered_ids(model, FIRST))
    assert [token.token_id for token in second] == [
        token.token_id for token in fmoe.stream_tokens(model, ask(messages), **GREEDY)
    ]


def test_a_dropped_message_costs_no_more_than_itself(demo):
    prompts = Prompts(demo, CHATML)
    chat = Conversation(prompts.model)
    _, messages = talk(chat, FIRST)
    turns = chat.stream(ask(messages, "This one is dropped"), **GREEDY)
    next(turns)
    turns.close()
    [_, reply, dropped] = chat.states
    seen = len(reply)
    assert seen < len(dropped)
    prompts.take()
    talk(chat, ask(messages))
    assert sum(prompts.take()) == len(rendered_ids(prompts.model, ask(messages))) - seen


def test_a_template_without_special_tokens_is_read_anew(demo):
    prompts = Prompts(demo, PLAIN)
    chat = Conversation(prompts.model)
    _, messages = talk(chat, FIRST)
    prompts.take()
    tokens, _ = talk(chat, ask(messages))
    assert sum(prompts.take()) <= len(rendered_ids(prompts.model, ask(messages)))
    assert tokens == list(fmoe.stream_tokens(prompts.model, ask(messages), **GREEDY))


def test_nothing_is_kept_where_memory_is_short(demo, caplog, monkeypatch):
    model = replace(demo, text=replace(demo.text, chat_template=CHATML))
    chat, expected = Conversation(model), list(fmoe.stream_tokens(model, FIRST, **GREEDY))
    _, longer = talk(chat, FIRST)
    assert chat.states
    tokens = len(rendered_ids(model, longer)) + 6
    room = cache_size.measure_caches(model).count(2, cache_size.cache_slots(tokens)) + 5 * tokens**2
    monkeypatch.setattr(cache_size, "available_bytes", lambda: room)
    with caplog.at_level(logging.DEBUG, logger="fmoe"):
        found = list(chat.stream(FIRST, **GREEDY))
    assert found == expected
    assert chat.states == []
    assert caplog.messages[-1].endswith("tokens fit once, but are not kept for the next turn")
    monkeypatch.setattr(cache_size, "available_bytes", lambda: 0)
    with pytest.raises(ValueError, match="nothing would fit"):
        chat.stream(FIRST, **GREEDY)


def test_what_is_kept_lies_in_memory_once(demo):
    model = replace(demo, text=replace(demo.text, chat_template=CHATML))
    chat = Conversation(model)
    _, messages = talk(chat, FIRST)
    talk(chat, ask(messages))
    pointers = {state.caches[3].k_BJMC.data_ptr() for state in chat.states}
    assert len(chat.states) == 3
    assert len(pointers) == 1
    assert torch.isnan(chat.states[-1].logits_V).all()  # nothing is ever chosen from them


def test_errors_come_before_the_first_token(demo):
    with pytest.raises(ValueError, match=r"has no tokenizer.json, so it cannot chat; use fmoe.generate"):
        Conversation(replace(demo, text=None))
    with pytest.raises(ValueError, match=r"model must come from fmoe.load"):
        conversation.Conversation("demo")
    chat = Conversation(replace(demo, text=replace(demo.text, chat_template=CHATML)))
    with pytest.raises(ValueError, match="max_new_tokens=0 must be an int >= 1"):
        chat.stream(FIRST, max_new_tokens=0)
    with pytest.raises(ValueError, match="context of 4096"):
        chat.stream(ask([], "x " * 5000))
