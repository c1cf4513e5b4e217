"""From a sequence's tokens to its text: the state of one sequence on the API side of the engine.

Owns the incremental detokenizer and the stop strings of one sequence. Knows no HTTP and no scheduler.

    TokenOutput (engine) -> SequenceText.push -> RequestOutput (text delta, tokens, finish) -> api or research code
"""

from __future__ import annotations

import msgspec

from jaxserve.engine.request import FinishReason, SamplingParams, Support, TokenLogprobs, TokenOutput
from jaxserve.text.detokenizer import make_detokenizer
from jaxserve.text.patterns import compile_patterns
from jaxserve.text.stop import StopChecker
from jaxserve.text.tokenizer import Tokenizer


class RequestOutput(msgspec.Struct):
    """What one choice of a request gained since the last output. Deltas, but for the counts."""

    request_id: str
    index: int  # the choice: 0 .. n-1
    text: str = ""
    token_ids: list[int] = []  # a Struct copies its default
    logprobs: list[TokenLogprobs] | None = None  # aligned with token_ids
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once
    support: list[Support] | None = None  # aligned with token_ids
    hidden: bytes | None = None  # float32, little endian, [tokens, D]
    prompt_hidden: bytes | None = None  # likewise of the prompt; once
    experts: bytes | None = None  # int32, little endian, [tokens, L, K]: of the token before each
    prompt_experts: bytes | None = None  # likewise of the prompt; once
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None  # the token id or the string that ended it
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    queue_seconds: float = 0.0  # from arrival to admission; with the first token
    prefill_seconds: float = 0.0  # from admission to the first token; with it
    embedding: bytes | None = None  # float32, little endian; once, of a request that asked for it

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class SequenceText:
    """Turns one sequence's tokens into text, and finds its stop strings."""

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.finished = False
        self.output_token_ids: list[int] = []
        self.stopped_by_text = False  # the engine still runs the sequence and must be told to end it
        self._params = params
        self._num_prompt_tokens = len(prompt_token_ids)
        self._num_cached_tokens = 0
        self._detokenizer = make_detokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            visible_token_ids=params.visible_token_ids,
        )
        self._stops: StopChecker | None = None
        if params.stop or params.stop_regex:
            patterns = compile_patterns(params.stop_regex)
            self._stops = StopChecker(params.stop, patterns, include=params.include_stop_str_in_output)

    def push(self, output: TokenOutput) -> RequestOutput:
        """The next tokens of the sequence. After a stop string the rest of `output` is dropped."""
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        result = RequestOutput(
            self.request_id,
            self.index,
            prompt_logprobs=output.prompt_logprobs,
            prompt_hidden=output.prompt_hidden,
            prompt_experts=output.prompt_experts,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            queue_seconds=output.queue_seconds,
            prefill_seconds=output.first_token_seconds - output.queue_seconds,
            embedding=output.embedding,
        )
        used, matched = self._take_text(output, result)
        result.token_ids = output.token_ids[:used]
        result.logprobs = None if output.logprobs is None else output.logprobs[:used]
        result.support = None if output.support is None else output.support[:used]
        result.hidden = _first_rows(output.hidden, used, len(output.token_ids))
        result.experts = _first_rows(output.experts, used, len(output.token_ids))
        self.output_token_ids += result.token_ids
        result.num_output_tokens = len(self.output_token_ids)
        if matched is not None:
            self.stopped_by_text = output.finish_reason is None
            result.finish_reason, result.matched_stop = FinishReason.STOP, matched
        elif output.finish_reason is not None:
            result.finish_reason, result.matched_stop = output.finish_reason, output.stop_token_id
        self.finished = result.finished
        return result

    def _take_text(self, output: TokenOutput, result: RequestOutput) -> tuple[int, str | None]:
        """Add the text of the tokens to `result`; (tokens used, stop string found)."""
        shown = output.token_ids
        if output.stop_token_id is not None and not self._params.include_stop_str_in_output:
            shown = shown[:-1]
        if self._stops is None:
            result.text = self._detokenizer.push(shown) if shown else ""
            if output.finish_reason is not None:
                result.text += self._detokenizer.flush()
            return len(output.token_ids), None
        for used, token_id in enumerate(shown, 1):
            early = len(self.output_token_ids) + used <= self._params.min_tokens
            text, matched = self._stops.push(self._detokenizer.push([token_id]), ignore=early)
            result.text += text
            if matched is not None:
                return used, matched
        if output.finish_reason is not None:
            text, matched = self._stops.push(self._detokenizer.flush())
            result.text += text + ("" if matched is not None else self._stops.flush())
            return len(output.token_ids), matched
        return len(output.token_ids), None


def _first_rows(data: bytes | None, used: int, count: int) -> bytes | None:
    """Those of the first `used` of `count` tokens."""
    return data if data is None or used == count else data[: len(data) // count * used]
