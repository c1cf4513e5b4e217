"""The simulation of chats over several engines: the claim that BENCHMARKS.md makes of it, on a small service."""

from pathlib import Path

import pytest

from benchmarks import routing
from benchmarks.routing import PAGE_SIZE, Simulation, make_turns, parse

SMALL = ["--turns", "300", "--chats", "20", "--systems", "4", "--longest", "2500"]


def test_a_prompt_begins_with_the_answered_turns_of_its_chat() -> None:
    before: dict[int, list[int]] = {}
    begun = 0
    for turn in make_turns(parse(SMALL)):
        said = before.get(turn.chat, [])
        begun += turn.prompt[: len(said)] != said or not said
        before[turn.chat] = turn.prompt + turn.answer
    assert 20 <= begun < 150, "chats go on, and begin anew when they are long"


def test_two_engines_find_about_what_one_with_all_the_memory_finds() -> None:
    turns, pages = make_turns(parse([*SMALL, "--chats", "30"])), 30_000 // PAGE_SIZE
    found = {
        policy: Simulation(turns, policy, count, pages).run().hits
        for policy, count in [("one engine", 1), ("router", 2), ("round robin", 2), ("least loaded", 2)]
    }
    assert found["router"] > 0.95 * found["one engine"]
    assert max(found["round robin"], found["least loaded"]) < 0.92 * found["one engine"]


def test_pages_are_only_computed_once_if_all_fit() -> None:
    turns = make_turns(parse([*SMALL, "--rate", "0.1"]))  # one after the other
    result = Simulation(turns, "one engine", 1, 2**20).run()
    seen, new = set[tuple[int, ...]](), 0
    for turn in turns:
        pages = [tuple(turn.prompt[: end + PAGE_SIZE]) for end in range(0, len(turn.prompt) - PAGE_SIZE, PAGE_SIZE)]
        hit = next((i for i, page in enumerate(pages) if page not in seen), len(pages))
        new += len(turn.prompt) - hit * PAGE_SIZE
        whole = turn.prompt + turn.answer[:-1]
        seen.update(tuple(whole[: end + PAGE_SIZE]) for end in range(0, len(whole) - PAGE_SIZE + 1, PAGE_SIZE))
    assert result.computed == [new]


def test_a_trace_gives_arrivals_and_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{second}.5,100,{second}" for second in range(10, 40)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    options = [*SMALL, "--trace", str(trace)]
    turns = make_turns(parse(options))
    assert [turn.at for turn in turns] == [float(second) for second in range(30)]
    assert [len(turn.answer) for turn in turns] == list(range(10, 40))
    routing.main([*options, "--engines", "2", "--policies", "router", "--pool", "40000"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[-2:]] == ["| one engine", "| router"]
