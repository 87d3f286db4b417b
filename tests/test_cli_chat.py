"""``fmoe chat``: what is sent to the model turn by turn, and what reaches which stream."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import fmoe
from fmoe import cli
from fmoe.model import resolve_folder

DEMO = resolve_folder("demo")
SHORT = ("--max-new-tokens", "5", "--temperature", "0")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def run(*arguments: str, stdin: str) -> Result:
    return CliRunner().invoke(cli.main, [*arguments], input=stdin)


@pytest.fixture(scope="module")
def model() -> fmoe.Model:
    return fmoe.load("demo")


@pytest.fixture
def loaded(model: fmoe.Model, monkeypatch: pytest.MonkeyPatch) -> fmoe.Model:
    """Let the command take the demo model that is loaded already."""
    monkeypatch.setattr(cli, "load", lambda path, **options: model)
    return model


def link_demo(folder: Path, *, without: tuple[str, ...] = ()) -> Path:
    for file in DEMO.iterdir():
        if file.name not in without:
            (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture
def chat_folder(tmp_path: Path) -> Path:
    link_demo(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def test_chat_keeps_the_conversation(chat_folder: Path, model: fmoe.Model) -> None:
    result = run("chat", "--model", str(chat_folder), *SHORT, "--system", "be brief", stdin="Who art thou?\n\nWhy?\n")
    assert result.exit_code == 0
    chat = "system: be brief\nuser: Who art thou?\nassistant:"
    [first] = fmoe.generate(model, chat, max_new_tokens=5, temperature=0)
    [second] = fmoe.generate(
        model,
        f"{chat[: -len('assistant:')]}assistant: {first.text}\nuser: Why?\nassistant:",
        max_new_tokens=5,
        temperature=0,
    )
    assert result.stdout == f"{first.text}\n{second.text}\n"


@pytest.fixture
def loaded_chat(chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> fmoe.Model:
    """Let the command take the chat model, loaded once."""
    model = fmoe.load(chat_folder)
    monkeypatch.setattr(cli, "load", lambda path, **options: model)
    return model


class Talk:
    """Stand in for every Conversation: remember the messages, and reply with what was prepared."""

    def __init__(self, *replies: list[str | BaseException] | Exception) -> None:
        self.replies = iter(replies)
        self.asked: list[list[str]] = []
        self.begun = 0

    def __call__(self, model: fmoe.Model) -> "Talk":
        self.begun += 1
        return self

    def stream(self, messages: list[dict[str, str]], **options: Any) -> Iterator[fmoe.StreamedToken]:
        reply = next(self.replies)
        self.asked.append([message["content"] for message in messages])
        if isinstance(reply, Exception):
            raise reply
        return self.say(reply)

    def say(self, reply: list[str | BaseException]) -> Iterator[fmoe.StreamedToken]:
        for piece in reply:
            if isinstance(piece, BaseException):
                raise piece
            yield fmoe.StreamedToken(7, piece, None, None)
        yield fmoe.StreamedToken(0, "", "eos", None)


@pytest.fixture
def chat(chat_folder: Path, loaded: fmoe.Model, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a chat with prepared replies; gives the talk and the result."""

    def talk(replies: list[Any], stdin: str, *arguments: str) -> tuple[Talk, Result]:
        stand_in = Talk(*replies)
        monkeypatch.setattr(cli, "stream_tokens", lambda model, messages, **options: None)
        monkeypatch.setattr(cli, "Conversation", stand_in)
        return stand_in, run("-q", "chat", "--model", str(chat_folder), *arguments, stdin=stdin)

    return talk


def test_chat_reset_keeps_the_system_prompt(chat: Any) -> None:
    talk, result = chat([["A"], ["B"]], "one\n/reset\ntwo\n/quit\nthree\n", "--system", "S")
    assert talk.asked == [["S", "one"], ["S", "two"]]
    assert talk.begun == 2
    assert result.stdout == "A\nB\n"
    assert result.exit_code == 0


def test_chat_interrupt_keeps_what_was_said(chat: Any) -> None:
    talk, result = chat([["so", " far", KeyboardInterrupt()], ["B"]], "one\ntwo\n")
    assert talk.asked == [["one"], ["one", "so far", "two"]]
    assert result.stdout == "so far\nB\n"
    assert result.exit_code == 0


def test_chat_drops_a_turn_without_reply(chat: Any) -> None:
    talk, result = chat([[KeyboardInterrupt()], ["B"]], "one\ntwo\n")
    assert talk.asked == [["one"], ["two"]]
    assert "dropped" in result.stderr


def test_chat_drops_a_turn_that_does_not_fit(chat: Any) -> None:
    talk, result = chat([["A"], ValueError("too long"), ["C"]], "one\nlong\nthree\n")
    assert talk.asked == [["one"], ["one", "A", "long"], ["one", "A", "three"]]
    assert result.stdout == "A\nC\n"
    assert result.stderr == "Error: too long. This message was dropped; /reset forgets the earlier ones\n"


def test_chat_tells_of_a_reply_that_was_cut(chat_folder: Path, loaded_chat: fmoe.Model) -> None:
    command, cut = ("chat", "--model", str(chat_folder), *SHORT), "the reply was cut after 5 tokens; a larger "
    [loud, quiet] = [run(*command, *extra, stdin="hello\nwho?\n") for extra in ((), ("-q",))]
    assert loud.stderr.count(cut) == 2
    assert quiet.stderr == ""
    assert loud.stdout == quiet.stdout
    stopped = run(*command, "--stop", loud.stdout[0], stdin="hello\n")
    assert (stopped.stdout, cut in stopped.stderr) == ("\n", False)


def test_chat_tells_of_an_overflow(chat_folder: Path) -> None:
    result = run("-q", "chat", "--model", str(chat_folder), *SHORT, stdin="x " * 5000 + "\nhello\n")
    assert result.exit_code == 0
    assert "context of 4096" in result.stderr
    assert "was dropped" in result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize(
    ("without", "message"), [((), "has no chat template"), (("tokenizer.json",), "has no tokenizer.json")]
)
def test_chat_needs_a_template(tmp_path: Path, without: tuple[str, ...], message: str) -> None:
    link_demo(tmp_path, without=without)
    result = run("chat", "--model", str(tmp_path), stdin="hello\n")
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stdout == ""
