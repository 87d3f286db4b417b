"""The command ``fmoe``: generated text goes to standard output, everything else to standard error."""

import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import click

from .checkpoint import read_config
from .cli_bench import bench_command
from .cli_machine import doctor_command, tune_command
from .cli_options import choosing, command, loading, quiet_progress, running, sampling, split_options, switches
from .cli_warm import warm_command
from .completion import StreamedToken
from .conversation import Conversation
from .generation import BATCH_SIZE, generate, stream_tokens
from .info import describe
from .inputs import check_input, check_utf8, read_prompts, read_text
from .model import Model, find_folder, load
from .options import Defaults, resolve_options
from .report import format_info
from .text import load_text

if find_spec("readline"):
    import readline  # noqa: F401 (makes input() edit its line and remember earlier ones)

LOG = logging.getLogger("fmoe")
ENDINGS: Mapping[str, str] = {
    "length": "cut at --max-new-tokens",
    "stop": "ended by a stop string",
    "eos": "ended by the model",
}
CHAT_HELP = "/reset forgets the conversation, /quit or end of input leaves, Ctrl-C stops a reply"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fmoe", prog_name="fmoe")
@switches
def main() -> None:
    """Run mixture-of-experts language models."""


class _Meter:
    """Note when the tokens of one sequence came, and why it ended."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []
        self.finish_reason = ""

    def watch(self, tokens: Iterable[StreamedToken]) -> Iterator[str]:
        """Give the texts of the tokens, without the empty ones."""
        for token in tokens:
            self.times.append(time.perf_counter())
            self.finish_reason = token.finish_reason or ""
            if token.text:
                yield token.text

    def summary(self) -> str:
        """Say how many tokens came, how fast, the first one apart, and how they ended."""
        count = len(self.times)
        first, rest = self.times[0] - self.start, self.times[-1] - self.times[0]
        speed = f", {(count - 1) / rest:.1f} tokens/s" if rest > 0 else ""
        return f"{_count(count, 'token')}{speed}, first token after {first:.2f} s, {ENDINGS[self.finish_reason]}"


@main.command("generate")
@click.argument("prompt", required=False)
@click.option("--prompts-file", metavar="FILE", help="One prompt per line, all run in batches; - is standard input.")
@loading
@choosing
@running
@sampling
@click.option("--logprobs", type=int, metavar="N", help="With --json: each token's log-probability and the N largest.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per completion and line.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help=f"Prompts that run together.  [default: {BATCH_SIZE}, or as many as fit into memory]",
)
@switches
@command
def generate_command(
    prompt: str | None,
    prompts_file: str | None,
    path: str,
    logprobs: int | None,
    as_json: bool,
    batch_size: int | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Continue PROMPT and stream the text; a PROMPT of - is read from standard input."""
    if (prompt is None) == (prompts_file is None):
        raise click.UsageError("give one of PROMPT and --prompts-file; a PROMPT of - is read from standard input")
    if logprobs is not None and not as_json:
        raise click.UsageError("--logprobs needs --json, there is no room for them in the text")
    if prompts_file is not None:
        prompts = read_prompts(prompts_file)
    else:
        prompts = [read_text("-").removesuffix("\n") if prompt == "-" else str(prompt)]
        check_utf8("the prompt", prompts[0])
        if not prompts[0]:
            raise ValueError("the prompt is empty; write the beginning of a text")
    loading_options, options = split_options(options)
    _check_options(logprobs=logprobs, **options)
    model = _load(path, quiet, **loading_options)
    if prompts_file is None and not as_json:
        if not quiet and sys.stdout.isatty() and sys.stderr.isatty():
            click.secho(prompts[0], dim=True, err=True, nl=False)  # a text reads better from its beginning
        _stream_text(model, prompts[0], **options)
        return
    start = time.perf_counter()
    done = generate(model, prompts, logprobs=logprobs, batch_size=batch_size, progress=quiet_progress(quiet), **options)
    seconds = time.perf_counter() - start
    for i, completion in enumerate(done):
        if as_json:
            click.echo(json.dumps(asdict(completion)))
        else:
            click.echo(f"--- {i + 1} of {len(done)}: {prompts[i]!r}\n{completion.text}\n")
    tokens = sum(len(completion.token_ids) for completion in done)
    LOG.info("%s of %s, %.1f tokens/s", _count(tokens, "token"), _count(len(done), "prompt"), tokens / seconds)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _check_options(*, logprobs: int | None = None, **options: Any) -> None:
    """Refuse what no model could take, before one is loaded."""
    for text in options["stop"]:
        check_utf8("--stop", text)
    resolve_options(Defaults(), vocab_size=sys.maxsize, logprobs=logprobs, **options)


def _load(path: str, quiet: bool, **options: Any) -> Model:
    start = time.perf_counter()
    model = load(path, progress=quiet_progress(quiet), **options)
    seconds = time.perf_counter() - start
    name = str(model.dtype).removeprefix("torch.")
    LOG.info("loaded %s in %.1f s: %s on %s", path, seconds, name, model.device)
    return model


def _stream_text(model: Model, prompt: Any, **options: Any) -> None:
    """Print a continuation piece by piece; the last line is ended whatever happens."""
    meter = _Meter()
    tokens = stream_tokens(model, prompt, **options)
    try:
        for piece in meter.watch(tokens):
            click.echo(piece, nl=False)
    except (KeyboardInterrupt, RuntimeError):
        click.echo()
        raise
    click.echo()
    LOG.info(meter.summary())


@main.command("chat")
@loading
@choosing
@running
@click.option("--system", metavar="TEXT", help="A first message that says how to answer.")
@sampling
@switches
@command
def chat_command(
    path: str,
    system: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Talk with a model: lines from standard input, its replies on standard output."""
    check_input()
    check_utf8("--system", system or "")
    folder = find_folder(path)
    read_config(folder)  # says what is wrong with a folder that is no checkpoint
    text = load_text(folder)
    if text is None or text.chat_template is None:
        missing = "tokenizer.json" if text is None else "chat template"
        raise ValueError(f"{path} has no {missing}, so it cannot chat; use fmoe generate, or a chat model")
    loading_options, options = split_options(options)
    _check_options(**options)
    model = _load(path, quiet, **loading_options)
    opening = [] if system is None else [{"role": "system", "content": system}]
    stream_tokens(model, [*opening, {"role": "user", "content": "?"}], **options)  # raises where no turn could be run
    LOG.info(CHAT_HELP)
    messages, conversation = list(opening), Conversation(model)
    for line in _read_lines():
        if line == "/quit":
            break
        if line == "/reset":
            messages, conversation = list(opening), Conversation(model)
            LOG.info("the conversation is forgotten")
        elif line == "/help":
            click.echo(CHAT_HELP, err=True)
        elif line:
            messages = _take_turn(conversation, messages, line, **options)


def _read_lines() -> Iterator[str]:
    """Read lines until the end of input, with a mark to write behind where somebody types."""
    mark = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    while True:
        try:
            yield input(mark).strip()
        except EOFError:
            if mark:
                click.echo()  # the shell's own mark comes on a line of its own
            return


def _take_turn(
    conversation: Conversation, messages: list[dict[str, str]], line: str, **options: Any
) -> list[dict[str, str]]:
    """Stream the reply to one more message and return the longer conversation, or the old one where that fails."""
    asked = [*messages, {"role": "user", "content": line}]
    try:
        tokens = conversation.stream(asked, **options)
    except ValueError as error:
        click.echo(f"Error: {error}. This message was dropped; /reset forgets the earlier ones", err=True)
        return messages
    meter = _Meter()
    said = "".join(_say(meter.watch(tokens)))
    if meter.finish_reason == "length":
        LOG.info("the reply was cut after %d tokens; a larger --max-new-tokens lets it go on", len(meter.times))
    if not said:
        click.echo("There was no reply; this message was dropped", err=True)
        return messages
    return [*asked, {"role": "assistant", "content": said}]


def _say(pieces: Iterable[str]) -> list[str]:
    """Print a reply as it comes; Ctrl-C ends it, and what was said remains."""
    said: list[str] = []
    try:
        for piece in pieces:
            said.append(piece)
            click.echo(piece, nl=False)
    except KeyboardInterrupt:
        click.echo(" (stopped)", err=True, nl=False)
    click.echo()
    return said


@main.command("info")
@loading
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@switches
@command
def info_command(path: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Describe a model and what it needs on this machine, without loading its weights."""
    info = describe(path, **options)
    click.echo(json.dumps(asdict(info)) if as_json else format_info(info))


main.add_command(tune_command)
main.add_command(bench_command)
main.add_command(doctor_command)
main.add_command(warm_command)
