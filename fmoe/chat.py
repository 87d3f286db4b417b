"""Chat messages -> the text or token ids that a checkpoint's chat template makes of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from .templates import render_template
from .text import Text, encode


def render_chat(
    text: Text,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render chat messages with the checkpoint's chat template, in a sandbox that bounds its time and memory.

    Args:
        messages: mappings with role and content; content is a string or a list of parts, None beside tool_calls.
        tools: JSON schemas of the functions that the model may call.
        add_generation_prompt: end with the opening of the assistant's turn.
        variables: further names that the template reads, such as enable_thinking.

    Returns:
        The prompt as text, its special tokens written out.
    """
    if text.chat_template is None:
        raise ValueError(
            "this checkpoint has no (default) chat template, so messages cannot be rendered; pass a string prompt"
        )
    _check_messages(messages)
    names = {
        **dict(text.special_tokens),
        **(variables or {}),
        "messages": [dict(message) for message in messages],
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    return _render(text.chat_template, names)


def encode_chat(
    text: Text,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Turn chat messages into token ids; the template writes every special token, so none is added again."""
    rendered = render_chat(
        text, messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
    )
    return encode(text, rendered, special_tokens=False)


def _render(template: str, names: Mapping[str, Any]) -> str:
    try:
        return render_template(template, names)
    except TemplateError as error:
        raise ValueError(f"the checkpoint's chat template does not take these messages: {error}") from error
    except Exception as error:  # a template is a program of somebody else's, and raises whatever it wants
        raise ValueError(
            f"the checkpoint's chat template failed on these messages with {type(error).__name__}: {error!s:.1000}; "
            "check the type of each content"
        ) from error


def _check_messages(messages: object) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(
            f"messages must be a non-empty list of mappings with role and content, got {messages!r:.80}; "
            'write [{"role": "user", "content": "..."}]'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}] must be a mapping with role and content, got {type(message).__name__}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise ValueError(f"messages[{i}] needs a role that is a string, such as 'user', got {role!r}")
        if not isinstance(content, str | list | tuple) and not (content is None and message.get("tool_calls")):
            raise ValueError(
                f"messages[{i}] needs a content that is a string or a list of parts (None only beside tool_calls), "
                f"got {content!r}"
            )
