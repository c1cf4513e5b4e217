"""From the device's log-probability arrays to TokenLogprobs, one row at a time. No jax."""

from __future__ import annotations

from jaxserve.engine.request import Request, SampledTokens, ScheduledRow, TokenLogprobs


def output_logprobs(sampled: SampledTokens, row: int, token_ids: list[int], top: int) -> list[TokenLogprobs]:
    """Of the tokens that row `row` yielded, each with the `top` most likely ones."""
    assert sampled.logprobs is not None and sampled.ranks is not None
    assert sampled.top_ids is not None and sampled.top_logprobs is not None
    return [
        TokenLogprobs(
            token,
            float(sampled.logprobs[row, q]),
            int(sampled.ranks[row, q]),
            sampled.top_ids[row, q, :top].tolist(),
            sampled.top_logprobs[row, q, :top].tolist(),
        )
        for q, token in enumerate(token_ids)
    ]


def gather_prompt_logprobs(request: Request, row: ScheduledRow, index: int, sampled: SampledTokens) -> None:
    """Enter a chunk's log-probabilities at their positions; what lies beyond the prompt is left out."""
    arrays = (sampled.prompt_logprobs or {}).get(index)
    entries, prompt, top = request.prompt_logprobs, request.prompt_token_ids, row.prompt_logprobs
    if arrays is None or entries is None:
        return
    logprobs, ranks, top_ids, top_logprobs = arrays
    first = row.start + 1
    for i in range(min(len(logprobs), len(prompt) - first)):
        entries[first + i] = TokenLogprobs(
            prompt[first + i],
            float(logprobs[i]),
            int(ranks[i]),
            top_ids[i, :top].tolist(),
            top_logprobs[i, :top].tolist(),
        )
