"""Stop strings and stop patterns over text deltas: found across any border of the deltas.

The output ends at the first character that completes a stop, however the text is cut. A stop string is held back until
it is decided and is cut off the output; where several end at one character, the longest counts. The text that a
pattern matches stays in the output, as in SGLang. Strings are found together by one automaton (Aho and Corasick,
"Efficient string matching", 1975), about 0.2 us a character however many there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from jaxserve.text.patterns import PatternSearch, StopPatterns


class Stops:
    """The stops of one request, prepared once for all of its choices."""

    def __init__(self, strings: Sequence[str], patterns: StopPatterns | None = None) -> None:
        self.automaton = _Automaton([string for string in strings if string])
        self.patterns = patterns or StopPatterns(())


class StopChecker:
    """The search for stops in one output.

        checker = StopChecker(Stops(["\\n\\n", "END"], StopPatterns(["Q\\\\d+:"])))
        text, matched = checker.push(delta)     # `text` may go out; `matched` is the stop string or pattern, or None
        text = checker.flush()                  # at the end of an output that no stop ended

    include: a stop string stays in the output
    """

    def __init__(self, stops: Stops, *, include: bool = False) -> None:
        self._automaton = stops.automaton
        self._state = 0
        self._search = PatternSearch(stops.patterns)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str, *, ignore: bool = False) -> tuple[str, str | None]:
        """Take new text; returns (text that may go out, what matched or None). After a match nothing goes out.

        ignore: no stop counts within this delta (before min_tokens); the search begins anew after it
        """
        if self.matched is not None:
            return "", self.matched
        if ignore:
            return self._skip(delta), None
        end, string = self._find_string(delta)
        pattern = self._search.push(delta)
        text = self._held + delta
        if pattern is not None and (string is None or pattern[0] < end):
            return self._end(text[: len(self._held) + pattern[0]], pattern[1])
        if string is not None:
            cut = len(self._held) + end - (0 if self._include else len(string))
            return self._end(text[:cut], string)
        cut = len(text) - self._automaton.depth[self._state]
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """Return the text held back for a stop that did not come."""
        held, self._held = self._held, ""
        return held

    def _find_string(self, delta: str) -> tuple[int, str | None]:
        """Return where in the delta a stop string ends first, and the longest one that ends there."""
        for end, char in enumerate(delta, 1):
            self._state = self._automaton.next(self._state, char)
            if (found := self._automaton.output[self._state]) is not None:
                return end, found
        return len(delta), None

    def _end(self, text: str, matched: str) -> tuple[str, str]:
        self.matched, self._held = matched, ""
        return text, matched

    def _skip(self, delta: str) -> str:
        self._state = 0
        self._search.skip(delta)
        return self.flush() + delta


class _Automaton:
    """Aho-Corasick: a state is the longest suffix of the text that begins some stop. 0 is the empty suffix.

    depth     characters of a state's suffix
    output    the longest stop that ends in a state
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._goto: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.output: list[str | None] = [None]
        self._fail = [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, 1):
            if char not in self._goto[state]:
                self._goto[state][char] = len(self._goto)
                self._goto.append({})
                self.depth.append(depth)
                self.output.append(None)
                self._fail.append(0)
            state = self._goto[state][char]
        self.output[state] = stop

    def _link(self) -> None:
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, target in self._goto[state].items():
                self._fail[target] = self.next(self._fail[state], char)
                self.output[target] = self.output[target] or self.output[self._fail[target]]
                queue.append(target)

    def next(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        while state and char not in self._goto[state]:
            state = self._fail[state]
        return self._goto[state].get(char, 0)
