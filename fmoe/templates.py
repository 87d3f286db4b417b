"""Render a template that somebody else wrote: no access to Python, and bounds on time, on values and on their sum.

jinja2's sandbox guards attributes only; a template may still loop for ever or double a string forty times. So each
loop and call looks at the clock, and each operation that makes a larger value is measured, before it runs where one
step could make it enormous. What cannot be measured in advance and no chat template needs is taken away.
"""

import json
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, wraps
from time import monotonic
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

TIMEOUT_S = 10.0
MAX_SOURCE = 2**20  # characters of the template
MAX_SIZE = 2**25  # of one value: its characters, and ITEM_SIZE for each thing that it holds
MAX_TOTAL_SIZE = 2**30  # of all values made while rendering
MAX_SETTING = 2**16  # digits to round to, columns to indent by
ITEM_SIZE = 32
DROPPED_GLOBALS = ("lipsum", "cycler", "joiner")
_CONTAINERS = (list, tuple, dict, set, frozenset)
DROPPED_FILTERS = ("batch", "center", "pprint", "slice", "urlencode", "urlize", "wordwrap", "xmlattr")


def render_template(source: str, names: Mapping[str, Any], /) -> str:
    """Render a jinja2 template with ``names``.

    Raises:
        TemplateError: the template's own complaint, a syntax error, or a bound that was passed.
    """
    environment = _Environment()
    code = _compile_source(source)
    template = environment.template_class.from_code(environment, code, environment.make_globals(None))
    return template.render(names)


class _Environment(ImmutableSandboxedEnvironment):
    """One rendering: the sandbox with a clock and a sum of all that was made."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag], finalize=self.print_value
        )
        self.deadline = monotonic() + TIMEOUT_S
        self.left = MAX_TOTAL_SIZE
        self.concat = self.join_texts  # type: ignore[method-assign]
        for name in DROPPED_GLOBALS:
            del self.globals[name]
        helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals.update(helpers)
        filters: dict[str, Any] = {**self.filters, "tojson": self.write_json, "join": self.join_filter}
        self.filters = {
            name: self.guard(name, function) for name, function in filters.items() if name not in DROPPED_FILTERS
        }
        tests: dict[str, Any] = {**self.tests}
        self.tests = {name: self.guard(name, function) for name, function in tests.items()}

    def check(self, size: int) -> None:
        """Raise where a value of this size is too large, or the time is over."""
        if size > MAX_SIZE:
            raise TemplateRuntimeError(f"it makes a text or list of more than {MAX_SIZE} characters")
        if monotonic() > self.deadline:
            raise TemplateRuntimeError(f"it runs for more than {TIMEOUT_S:g} seconds")

    def spend(self, size: int) -> None:
        """Check a size and add it to the sum."""
        self.check(size)
        self.left -= size
        if self.left < 0:
            raise TemplateRuntimeError(f"it makes texts and lists of more than {MAX_TOTAL_SIZE} characters in all")

    def spend_on(self, value: Any) -> Any:
        """Return a value, checked with all that it holds; only what is new is added to the sum."""
        self.check(_measure(value))
        each = 1 if isinstance(value, str | bytes) else ITEM_SIZE if isinstance(value, _CONTAINERS) else 0
        self.spend(len(value) * each if each else 0)
        return value

    def print_value(self, value: Any) -> Any:
        """Return a value, of which a text is going to be made."""
        self.spend(_measure(value))
        return value

    def tick(self) -> bool:
        """Do nothing: the call of it looks at the clock."""
        return True

    def join_texts(self, pieces: Iterable[str]) -> str:
        """Join strings whose sum was looked at first."""
        pieces = list(pieces)
        self.spend(sum(map(len, pieces)))
        return "".join(pieces)

    def join_values(self, *values: Any) -> str:
        """Do what the operator ``~`` does."""
        return self.join_texts([str(self.print_value(value)) for value in values])

    def join_filter(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        """Do what jinja2's own filter does without autoescape."""
        items = list(value if attribute is None else map(make_attrgetter(self, attribute), value))
        self.check(len(items) * len(str(d)))
        return str(d).join(str(self.print_value(item)) for item in items)

    def write_json(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Write JSON; jinja2's own filter escapes HTML and sorts keys: other tokens than in training."""
        self.check(_measure((value, indent, separators)))
        if isinstance(indent, int) and indent > MAX_SETTING:
            raise TemplateRuntimeError(f"it indents by {indent!r:.40}")
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        if indent is None and separators is None:
            return encoder.encode(value)
        return "".join(self.spend_on(chunk) for chunk in encoder.iterencode(value))

    def guard(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter or test in the bounds."""

        @wraps(function)  # which keeps jinja2's mark of a function that takes the context
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if name in ("round", "indent", "truncate"):
                _check_settings([*args[1:], *kwargs.values()])
            if name == "indent":
                self.check(
                    _count(args, "\n") * max([1, *_ints([*args, *kwargs.values()]), *_lengths(args[1:], kwargs)])
                )
            elif name == "replace":
                self.check(_size_after_replace(*(str(a) for a in (*args, *kwargs.values()) if isinstance(a, str))))
            elif name == "format":
                self.check(_size_after_percent(args[0], kwargs or args[1:]))
            else:
                self.check(0)
            return self.spend_on(function(*args, **kwargs))

        return guarded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Measure what an operator would make before it does."""
        self.check(_size_after_operator(operator, left, right))
        return self.spend_on(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Measure what a method of a string would make, and what any call has made."""
        if isinstance(getattr(function, "__self__", None), str | bytes) and function.__name__ == "join":
            # an iterator cannot be measured without using it up
            args = tuple(value if isinstance(value, str) else list(value) for value in args)
        self.check(_size_after_call(function, args, kwargs))
        return self.spend_on(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Replace ``format`` and ``format_map`` of a string by one that counts what each field makes."""
        if super().wrap_str_format(value) is None:
            return None
        formatter = _Formatter(self)
        if value.__name__ == "format_map":
            return lambda mapping: formatter.vformat(str(value.__self__), (), mapping)
        return lambda *args, **kwargs: formatter.vformat(str(value.__self__), args, kwargs)


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        environment: Any = self._env
        environment.check(sum(map(_to_int, re.findall(r"\d+", format_spec))))
        environment.print_value(value)
        text: str = environment.spend_on(super().format_field(value, format_spec))
        return text

    def convert_field(self, value: Any, conversion: Any) -> Any:
        environment: Any = self._env
        environment.print_value(value)
        return super().convert_field(value, conversion)


class _Guard(NodeTransformer):
    """Put a look at the clock into each loop, and a measurement around what makes values without a call."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Look at the clock in each turn; those that the loop's test skips are no more than a list holds."""
        node = self.generic_visit(node)  # type: ignore[assignment]
        node.body.insert(0, nodes.ExprStmt(_call("tick")))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        """Replace the operator ``~``."""
        self.generic_visit(node)
        return _call("join_values", *node.nodes)

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Expr:
        """Measure what holds other values: holding one value twice, again and again, doubles each time."""
        self.generic_visit(node)
        return _call("spend_on", node)

    visit_Dict = visit_List

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        """Measure a slice, which is a copy."""
        self.generic_visit(node)
        return _call("spend_on", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        """Measure it likewise, unless it is assigned to."""
        self.generic_visit(node)
        return _call("spend_on", node) if node.ctx == "load" else node


class _GenerationTag(Extension):
    """Let ``{% generation %}`` ... ``{% endgeneration %}`` pass: it marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 names and types it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Give the tag's body in its place."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compile_source(source: str) -> types.CodeType:
    if len(source) > MAX_SOURCE:
        raise TemplateRuntimeError(f"it has {len(source)} characters, more than {MAX_SOURCE}")
    environment = _Environment()
    tree = environment.parse(source)
    _Guard().visit(tree)
    tree.set_environment(environment)
    return environment.compile(tree)


def _call(name: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


def _measure(value: Any) -> int:
    """Count the characters of a value and ITEM_SIZE for each thing in it, up to the bound and a little beyond."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3
    if isinstance(value, Namespace):
        value = value._Namespace__attrs
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = (part for pair in value.items() for part in pair)
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    size = 0
    for part in parts:
        size += ITEM_SIZE + _measure(part)
        if size > MAX_SIZE:
            break
    return size


def _size_after_operator(operator: str, left: Any, right: Any) -> int:
    if operator == "%":
        return _size_after_percent(left, right)
    if operator == "+":
        return 0 if isinstance(left, float) or isinstance(right, float) else _measure(left) + _measure(right)
    if isinstance(left, int) and isinstance(right, int):
        return (left.bit_length() * max(right, 0) if operator == "**" else _measure(left) + _measure(right)) // 3
    for many, times in ((left, right), (right, left)):
        if operator == "*" and isinstance(times, int):
            return _measure(many) * max(times, 0)
    return 0


def _size_after_percent(left: Any, right: Any) -> int:
    if not isinstance(left, str | bytes):
        return 0
    text = left if isinstance(left, str) else left.decode("latin-1")
    widths = [_to_int(digits) for digits in re.findall(r"\d+", text)]
    if "*" in text:
        widths += _ints(right if isinstance(right, tuple) else [right])
    by_name = max(1, text.count("%(")) if isinstance(right, Mapping) else 1
    return len(text) + sum(widths) + by_name * _measure(right)


def _size_after_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Bound what a method of a string or number makes; other calls are measured afterwards."""
    owner = getattr(function, "__self__", None)
    if not isinstance(function, types.BuiltinMethodType) or not isinstance(owner, str | bytes | int):
        return 0
    given = [*args, *kwargs.values()]
    name = function.__name__
    size = max([0, *_ints(given)])
    if isinstance(owner, int):
        return size
    if name == "replace":
        texts = [text for text in given if isinstance(text, str | bytes)]
        return _size_after_replace(owner, *texts)
    if name == "join":
        return sum(len(owner) * len(value) + _measure(value) for value in args)
    if name == "expandtabs":
        return _count([owner], "\t") * max([8, size]) + len(owner)
    if name == "translate":
        return len(owner) * max([1, *(_measure(value) for table in args for value in _values(table))])
    return size


def _size_after_replace(text: Any, *old_and_new: Any) -> int:
    if len(old_and_new) != 2 or type(old_and_new[0]) is not type(old_and_new[1]):
        return 0  # not a replacement that succeeds
    old, new = old_and_new
    count: int = text.count(old) if isinstance(old, type(text)) else 0
    return len(text) + count * len(new)


def _values(table: Any) -> Sequence[Any]:
    return list(table.values()) if isinstance(table, Mapping) else list(table) if isinstance(table, str | list) else []


def _ints(values: Iterable[Any]) -> list[int]:
    return [abs(value) for value in values if isinstance(value, int)]


def _lengths(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    return [len(value) for value in (*args, *kwargs.values()) if isinstance(value, str)]


def _count(values: Sequence[Any], char: str) -> int:
    return sum(str(value).count(char) + 1 for value in values[:1])


def _to_int(digits: str) -> int:
    return int(digits) if len(digits) < 20 else MAX_SIZE + 1


def _check_settings(values: Sequence[Any]) -> None:
    if any(value > MAX_SETTING for value in _ints(values)):
        raise TemplateRuntimeError(f"it rounds, cuts or indents by more than {MAX_SETTING}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 1000:
        raise TemplateRuntimeError(f"it asks for the date in a pattern of {len(pattern)} characters")
    return datetime.now().strftime(pattern)
