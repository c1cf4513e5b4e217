"""Token ids to text as they arrive: never half a character, and the joined deltas are the whole text.

`SequenceText` is the state of one sequence on the API side of the engine: its incremental detokenizer, its stop strings
and its limit on reasoning. It knows no HTTP and no scheduler.

    TokenOutput (engine) -> SequenceText.push -> RequestOutput (text delta, tokens, finish) -> api or research code

If every token has its own bytes (byte-level and byte-fallback vocabularies: all models of today) the bytes go through
an incremental UTF-8 decoder, which is linear also for endless invalid bytes. Other decoders (WordPiece, CTC) need the
neighbours of a token; they go through the tokenizers library's DecodeStream.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import msgspec
from tokenizers.decoders import DecodeStream

from jaxserve.errors import HTTPError, InvalidValueError, RequestTimeoutError, ServerError
from jaxserve.text.events import ContentDelta, ReasoningDelta
from jaxserve.text.output_parser import ThinkingLimit, think_tags, thoughts_of
from jaxserve.text.stop import StopChecker, StopPatterns, Stops
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.extras import TokenExtras
from jaxserve.types.sampling import SamplingParams, ThinkingBudget
from jaxserve.types.step import FIRST_VERSION, FinishReason, TokenLogprobs, TokenOutput

# a UTF-8 character has at most 4 bytes, so 4 tokens of context finish any character the prompt began
TAIL_TOKENS = 4


class Detokenizer(Protocol):
    """The text state of one output. Not shared between threads."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete; "" while a character is unfinished."""
        ...

    def flush(self) -> str:
        """Return the rest of the text at the end. A character that the end of the output cuts in half is dropped."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    visible_token_ids: Collection[int] = (),
) -> Detokenizer:
    """Return a detokenizer for the output that follows a prompt (only its last few ids are read).

    visible_token_ids: special tokens that are not skipped. If there are any, decoder_kind "other" skips none.
    """
    tail = list(prompt_token_ids[-TAIL_TOKENS:])
    if tokenizer.decoder_kind == "other":
        return StreamDetokenizer(tokenizer, tail, skip_special_tokens and not visible_token_ids)
    skipped = tokenizer.special_ids.difference(visible_token_ids) if skip_special_tokens else frozenset[int]()
    return ByteDetokenizer(tokenizer, tail, skipped)


class ByteDetokenizer:
    """Joins the tokens' bytes and decodes them as UTF-8; bytes that no character has become U+FFFD."""

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int], skipped: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skip = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # A sentencepiece text does not begin with the space that its first token carries.
        first = all(i in tokenizer.special_ids for i in tail)
        self._strip_first = tokenizer.decoder_kind == "byte_fallback" and tokenizer.strips_first_space and first
        self._decoder.decode(b"".join([self._token_bytes(i) for i in tail]))
        self._begun = self._decoder.getstate()[0]  # bytes of a character that the prompt has not finished

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that the tokens complete. The bytes of an incomplete character are kept."""
        data = b"".join([self._token_bytes(i) for i in token_ids if i not in self._skip])
        if self._strip_first and data:
            self._strip_first = False
            data = data.removeprefix(b" ")
        if self._begun and data:
            if not _goes_on(self._begun, data[:1]):
                self._decoder.reset()  # the half character is the prompt's
            self._begun = b""
        return self._decoder.decode(data)

    def flush(self) -> str:
        self._decoder.reset()
        return ""


def _goes_on(begun: bytes, byte: bytes) -> bool:
    """Return whether a byte belongs to the UTF-8 character that has begun."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begun + byte)
    except UnicodeDecodeError:
        return False
    return True


class StreamDetokenizer:
    """Decodes with DecodeStream of the tokenizers library, which decodes a short window again with each token."""

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int], skip_special_tokens: bool) -> None:
        self._backend, self._skip = tokenizer.backend, skip_special_tokens
        self._stream = DecodeStream(ids=list(tail), skip_special_tokens=skip_special_tokens)

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join([self._step(i) for i in token_ids])

    def flush(self) -> str:
        return ""

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._backend, token_id) or ""
        except Exception:  # the library raises a bare one: the token changed the text before it
            self._stream = DecodeStream(ids=[token_id], skip_special_tokens=self._skip)
            return self._backend.decode([token_id], skip_special_tokens=self._skip)


class RequestOutput(msgspec.Struct):
    """The news of one choice of a request since the last output. All fields but the counts are deltas."""

    request_id: str
    index: int  # the choice: 0 .. n-1
    text: str = ""
    token_ids: list[int] = []  # a Struct copies its default
    logprobs: list[TokenLogprobs] | None = None  # aligned with token_ids
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # sent once
    extras: TokenExtras | None = None  # extra outputs of the tokens, if the request asks for some
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None  # the token id or the string that ended it
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    queue_seconds: float = 0.0  # from arrival to admission; sent with the first token
    prefill_seconds: float = 0.0  # from admission to the first token; sent with it
    num_preemptions: int = 0  # sent with finish_reason
    num_accepted_drafts: int = 0  # as in TokenOutput
    num_rejected_drafts: int = 0
    embedding: bytes | None = None  # float32, little-endian; sent once, if the request asked for it
    weight_versions: tuple[str, ...] = ()  # labels of the weights that made it; empty: no weights made any of it
    weights: int = 0  # as in TokenOutput
    error: HTTPError | None = None  # why it failed, with finish_reason error; AsyncEngine raises it instead

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def held_bytes(self) -> int:
        """Return the approximate size in memory, in bytes."""
        size = 500 + len(self.text) + 36 * len(self.token_ids)
        if self.logprobs:
            entry = self.logprobs[-1]
            size += len(self.logprobs) * (300 + 60 * len(entry.top_ids) + 32 * len(entry.watched))
        return size if self.extras is None else size + self.extras.held_bytes()


def make_stops(params: SamplingParams) -> Stops | None:
    """Return the stops of a request, to be shared by its choices; None if it has none. Raises InvalidValueError."""
    if not (params.stop or params.stop_regex):
        return None
    return Stops(params.stop, StopPatterns(params.stop_regex))


class SequenceText:
    """Turns one sequence's tokens into text, and finds its stop strings.

    stops: the stops that `make_stops` made for all choices of a request; None: make them here
    thinks_too_long: the reasoning exceeds its budget. Call `end_thinking`, and drop later outputs of the engine for
      this sequence.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        stops: Stops | None = None,
    ) -> None:
        self.request_id = request_id
        self.index = index
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
        stops = stops or make_stops(params)
        self._stops = StopChecker(stops, include=params.include_stop_str_in_output) if stops else None
        self._thoughts = None if params.stops_after is None or stops is None else thoughts_of(params.stops_after)
        self._thinking = None if params.thinking is None else _limit(params.thinking)
        self.thinks_too_long = self._thinking is not None and self._thinking.exceeded

    def end_thinking(self) -> RequestOutput:
        """Append the tokens that end the thinking as if the model had chosen them, and return them.

        They have no log-probabilities, because the model did not predict them.
        """
        budget, max_tokens = self._params.thinking, self._params.max_tokens
        assert budget is not None
        self._thinking, self.thinks_too_long = None, False
        room = len(budget.end_token_ids) if max_tokens is None else max_tokens - len(self.output_token_ids)
        token_ids = list(budget.end_token_ids[:room])
        last = max_tokens is not None and room <= len(token_ids)
        result = self.push(
            TokenOutput(request_id="", token_ids=token_ids, finish_reason=FinishReason.LENGTH if last else None)
        )
        result.weight_versions = ()
        return result

    def fail(self, error: HTTPError) -> RequestOutput:
        """Return the last output of a sequence that failed."""
        return RequestOutput(
            self.request_id,
            self.index,
            finish_reason=FinishReason.ERROR,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=len(self.output_token_ids),
            error=error,
        )

    def push(self, output: TokenOutput) -> RequestOutput:
        """Return the next tokens of the sequence. The rest is dropped after a stop string or too much thinking."""
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        result = RequestOutput(
            self.request_id,
            self.index,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            extras=output.extras,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            queue_seconds=output.queue_seconds,
            prefill_seconds=output.first_token_seconds - output.queue_seconds,
            num_preemptions=output.num_preemptions,
            num_accepted_drafts=output.num_accepted_drafts,
            num_rejected_drafts=output.num_rejected_drafts,
            embedding=output.embedding,
            weight_versions=(output.weight_versions or (FIRST_VERSION,)) if output.is_made else (),
            weights=output.weights,
        )
        used, matched = self._take_text(output, result)
        result.token_ids = output.token_ids[:used]
        if used < len(output.token_ids):
            result.num_accepted_drafts = min(used, output.num_accepted_drafts)
            result.logprobs = None if result.logprobs is None else result.logprobs[:used]
            result.extras = None if result.extras is None else result.extras.first(used, len(output.token_ids))
        self.output_token_ids += result.token_ids
        result.num_output_tokens = len(self.output_token_ids)
        if matched is not None:
            self.stopped_by_text = output.finish_reason is None
            result.finish_reason, result.matched_stop = FinishReason.STOP, matched
        elif output.finish_reason is not None and used == len(output.token_ids):
            result.finish_reason, result.matched_stop = output.finish_reason, output.stop_token_id
        if self._thinking is not None:
            self.thinks_too_long = self._thinking.exceeded and not result.finished
        return result

    def _take_text(self, output: TokenOutput, result: RequestOutput) -> tuple[int, str | None]:
        """Add the text of the tokens to `result`. Return (number of tokens used, stop string found)."""
        shown = output.token_ids
        if output.stop_token_id is not None and not self._params.include_stop_str_in_output:
            shown = shown[:-1]
        if self._stops is None and self._thinking is None:
            result.text = self._detokenizer.push(shown) if shown else ""
            if output.finish_reason is not None:
                result.text += self._detokenizer.flush()
            return len(output.token_ids), None
        for used, token_id in enumerate(shown, 1):
            matched = self._take_token(token_id, len(self.output_token_ids) + used, result)
            if matched is not None:
                return used, matched
            if self._thinking is not None and self._thinking.exceeded and used < len(output.token_ids):
                return used, None
        if output.finish_reason is None:
            return len(output.token_ids), None
        text, matched = self._checked(self._detokenizer.flush(), last=True)
        result.text += text
        if matched is None and self._stops is not None:
            result.text += self._stops.flush()
        return len(output.token_ids), matched

    def _take_token(self, token_id: int, number: int, result: RequestOutput) -> str | None:
        """Add the text of one token, the `number`th of the output, to `result`. Return the stop string found."""
        delta = self._detokenizer.push([token_id])
        if self._thinking is not None:
            self._thinking.add(delta)
        text, matched = self._checked(delta, early=number <= self._params.min_tokens)
        result.text += text
        return matched

    def _checked(self, text: str, *, early: bool = False, last: bool = False) -> tuple[str, str | None]:
        """Return the text that may be sent, and the stop string found. No stop counts within reasoning.

        early: no stop counts yet (min_tokens). last: the output ends here
        """
        if self._stops is None:
            return text, None
        if self._thoughts is None:
            return self._stops.push(text, ignore=early)
        sent = ""
        for event in self._thoughts.feed(text) + (self._thoughts.finish() if last else []):
            assert isinstance(event, ContentDelta | ReasoningDelta)
            text, matched = self._stops.push(event.text, ignore=early or isinstance(event, ReasoningDelta))
            sent += text
            if matched is not None:
                return sent, matched
        return sent, None


def error_of(output: TokenOutput) -> HTTPError:
    """Return the exception for a failed output."""
    message = output.error or "the request failed"
    if 400 <= output.error_status < 500:
        return InvalidValueError(message, param=output.error_param)
    return RequestTimeoutError(message) if output.error_status == 504 else ServerError(message)


def _limit(budget: ThinkingBudget) -> ThinkingLimit:
    tags = think_tags(budget.family, budget.calls)
    assert tags is not None
    return ThinkingLimit(tags, budget.tokens, inside=budget.inside, only_first=budget.only_first, tools=budget.tools)
