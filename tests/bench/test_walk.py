"""How many files a reader goes through, against the committed table."""

from dataclasses import asdict

from benchmarks.walk import difference, load, measure, walk_of

SHARE = 1.15  # a walk may grow by this share before the table must be looked at; a batch varies by a tenth


def test_a_walk_is_counted_by_thread() -> None:
    calls = [(1, "a.py"), (1, "a.py"), (2, "b.py"), (1, "c.py"), (1, "a.py"), (2, "b.py")]
    assert asdict(walk_of(calls)) == {"files": 3, "calls": 6, "moves": 4, "back": 1}


def test_no_walk_is_longer_than_the_table_says() -> None:
    """`python -m benchmarks.walk --write` writes the table, if the way is worth it."""
    before, after = load(), measure()
    shown = "\n".join(difference(before, after))
    print(shown)
    assert before.keys() == after.keys()
    for name, walk in after.items():
        for key, value in asdict(walk).items():
            assert 0 < value <= asdict(before[name])[key] * SHARE, f"{name}: {key}\n{shown}"
