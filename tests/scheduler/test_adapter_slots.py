"""Slots of adapters: which one is evicted, who waits, and that nobody waits for ever. On the fake device."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from jaxserve.engine.core import EngineCore
from jaxserve.errors import ModelNotFoundError
from jaxserve.types.page_keys import namespace_of
from jaxserve.types.sampling import BACKGROUND_PRIORITY, EngineRequest
from tests.fakes import Transcripts, make_request, run_all
from tests.scheduler.test_scheduler import Recorder, prompt_of, recording_core, step


class Known:
    """Stands for the engine's adapters: these digests are loaded."""

    def __init__(self, *digests: str) -> None:
        self.digests = digests

    def check(self, digest: str) -> None:
        if digest not in self.digests:
            raise ModelNotFoundError(digest, param="model")

    def label(self, digest: str) -> str:
        return f"{digest}@1"


def make(slots: int, *digests: str, **changes: Any) -> tuple[EngineCore, Recorder]:
    core, recorder = recording_core(num_adapter_slots=slots, **changes)
    core.adapters = Known(*digests)  # type: ignore[assignment]
    return core, recorder


def asked(name: str, adapter: str, length: int = 5, first: int = 1, **params: Any) -> EngineRequest:
    request = make_request(name, prompt_of(length, first), **({"max_tokens": 4} | params))
    return msgspec.structs.replace(request, adapter=adapter, namespace=namespace_of(adapter, ""))


def writes(recorder: Recorder) -> list[dict[int, str]]:
    return [output.adapter_writes for output in recorder.outputs if output.adapter_writes]


def test_an_adapter_is_written_once_and_the_one_used_longest_ago_is_replaced() -> None:
    core, recorder = make(2, "A", "B", "C")
    for i, adapter in enumerate("ABABCA"):
        run_all(core, [asked(str(i), adapter)])
        core.scheduler.check_integrity()
    assert writes(recorder) == [{0: "A"}, {1: "B"}, {0: "C"}, {1: "A"}]
    slots = [init.adapter for output in recorder.outputs for init in output.slot_inits]
    assert slots == [0, 1, 0, 1, 0, 1]
    assert core.scheduler.adapters.num_loads == 4
    assert core.scheduler.adapters.num_waits == 0


def test_a_request_waits_for_a_slot_and_others_pass_it() -> None:
    core, recorder = make(1, "A", "B")
    transcripts = Transcripts()
    core.add(asked("a", "A", max_tokens=8))
    step(core, transcripts, 2)
    core.add(asked("b", "B", first=20))
    core.add(make_request("plain", prompt_of(4, 30), max_tokens=2))
    step(core, transcripts, 2)
    assert {request.reason for request in core.waiting()} == {"a free slot for its adapter (lora.slots)"}
    assert core.scheduler.adapters.num_waits == 1
    assert recorder.rows("plain")
    run_all(core, transcripts=transcripts)
    assert writes(recorder) == [{0: "A"}, {0: "B"}]


def test_later_requests_of_a_running_adapter_do_not_keep_another_waiting() -> None:
    core, recorder = make(1, "A", "B")
    transcripts = Transcripts()
    core.add(asked("a0", "A", max_tokens=6))
    step(core, transcripts)
    core.add(asked("b", "B", first=20))
    for i in range(1, 6):
        core.add(asked(f"a{i}", "A", first=30 + i, max_tokens=6))
        step(core, transcripts)
    run_all(core, transcripts=transcripts)
    order = [row.request_id for output in recorder.outputs for row in output.rows]
    assert order.index("b") < min(order.index(f"a{i}") for i in range(1, 6))


def test_lines_of_a_batch_that_came_before_keep_no_request_waiting_for_a_slot() -> None:
    core, recorder = make(1, "A", "B", "C", max_num_seqs=2)
    transcripts = Transcripts()
    lines = [asked(f"a{i}", "A", first=i, max_tokens=6) for i in range(6)] + [asked("c", "C", first=20)]
    for line in lines:
        core.add(msgspec.structs.replace(line, priority=BACKGROUND_PRIORITY))
    step(core, transcripts, 2)  # the last line claims the slot of A
    core.add(asked("b", "B", first=30))
    run_all(core, transcripts=transcripts)
    order = list(dict.fromkeys(row.request_id for output in recorder.outputs for row in output.rows))
    assert order == ["a0", "a1", "b", "a2", "a3", "a4", "a5", "c"]


def test_a_pinned_adapter_keeps_its_slot() -> None:
    core, recorder = make(2, "A", "B", "C")
    core.scheduler.adapters.pinned = {"A"}
    for i, adapter in enumerate("ABCB"):
        run_all(core, [asked(str(i), adapter)])
    assert writes(recorder) == [{0: "A"}, {1: "B"}, {1: "C"}, {1: "B"}]


def test_a_waiting_request_does_not_claim_the_slot_of_an_adapter_that_is_pinned_meanwhile() -> None:
    core, recorder = make(2, "A", "B", "C")
    transcripts = Transcripts()
    core.add(asked("a", "A", max_tokens=20))
    core.add(asked("b", "B", first=20, max_tokens=20))
    step(core, transcripts)
    core.add(asked("c", "C", first=30))
    step(core, transcripts)  # it claims the slot of A
    core.scheduler.adapters.pinned = {"A"}
    core.add(asked("a later", "A", first=40))
    core.add(asked("b later", "B", first=50))
    run_all(core, transcripts=transcripts)
    order = [row.request_id for output in recorder.outputs for row in output.rows]
    assert order.index("a later") < order.index("c") < order.index("b later")


def test_adapters_share_no_pages() -> None:
    core, recorder = make(2, "A", "B")
    run_all(core, [asked("a", "A", length=17)])
    run_all(core, [asked("b", "B", length=17)])
    run_all(core, [make_request("plain", prompt_of(17), max_tokens=4)])
    run_all(core, [asked("again", "A", length=17)])
    starts = [recorder.rows(name)[0].start for name in ("a", "b", "plain", "again")]
    assert starts[:3] == [0, 0, 0]
    assert starts[3] > 0
    pairs = [(adapter, salt) for adapter in ("", "A") for salt in ("", "s", "A\0", "A\0s", "\0s", "\0A\0s")]
    assert len({namespace_of(*pair) for pair in pairs}) == len(pairs)


def test_what_the_devices_lost_is_written_again() -> None:
    core, recorder = make(2, "A", "B")
    transcripts = Transcripts()
    core.add(asked("a", "A", max_tokens=6))
    core.add(asked("b", "B", first=20, max_tokens=6))
    step(core, transcripts, 3)
    core.recover()
    core.scheduler.check_integrity()
    run_all(core, transcripts=transcripts)
    assert sorted(digest for each in writes(recorder) for digest in each.values()) == ["A", "A", "B", "B"]


def test_a_request_of_an_unknown_adapter_is_refused() -> None:
    core, _ = make(1, "A")
    with pytest.raises(ModelNotFoundError):
        core.add(asked("x", "X"))
    assert not core.live_ids


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_is_accounted_for(seed: int) -> None:
    """Few slots and pages, preemptions, aborts and failed steps: every request ends, and has its adapter."""
    rng = random.Random(seed)
    core, recorder = make(2, *"ABCDE", num_pages=24, policy=rng.choice(["fcfs", "priority", "lpm"]))
    transcripts, wanted = Transcripts(), dict[str, str]()
    for i in range(40):
        wanted[f"r{i}"] = rng.choice(["", *"ABCDE"])
        length, first = rng.randint(1, 20), rng.randrange(60)
        request = asked(f"r{i}", wanted[f"r{i}"], length, first, max_tokens=rng.randint(1, 9))
        core.add(msgspec.structs.replace(request, priority=rng.randrange(3)))
        step(core, transcripts, rng.randrange(3))
        if rng.random() < 0.1:
            core.abort([rng.choice([*core.live_ids, "none"])])
        if rng.random() < 0.05:
            core.recover()
        core.scheduler.check_integrity()
    run_all(core, transcripts=transcripts)
    held: dict[int, str] = {}
    for output in recorder.outputs:
        held |= output.adapter_writes
        for init in output.slot_inits:
            name = next(row.request_id for row in output.rows if row.slot == init.slot)
            assert (held[init.adapter] if init.adapter >= 0 else "") == wanted[name]
    assert not core.scheduler.has_work
