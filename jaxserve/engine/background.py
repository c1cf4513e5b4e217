"""How background work, the lines of batches, gives way to online requests that have no token yet.

Decides per step and holds counts only; what is queued and what runs is the scheduler's.
"""

from __future__ import annotations

from jaxserve.engine.request import BACKGROUND_PRIORITY, Request
from jaxserve.engine.scheduler_config import SchedulerConfig

PATIENCE = 16  # steps; under a stream of online prompts without a gap lines run in one of so many
ONLINE_MEMORY = 30.0  # seconds after the last online request in which another one is expected
# Meanwhile a step with lines has at most this fraction of the tokens, since an arrival waits for its end. Prompts
# alone, as on a CPU (see `keeps_apart`), are done sooner, and 128 of their tokens at once cost less than twice 64.
SMALL_STEP, SMALL_STEP_APART = 16, 4
# Or this part of an average online prompt, where that is more: the wait is felt beside the prompt's own time.
PROMPT_SHARE = 0.25
_MEMORY = 1 / 16  # weight of the newest prompt in that average


class Courtesy:
    """Tells lines from online requests, and when lines sit a step out or keep it small."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._line_priority = config.rank(BACKGROUND_PRIORITY)
        self._budget = config.prefill_budget
        self._apart = bool(config.step_sizes)
        fraction = SMALL_STEP_APART if self._apart else SMALL_STEP
        # a text that runs in one step or not at all has to find room for all of it
        self._small_step = None if config.whole_prompts else max(4, config.max_num_batched_tokens // fraction)
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

    def expects_online(self, now: float) -> bool:
        """Whether lines are about, and online requests have been of late: what comes while a step runs should not find
        many dispatched already."""
        return bool(self._num_lines) and now - self._last_online <= ONLINE_MEMORY

    def keeps_apart(self, now: float) -> bool:
        """Whether lines that decode sit out a step with a line's prompt.

        So where a token costs the same whatever else a step has: small steps of one kind are better filled then. The
        demo model's 64 prompt tokens take 3.1 ms and 20 decode rows 2.6; 16 of each in one step take 3.4.
        """
        return self._apart and self.expects_online(now)

    def in_order(self, prefilling: list[Request]) -> list[Request]:
        """Online prompts first."""
        return sorted(prefilling, key=self.is_line) if self._num_lines else prefilling

    def without_lines(self, requests: list[Request]) -> list[Request]:
        return [request for request in requests if request.priority < self._line_priority]

    def only_lines(self, requests: list[Request]) -> list[Request]:
        return [request for request in requests if request.priority >= self._line_priority]

    def budget(self, num_decode_rows: int, lines: bool, now: float) -> int:
        """Prompt tokens that a step may have; lines: whether they take part in it."""
        small = self._small_step
        if not (lines and self.expects_online(now)) or small is None:
            return self._budget
        step = max(small, int(PROMPT_SHARE * self._online_prompt))
        return min(self._budget, max(step // 4, step - num_decode_rows))
