"""The statistics that the engine process reports, from those of its parts."""

from __future__ import annotations

from jaxserve.engine.core.compiling import CompilingRequests
from jaxserve.engine.core.serving_state import ServingState
from jaxserve.scheduler.scheduler_stats import SchedulerStats
from jaxserve.types.messages import EngineStats

# counters without a named field in EngineStats
COUNTERS = (
    "recomputed_tokens",
    "dropped_tokens",
    "retractions",
    "retraction_events",
    "priority_preemptions",
    "admissions",
    "queue_seconds",
    "first_tokens",
    "first_token_seconds",
    "finished_stop",
    "finished_length",
    "finished_abort",
    "finished_error",
    "pages_written",
    "pages_read",
)


def engine_stats(
    stats: SchedulerStats,
    compiling: CompilingRequests,
    *,
    compiles: int,
    host_seconds: float,
    details: dict[str, float],
    serving: ServingState,
) -> EngineStats:
    """Return the current gauges and counters. details: further values that only the metrics show"""
    counters = stats.counters
    return EngineStats(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting + len(compiling),
        num_compiling=len(compiling),
        num_waiting_tokens=stats.num_waiting_tokens + compiling.num_tokens,
        num_pages_free=stats.num_pages_free,
        num_pages_cached=stats.num_pages_cached,
        num_pages_used=stats.num_pages - stats.num_pages_free - stats.num_pages_evictable,
        steps=counters.steps,
        prompt_tokens=counters.prompt_tokens,
        computed_prompt_tokens=counters.prefill_tokens,
        cached_tokens=counters.cached_tokens,
        generation_tokens=counters.generation_tokens,
        preemptions=counters.retractions + counters.priority_preemptions,
        compiles=compiles,
        host_seconds=host_seconds,
        step_tokens=counters.step_tokens,
        step_sizes=list(counters.step_sizes),
        drafts=stats.drafts,
        weight_version=serving.version,
        details={
            **details,
            "weight_updates": serving.num_updates,
            "paused": float(serving.paused is not None),
            "asleep": float(bool(serving.asleep)),
            "requests_preempted": stats.num_preempted,
            "pages_evictable": stats.num_pages_evictable,
            "host_pages_used": stats.num_host_pages_used,
            "host_pages_stored": stats.num_host_pages_stored,
            "host_pages_loaded": stats.num_host_pages_loaded,
            "window_pages_used": stats.num_window_pages_used,
            "new_token_ratio": stats.new_token_ratio,
            **{name: float(getattr(counters, name)) for name in COUNTERS},
        },
    )
