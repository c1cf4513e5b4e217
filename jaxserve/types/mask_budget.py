"""Limits the CPU time that the token masks of one request may take in the engine process."""

from __future__ import annotations

import threading

QUICK = 0.001  # seconds per mask; a request with slower masks has them computed in a thread
NUM_QUICK = 32  # quick masks in a row, over all choices, after which the engine loop computes the masks again


class MaskBudget:
    """CPU time budget of the token masks of all choices of a request. An exhausted budget ends the request.
    Thread-safe.

    A mask of a JSON schema takes 10 to 100 us. The most ambiguous grammar within the parser's limits takes 20 to 30
    ms per mask. At 1 ms per mask the budget is never exhausted, at 30 ms it ends the request after about 100 tokens.

    is_slow: one of the last masks took longer than QUICK
    """

    SECONDS = 2.0
    SECONDS_PER_TOKEN = 0.002  # added to the budget for each output token

    def __init__(self) -> None:
        self.is_slow = False
        self._left = self.SECONDS
        self._num_quick = 0
        self._lock = threading.Lock()

    def charge(self, seconds: float, num_tokens: int = 0) -> None:
        """Subtract CPU time that was spent and add what new output tokens earn."""
        with self._lock:
            self._left += num_tokens * self.SECONDS_PER_TOKEN - seconds
            self._num_quick = 0 if seconds > QUICK else self._num_quick + 1
            self.is_slow = seconds > QUICK or (self.is_slow and self._num_quick < NUM_QUICK)

    @property
    def error(self) -> str | None:
        """Return why the request must end; None while budget is left."""
        if self._left >= 0:
            return None
        return f"its masks took more than {self.SECONDS:g} s and {self.SECONDS_PER_TOKEN * 1000:g} ms a token"
