"""Decoders are made by modules, not by functions.

msgspec 0.22 ends the process (a segmentation fault) if two threads make decoders of the same nested types, or call
`decode` with such a type, for the first time at once. Threads do so at a start from kept programs.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import jaxserve

PACKAGE = Path(jaxserve.__file__).parent


def _made_in_functions(path: Path) -> Iterator[str]:
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and _is_late(call):
                    yield f"{path.relative_to(PACKAGE)}:{call.lineno}"


def _is_late(call: ast.Call) -> bool:
    """Whether msgspec makes a decoder in this call."""
    name = ast.unparse(call.func)
    typed = any(keyword.arg == "type" for keyword in call.keywords)
    return name.endswith(".Decoder") or (name.startswith("msgspec.") and name.endswith(".decode") and typed)


def test_no_function_makes_a_decoder() -> None:
    assert not [place for path in sorted(PACKAGE.rglob("*.py")) for place in _made_in_functions(path)]
