"""Templates that are cheap by construction, so that the API process itself may render them.

In `PlainEnvironment`, nothing can take more than a few milliseconds between two checks of the clock:
- only listed operations are allowed; others are refused when the template is loaded or when they are met;
- a list or dict that the template makes holds no other list or dict, so the cost of a value is its size;
- everything that the template makes is bounded: a text, its whole output, the entries of a literal;
- the clock is checked before each step of a loop, call, filter, comparison and slice.
A refusal raises RenderLimitError. The caller then renders in the template worker, whose limits the kernel enforces.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.filters import sync_do_rejectattr, sync_do_selectattr
from jinja2.runtime import Context, Macro
from jinja2.utils import Namespace

from jaxserve.text.sandbox import (
    RenderBudget,
    RenderLimitError,
    Rewriter,
    TemplateEnvironment,
    counted,
    filtered,
    raise_exception,
    strftime_now,
)

MAX_SOURCE = 32 * 1024  # characters; published templates have 20,000 at most
MAX_ITEMS = 64  # entries of a literal
MAX_PLAIN_SECONDS = 0.01
MAX_TEXT_CHARS = 16 * 1024  # of a text
MAX_OUTPUT = 64 * 1024  # characters of all output, also into macros
ENTRY_CHARS = 8  # characters for which each entry counts when a list or dict is written
MAX_CONSTANT = 64  # characters of a text among the arguments of a filter that uses it for each entry or character

_STATEMENTS = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Assign, nodes.Macro),
    *(nodes.Break, nodes.Continue, nodes.Name, nodes.NSRef, nodes.Const, nodes.List, nodes.Dict, nodes.Pair),
    *(nodes.Tuple, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Compare, nodes.Operand, nodes.And, nodes.Or),
    *(nodes.Not, nodes.Neg, nodes.Pos, nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod),
    *(nodes.Concat, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Keyword),
)
_FILTERS = frozenset(
    {"trim", "length", "count", "string", "upper", "lower", "capitalize", "first", "last", "default", "d", "int"}
    | {"tojson", "items", "list", "replace", "join", "selectattr", "rejectattr"}
)
_REPEATING = frozenset({"trim", "join", "tojson"})  # use their arguments again and again
_TESTS = frozenset(
    {"defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "true", "false", "mapping"}
    | {"iterable", "sequence", "odd", "even"}
)
_COMPARING_TESTS = ("equalto", "eq", "==")  # of selectattr only, which counts its steps
_NAMES = ("varargs", "kwargs", "caller", "self")  # lists and dicts that a macro's call makes
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        ["strip", "lstrip", "rstrip", "split", "startswith", "endswith", "upper", "lower", "title", "replace", "join"]
    ),
    dict: frozenset(["items", "keys", "values", "get"]),
}
_JINJAS_OWN = ("_loop_vars", "_block_vars")  # among the arguments of a call
_FUNCTIONS = (raise_exception, strftime_now)
_SCALARS = (str, int, float, NoneType, jinja2.Undefined)
_VALUES = (*_SCALARS, list, dict)


def is_plain(tree: nodes.Template) -> bool:
    """Return whether a template is cheap. tree: as parsed, without any rewriting"""
    return all(_allowed(node) for node in tree.find_all(nodes.Node))


def _allowed(node: nodes.Node) -> bool:
    match node:
        case nodes.Filter(name=name, node=inner, args=args, kwargs=kwargs):
            short = name not in _REPEATING or all(_is_short(each) for each in (*args, *(k.value for k in kwargs)))
            return name in _FILTERS and inner is not None and short
        case nodes.Test(name=name):
            return name in _TESTS
        case nodes.Name(name=name):
            return name not in _NAMES
        case nodes.List(items=items) | nodes.Tuple(items=items) | nodes.Dict(items=items):
            return len(items) <= MAX_ITEMS
        case nodes.For(recursive=recursive):
            return not recursive
        case nodes.Call(dyn_args=args, dyn_kwargs=kwargs):
            return args is None and kwargs is None
    return isinstance(node, _STATEMENTS)


def _is_short(node: nodes.Expr) -> bool:
    """Return whether it is a constant whose texts are short."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(_is_short(each) for each in node.items)
    return isinstance(node, nodes.Const) and not (isinstance(node.value, str) and len(node.value) > MAX_CONSTANT)


class PlainBudget(RenderBudget):
    """Reads the clock at every step, and counts all output."""

    def __init__(self) -> None:
        super().__init__(MAX_PLAIN_SECONDS, MAX_TEXT_CHARS)
        self._output = 0

    def step(self) -> None:
        self.check_time()

    def put_out(self, value: Any) -> None:
        """Count a value as output. Raises RenderLimitError over the limit."""
        self.check_time()
        _check_kind(value, _VALUES)
        if isinstance(value, str):
            self._output += len(value)
        elif isinstance(value, list | dict):
            self._output += ENTRY_CHARS * len(value)
        if self._output > MAX_OUTPUT:
            raise RenderLimitError("it puts out too much")


class PlainEnvironment(TemplateEnvironment):
    """Renders need a PlainBudget among their variables, under RenderBudget.NAME."""

    def __init__(self) -> None:
        super().__init__(PlainRewriter)
        self.finalize = _finalized
        self.filters |= {
            "_step": _step_filter,
            "_made": _made_filter,
            "_scalar": _scalar_filter,
            "_joined": _joined_filter,
            "_sum": _sum_filter,
            "_product": _product_filter,
            "_modulo": _modulo_filter,
            "_number": _number_filter,
            "list": _list_filter,
            "selectattr": _selecting(sync_do_selectattr),
            "rejectattr": _selecting(sync_do_rejectattr),
        }
        self.globals = {name: self.globals[name] for name in ("namespace", "range", "raise_exception", "strftime_now")}

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if not isinstance(obj, Macro):
            given = [value for name, value in kwargs.items() if name not in _JINJAS_OWN]
            self._check_callable(obj, [*args, *given])
        result = super().call(context, obj, *args, **kwargs)
        return _made_filter(context, result)

    def _check_callable(self, obj: Any, values: list[Any]) -> None:
        if any(obj is function for function in (Namespace, self.globals["range"], *_FUNCTIONS)):
            for value in values:
                _check_kind(value, _VALUES)
            return
        owner = getattr(obj, "__self__", None)
        methods = next((names for kind, names in _METHODS.items() if isinstance(owner, kind)), frozenset[str]())
        if getattr(obj, "__name__", "") not in methods:
            raise RenderLimitError("a call that may cost much")
        if isinstance(owner, str):
            for value in values:
                _check_kind(value, (*_SCALARS, list, tuple))
            if getattr(obj, "__name__", "").endswith("strip") and any(len(str(v)) > MAX_CONSTANT for v in values):
                raise RenderLimitError("a strip of many characters")


class PlainRewriter(Rewriter):
    """Checks the clock before operations that take time, and checks the values of literals."""

    def visit_Filter(self, node: nodes.Filter) -> nodes.Expr:
        """Check the clock before a filter and check its arguments."""
        self.generic_visit(node)
        assert node.node is not None
        node.node = filtered("_step", node.node)
        node.args = [_checked(each) for each in node.args]
        for keyword in node.kwargs:
            keyword.value = _checked(keyword.value)
        return filtered("_made", node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        """Count the texts of a macro one by one, because its output is joined before it can be counted."""
        self.generic_visit(node)
        for output in node.find_all(nodes.Output):
            output.nodes = [_as_constant(each) for each in output.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        node.expr = filtered("_step", node.expr)
        for operand in node.ops:
            operand.expr = filtered("_step", operand.expr)
        return node

    def visit_Sub(self, node: nodes.BinExpr) -> nodes.Expr:
        self.generic_visit(node)
        node.left = filtered("_number", node.left)
        node.right = filtered("_number", node.right)
        return node

    visit_Div = visit_FloorDiv = visit_Sub

    def visit_Neg(self, node: nodes.UnaryExpr) -> nodes.Expr:
        self.generic_visit(node)
        node.node = filtered("_number", node.node)
        return node

    visit_Pos = visit_Neg

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = filtered("_step", node.node)
        return node

    def visit_List(self, node: nodes.List | nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") == "load":
            node.items = [_checked(each) for each in node.items]
        return node

    visit_Tuple = visit_List

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _checked(node.key)
        node.value = _checked(node.value)
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.target, nodes.NSRef):
            node.node = filtered("_step", node.node)
        return node


def _as_constant(node: nodes.Expr) -> nodes.Expr:
    return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node


def _checked(node: nodes.Expr) -> nodes.Expr:
    return node if _is_constant(node) else filtered("_scalar", node)


def _is_constant(node: nodes.Expr) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(_is_constant(each) for each in node.items)
    return isinstance(node, nodes.Const)


def _kind(value: Any, kinds: tuple[type, ...]) -> Any:
    _check_kind(value, kinds)
    return value


def _check_kind(value: Any, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds):
        raise RenderLimitError("a value that may cost much")


@jinja2.pass_context
def _finalized(context: Context, value: Any) -> Any:
    context.parent[RenderBudget.NAME].put_out(value)
    return value


@jinja2.pass_context
def _step_filter(context: Context, value: Any) -> Any:
    context.parent[RenderBudget.NAME].check_time()
    if isinstance(value, Namespace):
        raise RenderLimitError("a namespace as a value")
    return value


@jinja2.pass_context
def _made_filter(context: Context, value: Any) -> Any:
    if isinstance(value, str):
        context.parent[RenderBudget.NAME].check_size(len(value))
    return value


def _scalar_filter(value: Any) -> Any:
    return _kind(value, _SCALARS)


@jinja2.pass_context
def _joined_filter(context: Context, pieces: list[Any]) -> str:
    for piece in pieces:
        _check_kind(piece, _VALUES)
    return context.parent[RenderBudget.NAME].join(pieces)


@jinja2.pass_context
def _sum_filter(context: Context, left: Any, right: Any) -> Any:
    for value in (left, right):
        _check_kind(value, (*_SCALARS, dict))  # Arguments are a dict that adds to a text
    if isinstance(left, str) and isinstance(right, str):
        context.parent[RenderBudget.NAME].check_size(len(left) + len(right))
    return _made_filter(context, left + right)


def _number_filter(value: Any) -> Any:
    _check_kind(value, (int, float, jinja2.Undefined))
    if isinstance(value, int) and value.bit_length() > 64:
        raise RenderLimitError("a number too large")
    return value


@jinja2.pass_context
def _product_filter(context: Context, left: Any, right: Any) -> Any:
    return _number_filter(left) * _number_filter(right)


def _modulo_filter(left: Any, right: Any) -> Any:
    return _number_filter(left) % _number_filter(right)


@jinja2.pass_context
def _list_filter(context: Context, value: Any) -> list[Any]:
    return list(counted(value, context.parent[RenderBudget.NAME]))


def _selecting(select: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_context
    def selected(context: Context, value: Any, *args: Any) -> Any:
        """Apply a selecting filter. Raises RenderLimitError for a test that may be expensive."""
        if len(args) > 1 and args[1] not in _TESTS and args[1] not in _COMPARING_TESTS:
            raise RenderLimitError("a test that may cost much")
        return select(context, counted(value, context.parent[RenderBudget.NAME]), *args)

    return selected
