"""Copies log-probabilities and extra outputs of a step into the outputs of its requests. No jax."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.scheduler.scheduler_stats import Counters
from jaxserve.types.extras import PromptExtras, StepExtras, TokenExtras
from jaxserve.types.sampling import Prefilled
from jaxserve.types.step import Request, SampledTokens, ScheduledRow, TokenLogprobs, TokenOutput


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


def gather_prompt_outputs(request: Request, row: ScheduledRow, index: int, sampled: SampledTokens) -> None:
    """Store what a request asks for on the prompt tokens of a chunk."""
    if row.prompt_logprobs is not None:
        _gather_logprobs(request, row, index, sampled)
    if request.prompt_extras is not None and sampled.extras is not None:
        request.prompt_extras.add(sampled.extras, index, row.start)


def _gather_logprobs(request: Request, row: ScheduledRow, index: int, sampled: SampledTokens) -> None:
    """Store a prompt chunk's log-probabilities at their positions. Positions beyond the prompt are skipped."""
    arrays = (sampled.prompt_logprobs or {}).get(index)
    entries, prompt, top = request.prompt_logprobs, request.prompt_token_ids, row.prompt_logprobs
    if arrays is None or entries is None:
        return
    first = row.start + 1
    known = max(0, min(len(arrays[0]), len(prompt) - first))
    logprobs, ranks = (array[:known].tolist() for array in arrays[:2])
    top_ids, top_logprobs = (array[:known, :top].tolist() for array in arrays[2:])
    found = None if sampled.extras is None else (sampled.extras.prompt_id_logprobs or {}).get(index)
    count = len(request.params.extras.logprob_token_ids)
    of_ids = [[]] * known if found is None else found[:known, :count].tolist()
    columns = zip(prompt[first : first + known], logprobs, ranks, top_ids, top_logprobs, of_ids, strict=True)
    entries[first : first + known] = [TokenLogprobs(*column) for column in columns]


def too_many_candidates(row: ScheduledRow, index: int, extras: StepExtras | None) -> str | None:
    """Return the error of a row whose token has more candidates than the server reports; None if they fit."""
    if row.extras is None or not row.extras.sampling_mask:
        return None
    assert extras is not None and extras.sampling_masks is not None
    count, limit = int(extras.sampling_masks.counts[index]), extras.sampling_masks.ids.shape[1]
    if count <= limit:
        return None
    message = f"a token was drawn from {count} candidates, of which return_sampling_mask gives at most {limit}"
    return f"{message}: set top_k, or a lower top_p"


def add_extras(result: TokenOutput, row: ScheduledRow, index: int, extras: StepExtras | None) -> None:
    """Add the extra outputs that `row` asks for to `result`, whose log-probabilities are set. The row yielded one
    token.
    """
    asked = row.extras
    if asked is None or not result.token_ids:
        return
    assert extras is not None
    if asked.logprob_token_ids and result.logprobs:
        assert extras.id_logprobs is not None
        values = extras.id_logprobs[index, : len(asked.logprob_token_ids)].tolist()
        result.logprobs = [_with_ids(entry, values) for entry in result.logprobs]
    result.extras = result.extras or TokenExtras()
    extras.add_token(asked, index, result.extras)


def _with_ids(entry: TokenLogprobs, values: list[float]) -> TokenLogprobs:
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top_ids, entry.top_logprobs, values)


def ask_prompt_outputs(request: Request) -> None:
    """Prepare to collect what a request asks for on its prompt tokens, unless it was sent already."""
    if request.is_answered:
        return
    if request.params.prompt_logprobs is not None:
        unknown: list[TokenLogprobs | None] = [None]
        request.prompt_logprobs = unknown * request.num_prompt_tokens
    request.prompt_extras = PromptExtras.of(request.params.extras)


def take_prompt_outputs(request: Request, result: TokenOutput) -> None:
    """Move what was collected on all prompt tokens into `result`, once."""
    result.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    if request.prompt_extras is not None:
        result.extras = request.prompt_extras.joined(request.num_prompt_tokens)
        request.prompt_extras = None


def report_first(request: Request, result: TokenOutput, now: float, counters: Counters) -> None:
    """Add what is sent once to the first output of a request. now: seconds"""
    if request.is_answered:
        return
    result.num_cached_tokens = request.num_cached_tokens
    take_prompt_outputs(request, result)
    if request.first_token is None:
        assert request.admitted is not None
        request.first_token = now
        before = request.prefilled or Prefilled()
        result.queue_seconds = before.queue_seconds + request.admitted - request.arrival
        result.first_token_seconds = before.seconds + now - request.arrival
        counters.first_tokens += 1
        counters.first_token_seconds += result.first_token_seconds
