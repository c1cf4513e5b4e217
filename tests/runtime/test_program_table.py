"""The table of programs by size, in whatever order they are compiled."""

from typing import Any

import pytest

from jaxserve.runtime.compilation.compiler import ProgramTable


def table(*names: str) -> ProgramTable:
    compiled: dict[str, Any] = {name: object() for name in names}
    return ProgramTable({"extend": (8, 64, 512), "verify": (2, 16)}, compiled)


def test_sizes_are_ascending_in_any_order_of_arrival() -> None:
    programs = table("extend[512]", "admit", "verify[16]", "extend[8]", "verify[2]")
    assert programs.sizes("extend") == (8, 512) and list(programs.by_size["extend"]) == [8, 512]
    assert list(programs.by_size["verify"]) == [2, 16]
    programs.add("extend[64]", object())  # type: ignore[arg-type]
    assert programs.sizes("extend") == (8, 64, 512) and list(programs.by_size["extend"]) == [8, 64, 512]
    assert "admit" not in programs.by_size


def test_a_step_takes_the_smallest_program_that_is_there() -> None:
    programs = table("extend[512]", "extend[8]")
    assert [programs.fit("extend", count) for count in (1, 8, 9, 512)] == [8, 8, 512, 512]
    assert programs.find("verify", 1) is None
    with pytest.raises(ValueError, match="513 is above the largest bucket, 512"):
        programs.fit("extend", 513)
    with pytest.raises(ValueError, match="1 is above the largest bucket, 0"):
        programs.fit("verify", 1)
