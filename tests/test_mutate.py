"""What tests/mutate.py plants, and where."""

import ast
import os
import subprocess
import sys

import pytest

from jaxserve.kv.page_pool import PagePool
from tests.mutate import child, files, mutants, plant, sites

TEXT = """
def f(a: int, b: int = 1) -> None:
    if a < b and not a:
        return [a + 1 for _ in a if max(a, b)]
    logger.info("%d", 7)
    a.b = True
    while a:
        continue
"""
KINDS = {
    "2", "condition negated", "Or", "LtE", "without not", "return None", "Sub", "filter negated", "min", "deleted",
    "False", "break",
}  # fmt: skip


def test_every_kind_of_change_is_made() -> None:
    assert {kind for *_, (kind, _) in sites(ast.parse(TEXT))} == KINDS


def test_every_change_is_another_program() -> None:
    (file,) = (each for each in files("kv") if each.name == "page_pool.py")
    text = file.read_text()
    programs = [ast.unparse(ast.parse(text))]
    for index, _ in enumerate(sites(ast.parse(text))):
        tree = ast.parse(text)
        *_, (_, change) = list(sites(tree))[index]
        change()
        programs.append(ast.unparse(compile(ast.fix_missing_locations(tree), "", "exec", ast.PyCF_ONLY_AST)))
    assert len(set(programs)) == len(programs) > 20


def test_a_mutant_is_in_a_process_of_its_own() -> None:
    """Forked from a process without jax's threads, in which no other test has imported a module twice."""
    done = subprocess.run([sys.executable, "-m", "tests.test_mutate"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def main() -> None:
    (mutant,) = (each for each in mutants("kv") if "page_pool" in each.name and "return len(self._free)" in each.name)

    def planted() -> int:
        plant(mutant)
        return PagePool(3).num_free

    assert child(planted) is None and PagePool(3).num_free == 3
    with pytest.raises(ChildProcessError, match="crash"):
        child(lambda: os._exit(1))


if __name__ == "__main__":
    main()
