"""The texts that both servers write: ids that occur once, and are the same in the prompt where the text is the same."""

from benchmarks.speculation_peer import renumbered


def test_a_text_counts_and_its_prompt_has_the_same_ids_where_the_text_is_the_same() -> None:
    prompt, output = renumbered(([5, 6, 7, 8, 9], [6, 7, 1, 8, 9, 9]), first=300, filler=1000)
    assert output == [301, 302, 303, 304, 305, 306]
    assert prompt == [1000, 301, 302, 304, 305, 300]
