"""The mutants fit the source that they are planted in, and each is killed by its test."""

from pathlib import Path

import pytest

from tests.faults.mutants import MUTANTS, ROOT, Mutant, is_killed, planted


def test_mutants_fit_the_source(tmp_path: Path) -> None:
    for mutant in MUTANTS:
        assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1, mutant.name
        path, _, name = mutant.test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), mutant.name
    planted(MUTANTS[0], tmp_path)
    assert MUTANTS[0].new in (tmp_path / MUTANTS[0].file).read_text(encoding="utf-8")


def test_the_documentation_lists_them() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    for mutant in MUTANTS:
        assert f"| {mutant.name} | `{mutant.test}` |" in page, mutant.name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_is_killed(mutant: Mutant) -> None:
    assert is_killed(mutant)
