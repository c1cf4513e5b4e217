"""How batch requests take part in steps beside online requests. There is one policy for each kind of platform.

PriorityOnly    GPU and TPU: batch requests are in every step, and their prompts come after those of online requests.
                A decode row in a step with a prompt costs almost nothing there.
YieldToOnline   CPU: every token of a step makes it longer, so batch requests sit out while online prompts are computed.

Both hold counts only. What waits and what runs is the scheduler's.
"""

from __future__ import annotations

from jaxserve.types.request import Request
from jaxserve.types.sampling import BACKGROUND_PRIORITY
from jaxserve.types.scheduler_config import SchedulerConfig
from jaxserve.types.step import SchedulerOutput

PATIENCE = 16  # steps; while online prompts follow each other without a gap, batch requests run in one of so many
# Seconds after the last online request in which the next one is expected. It is the pause of a client between two
# requests and does not depend on the model.
ONLINE_MEMORY = 30.0
# A step of batch requests takes at most as long as so many of the decode steps that an arrival waits for anyway, or
# this part of the time that an average online prompt takes itself, whichever is longer.
DECODE_STEPS = 2
PROMPT_SHARE = 0.25
UNTIMED_SHARE = 4  # without step times, a step of batch requests has at most one of so many of a step's tokens
_WEIGHT = 1 / 16  # of the newest prompt in the average


class PriorityOnly:
    """Batch requests take part in every step. The order of prompts puts them after online requests."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._batch_priority = config.rank(BACKGROUND_PRIORITY)
        self._budget = config.prefill_budget
        self.num_batch = 0  # batch requests that wait or run

    def is_batch(self, request: Request) -> bool:
        """Whether the request gives way to online requests. An aged batch request does not."""
        return request.priority >= self._batch_priority and not request.aged

    def online(self, requests: list[Request]) -> list[Request]:
        """Those that do not give way."""
        return [request for request in requests if not self.is_batch(request)] if self.num_batch else requests

    def batch(self, requests: list[Request]) -> list[Request]:
        """Those that give way."""
        return [request for request in requests if self.is_batch(request)] if self.num_batch else []

    def count(self, request: Request, change: int) -> None:
        """A request came (1) or ended (-1)."""
        if request.priority >= self._batch_priority:
            self.num_batch += change

    def started(self, request: Request, num_tokens: int) -> None:
        """A request got its slot, and so many tokens of its prompt are to be computed."""

    def joins(self, num_live: int, online_prompts: bool, now: float) -> bool:
        """Whether batch requests take part in the next step whatever online requests do in it. Asked once a step.

        num_live: requests of both kinds. online_prompts: whether online requests wait or compute their prompts.
        """
        return True

    def budget(self, num_decode_rows: int, *, batch: bool, now: float) -> int:
        """Prompt tokens that a step may have. batch: whether prompts of batch requests are among them."""
        return self._budget

    def runs_ahead(self, in_flight: SchedulerOutput, now: float) -> bool:
        """Whether a step may be dispatched while this one is still running."""
        return True


class YieldToOnline(PriorityOnly):
    """Batch requests sit out a step that computes an online prompt, but for one step in PATIENCE.

    While online requests run or are expected, the other steps with batch requests are kept short, because an arrival
    waits for their end. Such a step computes prompts of batch requests or decodes batch requests. Small steps of one
    kind are better filled: the demo model's 64 prompt tokens take 3.1 ms, 20 decode rows 2.6, 16 of each together 3.4.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._times = config.step_times
        self._decode_seconds = DECODE_STEPS * self._times.decode_seconds(config.num_slots)
        # A text that is computed in one step or not at all needs a step that holds all of it.
        untimed = config.max_num_batched_tokens // UNTIMED_SHARE
        self._untimed = config.prefill_budget if config.whole_prompts else max(4, untimed)
        self._whole = config.whole_prompts
        self._steps_sat_out = 0
        self._last_online = float("-inf")
        self._online_prompt = 0.0  # tokens to compute of an online prompt, on average

    def started(self, request: Request, num_tokens: int) -> None:
        if request.priority < self._batch_priority:
            self._online_prompt += _WEIGHT * (num_tokens - self._online_prompt)

    def joins(self, num_live: int, online_prompts: bool, now: float) -> bool:
        if num_live > self.num_batch:
            self._last_online = now
        if not self._expects_online(now):
            return True
        if not online_prompts:
            self._steps_sat_out = 0
            return False
        self._steps_sat_out += 1
        return self._steps_sat_out % PATIENCE == 0

    def _expects_online(self, now: float) -> bool:
        """Whether there are batch requests, and online requests run or came lately."""
        return self.num_batch > 0 and now - self._last_online <= ONLINE_MEMORY

    def budget(self, num_decode_rows: int, *, batch: bool, now: float) -> int:
        if not (batch and self._expects_online(now)) or self._whole:
            return self._budget
        small = self._times.tokens_within(self._longest_step()) or self._untimed
        return min(self._budget, max(small // 4, small - num_decode_rows, 1))

    def _longest_step(self) -> float:
        """Seconds that an arrival may wait for a step of batch requests."""
        return max(self._decode_seconds, PROMPT_SHARE * self._times.prefill_seconds(round(self._online_prompt)))

    def runs_ahead(self, in_flight: SchedulerOutput, now: float) -> bool:
        """Two decode steps may be in flight; a step with a prompt is read before the next one is made."""
        return in_flight.num_decode_rows == len(in_flight.rows) or not self._expects_online(now)


def make_policy(config: SchedulerConfig) -> PriorityOnly:
    """The policy that the configuration names."""
    return YieldToOnline(config) if config.batch_policy == "yield" else PriorityOnly(config)
