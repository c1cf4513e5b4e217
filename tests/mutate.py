"""Random mutants of a package: `python -m tests.mutate kv [--count 200] [--seed 0] [--tests ...] [--only ...]`.

A mutant is one change of a function: of an operator, a condition, a number, a name or a statement. It is planted in
memory, so that others can use the checkout meanwhile. The tests are imported once. Then each mutant has a process that
is forked: there the function gets the code of the mutant, and the tests run that reach the changed statement, until
one fails.

    killed      a test failed, took much longer than usual, or ended the process
    survived    all tests that reach the statement passed: it has no effect that matters, or a test is missing
    unreached   no test of these folders reaches the statement in its own process

Tests of more than a second run last, so what one of them finds, no quicker test does. Tests of more than two seconds
do not run if quicker ones reach the statement.

Never changed: constants of modules and classes, the words of logs and errors, and code in processes that tests start.
The mutants of tests/faults/mutants.py are chosen by hand, each with its test.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import random
import resource
import select
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import hypothesis
import psutil
import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parent.parent
SLOW = 1.0  # seconds of a test that runs behind all others
LONGEST = 2.0  # seconds of a test that does not run if quicker ones reach the line
LIMIT = 10  # seconds of a processor for a test, beside five times its usual ones
STALL = 60  # seconds without work, after which a test is stuck
UNPLANTED = "not planted:"
MEMORY = 4 << 30  # bytes for a mutant, beside what the tests' imports take
Function = ast.FunctionDef | ast.AsyncFunctionDef
SWAPS: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}

Change = tuple[str, Callable[[], object]]  # its kind, and what makes it


@dataclass(frozen=True)
class Mutant:
    """The change number `index` of `file`, in the statement at `line`."""

    file: Path
    index: int
    line: int
    name: str


def _not(test: ast.expr) -> ast.expr:
    return ast.copy_location(ast.UnaryOp(ast.Not(), test), test)


def _of_expression(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare():
            for place, op in enumerate(node.ops):
                new = SWAPS[type(op)]()
                yield type(new).__name__, lambda at=place, new=new: node.ops.__setitem__(at, new)
        case ast.BoolOp() | ast.BinOp() | ast.AugAssign() if type(node.op) in SWAPS:
            yield SWAPS[type(node.op)].__name__, lambda: setattr(node, "op", SWAPS[type(node.op)]())
        case ast.If() | ast.While() | ast.IfExp():
            yield "condition negated", lambda: setattr(node, "test", _not(node.test))
        case ast.comprehension(ifs=[first, *others]):
            yield "filter negated", lambda: setattr(node, "ifs", [_not(first), *others])
        case ast.UnaryOp(op=ast.Not()):
            yield "without not", lambda: setattr(node, "operand", _not(node.operand))
        case ast.Constant(value=bool() as value):
            yield str(not value), lambda: setattr(node, "value", not value)
        case ast.Constant(value=int() as value):
            yield str(value + 1), lambda: setattr(node, "value", value + 1)
        case ast.Call(func=ast.Name(id=name) as function) if name in NAMES:
            yield NAMES[name], lambda: setattr(function, "id", NAMES[name])


def _of_statement(body: list[ast.stmt], place: int) -> Iterator[Change]:
    new: ast.stmt = ast.Pass()
    match statement := body[place]:
        case ast.Return(value=ast.Constant(value=None) | None) | ast.Expr(value=ast.Constant() | ast.Yield()):
            return
        case ast.Assign(targets=[ast.Name() | ast.Tuple()]):  # then a name is missing, which any test finds
            return
        case ast.Return():
            kind, new = "return None", ast.Return(ast.Constant(None))
        case ast.Continue():
            kind, new = "break", ast.Break()
        case ast.Break():
            kind, new = "continue", ast.Continue()
        case ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Delete() | ast.Raise():
            kind = "deleted"
        case _:
            return
    yield kind, lambda: body.__setitem__(place, ast.copy_location(new, statement))


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        if isinstance(body := getattr(node, field, None), list):
            yield body


def _changes(node: ast.AST, line: int) -> Iterator[tuple[int, Any, Change]]:
    """All changes in `node`, each with the line of its statement, and its own node.

    Without annotations, decorators, and the words of logs and errors.
    """
    match node:
        case ast.JoinedStr() | ast.Call(func=ast.Attribute(value=ast.Name(id="logger"))):
            return
    line = node.lineno if isinstance(node, ast.stmt) else line
    shown = node.target if isinstance(node, ast.comprehension) else node  # what has a place in the text
    for change in _of_expression(node):
        yield line, shown, change
    for body in _bodies(node):
        for place, statement in enumerate(body):
            for change in _of_statement(body, place):
                yield statement.lineno, statement, change
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list", "exc"):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from _changes(each, line)


def sites(tree: ast.AST) -> Iterator[tuple[Function, int, Any, Change]]:
    """All changes of the functions of `tree` in a fixed order, with their outermost functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            for line, place, change in _changes(node, node.lineno):
                yield node, node.body[0].lineno if line == node.lineno else line, place, change  # a default
        else:
            yield from sites(node)


def mutants(package: str) -> list[Mutant]:
    """Return all mutants of jaxserve/`package`."""
    found = []
    for file in files(package):
        text = file.read_text(encoding="utf-8")
        for index, (_, line, node, (kind, _)) in enumerate(sites(ast.parse(text))):
            source = text.splitlines()[node.lineno - 1].strip()
            name = f"{file.relative_to(ROOT)}:{node.lineno}:{node.col_offset} {kind}: {source}"
            found.append(Mutant(file, index, line, name))
    return found


def files(package: str) -> list[Path]:
    return sorted((ROOT / "jaxserve" / package).rglob("*.py"))


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def live_functions() -> dict[tuple[str, str, int], FunctionType]:
    functions = (each for each in gc.get_objects() if isinstance(each, FunctionType))
    return {_place(each.__code__): each for each in functions if each.__name__ != "<lambda>"}


def replace(file: Path, tree: ast.Module, live: dict[tuple[str, str, int], FunctionType]) -> None:
    """Give the functions of `file` the code of `tree`. Raises ValueError if one has other free variables."""
    module = compile(ast.fix_missing_locations(tree), str(file), "exec")
    for code in _codes(module):
        if _place(code) in live:
            live[_place(code)].__code__ = code


def plant(mutant: Mutant) -> None:
    """Plant a mutant in this process. Raises ValueError if its function has other free variables or is gone."""
    tree = ast.parse(mutant.file.read_text(encoding="utf-8"))
    function, _, _, (_, change) = list(sites(tree))[mutant.index]
    change()
    functions = live_functions()
    replace(mutant.file, tree, functions)
    first = min(node.lineno for node in (function, *function.decorator_list))
    found = [each for each in functions.values() if _place(each.__code__)[::2] == (str(mutant.file), first)]
    if not found:
        raise ValueError("its function is gone: it ran at import")
    (live,) = found

    def value(default: ast.expr) -> Any:
        return eval(compile(ast.Expression(default), "", "eval"), live.__globals__)

    named = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    live.__defaults__ = tuple(map(value, function.args.defaults))
    live.__kwdefaults__ = {name.arg: value(default) for name, default in named if default is not None}


def record(package: str) -> set[tuple[str, int]]:
    """Let all functions of `package` add (file, line) of each statement to the set that is returned, before it runs."""
    reached: set[tuple[str, int]] = set()
    functions = live_functions()
    for file in files(package):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case)]
        for body in [body for node in nodes for body in _bodies(node)]:
            marks = [ast.parse(f"_reached.add(({str(file)!r}, {each.lineno}))").body[0] for each in body]
            body[:] = [each for pair in zip(marks, body, strict=True) for each in pair]
        replace(file, tree, functions)
    for live in functions.values():
        if live.__code__.co_filename.startswith(str(ROOT / "jaxserve" / package)):
            live.__globals__["_reached"] = reached
    return reached


class Mutation:
    """The plugin that runs mutants in place of the session's tests."""

    def __init__(self, package: str, count: int, seed: int, only: list[str]) -> None:
        self._package = package
        every = mutants(package)
        drawn = random.Random(seed).sample(every, min(count, len(every)))
        self._mutants = [each for each in drawn if not only or any(text in each.name for text in only)]
        self._num_sites = len(every)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        measured = child(lambda: self._measure(session.items))
        seconds = {name: took for name, (took, _) in measured.items()}
        lines = {name: {tuple(line) for line in reached} for name, (_, reached) in measured.items()}
        say(f"{len(items)} tests in {sum(seconds.values()):.0f} s, {self._num_sites} possible mutants")
        say(f"not used, because they fail or are skipped: {[name for name in items if name not in seconds]}")
        verdicts: Counter[str] = Counter()
        kills: Counter[str] = Counter()
        try:
            for mutant in self._mutants:
                reaching = [name for name in lines if (str(mutant.file), mutant.line) in lines[name]]
                tests = [name for name in reaching if seconds[name] <= LONGEST] or reaching
                tests.sort(key=lambda name: (seconds[name] > SLOW, name.split("::")[0], seconds[name]))
                verdict, killer = self._judge(mutant, {items[name]: seconds[name] for name in tests})
                verdicts[verdict] += 1
                kills[killer] += 1
                say(f"{verdict:9} {mutant.name}   {killer or f'{len(tests)} tests'}")
        except KeyboardInterrupt:
            say("interrupted")
        say(f"{self._package}: {dict(verdicts)}")
        for name in sorted(seconds, key=lambda name: -seconds[name]):
            if seconds[name] > SLOW:
                say(f"{seconds[name]:6.1f} s  finds {kills[name]} that no quicker test finds: {name}")
        return True

    def _judge(self, mutant: Mutant, tests: dict[pytest.Item, float]) -> tuple[str, str]:
        """Return the verdict, and what found the mutant. tests: with their seconds"""
        if not tests:
            return "unreached", ""
        try:
            killer = child(lambda: self._attack(mutant, tests))
        except ChildProcessError as error:
            killer = str(error)
        verdict = "survived" if not killer else "unplanted" if killer.startswith(UNPLANTED) else "killed"
        return verdict, killer

    @staticmethod
    def _attack(mutant: Mutant, tests: dict[pytest.Item, float]) -> str:
        """Plant a mutant. Return the first test that fails, "" if none does."""
        try:
            plant(mutant)
        except ValueError as error:
            return f"{UNPLANTED} {error}"
        size = psutil.Process().memory_info().vms + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        for item, reports in _run([*tests], tests):
            if any(report.failed for report in reports):
                return item.nodeid
        return ""

    def _measure(self, items: list[pytest.Item]) -> dict[str, tuple[float, list[tuple[str, int]]]]:
        """Run all tests. Return of those that pass the processor seconds, and the statements that they reach."""
        reached = record(self._package)
        found, start = {}, sum(os.times()[:4])
        for item, reports in _run(items):
            now = sum(os.times()[:4])
            if all(report.passed for report in reports):
                found[item.nodeid] = now - start, sorted(reached)
            start = now
            reached.clear()
        return found


def say(line: str) -> None:
    print(line, file=sys.__stderr__, flush=True)  # pytest captures the other streams


def _run(
    items: list[pytest.Item], usual: Mapping[pytest.Item, float] | None = None
) -> Iterator[tuple[pytest.Item, list[pytest.TestReport]]]:
    """Run tests and yield what they report. usual: their seconds; this process ends if one takes much longer"""
    for item, following in zip(items, [*items[1:], None], strict=True):
        if usual is not None:
            end = int(sum(os.times()[:2]) + LIMIT + 5 * usual[item])
            resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        yield item, runtestprotocol(item, log=False, nextitem=following)


def child(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, done by a process of its own. Raises ChildProcessError if there is none."""
    reader, writer = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # jax warns of a fork; nothing here has used it
        pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            result = json.dumps(work())
            with open(writer, "w", encoding="utf-8") as pipe:
                pipe.write(result)
        finally:
            os._exit(0)
    os.close(writer)
    process, used, is_stuck = psutil.Process(pid), -1.0, False
    try:
        while not is_stuck and not select.select([reader], [], [], STALL)[0]:
            is_stuck, used = sum(process.cpu_times()[:2]) < used + 0.05, sum(process.cpu_times()[:2])
        if is_stuck:
            os.kill(pid, signal.SIGKILL)
        with open(reader, encoding="utf-8") as pipe:
            result = pipe.read()
    finally:
        os.killpg(pid, signal.SIGKILL)  # with the processes that tests left
        os.waitpid(pid, 0)
    if not result:
        raise ChildProcessError("stuck" if is_stuck else "crash or limit")
    return json.loads(result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", help="a folder of jaxserve, as kv")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", help="tests that run; default: the package's folder of tests/")
    parser.add_argument("--only", nargs="+", default=[], help="of the drawn mutants those whose line has such a text")
    given = parser.parse_args()
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # a failing example is not made smaller
    hypothesis.settings.register_profile("mutants", database=None, deadline=None, derandomize=True, phases=phases)
    arguments = ["-q", "-p", "no:cacheprovider", "-o", "timeout=0", "--hypothesis-profile=mutants"]
    arguments += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning", "--rootdir", str(ROOT)]
    tests = given.tests or [f"tests/{given.package}"]
    mutation = Mutation(given.package, given.count, given.seed, given.only)
    return pytest.main([*arguments, *tests], plugins=[mutation])


if __name__ == "__main__":
    sys.exit(main())
