"""Copies log-probabilities, candidates and hidden states of a step into the outputs of its requests. No jax."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.types.output import Support, TokenLogprobs, TokenOutput
from jaxserve.types.request import Request
from jaxserve.types.step import SampledTokens, ScheduledRow


class StepLogprobs:
    """The log-probabilities of a step as lists. Each array is converted once for all rows."""

    def __init__(self, sampled: SampledTokens, rows: Sequence[ScheduledRow]) -> None:
        assert sampled.logprobs is not None and sampled.ranks is not None
        assert sampled.top_ids is not None and sampled.top_logprobs is not None
        width = max((row.logprobs or 0 for row in rows), default=0)
        self._logprobs: list[list[float]] = sampled.logprobs.tolist()
        self._ranks: list[list[int]] = sampled.ranks.tolist()
        self._top_ids: list[list[list[int]]] = sampled.top_ids[:, :, :width].tolist()
        self._top_logprobs: list[list[list[float]]] = sampled.top_logprobs[:, :, :width].tolist()

    def of_row(self, row: int, token_ids: list[int], top: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens that row `row` yielded, each with the `top` most likely tokens."""
        own, ranks, ids, most = self._logprobs[row], self._ranks[row], self._top_ids[row], self._top_logprobs[row]
        found = []
        for i, token in enumerate(token_ids):  # half the time of a comprehension over zip
            found.append(TokenLogprobs(token, own[i], ranks[i], ids[i][:top], most[i][:top]))
        return found


def gather_prompt_logprobs(request: Request, row: ScheduledRow, index: int, sampled: SampledTokens) -> None:
    """Store a prompt chunk's log-probabilities at their positions. Positions beyond the prompt are skipped."""
    arrays = (sampled.prompt_logprobs or {}).get(index)
    entries, prompt, top = request.prompt_logprobs, request.prompt_token_ids, row.prompt_logprobs
    if arrays is None or entries is None:
        return
    first = row.start + 1
    known = max(0, min(len(arrays[0]), len(prompt) - first))
    logprobs, ranks = (array[:known].tolist() for array in arrays[:2])
    top_ids, top_logprobs = (array[:known, :top].tolist() for array in arrays[2:])
    watched = (sampled.prompt_watched or {}).get(index)
    count = len(request.params.logprob_token_ids)
    watching = [[]] * known if watched is None else watched[:known, :count].tolist()
    columns = zip(prompt[first : first + known], logprobs, ranks, top_ids, top_logprobs, watching, strict=True)
    entries[first : first + known] = [TokenLogprobs(*column) for column in columns]


def too_many_candidates(row: ScheduledRow, index: int, sampled: SampledTokens) -> str | None:
    """Return the error of a row whose token has more candidates than the server reports; None if they fit."""
    if row.detail is None or not row.detail.support:
        return None
    assert sampled.details is not None
    count, limit = int(sampled.details.support_counts[index]), sampled.details.support_ids.shape[1]
    if count <= limit:
        return None
    message = f"a token was drawn from {count} candidates, of which return_sampling_mask gives at most {limit}"
    return f"{message}: set top_k, or a lower top_p"


def add_details(result: TokenOutput, row: ScheduledRow, index: int, sampled: SampledTokens) -> None:
    """Add the extra outputs that `row` asks for to `result`, whose log-probabilities are set. The row yielded one
    token.
    """
    params, details = row.detail, sampled.details
    if params is None or not result.token_ids:
        return
    if params.logprob_token_ids and result.logprobs:
        assert details is not None
        watched = details.watched[index, : len(params.logprob_token_ids)].tolist()
        result.logprobs = [_watching(entry, watched) for entry in result.logprobs]
    if params.support:
        assert details is not None
        count = int(details.support_counts[index])
        ids, top = details.support_ids[index, :count].tolist(), details.support_top[index, :count].tolist()
        result.support = [Support(float(details.support_logprobs[index]), ids, top)]
    if params.hidden_states and sampled.hidden is not None:
        result.hidden = sampled.hidden[index][-1:].tobytes()
    if params.experts and sampled.experts is not None:
        result.experts = sampled.experts[index][-1:].tobytes()


def _watching(entry: TokenLogprobs, watched: list[float]) -> TokenLogprobs:
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top_ids, entry.top_logprobs, watched)


def ask_prompt_details(request: Request) -> None:
    """Prepare to collect the extra outputs that a request asks for on its prompt tokens."""
    params = request.params
    if params.prompt_logprobs is not None:
        unknown: list[TokenLogprobs | None] = [None]
        request.prompt_logprobs = unknown * request.num_prompt_tokens
    request.prompt_hidden = {} if params.hidden_states == "all" else None
    request.prompt_experts = {} if params.experts else None


def gather_prompt_details(request: Request, row: ScheduledRow, index: int, sampled: SampledTokens) -> None:
    """Keep a prompt chunk's hidden states and routed experts until the prompt is complete."""
    pairs = (request.prompt_hidden, sampled.hidden), (request.prompt_experts, sampled.experts)
    for kept, found in pairs:
        if kept is not None and found is not None and index in found:
            kept[row.start] = found[index]


def take_prompt_details(request: Request, result: TokenOutput) -> None:
    """Move the collected hidden states and routed experts of all prompt tokens into `result`, once."""
    result.prompt_hidden = _joined(request.prompt_hidden, request.num_prompt_tokens)
    result.prompt_experts = _joined(request.prompt_experts, request.num_prompt_tokens)
    request.prompt_hidden = request.prompt_experts = None


def _joined(chunks: dict[int, np.ndarray] | None, count: int) -> bytes | None:
    if not chunks:
        return None
    first = next(iter(chunks.values()))
    whole = np.zeros((count, *first.shape[1:]), first.dtype)
    for start, chunk in chunks.items():
        whole[start : start + len(chunk)] = chunk[: max(0, count - start)]
    return whole.tobytes()
