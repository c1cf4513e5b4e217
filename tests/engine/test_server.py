"""The engine's loop over a channel of lists: what it sends, whom it refuses, and how often it rebuilds."""

from collections import deque
from concurrent.futures import Future
from typing import Any

import jax
import msgspec
import pytest

from jaxserve.engine import server as server_module
from jaxserve.engine.core import EngineCore, RequestFactory, StepError
from jaxserve.engine.server import MAX_REBUILDS, BuiltEngine, EngineServer
from jaxserve.errors import InvalidSchemaError
from jaxserve.scheduler.waiting_queue import WaitReason
from jaxserve.text.detokenizer import error_of
from jaxserve.transport.shared_state import SharedState
from jaxserve.types.calls import FlushCache, IsAlive, ListWaiting, ReadPages
from jaxserve.types.messages import (
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
from jaxserve.types.sampling import GrammarSpec, SamplingParams
from jaxserve.types.step import FinishReason, SchedulerOutput, TokenOutput
from tests.fake_grammar import CountingMatcher
from tests.fakes import VOCAB, alone, make_core, make_request, small_config
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
    EngineServer(BuiltEngine(core, info(), prepare or (lambda spec: Future())), channel, SharedState()).run()


def test_requests_are_answered_once_the_engine_is_ready() -> None:
    channel = ListChannel(
        [Add.of(make_request("a", [1, 2], max_tokens=5))], [Add.of(make_request("b", [3], max_tokens=2))]
    )
    serve(channel, make_core(small_config()))
    assert isinstance(channel.sent[0], Outputs) and isinstance(channel.sent[1], Ready)  # true gauges from the start
    assert channel.tokens("a") == alone([1, 2], SamplingParams(temperature=0.0, max_tokens=5))[0]
    assert channel.outputs("b")[-1].finish_reason is FinishReason.LENGTH


def test_a_request_that_cannot_run_is_refused_alone() -> None:
    bad = make_request("bad", [10**6], max_tokens=2)
    channel = ListChannel([Add.of(bad), Add.of(make_request("a", [1], max_tokens=2))])
    serve(channel, make_core(small_config()))
    (refusal,) = channel.outputs("bad")
    assert (refusal.finish_reason, refusal.error_status) == (FinishReason.ERROR, 400)
    assert error_of(refusal).param == "prompt"
    assert len(channel.tokens("a")) == 2


def test_calls_are_answered_whatever_they_ask() -> None:
    calls: list[ToEngine] = [Call(1, FlushCache()), Call(2, ReadPages("gone")), Call(3, IsAlive())]
    channel = ListChannel(calls)
    serve(channel, make_core(small_config()))
    replies = [message for message in channel.sent if isinstance(message, Reply)]
    assert [(reply.call_id, bool(reply.error)) for reply in replies] == [(1, False), (2, True), (3, True)]


def test_it_tells_which_requests_wait_and_why() -> None:
    adds: list[ToEngine] = [Add.of(make_request(name, [1], max_tokens=3)) for name in ("a", "b", "c")]
    channel = ListChannel(adds, [Call(1, ListWaiting())])
    serve(channel, make_core(small_config(max_num_seqs=1)))
    (reply,) = [message for message in channel.sent if isinstance(message, Reply)]
    assert [(each.request_id, each.reason) for each in reply.result] == [("b", WaitReason.SLOT), ("c", WaitReason.SLOT)]
    assert all(each.seconds >= 0 for each in reply.result)


def test_a_requests_life_is_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="jaxserve")
    adds: list[ToEngine] = [Add.of(make_request(name, [1], max_tokens=2)) for name in ("a", "b")]
    serve(ListChannel(adds), make_core(small_config(max_num_seqs=1)))
    lines = [text.removeprefix("request b ") for text in caplog.messages if text.startswith("request b ")]
    assert [line.split()[0] for line in lines] == ["()", "waits:", "starts", "has", "finished:"]
    assert WaitReason.SLOT.value in lines[1] and "length" in lines[-1]


def test_an_idle_engine_says_so_at_once() -> None:
    """Who waits for its pages to come back need not wait for the next interval."""
    channel = ListChannel([Add.of(make_request("a", [1], max_tokens=3))])
    serve(channel, make_core(small_config()))
    assert channel.stats[-1].num_running == 0 and channel.stats[-1].num_pages_used == 0
    assert channel.stats[-1].generation_tokens == 3


class Compiling(ListChannel):
    """The grammar is compiled when turn `at` comes; 0: never, and the engine stops after 100 turns more."""

    def __init__(self, at: int, *turns: list[ToEngine], result: Any = None) -> None:
        super().__init__(*turns)
        self.compiled: Future[Any] = Future()
        self.result = CountingMatcher(3, 4) if result is None else result
        self._left = at or 10**6
        self._turns_left = 100 if at == 0 else 10**6

    def receive(self, timeout: float) -> list[ToEngine]:
        self._left -= 1
        self._turns_left -= 1
        if self._left == 0 and isinstance(self.result, Exception):
            self.compiled.set_exception(self.result)
        elif self._left == 0:
            self.compiled.set_result(self.result)
        return super().receive(timeout) if self.turns or self._left < 0 or self._turns_left < 0 else []


def grammar_core(**config: Any) -> EngineCore:
    def make_matcher(spec: GrammarSpec) -> CountingMatcher:
        raise AssertionError("the matcher that was compiled in a thread is the one to use")

    return make_core(small_config(**config), make_matcher=make_matcher)


def test_a_request_waits_for_its_grammar_and_no_other_does() -> None:
    channel = Compiling(40, [Add.of(make_request("g", [1], grammar=GRAMMAR)), Add.of(make_request("free", [1]))])
    serve(channel, grammar_core(), lambda spec: channel.compiled)
    assert len(channel.tokens("g")) == 4 and len(channel.tokens("free")) == 16
    order = [
        output.request_id for message in channel.sent if isinstance(message, Outputs) for output in message.outputs
    ]
    assert order.index("g") > max(i for i, name in enumerate(order) if name == "free")


def test_siblings_wait_for_a_matcher_each() -> None:
    prompt, compiled = [1, 2], [CountingMatcher(3, 4), CountingMatcher(3, 2)]
    siblings = [make_request(name, prompt, grammar=GRAMMAR) for name in ("g0", "g1")]
    siblings[1] = msgspec.structs.replace(siblings[1], prompt_token_ids=siblings[0].prompt_token_ids)
    channel = ListChannel([Add.of(*siblings)])

    def prepare(spec: GrammarSpec) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(compiled.pop(0))
        return future

    serve(channel, grammar_core(), prepare)
    assert (len(channel.tokens("g0")), len(channel.tokens("g1"))) == (4, 2)


@pytest.mark.parametrize("at", [0, 2], ids=["compiling", "compiled at the same moment"])
def test_an_abort_of_a_request_whose_grammar_is_compiled_is_answered(at: int) -> None:
    channel = Compiling(at, [Add.of(make_request("g", [1], grammar=GRAMMAR))], [Abort(["g"])])
    core = grammar_core()
    serve(channel, core, lambda spec: channel.compiled)
    (end,) = channel.outputs("g")
    assert end.finish_reason is FinishReason.ABORT and core.stats().prompt_tokens == 0
    assert channel.compiled.cancelled() == (at == 0) and core.scheduler.counters.finished_abort == 1


@pytest.mark.parametrize(("limits", "message"), [({"deadline": 0.02}, "deadline"), ({}, "in the queue")])
def test_a_request_whose_grammar_is_compiled_ends_by_the_clock(limits: Any, message: str) -> None:
    channel = Compiling(0, [Add.of(make_request("g", [1], grammar=GRAMMAR, **limits))])
    now = iter(range(1000))
    core = make_core(
        small_config(queue_timeout=None if limits else 0.02),
        make_matcher=lambda spec: CountingMatcher(3, 4),
        clock=lambda: next(now) * 1e-3,
    )
    serve(channel, core, lambda spec: channel.compiled)
    (end,) = channel.outputs("g")
    assert end.error_status == 504 and message in (end.error or "") and core.stats().prompt_tokens == 0


def test_a_request_whose_grammar_is_compiled_counts_as_waiting() -> None:
    channel = Compiling(
        0, [Add.of(make_request("g", [1, 2, 3], grammar=GRAMMAR))], [], [Call(1, FlushCache())], [Abort(["g"])]
    )
    core = grammar_core()
    seen: list[EngineStats] = []
    channel.core = core
    server = EngineServer(BuiltEngine(core, info(), lambda spec: channel.compiled), channel, SharedState())
    core.flush_prefix_cache = lambda **_: seen.append(core.stats())
    server.run()
    assert (seen[0].num_waiting, seen[0].num_waiting_tokens) == (1, 3)
    assert (core.stats().num_waiting, core.stats().num_waiting_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("result", "param"),
    [
        (InvalidSchemaError("no grammar", param="guided_regex"), "guided_regex"),
        (RuntimeError("no grammar"), "response_format"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(result: Exception, param: str) -> None:
    turn: list[ToEngine] = [Add.of(make_request("g", [1], grammar=GRAMMAR)), Add.of(make_request("free", [1]))]
    channel = Compiling(2, turn, result=result)
    serve(channel, grammar_core(), lambda spec: channel.compiled)
    (end,) = channel.outputs("g")
    assert (end.error_status, error_of(end).param) == (400, param)
    assert "no grammar" in (end.error or "") and len(channel.tokens("free")) == 16


def test_a_request_that_cannot_run_is_refused_before_its_grammar_is_compiled() -> None:
    channel = ListChannel([Add.of(make_request("g", [VOCAB], grammar=GRAMMAR))])
    serve(channel, grammar_core(), lambda spec: pytest.fail("compiled"))
    assert [output.error_status for output in channel.outputs("g")] == [400]


def test_siblings_are_refused_together_and_their_prompt_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    check = RequestFactory._check_tokens
    monkeypatch.setattr(RequestFactory, "_check_tokens", lambda self, ids: (checked.append(len(ids)), check(self, ids)))
    for bad in (VOCAB, -1):
        prompt = [1, 2, bad]
        first = make_request("s0", prompt)
        siblings = [msgspec.structs.replace(first, request_id=f"s{i}") for i in range(4)]
        channel = ListChannel([Add.of(*siblings)])
        serve(channel, make_core(small_config()))
        for i in range(4):
            (end,) = channel.outputs(f"s{i}")
            assert end.error_status == 400 and "token ids" in (end.error or "")
    assert checked == [3, 3]


def test_what_was_admitted_is_reported_before_its_first_token() -> None:
    prompt = list(range(70))
    channel = ListChannel([Add.of(make_request("a", prompt, max_tokens=2))])
    serve(channel, make_core(small_config(max_num_batched_tokens=16)))
    outputs = [message for message in channel.sent if isinstance(message, Outputs)]
    admitted = [i for i, message in enumerate(outputs) if message.admitted == ["a"]]
    first = next(i for i, message in enumerate(outputs) if message.outputs)
    assert len(admitted) == 1 and admitted[0] < first


def faulty_core(failing: set[int], kind: str = "read") -> EngineCore:
    core = make_core(small_config())
    core.runner = FaultyRunner(core.runner, lambda output: kind if output.step in failing else None)
    return core


def test_failed_steps_are_rebuilt_and_change_nothing() -> None:
    channel = ListChannel(
        [Add.of(make_request("a", [1, 2], max_tokens=20)), Add.of(make_request("b", [9], max_tokens=20))]
    )
    serve(channel, faulty_core({2, 7, 12}))
    for name, prompt in (("a", [1, 2]), ("b", [9])):
        assert channel.tokens(name) == alone(prompt, SamplingParams(temperature=0.0, max_tokens=20))[0]


def test_more_failures_than_allowed_end_the_engine() -> None:
    failing = set(range(2, 2 + 5 * (MAX_REBUILDS + 1), 5))
    channel = ListChannel([Add.of(make_request("a", [1], max_tokens=20))])
    with pytest.raises(StepError, match="on purpose"):
        serve(channel, faulty_core(failing))


def test_requests_that_always_fail_do_not_end_the_engine() -> None:
    """They are found and end; the failures of their search do not count against the device."""
    turns: list[list[ToEngine]] = []
    for i in range(MAX_REBUILDS + 2):
        turns.append([Add.of(make_request(f"{kind}{i}", [i], max_tokens=9)) for kind in ("good", "bad", "fine")])
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
    channel = ListChannel([Add.of(make_request("a", [1], max_tokens=20))])
    serve(channel, faulty_core({2, 7, 12, 17, 22}))
    assert len(channel.tokens("a")) == 20


def test_a_rebuild_that_fails_ends_the_engine() -> None:
    channel = ListChannel([Add.of(make_request("a", [1], max_tokens=20))])
    with pytest.raises(Exception, match="no device behind"):
        serve(channel, faulty_core({3}, "rebuild"))


def test_a_stored_program_that_cannot_be_run_is_discarded_before_the_process_ends() -> None:
    """No request fails: another process computes what runs again, and does not load the program."""
    channel = ListChannel([Add.of(make_request("a", [1], max_tokens=20))])
    channel.core = core = make_core(small_config())
    failing, discarded = jax.errors.JaxRuntimeError("NOT_FOUND: Function f not found (type id: 1)"), ["decode[4]"]

    def execute(output: object) -> None:
        raise failing

    core.runner.execute = execute  # type: ignore[method-assign]
    built = BuiltEngine(core, info(), lambda spec: Future(), discard=lambda: [discarded.pop()])
    with pytest.raises(StepError, match="Function f not found"):
        EngineServer(built, channel, SharedState()).run()
    assert not discarded
    assert not [output for output in channel.outputs("a") if output.finish_reason is not None]


def test_the_turns_of_the_loop_are_counted() -> None:
    channel = ListChannel([Add.of(make_request("a", [1], max_tokens=3))])
    core = make_core(small_config())
    channel.core = core
    state = SharedState()
    server = EngineServer(BuiltEngine(core, info(), lambda spec: Future()), channel, state)
    server.run()
    assert state.pulse.iterations >= 3
