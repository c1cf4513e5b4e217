"""A Jinja environment for chat templates: immutable sandbox, Hugging Face's globals, and limits on time and size.

A template that loops without end or builds a huge string is stopped by the budget of its render: every loop step,
every joined string and every product of a string is counted against it. It knows nothing of messages.
"""

from __future__ import annotations

import json
import re
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import sync_do_join
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_SEQUENCES = (str, list, tuple)
_MAX_BITS = 1 << 16  # bits of an integer: a loop of products would double them at each step
_CHECK_EVERY = 256  # loop steps between two looks at the clock: 256 empty steps take about 20 us


class RenderLimitError(Exception):
    """A template exceeded its time or size."""


class RenderBudget:
    """The limits of one render: seconds from now, and characters of any one string."""

    NAME: ClassVar[str] = "jaxserve_render_budget"

    def __init__(self, max_seconds: float, max_chars: int) -> None:
        self.deadline = time.monotonic() + max_seconds
        self._cpu_deadline = time.thread_time() + max_seconds
        self.max_chars = max_chars
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps % _CHECK_EVERY == 0:
            self.check_time()

    def check_time(self) -> None:
        """Raise RenderLimitError once both the wall clock and the thread's CPU time exceed their limits.

        A busy machine may not have run the thread. CPU time is checked second: reading it takes four times as long.
        """
        if time.monotonic() > self.deadline and time.thread_time() > self._cpu_deadline:
            raise RenderLimitError("it takes too long")

    def check_size(self, chars: int) -> None:
        """Check the length of a text. Raises RenderLimitError."""
        if chars > self.max_chars:
            raise RenderLimitError(f"its output passes {self.max_chars} characters")

    def join(self, pieces: Iterable[Any]) -> str:
        """Join the pieces as text. Raises RenderLimitError beyond the limits."""
        parts, size = [], 0
        for piece in pieces:
            part = str(piece)
            size += len(part)
            self.step()
            if size > self.max_chars:
                self.check_size(size)
            parts.append(part)
        return "".join(parts)


class _CountedLoop:
    """An iterable whose steps are counted; it keeps the length that `loop.last` and `loop.length` need."""

    def __init__(self, iterable: Any, budget: RenderBudget) -> None:
        self._items = iterable if hasattr(iterable, "__len__") else list(_counted(iterable, budget))
        self._budget = budget

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return _counted(self._items, self._budget)


def _counted(items: Iterable[Any], budget: RenderBudget) -> Iterator[Any]:
    for item in items:
        budget.step()
        yield item


@jinja2.pass_context
def _counted_filter(context: Context, iterable: Any) -> Any:
    if isinstance(iterable, jinja2.Undefined):
        return iterable
    return _CountedLoop(iterable, context.parent[RenderBudget.NAME])


@jinja2.pass_context
def _joined_filter(context: Context, pieces: list[Any]) -> str:
    return context.parent[RenderBudget.NAME].join(pieces)


@jinja2.pass_context
def _product_filter(context: Context, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
        raise RenderLimitError("a number too large")
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, _SEQUENCES) and isinstance(times, int):
            context.parent[RenderBudget.NAME].check_size(len(sequence) * times)
    return left * right


@jinja2.pass_context
def _sum_filter(context: Context, left: Any, right: Any) -> Any:
    size = sum(len(value) for value in (left, right) if isinstance(value, _SEQUENCES))
    context.parent[RenderBudget.NAME].check_size(size)
    return left + right


def _power_filter(left: Any, right: Any) -> Any:
    if abs(right) > 64 or (isinstance(left, int) and left.bit_length() > 64):
        raise RenderLimitError("an exponent over 64, or of a number over 64 bits")
    return left**right


def _modulo_filter(left: Any, right: Any) -> Any:
    return _format_filter(left, right) if isinstance(left, str) else left % right


def _format_filter(text: str, *args: Any, **kwargs: Any) -> str:
    """Format in printf style. Raises RenderLimitError for a width over 999."""
    if "*" in text or re.search(r"%[^a-zA-Z%]*\d{4}", text):
        raise RenderLimitError("a width over 999")
    return str(text) % (kwargs or (args[0] if len(args) == 1 else args))


@jinja2.pass_context
def _replace_filter(context: Context, text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    context.parent[RenderBudget.NAME].check_size(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


@jinja2.pass_context
def _join_filter(context: Context, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items = [] if isinstance(value, jinja2.Undefined) else list(_counted(value, context.parent[RenderBudget.NAME]))
    context.parent[RenderBudget.NAME].check_size(sum(map(_length, items)) + len(items) * len(str(d)))
    return sync_do_join(context.eval_ctx, items, d, attribute)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, _SEQUENCES) else 0


@jinja2.pass_context
def _as_it_is(_: Context, value: Any) -> Any:
    """Return the output unchanged.

    Jinja does not compute a constant at compile time if it passes through a function of the context. Otherwise a
    template could compute for hours before it is loaded.
    """
    return value


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own spelling

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_through"), [], [], body).set_lineno(line)

    def _through(self, caller: Macro) -> str:
        return caller()


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Renders need a RenderBudget among their variables, under RenderBudget.NAME."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
            optimized=False,
            finalize=_as_it_is,
        )
        self.filters |= {
            "tojson": _tojson,
            "_counted": _counted_filter,
            "_joined": _joined_filter,
            "_product": _product_filter,
            "_sum": _sum_filter,
            "_power": _power_filter,
            "_modulo": _modulo_filter,
            "format": _format_filter,
            "replace": _replace_filter,
            "join": _join_filter,
        }
        for name in ("center", "indent", "wordwrap", "slice", "batch"):
            self.filters[name] = _bounded(self.filters[name])
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)

    def parse_only(self, source: str, name: str | None = None, filename: str | None = None) -> nodes.Template:
        """Parse a template as Jinja does. Raises TemplateSyntaxError."""
        return super()._parse(source, name, filename)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template, and send its loops, joins and products through the filters above."""
        if RenderBudget.NAME in unicodedata.normalize("NFKC", source):
            raise jinja2.TemplateSyntaxError(f"the name {RenderBudget.NAME} is reserved", 1, name, filename)
        tree = self.parse_only(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered("_counted", loop.iter)
        return _Rewriter().visit(tree)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Count the call and make it in the sandbox. `replace` and `join` of a text become the filters above."""
        context.parent[RenderBudget.NAME].step()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) and getattr(obj, "__name__", "") == "join":
            return _join_filter(context, args[0], owner)
        if isinstance(owner, str) and getattr(obj, "__name__", "") == "replace":
            return _replace_filter(context, owner, *args)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandbox's own safe `format`. Raises RenderLimitError for a width over 999."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and re.search(r"\{[^{}]*(\d{4}|\{)", value.__self__):
            raise RenderLimitError("a width over 999")
        return wrapped

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse methods like `center` of a text: they make any width, and no template needs them."""
        if isinstance(obj, str) and attr in ("center", "ljust", "rjust", "zfill", "expandtabs", "translate"):
            return False
        return super().is_safe_attribute(obj, attr, value)


class _Rewriter(NodeTransformer):
    """Replaces operators that can make a text longer than their operands by filters."""

    OPERATORS: ClassVar[dict[type[nodes.BinExpr], str]] = {
        nodes.Mul: "_product",
        nodes.Add: "_sum",
        nodes.Pow: "_power",
        nodes.Mod: "_modulo",
    }

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered("_joined", nodes.List(node.nodes, lineno=node.lineno))

    def visit_BinExpr(self, node: nodes.BinExpr) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(self.OPERATORS[type(node)], node.left, node.right)

    visit_Mul = visit_Add = visit_Pow = visit_Mod = visit_BinExpr


def _filtered(name: str, value: Any, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with a limit on its numbers, which otherwise make strings of any size."""
    skipped = 2 if vars(function) else 1  # the environment, if jinja gives it, and the text itself

    def checked(*args: Any, **kwargs: Any) -> Any:
        """Call the filter. Raises RenderLimitError for a width over 1,000."""
        for value in (*args[skipped:], *kwargs.values()):
            if (isinstance(value, int) and value > 1000) or (isinstance(value, str) and len(value) > 1000):
                raise RenderLimitError("a width over 1000")
        return function(*args, **kwargs)

    for name, value in vars(function).items():  # jinja marks filters that take the environment
        setattr(checked, name, value)
    return checked


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the value as JSON in the form that models are trained on: no HTML escapes, characters as they are."""
    if _length(indent) > 16 or (isinstance(indent, int) and indent > 16):
        raise RenderLimitError("an indent over 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    """Raise jinja2.TemplateError. A template calls this to refuse the conversation."""
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
