"""Pages in the memory of the host: a preempted request loads its own again, and a long prompt in several steps."""

from __future__ import annotations

from jaxserve.engine.core import EngineCore
from jaxserve.kv.kv_manager import MAX_LOADED
from jaxserve.scheduler.waiting_queue import WaitReason
from tests.fakes import Transcripts, alone, make_core, make_request, run_all, small_config

PAGE = small_config().page_size


def run(num_host_pages: int) -> EngineCore:
    """Run requests that need several times the pages of the device."""
    config = small_config(num_pages=8, max_model_len=32, new_token_ratio=0.01, num_host_pages=num_host_pages)
    core = make_core(config, eos_token_ids=(1000,))  # without one, room for all tokens is kept
    requests = [make_request(str(first), [first + 7 * i for i in range(6)], max_tokens=20) for first in (1, 30)]
    found = run_all(core, requests)
    for request in requests:
        assert found[request.request_id].token_ids == alone(request.prompt_token_ids, request.params)[0]
    return core


def test_a_preempted_request_loads_its_pages() -> None:
    without, swapped = run(0).scheduler.counters, run(100).scheduler.counters
    assert without.retractions and swapped.retractions
    assert without.recomputed_tokens > PAGE * without.retractions
    assert swapped.recomputed_tokens <= PAGE * swapped.retractions, "what is in no full page"


LONG = [(7 * i) % 90 for i in range(4 * PAGE * MAX_LOADED)]


def load_beside(num_streams: int) -> tuple[list[int], set[WaitReason]]:
    """Ask a prompt again that is in the memory of the host alone. Returns the pages that each step loads, and why the
    prompt waited.
    """
    config = small_config(
        num_pages=300, max_model_len=1200, max_num_batched_tokens=300, num_host_pages=2000, new_token_ratio=0.01
    )
    core = make_core(config)
    others = [[(11 * i + first) % 90 for i in range(1100)] for first in (1, 2)]
    run_all(core, [make_request(str(index), prompt, max_tokens=1) for index, prompt in enumerate([LONG, *others])])
    streams = [make_request(f"stream {index}", [index, 5], max_tokens=40) for index in range(num_streams)]
    transcripts, loads, reasons = Transcripts(), list[int](), set[WaitReason]()
    for request in streams:
        core.add(request)
    transcripts.take(core.step() if streams else [])
    asked = make_request("again", LONG, max_tokens=5)
    core.add(asked)
    host = core.scheduler.kv.host
    assert host is not None
    before = host.full.num_loaded
    while core.has_work:
        transcripts.take(core.step())
        core.scheduler.check_integrity()
        reasons |= {reason for _, reason in core.scheduler.waiting(1)}
        loads.append(host.full.num_loaded - before - sum(loads))
    for request in [*streams, asked]:
        assert transcripts[request.request_id].token_ids == alone(request.prompt_token_ids, request.params)[0]
    assert sum(loads) == len(LONG) // PAGE - 1, "all but the last page, of which a token is computed"
    return [count for count in loads if count], reasons


def test_beside_streams_a_prompt_loads_its_pages_in_several_steps() -> None:
    loads, reasons = load_beside(2)
    assert loads == [MAX_LOADED] * 3 + [MAX_LOADED - 1] and reasons == {WaitReason.LOADING}


def test_without_streams_a_prompt_loads_its_pages_at_once() -> None:
    assert load_beside(0) == ([4 * MAX_LOADED - 1], set())
