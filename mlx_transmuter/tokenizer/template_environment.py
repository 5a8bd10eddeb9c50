"""The Jinja environment of chat templates: that of transformers, with bounds on the time and text of one rendering."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import ext, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 10.0
MAX_CHARACTERS = 2**26  # of one text or list that a template makes; the text of a million tokens has about 4 million
MAX_TOTAL_CHARACTERS = 2**30  # of all that one rendering makes on the way
MAX_INT_BITS = 2**16

# What follows the key of %(key)5d, or the name of {name:>5}.
_FORMAT_SPECIFICATION = re.compile(r"%(?:\([^)]*\))?[-#0 +]*[\d.*]*|:[^{}]*\{?[^{}]*")


class Budget:
    """What is left to one rendering: time, and characters of the texts (items of the lists) that it makes."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + MAX_SECONDS
        self._characters = MAX_TOTAL_CHARACTERS

    def check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise jinja2.TemplateRuntimeError(f"it took more than {MAX_SECONDS:g} s")

    def spend(self, characters: int) -> None:
        self._characters -= characters
        if characters > MAX_CHARACTERS or self._characters < 0:
            raise jinja2.TemplateRuntimeError(
                f"it made more than {MAX_CHARACTERS:,} characters at once, or {MAX_TOTAL_CHARACTERS:,} in all"
            )


_budget: ContextVar[Budget] = ContextVar("_budget")


@contextmanager
def rendering_budget() -> Iterator[None]:
    """A new budget for the templates that are compiled and rendered inside, in this thread."""
    token = _budget.set(Budget())
    try:
        yield
    finally:
        _budget.reset(token)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of transformers' chat_template_utils: its sandbox, filters and `{% generation %}` block.

    Each pass of a loop and each call of a macro or block looks at the clock; texts and lists are measured before they
    are made, where an operator, a filter or a method can make them much longer than what goes in. A single filter,
    method or comparison cannot be interrupted: what bounds its time is the size of its operands alone (a comparison of
    lists that hold one another many times is not bounded). Render inside `rendering_budget()`.
    """

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols], finalize=_measured
        )
        self.filters = {name: _with_measure(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = _to_json
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=lambda format: datetime.now().strftime(format)
        )
        del self.globals["lipsum"]  # random text of any length

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _AddChecks().visit(super()._parse(source, name, filename))

    def check_time(self) -> None:
        _budget.get().check_time()

    @staticmethod
    def concat(texts: Iterable[Any]) -> str:  # type: ignore[override]
        """The texts joined: what a template, macro or block renders, and the operator ~."""
        budget, parts, length = _budget.get(), [], 0
        for text in texts:
            parts.append(text)
            length += len(text)
            if length > MAX_CHARACTERS:
                break
        budget.spend(length)
        return "".join(parts)

    def join_operands(self, *values: Any) -> str:
        """The operator ~."""
        return self.concat(str(_measured(value)) for value in values)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _budget.get().spend(_operator_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        size = _METHOD_SIZES.get(getattr(method, "__name__", ""))
        owner = getattr(method, "__self__", None)
        if size is not None and isinstance(owner, str | bytes | int):
            if method.__name__ == "join":
                args = tuple(list(arg) for arg in args)
            _spend_size(size, owner, args, kwargs)
        return self.measured_result(super().call(context, function, *args, **kwargs))

    def measured_result(self, value: Any) -> Any:
        """The result of a slice, a filter or a call, after its length is spent."""
        return _measured_result(value)


class _Generation(ext.Extension):
    tags = {"generation"}  # noqa: RUF012 jinja2 declares it as an attribute of each extension

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _AddChecks(NodeTransformer):
    """Adds a look at the clock to what can run many times, and calls `join_operands` for the operator ~."""

    def visit_For(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_environment_call("check_time", [], node.lineno), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = visit_For

    def visit_Concat(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _environment_call("join_operands", node.nodes, node.lineno)

    def visit_Getitem(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        slices = isinstance(node.arg, nodes.Slice)
        return _environment_call("measured_result", [node], node.lineno) if slices else node


def _environment_call(method: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method, lineno=line), args, [], None, None, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    _measured(value, len(indent) if isinstance(indent, str) else int(indent or 0))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _measured(value: Any, per_item: int = 0) -> Any:
    """The value, after its size as text is spent where it is a list or a dict, which may hold one part many times."""
    if not isinstance(value, Mapping | list | tuple | set):
        return value
    stack, size = [(value, 1)], 0
    while stack and size <= MAX_CHARACTERS:
        _budget.get().check_time()
        item, depth = stack.pop()
        if isinstance(item, Mapping):
            stack += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple | set):
            stack += [(part, depth + 1) for part in item]
        size += 2 + per_item * depth + (len(item) if isinstance(item, str) else 0)
    _budget.get().spend(size)
    return value


def _operator_size(operator: str, left: Any, right: Any) -> int:
    """The characters, items or (of integers) bits that `left operator right` has at most; 0 where that is few."""
    if isinstance(left, int) and isinstance(right, int):
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * abs(right)}.get(operator, 0)
        return bits if bits <= MAX_INT_BITS else MAX_CHARACTERS + 1
    if operator == "*":
        sizes = [_factor(side) for side in (left, right)]
        return sizes[0] * sizes[1]
    if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        return len(left) + len(right)
    return _format_size(left, right) if operator == "%" and isinstance(left, str | bytes) else 0


def _factor(side: Any) -> int:
    """What one side of a product contributes to the length of a text or list; 0 where the product is none."""
    if isinstance(side, int):
        return max(side, 0)
    return len(side) if isinstance(side, Sized) else 0


def _format_size(pattern: Any, *values: Any, **named: Any) -> int:
    """The characters of a formatted text at most: widths and precisions stand in the pattern, or among the values."""
    text = pattern if isinstance(pattern, str) else repr(pattern)
    specifications = "".join(_FORMAT_SPECIFICATION.findall(text))
    size = len(text) + sum(int(digits[-12:]) for digits in re.findall(r"\d+", specifications))
    flat = [part for value in (*values, *named.values()) for part in _format_values(value)]
    if "*" in specifications or ":{" in specifications:
        size += sum(abs(value) for value in flat if isinstance(value, int))
    for value in flat:
        _measured(value)
    fields = max(text.count("%") + text.count("{"), 1)
    return size + fields * sum(len(value) for value in flat if isinstance(value, str))


def _format_values(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, tuple) else [value]


def _replace_size(value: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> int:
    return len(value) + value.count(old) * len(new)


def _join_size(separator: Any, texts: Any) -> int:
    return sum(len(text) + len(separator) for text in texts if hasattr(text, "__len__"))


def _indent_size(value: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    return len(value) + (value.count("\n") + 1) * (width if isinstance(width, int) else len(width))


def _wrap_size(
    value: Any, width: int = 79, break_long_words: bool = True, wrapstring: Any = None, *_: Any, **__: Any
) -> int:
    return len(value) * (1 + len(wrapstring or "\n"))


def _padded_size(value: Any, *args: Any, **named: Any) -> int:
    widths = sum(abs(arg) for arg in (*args, *named.values()) if isinstance(arg, int))
    return (len(value) if hasattr(value, "__len__") else 0) + widths


def _joined_size(value: Any, d: Any = "", *_: Any, **__: Any) -> int:
    return _listed_size(value, d) + len(value) * len(d)


def _listed_size(value: Any, *args: Any, **named: Any) -> int:
    for part in (value, *args, *named.values()):
        _measured(part)
    return 0


_METHOD_SIZES: dict[str, Callable[..., int]] = {
    "center": _padded_size, "ljust": _padded_size, "rjust": _padded_size, "zfill": _padded_size,
    "expandtabs": lambda value, tabsize=8: len(value) * tabsize,
    "to_bytes": lambda value, length=1, *_, **__: length,
    "translate": lambda value, table: len(value) * max(map(len, map(str, table.values())), default=1),
    "replace": _replace_size, "join": _join_size, "format": _format_size, "format_map": _format_size,
}  # fmt: skip

_FILTER_SIZES: dict[str, Callable[..., int]] = {
    "center": _padded_size, "indent": _indent_size, "wordwrap": _wrap_size, "replace": _replace_size,
    "slice": _padded_size, "batch": _padded_size, "round": lambda value, precision=0, *_, **__: abs(precision) * 1000,
    "format": _format_size, "join": _joined_size,
}  # fmt: skip

# These make no text of a list or dict; all others may, and measure what goes in.
_STRUCTURAL_FILTERS = frozenset([
    "attr", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list", "map",
    "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "sum", "tojson",
    "unique",
])  # fmt: skip


def _with_measure(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that spends the length of its result, before it is made where it may be much longer than the value."""
    size = _FILTER_SIZES.get(name, None if name in _STRUCTURAL_FILTERS else _listed_size)
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def measured_filter(*args: Any, **kwargs: Any) -> Any:
        if size is not None and len(args) > first:
            value = args[first]
            if isinstance(value, Iterator):
                args = (*args[:first], value := list(value), *args[first + 1 :])
            _spend_size(size, value, args[first + 1 :], kwargs)
        return _measured_result(function(*args, **kwargs))

    return measured_filter


def _measured_result(value: Any) -> Any:
    if isinstance(value, str | bytes | list | tuple):
        _budget.get().spend(len(value))
    return value


def _spend_size(size: Callable[..., int], value: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    try:
        characters = size(value, *args, **kwargs)
    except (TypeError, AttributeError, ValueError):
        return  # arguments that the function itself refuses
    _budget.get().spend(int(characters))
