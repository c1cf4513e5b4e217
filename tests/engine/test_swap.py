"""A preempted request's pages go on in the memory of the host, and are loaded when it runs again."""

from __future__ import annotations

from jaxserve.engine.core import EngineCore
from tests.fakes import alone, make_core, make_request, run_all, small_config

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
