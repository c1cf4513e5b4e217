"""Several engines as one: their properties, statistics, status, and their answers to a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.client.processes.supervisor import EngineStatus
from jaxserve.types.messages import EngineInfo, EngineStats
from jaxserve.types.step import DraftCounters

_SUMMED_INFO = ("num_pages", "max_num_seqs", "useful_rows")
_NOT_SUMMED = ("weight_version", "step_sizes", "drafts", "details")
_LARGEST = ("paused", "asleep", "weight_updates", "new_token_ratio")  # of `details`


def joined_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Return the properties of all engines together: what they hold is added up."""
    first = infos[0]
    if len(infos) == 1:
        return first
    sums = {name: sum(getattr(info, name) for info in infos) for name in _SUMMED_INFO}
    devices = [device for info in infos for device in info.devices]
    length = min(info.max_model_len for info in infos)
    return msgspec.structs.replace(first, **sums, devices=devices, max_model_len=length)


def joined_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the statistics of all engines together."""
    if len(stats) == 1:
        return stats[0]
    names = [name for name in EngineStats.__struct_fields__ if name not in _NOT_SUMMED]
    details: dict[str, float] = {}
    for name in dict.fromkeys(name for each in stats for name in each.details):
        values = [each.details.get(name, 0.0) for each in stats]
        details[name] = max(values) if name in _LARGEST else sum(values)
    return EngineStats(
        **{name: sum(getattr(each, name) for each in stats) for name in names},
        weight_version=stats[0].weight_version,
        step_sizes=_added([each.step_sizes for each in stats]),
        drafts=_joined_drafts([each.drafts for each in stats if each.drafts is not None]),
        details=details,
    )


def _added(lists: Sequence[Sequence[int]]) -> list[int]:
    longest = max(map(len, lists))
    return [sum(each[index] for each in lists if index < len(each)) for index in range(longest)]


def _joined_drafts(drafts: Sequence[DraftCounters]) -> DraftCounters | None:
    if not drafts:
        return None
    return DraftCounters(
        sum(each.num_drafts for each in drafts),
        sum(each.num_draft_tokens for each in drafts),
        _added([each.accepted_per_pos for each in drafts]),
    )


def joined_status(statuses: Sequence[EngineStatus], *, started: bool) -> EngineStatus:
    """Return the status of the server.

    started: every engine was ready once. Until then it is loading, and an engine that cannot start ends it. Afterwards
    the server is ready while one engine is.
    """
    if len(statuses) == 1:
        return statuses[0]
    dead = [status for status in statuses if status.phase == "dead"]
    if len(dead) == len(statuses) or (dead and not started):
        return dead[0]
    for phase in ("draining", "ready") if started else ("draining", "loading"):
        if found := [status for status in statuses if status.phase == phase]:
            return min(found, key=lambda status: status.done)
    left = next(status for status in statuses if status.phase not in ("dead", "ready"))
    return left if started else EngineStatus("loading", left.detail, left.done, left.total, left.unit)


def joined_result(method: str, results: Sequence[Any]) -> Any:
    """Return the answer of all engines to a call that all have carried out."""
    if len(results) == 1:
        return results[0]
    match method:
        case "waiting":
            return [request for result in results for request in result]
        case "sleep" | "wake":
            return sorted({tag for result in results for tag in result})
        case "state":
            return results[0] | {
                "paused": all(result["paused"] for result in results),
                "asleep": sorted({tag for result in results for tag in result["asleep"]}),
            }
        case _:
            return results[0]
