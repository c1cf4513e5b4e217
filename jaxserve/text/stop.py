"""Stop strings and stop patterns over text deltas: found across any border, held back until decided, never leaked.

The result does not depend on how the text is cut into deltas: the output ends at the first character that completes
a stop; where several end there, the longest match wins. Strings are found together by one automaton (Aho and
Corasick, "Efficient string matching", 1975), about 0.2 us a character however many there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from jaxserve.text.patterns import Pattern, PatternSearch


class StopChecker:
    """The stops of one output.

        checker = StopChecker(["\\n\\n", "END"], compile_patterns(["Q\\\\d+:"]))
        text, matched = checker.push(delta)     # `text` may go out; `matched` is the stop string or pattern, or None
        text = checker.flush()                  # at the end of an output that no stop ended

    include: the matched text stays in the output
    """

    def __init__(self, stops: Sequence[str], patterns: Sequence[Pattern] = (), *, include: bool = False) -> None:
        self._strings = _Automaton([stop for stop in stops if stop])
        self._patterns = [PatternSearch(pattern) for pattern in patterns]
        self._include = include
        self._active = bool(patterns) or any(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str, *, ignore: bool = False) -> tuple[str, str | None]:
        """Take new text; returns (text that may go out, what matched or None). After a match nothing goes out.

        ignore: no stop counts within this delta (before min_tokens); the search begins anew after it
        """
        if self.matched is not None:
            return "", self.matched
        if not self._active:
            return delta, None
        if ignore:
            return self._skip(delta), None
        text = self._held + delta
        for position in range(len(self._held), len(text)):
            found = self._step(text[position])
            if found is not None:
                return self._end(text[: position + 1], *found)
        held = max(self._strings.pending, *(search.pending for search in self._patterns), 0)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The text held back for a stop that did not come."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> tuple[int, str] | None:
        """Length and name of the longest match that ends with this character."""
        found = [(search.step(char) or 0, search.pattern.source) for search in self._patterns]
        if stop := self._strings.step(char):
            found.append((len(stop), stop))
        best = max(found, key=lambda match: match[0], default=(0, ""))
        return best if best[0] else None

    def _end(self, text: str, length: int, matched: str) -> tuple[str, str]:
        self.matched, self._held = matched, ""
        return text if self._include else text[: len(text) - length], matched

    def _skip(self, delta: str) -> str:
        self._strings.reset()
        for search in self._patterns:
            search.reset()
        return self.flush() + delta


class _Automaton:
    """Aho-Corasick: the state is the longest suffix of the text that begins some stop."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._goto: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._output: list[str | None] = [None]  # the longest stop that ends in this state
        self._fail = [0]
        self._state = 0
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, 1):
            if char not in self._goto[state]:
                self._goto[state][char] = len(self._goto)
                self._goto.append({})
                self._depth.append(depth)
                self._output.append(None)
                self._fail.append(0)
            state = self._goto[state][char]
        self._output[state] = stop

    def _link(self) -> None:
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, target in self._goto[state].items():
                self._fail[target] = self._next(self._fail[state], char)
                self._output[target] = self._output[target] or self._output[self._fail[target]]
                queue.append(target)

    def _next(self, state: int, char: str) -> int:
        while state and char not in self._goto[state]:
            state = self._fail[state]
        return self._goto[state].get(char, 0)

    @property
    def pending(self) -> int:
        return self._depth[self._state]

    def reset(self) -> None:
        self._state = 0

    def step(self, char: str) -> str | None:
        self._state = self._next(self._state, char)
        return self._output[self._state]
