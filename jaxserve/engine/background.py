"""How background work, the lines of batches, gives way to online requests that have no token yet.

Decides per step and holds counts only; what is queued and what runs is the scheduler's.
"""

from __future__ import annotations

from jaxserve.engine.request import BACKGROUND_PRIORITY, Request
from jaxserve.engine.scheduler_config import SchedulerConfig

PATIENCE = 16  # steps; under a stream of online prompts without a gap lines run in one of so many
ONLINE_MEMORY = 30.0  # seconds after the last online request in which another one is expected
# Meanwhile a step with lines has at most this fraction of the tokens, since an arrival waits for two steps to end. On a
# CPU that is 32: the demo model computes 14 tokens a millisecond so, 19 in steps of 512.
SMALL_STEP = 16
# Or this part of an average online prompt, where that is more: the wait is felt beside the prompt's own time.
PROMPT_SHARE = 0.25
_MEMORY = 1 / 16  # weight of the newest prompt in that average


class Courtesy:
    """Tells lines from online requests, and when lines sit a step out or keep it small."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._line_priority = config.rank(BACKGROUND_PRIORITY)
        self._budget = config.prefill_budget
        # a text that runs in one step or not at all has to find room for all of it
        self._small_step = None if config.whole_prompts else max(4, config.max_num_batched_tokens // SMALL_STEP)
        self._num_lines = 0
        self._steps_sat_out = 0
        self._last_online = float("-inf")
        self._online_prompt = 0.0  # tokens to compute of an online prompt, on average

    def is_line(self, request: Request) -> bool:
        """request.priority: as ranked."""
        return request.priority >= self._line_priority

    def count(self, request: Request, change: int) -> None:
        """A request came (1) or ended (-1)."""
        if request.priority >= self._line_priority:
            self._num_lines += change

    def started(self, request: Request, num_tokens: int) -> None:
        """A request has its slot, and so many tokens of its prompt are to be computed."""
        if request.priority < self._line_priority:
            self._online_prompt += _MEMORY * (num_tokens - self._online_prompt)

    def sit_out(self, num_live: int, best_waiting: int | None, prefilling: list[Request], now: float) -> bool:
        """Whether lines have no part in the next step, being asked once for each.

        num_live: requests of both kinds; best_waiting: the best priority in the queue
        """
        if num_live > self._num_lines:
            self._last_online = now
        if 0 < self._num_lines < num_live:
            waits = best_waiting is not None and best_waiting < self._line_priority
            if waits or not all(map(self.is_line, prefilling)):
                self._steps_sat_out += 1
                return self._steps_sat_out % PATIENCE != 0
        self._steps_sat_out = 0
        return False

    def in_order(self, prefilling: list[Request]) -> list[Request]:
        """Online prompts first."""
        return sorted(prefilling, key=self.is_line) if self._num_lines else prefilling

    def without_lines(self, requests: list[Request]) -> list[Request]:
        return [request for request in requests if request.priority < self._line_priority]

    def budget(self, num_decode_rows: int, lines: bool, now: float) -> int:
        """Prompt tokens that a step may have; lines: whether they take part in it."""
        small = self._small_step
        if not (lines and self._num_lines) or small is None or now - self._last_online > ONLINE_MEMORY:
            return self._budget
        step = max(small, int(PROMPT_SHARE * self._online_prompt))
        return min(self._budget, max(step // 4, step - num_decode_rows))
