"""The two lists of running requests, and who of them is to stay."""

from jaxserve.scheduler.running_set import RunningSet
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import Request, RequestStatus


def running(name: str, *, output: int = 0, prompt: int = 4, priority: int = 0, aged: bool = False) -> Request:
    request = Request(name, [0] * prompt, SamplingParams(), arrival=0.0, seed=0, max_tokens=9, priority=priority)
    request.output_token_ids, request.aged, request.status = [0] * output, aged, RequestStatus.RUNNING
    return request


def names(requests: list[Request]) -> str:
    return "".join(request.request_id for request in requests)


def test_a_prompt_that_is_done_decodes() -> None:
    members = RunningSet()
    first, second = running("a"), running("b")
    members.prefilling += [first, second]
    first.num_inflight_tokens = 1
    members.promote()
    assert (names(members.decoding), names(members.prefilling), names(list(members))) == ("a", "b", "ab")


def test_what_ended_is_dropped_when_told() -> None:
    members = RunningSet()
    members.decoding += [running("a"), running("b")]
    members.prefilling.append(running("c"))
    members.decoding[0].status = RequestStatus.PREEMPTED
    members.prefilling[0].status = RequestStatus.FINISHED
    members.drop_ended()
    assert len(list(members)) == 3
    members.has_ended = True
    members.drop_ended()
    assert names(list(members)) == "b"
    members.decoding[0].status = RequestStatus.PREEMPTED
    members.drop_ended()
    assert names(list(members)) == "b", "it was not told again"


def test_the_furthest_stay_and_then_the_shorter_prompts() -> None:
    members = RunningSet()
    members.decoding += [running("c", output=2), running("b", output=5, prompt=9), running("a", output=5)]
    members.prefilling.append(running("d"))
    assert names(members.best_first()) == "abcd"


def test_priority_comes_before_progress_and_age_before_both() -> None:
    members = RunningSet()
    members.decoding += [running("c", output=9, priority=5), running("b", priority=1)]
    members.decoding.append(running("a", priority=7, aged=True))
    assert names(members.best_first()) == "abc"
