"""What the grammar of one request may cost the engine's process."""

from __future__ import annotations

import threading

QUICK = 0.001  # seconds of a mask; a request with slower ones has its masks made in a thread
NUM_QUICK = 32  # masks in a row, all choices together, after which they are made by the loop again


class MaskBudget:
    """CPU time of the masks of all choices of a request. Over it the request ends with an error. Safe for threads.

    A mask of a JSON schema takes 10 to 100 us, one of the most ambiguous grammar that the parser's limits let through
    20 to 30 ms. A grammar of 1 ms a mask never comes near the limit, one of 30 ms ends after a hundred tokens.

    is_slow: one of the last masks took longer than QUICK
    """

    SECONDS = 2.0
    SECONDS_PER_TOKEN = 0.002  # earned by each token of the output

    def __init__(self) -> None:
        self.is_slow = False
        self._left = self.SECONDS
        self._num_quick = 0
        self._lock = threading.Lock()

    def charge(self, seconds: float, num_tokens: int = 0) -> None:
        """Take off the CPU time that was spent, and add what new tokens of the output have earned."""
        with self._lock:
            self._left += num_tokens * self.SECONDS_PER_TOKEN - seconds
            self._num_quick = 0 if seconds > QUICK else self._num_quick + 1
            self.is_slow = seconds > QUICK or (self.is_slow and self._num_quick < NUM_QUICK)

    @property
    def error(self) -> str | None:
        """Why the request has to end, if the budget is spent."""
        if self._left >= 0:
            return None
        return f"its masks took more than {self.SECONDS:g} s and {self.SECONDS_PER_TOKEN * 1000:g} ms a token"
