"""The engine's loop over a channel of lists: what it sends, whom it refuses, and how often it rebuilds."""

import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import pytest

from jaxserve.engine import server as server_module
from jaxserve.engine.core import EngineCore, StepError
from jaxserve.engine.messages import (
    Abort,
    Add,
    Call,
    EngineInfo,
    EngineStats,
    FromEngine,
    Outputs,
    Ready,
    Reply,
    Stop,
    ToEngine,
)
from jaxserve.engine.request import FinishReason, GrammarSpec, SamplingParams, SchedulerOutput, TokenOutput
from jaxserve.engine.server import MAX_REBUILDS, BuiltEngine, EngineServer
from tests.fakes import CountingMatcher, alone, make_core, make_request, small_config
from tests.faults.faulty_runner import FaultyRunner

GRAMMAR = GrammarSpec(kind="regex", source="4")


class ListChannel:
    """Gives what it holds, some at each turn; orders the engine to stop when nothing is left and it has no work."""

    def __init__(self, *turns: list[ToEngine]) -> None:
        self.turns = deque(turns)
        self.core: EngineCore | None = None
        self.sent: list[FromEngine] = []

    def receive(self, timeout: float) -> list[ToEngine]:
        if self.turns:
            return self.turns.popleft()
        assert self.core is not None
        return [] if self.core.has_work else [Stop()]

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def outputs(self, request_id: str) -> list[TokenOutput]:
        found = [output for message in self.sent if isinstance(message, Outputs) for output in message.outputs]
        return [output for output in found if output.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs(request_id) for token in output.token_ids]

    @property
    def stats(self) -> list[EngineStats]:
        return [message.stats for message in self.sent if isinstance(message, Outputs) and message.stats is not None]


def info() -> EngineInfo:
    empty: dict[str, Any] = dict.fromkeys(EngineInfo.__struct_fields__, 0)
    empty |= {"num_pages": 64, "page_size": 4}
    return EngineInfo(**empty)


def serve(channel: ListChannel, core: EngineCore, prepare: Any = None) -> None:
    channel.core = core
    EngineServer(BuiltEngine(core, info(), prepare or (lambda spec: Future())), channel).run()


def test_requests_are_answered_once_the_engine_is_ready() -> None:
    channel = ListChannel([Add(make_request("a", [1, 2], max_tokens=5))], [Add(make_request("b", [3], max_tokens=2))])
    serve(channel, make_core(small_config()))
    assert isinstance(channel.sent[0], Outputs) and isinstance(channel.sent[1], Ready)  # true gauges from the start
    assert channel.tokens("a") == alone([1, 2], SamplingParams(temperature=0.0, max_tokens=5))[0]
    assert channel.outputs("b")[-1].finish_reason is FinishReason.LENGTH


def test_a_request_that_cannot_run_is_refused_alone() -> None:
    bad = make_request("bad", [10**6], max_tokens=2)
    channel = ListChannel([Add(bad), Add(make_request("a", [1], max_tokens=2))])
    serve(channel, make_core(small_config()))
    (refusal,) = channel.outputs("bad")
    assert (refusal.finish_reason, refusal.error_status) == (FinishReason.ERROR, 400)
    assert len(channel.tokens("a")) == 2


def test_calls_are_answered_whatever_they_ask() -> None:
    calls: list[ToEngine] = [Call(1, "flush_cache"), Call(2, "nothing"), Call(3, "flush_cache", {"x": 1})]
    channel = ListChannel(calls)
    serve(channel, make_core(small_config()))
    replies = [message for message in channel.sent if isinstance(message, Reply)]
    assert [(reply.call_id, reply.result) for reply in replies] == [(1, True), (2, None), (3, None)]
    assert replies[1].error and replies[2].error


def test_an_idle_engine_says_so_at_once() -> None:
    """Who waits for its pages to come back need not wait for the next interval."""
    channel = ListChannel([Add(make_request("a", [1], max_tokens=3))])
    serve(channel, make_core(small_config()))
    assert channel.stats[-1].num_running == 0 and channel.stats[-1].num_pages_used == 0
    assert channel.stats[-1].generation_tokens == 3


def grammar_core() -> EngineCore:
    return make_core(small_config(), make_matcher=lambda spec: CountingMatcher(3, int(spec.source)))


class Compiling(ListChannel):
    """The grammar is compiled when turn `at` comes."""

    def __init__(self, at: int, *turns: list[ToEngine]) -> None:
        super().__init__(*turns)
        self.compiled: Future[Any] = Future()
        self._left = at

    def receive(self, timeout: float) -> list[ToEngine]:
        self._left -= 1
        if self._left == 0:
            self.compiled.set_result(None)
        return super().receive(timeout) if self.turns or self._left < 0 else []


def test_a_request_waits_for_its_grammar_and_nobody_else_does() -> None:
    channel = Compiling(40, [Add(make_request("g", [1], grammar=GRAMMAR)), Add(make_request("free", [1]))])
    serve(channel, grammar_core(), lambda spec: channel.compiled)
    assert len(channel.tokens("g")) == 4 and len(channel.tokens("free")) == 16
    order = [
        output.request_id for message in channel.sent if isinstance(message, Outputs) for output in message.outputs
    ]
    assert order.index("g") > max(i for i, name in enumerate(order) if name == "free")


def test_an_abort_finds_a_request_whose_grammar_is_compiled() -> None:
    """Even where both come at the same moment."""
    channel = Compiling(2, [Add(make_request("g", [1], grammar=GRAMMAR))], [Abort(["g"])])
    core = grammar_core()
    serve(channel, core, lambda spec: channel.compiled)
    assert channel.outputs("g") == [] and core.stats().prompt_tokens == 0


def faulty_core(failing: set[int], kind: str = "read") -> EngineCore:
    core = make_core(small_config())
    core.runner = FaultyRunner(core.runner, lambda output: kind if output.step in failing else None)
    return core


def test_failed_steps_are_rebuilt_and_change_nothing() -> None:
    channel = ListChannel([Add(make_request("a", [1, 2], max_tokens=20)), Add(make_request("b", [9], max_tokens=20))])
    serve(channel, faulty_core({2, 7, 12}))
    for name, prompt in (("a", [1, 2]), ("b", [9])):
        assert channel.tokens(name) == alone(prompt, SamplingParams(temperature=0.0, max_tokens=20))[0]


def test_more_failures_than_allowed_end_the_engine() -> None:
    failing = set(range(2, 2 + 5 * (MAX_REBUILDS + 1), 5))
    channel = ListChannel([Add(make_request("a", [1], max_tokens=20))])
    with pytest.raises(StepError, match="on purpose"):
        serve(channel, faulty_core(failing))


def test_requests_that_always_fail_do_not_end_the_engine() -> None:
    """They are found and end; the failures of their search do not count against the device."""
    turns: list[list[ToEngine]] = []
    for i in range(MAX_REBUILDS + 2):
        turns.append([Add(make_request(f"{kind}{i}", [i], max_tokens=9)) for kind in ("good", "bad", "fine")])
        turns += [[]] * 40
    channel, core = ListChannel(*turns), make_core(small_config())
    faults = iter(range(100))  # then the device is well, and who still looks for a culprit finds none

    def plan(output: SchedulerOutput) -> str | None:
        bad = any("bad" in row.request_id for row in output.rows)
        return "read" if bad and next(faults, None) is not None else None

    core.runner = FaultyRunner(core.runner, plan)
    serve(channel, core)
    for i in range(MAX_REBUILDS + 2):
        expected = alone([i], SamplingParams(temperature=0.0, max_tokens=9))[0]
        assert channel.tokens(f"good{i}") == channel.tokens(f"fine{i}") == expected
        assert channel.outputs(f"bad{i}")[-1].finish_reason is FinishReason.ERROR


def test_old_failures_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REBUILD_WINDOW", -1.0)
    channel = ListChannel([Add(make_request("a", [1], max_tokens=20))])
    serve(channel, faulty_core({2, 7, 12, 17, 22}))
    assert len(channel.tokens("a")) == 20


def test_a_rebuild_that_fails_ends_the_engine() -> None:
    channel = ListChannel([Add(make_request("a", [1], max_tokens=20))])
    with pytest.raises(Exception, match="no device behind"):
        serve(channel, faulty_core({3}, "rebuild"))


def test_the_turn_of_the_loop_is_timed() -> None:
    channel = ListChannel([Add(make_request("a", [1], max_tokens=3))])
    core = make_core(small_config())
    channel.core = core
    server = EngineServer(BuiltEngine(core, info(), lambda spec: Future()), channel)
    before = time.monotonic()
    server.run()
    assert server.steps >= 3 and server.turn_started >= before
