"""Policies for batch requests that share steps with online requests. There is one policy per kind of platform.

online request  a request with the priority of an interactive client, or an aged batch request
batch request   a request of background work, with priority BACKGROUND_PRIORITY or a higher number

PriorityOnly    GPU and TPU: batch requests are in every step; their prompts come after the online prompts.
                A decode row in a step with a prompt costs almost nothing there.
YieldToOnline   CPU: every token makes a step longer, so batch requests skip steps that compute online prompts.

The policies only count. The scheduler owns the waiting and the running requests.
"""

from __future__ import annotations

from jaxserve.types.sampling import BACKGROUND_PRIORITY
from jaxserve.types.scheduling import SchedulerConfig, StepTimes
from jaxserve.types.step import Request, SchedulerOutput

BATCH_EVERY = 16  # while online prompts follow each other without a gap, batch requests run in one of BATCH_EVERY steps
# Seconds after the last online request in which the next one is expected. It is the pause of a client between two
# requests and does not depend on the model.
ONLINE_MEMORY = 30.0
# A new request waits for two decode steps anyway. A step of batch requests takes at most as long as DECODE_STEPS decode
# steps, or PROMPT_SHARE of the time that an average online prompt takes, whichever is longer.
DECODE_STEPS = 2
PROMPT_SHARE = 0.25
# without measured step times, a step of batch requests has at most 1/UNTIMED_SHARE of the token budget
UNTIMED_SHARE = 4
_WEIGHT = 1 / 16  # weight of the newest prompt in the moving average


class PriorityOnly:
    """Run batch requests in every step. The order of prompts puts them after online requests."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._batch_priority = config.rank(BACKGROUND_PRIORITY)
        self._budget = config.prefill_budget
        self.num_batch = 0  # batch requests that wait or run

    def is_batch(self, request: Request) -> bool:
        """Return whether the request is a batch request that is not aged."""
        return request.priority >= self._batch_priority and not request.aged

    def online(self, requests: list[Request]) -> list[Request]:
        """Select the online requests and the aged batch requests."""
        return [request for request in requests if not self.is_batch(request)] if self.num_batch else requests

    def batch(self, requests: list[Request]) -> list[Request]:
        """Select the batch requests that are not aged."""
        return [request for request in requests if self.is_batch(request)] if self.num_batch else []

    def count(self, request: Request, change: int) -> None:
        """Count a request that was added (1) or ended (-1)."""
        if request.priority >= self._batch_priority:
            self.num_batch += change

    def started(self, request: Request, num_tokens: int) -> None:
        """Record that a request got its slot and has `num_tokens` prompt tokens to compute."""

    def joins(self, num_live: int, online_prompts: bool, now: float) -> bool:
        """Return whether batch requests take part in the next step, whatever online requests do in it.

        Call once per step.

        num_live: requests of both kinds. online_prompts: whether online requests wait or compute their prompts.
        """
        return True

    def budget(self, num_decode_rows: int, *, batch: bool, now: float) -> int:
        """Return the maximum number of prompt tokens of a step. batch: whether batch prompts are among them."""
        return self._budget

    def runs_ahead(self, in_flight: SchedulerOutput, now: float) -> bool:
        """Return whether another step may be dispatched while `in_flight` still runs."""
        return True

    def retime(self, times: StepTimes) -> None:
        """Use these times of steps from now on."""


class YieldToOnline(PriorityOnly):
    """Skip batch requests in steps that compute an online prompt, except in one of BATCH_EVERY steps.

    If online requests run or are expected, the other steps with batch requests are kept short, because a new request
    waits for their end. Such a step either computes batch prompts or decodes batch requests, because a small step of
    one kind does more work in the same time. On the demo model 64 prompt tokens take 3.1 ms, 20 decode rows 2.6 ms, 16
    of each together 3.4 ms.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._num_slots = config.num_slots
        self.retime(config.step_times)
        self._untimed = max(4, config.max_num_batched_tokens // UNTIMED_SHARE)
        self._whole = config.whole_prompts  # an encoder's: every step must hold the longest text
        self._steps_sat_out = 0
        self._last_online = float("-inf")
        self._online_prompt = 0.0  # moving average of the tokens to compute of an online prompt

    def retime(self, times: StepTimes) -> None:
        self._times = times
        self._decode_seconds = DECODE_STEPS * times.decode_seconds(self._num_slots)

    def started(self, request: Request, num_tokens: int) -> None:
        if request.priority < self._batch_priority:
            self._online_prompt += _WEIGHT * (num_tokens - self._online_prompt)

    def joins(self, num_live: int, online_prompts: bool, now: float) -> bool:
        """Update the time of the last online request and decide. See PriorityOnly.joins."""
        if num_live > self.num_batch:
            self._last_online = now
        if not self._expects_online(now):
            return True
        if not online_prompts:
            self._steps_sat_out = 0
            return False
        self._steps_sat_out += 1
        return self._steps_sat_out % BATCH_EVERY == 0

    def _expects_online(self, now: float) -> bool:
        """Return whether there are batch requests, and an online request was live in the last ONLINE_MEMORY seconds."""
        return self.num_batch > 0 and now - self._last_online <= ONLINE_MEMORY

    def budget(self, num_decode_rows: int, *, batch: bool, now: float) -> int:
        if not (batch and self._expects_online(now)) or self._whole:
            return self._budget
        small = self._times.tokens_within(self._longest_step()) or self._untimed
        return min(self._budget, max(small // 4, small - num_decode_rows, 1))

    def _longest_step(self) -> float:
        """Return the seconds that a new request may wait for a step of batch requests."""
        return max(self._decode_seconds, PROMPT_SHARE * self._times.prefill_seconds(round(self._online_prompt)))

    def runs_ahead(self, in_flight: SchedulerOutput, now: float) -> bool:
        """Allow two decode steps in flight. A step with a prompt is read before the next one is dispatched."""
        return in_flight.num_decode_rows == len(in_flight.rows) or not self._expects_online(now)


def make_policy(config: SchedulerConfig) -> PriorityOnly:
    """Return the policy that the configuration names."""
    return YieldToOnline(config) if config.batch_policy == "yield" else PriorityOnly(config)
