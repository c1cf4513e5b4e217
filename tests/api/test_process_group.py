"""What the API processes of one server share: the sums that limits are compared with, and metrics as one."""

import pytest

from jaxserve.api.keys import DEFAULT_CALLER, KeyLimitError, KeyUsage, KeyUsages
from jaxserve.api.process_group import MAIN, GroupKeeper, ProcessGroup, num_columns
from jaxserve.api.state import LiveRequests
from jaxserve.client.async_engine import AbortSignal, Load
from jaxserve.config import ApiKey
from jaxserve.errors import QueueFullError
from jaxserve.telemetry.metrics import Families, counted, merge_families
from jaxserve.transport.shared_state import SharedCounters

KEYS = (
    ApiKey(name="narrow", value="a-narrow-key", max_running=1, max_queued=1),  # type: ignore[arg-type]
    ApiKey(name="metered", value="a-metered-key", tokens_per_minute=60),  # type: ignore[arg-type]
)


def processes(count: int = 3) -> list[ProcessGroup]:
    """Each with a mapping of its own, as in processes of their own."""
    shape = count, num_columns(len(KEYS))
    file = SharedCounters.create(*shape)
    return [ProcessGroup(SharedCounters(file, *shape), row) for row in range(count)]


def usages(groups: list[ProcessGroup], name: str) -> list[KeyUsage]:
    found = []
    for group in groups:
        of_process = KeyUsages(KEYS, 8, clock=lambda: 0.0)
        group.join(of_process)
        usage = of_process.of(name)
        assert usage is not None
        found.append(usage)
    return found


def test_bodies_are_limited_by_their_sum() -> None:
    first, second, third = [group.bodies() for group in processes()]
    first.add(60)
    second.add(30)
    third.check(10, 100)
    with pytest.raises(QueueFullError):
        third.check(11, 100)
    first.add(-60)
    third.check(70, 100)


def test_running_requests_are_counted_over_all_and_freed_with_their_process() -> None:
    groups = processes()
    main, first = (LiveRequests(groups[row].count_running) for row in (MAIN, 1))
    signals = [AbortSignal() for _ in range(3)]
    for live, signal in zip((main, first, first), signals, strict=True):
        live.add(signal, "id", DEFAULT_CALLER)
    assert [group.num_running for group in groups] == [3, 3, 3]
    first.remove(signals[1])
    assert groups[MAIN].num_running == 2
    GroupKeeper(groups[MAIN], lambda: Load(0, 0), list).ended(1)
    assert groups[MAIN].num_running == 1


def test_requests_of_a_key_are_counted_over_all_and_freed_with_their_process() -> None:
    groups = processes()
    main, first, second = usages(groups, "narrow")
    first.begin(1, 10)
    second.begin(1, 5)
    for usage in (main, first, second):
        with pytest.raises(KeyLimitError, match="2 requests in hand"):
            usage.check()
    keeper = GroupKeeper(groups[MAIN], lambda: Load(0, 0), lambda: [main])
    keeper.ended(1)
    second.check()
    total = {"requests": 2, "prompt_tokens": 15, "refused": 3, "num_live": 1}
    assert main.as_dict().items() >= total.items() and second.as_dict().items() >= total.items()


def test_tokens_of_a_key_come_out_of_one_bucket() -> None:
    groups = processes()
    main, first, second = usages(groups, "metered")
    keeper = GroupKeeper(groups[MAIN], lambda: Load(7, 9), lambda: [main])
    first.begin(1, 40)
    first.generated(10)
    keeper.write()
    second.check()
    second.begin(1, 40)
    keeper.write()
    for usage in (main, first, second):
        with pytest.raises(KeyLimitError) as refused:
            usage.check()
        assert refused.value.retry_after == 31  # 30 tokens too many, and one
    keeper.ended(1)
    keeper.write()
    assert second.peers is not None and second.peers.wait == 31  # what an ended process used is not used again
    assert groups[2].engine_load() == Load(7, 9)


def test_metrics_are_added_up_by_name_and_labels() -> None:
    def reading(ok: float, memory: float) -> Families:
        samples = [("done_total", {"code": "200"}, ok), ("done_created", {"code": "200"}, memory)]
        return [
            {"name": "done", "kind": "counter", "text": "", "samples": samples},
            {"name": "bytes", "kind": "gauge", "text": "", "samples": [("bytes", {}, memory)]},
        ]

    main, other = reading(2, 10), reading(3, 20)
    other[0]["samples"].append(("done_total", {"code": "500"}, 1))
    done, memory = merge_families([main, other])
    assert done["samples"] == [
        ("done_total", {"code": "200"}, 5),
        ("done_created", {"code": "200"}, 10),
        ("done_total", {"code": "500"}, 1),
    ]
    assert memory["samples"] == [("bytes", {}, 30)]
    assert [family["name"] for family in counted(other)] == ["done"]
