"""The reason that is given for a waiting request is what it waits for."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.engine.core import EngineCore
from jaxserve.scheduler.waiting_queue import WaitReason
from jaxserve.types.sampling import BACKGROUND_PRIORITY, Tenant
from tests.fakes import drain, make_core, make_request, small_config


def core_of(**changes: Any) -> EngineCore:
    return make_core(small_config(**changes))


def reasons(core: EngineCore) -> dict[str, str]:
    return {each.request_id: each.reason for each in core.waiting(100)}


def no_slot() -> EngineCore:
    core = core_of(max_num_seqs=1)
    core.add(make_request("first", [1, 2], max_tokens=50))
    core.step()
    core.add(make_request("late", [3], max_tokens=5))
    return core


def key_limit() -> EngineCore:
    core, tenant = core_of(), Tenant("limited", max_running=1)
    core.add(make_request("first", [1, 2], max_tokens=50, tenant=tenant))
    core.step()
    core.add(make_request("late", [3], max_tokens=5, tenant=tenant))
    return core


def no_pages() -> EngineCore:
    core = core_of(num_pages=8, page_size=4, max_model_len=32)
    core.add(make_request("first", list(range(20)), max_tokens=8))
    core.step()
    core.add(make_request("late", list(range(30, 50)), max_tokens=8))
    return core


def same_prefix() -> EngineCore:
    core = core_of(max_num_batched_tokens=16, num_pages=64, page_size=4, max_model_len=128)
    core.add(make_request("first", list(range(60)), max_tokens=5))
    core.step()
    core.add(make_request("late", list(range(40)), max_tokens=5))
    return core


def batch_beside_online() -> EngineCore:
    core = core_of(
        batch_policy="yield", step_sizes=(1, 8, 16), max_num_batched_tokens=16, max_model_len=128, num_pages=64
    )
    core.add(make_request("first", [7] * 100, max_tokens=5))
    core.step()
    core.add(make_request("late", [1, 2], max_tokens=5, priority=BACKGROUND_PRIORITY))
    return core


CASES = {
    WaitReason.SLOT: no_slot,
    WaitReason.PAGES: no_pages,
    WaitReason.KEY_LIMIT: key_limit,
    WaitReason.SHARED_PREFIX: same_prefix,
    WaitReason.ONLINE_FIRST: batch_beside_online,
}


@pytest.mark.parametrize("reason", CASES, ids=[reason.name for reason in CASES])
def test_the_reason(reason: WaitReason) -> None:
    make: Callable[[], EngineCore] = CASES[reason]
    core = make()
    for _ in range(2):  # batch requests wait for the step in flight first
        core.step()
    assert reasons(core) == {"late": reason}
    drain(core)
    assert reasons(core) == {}


def test_who_is_not_tried_waits_for_its_turn() -> None:
    core = no_pages()
    core.add(make_request("later", [5], max_tokens=5))
    core.step()
    assert reasons(core) == {"late": WaitReason.PAGES, "later": WaitReason.ROOM_BEFORE}


def test_a_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="jaxserve")
    core = no_slot()
    for _ in range(5):
        core.step()
    assert len([text for text in caplog.messages if text.startswith("request late waits")]) == 1
