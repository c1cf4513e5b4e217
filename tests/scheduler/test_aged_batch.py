"""An aged request that waits for room does not keep online requests from preempting batch requests."""

import pytest

from jaxserve.engine.core import EngineCore
from jaxserve.types.sampling import BACKGROUND_PRIORITY
from tests.fakes import Transcripts, alone, make_core, make_request, small_config

LONG = 400  # tokens of a batch request's output, in as many steps


def full_of_batch(policy: str, aging_steps: int = 20) -> EngineCore:
    """Four batch requests hold all slots, four more wait."""
    core = make_core(
        small_config(
            policy=policy, aging_steps=aging_steps, max_num_seqs=4, num_pages=512, page_size=4, max_model_len=512
        )
    )
    for number in range(8):
        core.add(make_request(f"batch{number}", [number], max_tokens=LONG, priority=BACKGROUND_PRIORITY))
    return core


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
@pytest.mark.parametrize("quiet", [3, 30, 100])
def test_an_online_request_starts_at_once(policy: str, quiet: int) -> None:
    """quiet: steps without online requests; after 20 a waiting batch request is aged."""
    core, transcripts = full_of_batch(policy), Transcripts()
    for _ in range(quiet):
        transcripts.take(core.step())
    core.add(make_request("online", [50, 51], max_tokens=3))
    steps = 0
    while "online" not in transcripts:
        transcripts.take(core.step())
        core.scheduler.check_integrity()
        steps += 1
    assert steps <= 8
    while core.has_work:
        transcripts.take(core.step())
    assert transcripts["online"].token_ids == alone([50, 51], make_request("x", [1], max_tokens=3).params)[0]
    assert all(len(transcripts[f"batch{number}"].token_ids) == LONG for number in range(8))


@pytest.mark.parametrize("policy", ["lpm", "priority"])
def test_an_aged_online_request_does_not_wait_for_batch_requests(policy: str) -> None:
    core, transcripts = full_of_batch(policy, aging_steps=1), Transcripts()
    for _ in range(10):
        transcripts.take(core.step())
    for number in range(6):  # more than there are slots, so some wait until they are aged
        core.add(make_request(f"online{number}", [60 + number], max_tokens=30, priority=number % 2))
    steps = 0
    while not all(f"online{number}" in transcripts for number in range(6)):
        transcripts.take(core.step())
        core.scheduler.check_integrity()
        steps += 1
    assert steps <= 80


def test_an_aged_request_gets_the_room_that_comes_free_beside_an_online_request() -> None:
    """Two batch requests hold all pages. The online request preempts both: its own needs and the aged one's are more
    than the half that one of them gives back."""
    core, transcripts = make_core(small_config(policy="priority", aging_steps=3, num_pages=12)), Transcripts()
    for name, length, max_tokens in (("first", 8, 16), ("second", 8, 16), ("aged", 20, 4)):
        request = make_request(name, range(length), max_tokens=max_tokens, priority=BACKGROUND_PRIORITY, namespace=name)
        core.add(request)
    for _ in range(5):
        transcripts.take(core.step())
    core.add(make_request("online", range(4), max_tokens=4))
    for _ in range(4):
        transcripts.take(core.step())
        core.scheduler.check_integrity()
    assert {"aged", "online"} <= transcripts.keys()
    assert core.scheduler.counters.priority_preemptions == 2
