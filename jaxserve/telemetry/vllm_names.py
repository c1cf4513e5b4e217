"""The names of metrics: our own, and the names of vLLM that routers and dashboards read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric

# our name -> vLLM's names, old and new if vLLM has renamed it
_ALIASES = {
    "jaxserve:num_requests_running": ("vllm:num_requests_running",),
    "jaxserve:num_requests_waiting": ("vllm:num_requests_waiting",),
    "jaxserve:kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "jaxserve:prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
    "jaxserve:generation_tokens": ("vllm:generation_tokens",),
    "jaxserve:cached_tokens": ("vllm:prefix_cache_hits",),
    "jaxserve:preemptions": ("vllm:num_preemptions",),
    "jaxserve:request_success": ("vllm:request_success",),
    "jaxserve:time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "jaxserve:inter_token_latency_seconds": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
    ),
    "jaxserve:e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "jaxserve:request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "jaxserve:request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "jaxserve:request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "jaxserve:request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "jaxserve:request_generation_tokens": ("vllm:request_generation_tokens",),
    "jaxserve:request_inference_time_seconds": ("vllm:request_inference_time_seconds",),
    "jaxserve:request_params_n": ("vllm:request_params_n",),
    "jaxserve:request_params_max_tokens": ("vllm:request_params_max_tokens",),
    "jaxserve:request_num_preemptions": ("vllm:request_num_preemptions",),
    "jaxserve:iteration_tokens": ("vllm:iteration_tokens_total",),
    "jaxserve:admission_rejections": ("vllm:admission_rejections",),
    "jaxserve:spec_decode_num_drafts": ("vllm:spec_decode_num_drafts",),
    "jaxserve:spec_decode_num_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "jaxserve:spec_decode_num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "jaxserve:spec_decode_num_accepted_tokens_per_pos": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
}


def all_names(name: str, labels: Mapping[str, str]) -> list[tuple[str, Mapping[str, str]]]:
    """Return all names of a metric, each with its labels. labels: the labels of vLLM's names"""
    return [(name, {}), *((alias, labels) for alias in aliases(name))]


def aliases(name: str) -> Sequence[str]:
    """Return vLLM's names of a metric."""
    return _ALIASES.get(name, ())


def text_of(name: str) -> str:
    """Return the help text of a metric: its name in words."""
    return name.partition(":")[2].replace("_", " ")


def histograms(
    names: Iterable[tuple[str, Mapping[str, str]]], buckets: Sequence[float], counts: Sequence[int], total: float
) -> Iterable[Metric]:
    """Yield a histogram under its names. counts: per bucket, not cumulative; one more entry than buckets."""
    bounds = [*map(str, map(float, buckets)), "+Inf"]
    pairs = list(zip(bounds, accumulate(counts), strict=True))
    text = ""
    for name, labels in names:
        text = text or text_of(name)  # all names have the text of the first one, which is ours
        family = HistogramMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), pairs, total)
        yield family
