"""The search for the request that kills the engine's process: thousands of simulated engines that die of some.

The engine here is as hostile as a real one may be: the outputs of its last steps are lost with it, two steps are in
work at once, and clients come, leave and abort at any time.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxserve.client.sequence_sender import ProcessFaultIsolator, SequenceSender
from jaxserve.client.sequences import LiveSequence, OutputQueue, SequenceTable
from jaxserve.client.supervisor import Restarts
from jaxserve.errors import HTTPError, ServerError
from jaxserve.types.messages import Abort, Add, ToEngine
from jaxserve.types.sampling import EngineRequest, SamplingParams
from jaxserve.types.step import FinishReason, TokenOutput

MAX_ROWS = 64


@dataclass
class Running:
    """A sequence in the engine. Its k-th output is the token k."""

    engine_id: str
    client_id: str
    num_outputs: int
    is_answered: bool


@dataclass
class Engine:
    """One engine process. Steps are read one later than they are dispatched."""

    harm: dict[str, int]  # client id -> the output whose computation kills the process
    rng: random.Random
    running: dict[str, Running] = field(default_factory=dict)
    in_flight: list[str] = field(default_factory=list)
    in_work: list[str] = field(default_factory=list)
    dies_anyway: float = 0.0
    share: float = 1.0  # of the rows that get an output in a step: prompts of others take several steps

    def take_in(self, message: ToEngine) -> list[TokenOutput]:
        match message:
            case Add():
                for each in message.requests():
                    assert each.request_id not in self.running, "sent twice"
                    done = len(each.resumed_token_ids)
                    assert each.resumed_token_ids == list(range(done))
                    self.running[each.request_id] = Running(each.request_id, each.client_id, done, each.is_answered)
            case Abort(request_ids):
                gone = [engine_id for engine_id in request_ids if self.running.pop(engine_id, None)]
                return [TokenOutput(request_id=engine_id, finish_reason=FinishReason.ABORT) for engine_id in gone]
            case _:
                raise AssertionError(message)
        return []

    def step(self) -> list[TokenOutput] | None:
        """Dispatch a step and read the one before; None: it died."""
        all_rows = list(self.running)[:MAX_ROWS]
        rows = [name for name in all_rows if self.rng.random() < self.share] or all_rows[:1]
        self.in_work = list(dict.fromkeys(self.in_flight + rows))
        dispatched = [self.running[name] for name in rows]
        if any(row.num_outputs + 1 >= self.harm.get(row.client_id, math.inf) for row in dispatched):
            return None
        if rows and self.rng.random() < self.dies_anyway:
            return None
        outputs = [self._read(self.running[name]) for name in self.in_flight if name in self.running]
        self.in_flight = [name for name in rows if name in self.running]
        return outputs

    def _read(self, row: Running) -> TokenOutput:
        row.num_outputs += 1
        ended = row.num_outputs == LENGTH
        if ended:
            del self.running[row.engine_id]
        reason = FinishReason.LENGTH if ended else None
        return TokenOutput(request_id=row.engine_id, token_ids=[row.num_outputs - 1], finish_reason=reason)


LENGTH = 24  # outputs of each sequence


class World:
    """A SequenceSender between clients and one engine after the other."""

    def __init__(
        self, seed: int, harm: dict[str, int] | None = None, dies_anyway: float = 0.0, share: float = 1.0
    ) -> None:
        self.rng = random.Random(seed)
        self.harm = harm or {}
        self.share = share
        self.dies_anyway = dies_anyway
        self.live = SequenceTable()
        self.row = Restarts()
        self.sender = SequenceSender(self.live, self._to_engine, self._fail, self._served)
        self.deaths = 0
        self.gave_up = False
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.errors: dict[str, str] = {}
        self.wire: list[list[TokenOutput]] = []  # sent by the engine, not yet read
        self._start()

    def _start(self) -> None:
        self.engine = Engine(self.harm, self.rng, dies_anyway=self.dies_anyway, share=self.share)
        self.wire.clear()
        self.sender.ready()

    def _to_engine(self, message: ToEngine) -> None:
        ended = self.engine.take_in(message)
        if ended:
            self.wire.append(ended)

    def _served(self) -> None:
        self.row.in_a_row = 0

    def _fail(self, sequence: LiveSequence, error: HTTPError) -> None:
        assert isinstance(error, ServerError) and error.status == 500
        self.live.remove(sequence)
        self.errors[sequence.request.client_id] = error.message

    def ask(self, client_id: str, n: int = 1) -> None:
        ids = [self.live.new_id() for _ in range(n)]
        group = ids[0] if n > 1 else ""
        prompt = [1]
        requests = [
            EngineRequest(request_id=each, client_id=client_id, group=group, prompt_token_ids=prompt, params=PARAMS)
            for each in ids
        ]
        sequences = []
        for index, request in enumerate(requests):
            text = cast("Any", SimpleNamespace(index=index, output_token_ids=[]))
            sequences.append(LiveSequence(request, text, OutputQueue()))
            self.live.add(sequences[-1])
            self.tokens[client_id, index] = text.output_token_ids
        self.sender.send(sequences, Add.of(*requests))

    def leave(self, client_id: str) -> None:
        gone = self.live.of_client(client_id)
        for sequence in gone:
            self.live.remove(sequence)
        self._to_engine(Abort([sequence.engine_id for sequence in gone]))
        self.sender.advance()

    def turn(self) -> None:
        outputs = self.engine.step()
        if outputs is None:
            self._die()
            return
        self.wire.append(outputs)
        while len(self.wire) > self.rng.randrange(3):
            self._deliver(self.wire.pop(0))

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        self.live.admit(output.request_id for output in outputs)
        self.sender.receive(outputs)
        for output in outputs:
            sequence = self.live.get(output.request_id)
            if sequence is None:
                continue
            sequence.text.output_token_ids.extend(output.token_ids)
            sequence.is_answered = True
            if output.finish_reason is not None:
                self.live.remove(sequence)
                self.reasons[sequence.request.client_id, sequence.text.index] = output.finish_reason
        self.sender.advance()

    def _die(self) -> None:
        self.deaths += 1
        for outputs in self.wire[: self.rng.randrange(len(self.wire) + 1)]:  # the rest is lost
            self._deliver(outputs)
        if self.row.next_delay(self.sender.died(self.engine.in_work), served=1.0) is None:
            self.gave_up = True
            return
        self._start()

    def run(self, max_turns: int = 20_000) -> None:
        for _ in range(max_turns):
            if self.gave_up or not len(self.live):
                return
            self.turn()
        raise AssertionError("it never ends")

    def check(self, clients: Iterable[str]) -> None:
        """Each of these has been answered in full, token by token, and no other has an error."""
        for client_id in clients:
            assert client_id not in self.errors, self.errors
        done = {key: tokens for key, tokens in self.tokens.items() if key[0] not in self.errors}
        for key, tokens in done.items():
            assert tokens == list(range(len(tokens))), key
            assert key not in self.reasons or self.reasons[key] != "length" or len(tokens) == LENGTH


PARAMS = SamplingParams(max_tokens=LENGTH, seed=0)


def most_deaths(count: int) -> int:
    """Until one among `count` is known: at first, and then in groups of ever fewer."""
    return 1 + max(1, math.ceil(math.log(count, ProcessFaultIsolator.parts)))


@pytest.mark.parametrize("count", [1, 2, 16, 17, 64])
def test_one_among_many_is_found_in_few_deaths(count: int) -> None:
    """Whichever it is, and whichever of its outputs kills. Half the logarithm to base two, and never a row of six."""
    for seed in range(min(count, 20) * 2):
        names = [f"r{i}" for i in range(count)]
        bad = names[seed * 7 % count]
        world = World(seed, {bad: 1 + seed % 9})
        for name in names:
            world.ask(name)
        world.run()
        assert not world.gave_up and world.errors.keys() == {bad}
        assert "died each time" in world.errors[bad]
        world.check(set(names) - {bad})
        assert world.deaths <= most_deaths(count) <= math.log2(count) + 2


@pytest.mark.parametrize("worlds", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_random_worlds_lose_and_blame_nobody(worlds: int) -> None:
    """Requests of several choices, several that kill, clients that come, leave and abort meanwhile."""
    for seed in range(worlds):
        rng = random.Random(seed)
        names = [f"r{i}" for i in range(rng.randrange(2, 40))]
        harm = {name: rng.randrange(1, 8) for name in rng.sample(names, rng.randrange(3))}
        world = World(seed, harm, share=rng.choice([1.0, 0.9, 0.5]))
        waiting, left = list(names), set[str]()
        for _ in range(20_000):
            if world.gave_up or not (waiting or len(world.live)):
                break
            for _ in range(rng.randrange(4) if waiting else 0):
                if waiting:
                    world.ask(waiting.pop(), n=rng.choice([1, 1, 1, 2, 5]))
            if rng.random() < 0.01:
                left.add(name := rng.choice(names))
                world.leave(name)
            world.turn()
        assert not world.gave_up and not len(world.live), seed
        assert world.errors.keys() <= harm.keys() and harm.keys() - left <= world.errors.keys(), seed
        world.check(set(names) - harm.keys())


def test_siblings_are_blamed_as_one() -> None:
    """A request of 64 choices that kills, beside others: its choices are not looked for one by one."""
    world = World(0, {"bad": 2})
    for name in ("a", "bad", "b"):
        world.ask(name, n=64 if name == "bad" else 3)
    world.run()
    assert world.errors.keys() == {"bad"} and world.deaths <= most_deaths(3)
    world.check({"a", "b"})


def test_what_is_not_the_fault_of_a_request_ends_none() -> None:
    """Deaths at random, as of an engine that is killed for its memory: every request is answered in full. Only where a
    second such death meets a request that is tried alone is it taken for that request's fault."""
    deaths = errors = 0
    for seed in range(300):
        world = World(seed, dies_anyway=0.004)
        names = [f"r{i}" for i in range(30)]
        for name in names:
            world.ask(name)
        world.run()
        assert not world.gave_up and (world.deaths > 1 or not world.errors)
        world.check(set(names) - world.errors.keys())
        deaths, errors = deaths + world.deaths, errors + len(world.errors)
    assert deaths >= 30 and errors <= deaths / 10, (deaths, errors)


def test_an_engine_that_always_dies_is_given_up() -> None:
    """Whichever requests are there; none of many is blamed for it."""
    world = World(0, dies_anyway=1.0)
    for i in range(40):
        world.ask(f"r{i}")
    world.run()
    assert world.gave_up and world.deaths == 6 and not world.errors


def test_an_engine_that_always_dies_is_given_up_after_few_requests_too() -> None:
    world = World(0, dies_anyway=1.0)
    for i in range(10):
        world.ask(f"r{i}")
        world.run()
    assert world.gave_up and world.deaths == 6 and len(world.errors) <= 3


def test_where_all_in_work_kill_another_is_the_witness() -> None:
    """Both are found by their deaths alone, once a request that waited for a slot has shown that the engine serves."""
    world = World(0, {"bad": 1, "worse": 1})
    for name in ("bad", "worse"):
        world.ask(name)
    while not world.deaths:
        world.turn()
    world.ask("waits")
    world.run()
    assert world.errors.keys() == {"bad", "worse"} and world.deaths == 3
    world.check(["waits"])


def test_requests_that_kill_one_after_the_other_end_no_server() -> None:
    """Far more deaths than restarts in a row are allowed, but each has its cause, and others are served between."""
    world = World(0, {f"bad{i}": 3 for i in range(20)})
    for i in range(20):
        for name in (f"a{i}", f"bad{i}", f"b{i}"):
            world.ask(name)
        world.run()
    assert not world.gave_up and world.deaths >= 40 and len(world.errors) == 20
    world.check([f"{name}{i}" for i in range(20) for name in "ab"])


def test_new_requests_wait_for_the_search() -> None:
    world = World(0, {"bad": 1})
    for name in ("a", "bad", "b"):
        world.ask(name)
    while not world.deaths:
        world.turn()
    world.ask("new")
    for _ in range(4):
        assert all(row.client_id != "new" for row in world.engine.running.values())
        world.turn()
    world.run()
    world.check(["a", "b", "new"])


def test_what_comes_once_is_asked_for_once() -> None:
    """A sequence that an engine has answered says so to the next, each choice for itself."""
    seen: list[bool] = []
    world = World(3, {"bad": 6})
    for name in ("a", "bad"):
        world.ask(name, n=2)
    while world.deaths == 0:
        world.turn()
    answered = {each.engine_id: each.is_answered for each in world.live}
    for row in world.engine.running.values():
        assert row.is_answered == answered[row.engine_id]
        seen.append(row.is_answered)
    assert any(seen)
