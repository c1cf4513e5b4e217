"""A grammar at one point of one output: which tokens may come next. Runs inside the engine process.

    factory = MatcherFactory(tokenizer.to_json(), vocab_size=..., eos_token_ids=...)
    factory.warm_up()                       # builds the token trie in a thread: 0.3 to 1 s for 150k tokens
    matcher = factory(spec)                 # or factory.submit(spec) -> Future: compiling may take up to a second
    matcher.fill(row); matcher.accept(token_id); matcher.is_terminated

An error of a matcher ends its own request: `accept` is False from then on and `error` says why.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance
import numpy as np

from jaxserve.engine.request import GrammarSpec
from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.translate import translate
from jaxserve.grammar.worker import build_tokenizer, parser_limits


class GrammarMatcher:
    """State of one output.

    Before a grammar with `begin_after` begins, every token is allowed but the end of the output. With
    `begin_unless` the first token decides: that one begins the free part, any other the grammar.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, spec: GrammarSpec, eos_token_ids: tuple[int, ...], token_bytes: TokenBytes
    ) -> None:
        self.ll = matcher
        self._eos = eos_token_ids
        self._token_bytes = token_bytes
        self._opening = spec.begin_unless
        self._marker = b"".join(token_bytes(i) for i in spec.begin_after)
        self._tokens: list[int] = []
        self._num_free = 0  # tokens of the output before the grammar's first
        self._tail = b""
        self._state = self._first_state()

    def _first_state(self) -> str:
        return "grammar" if not self._marker else "undecided" if self._opening else "free"

    @property
    def error(self) -> str | None:
        """Why the grammar ended unexpectedly: a token that it does not allow, or a limit of the parser."""
        return self.ll.get_error().split("<state>")[0].strip() if self.ll.is_error() else None

    @property
    def limit_error(self) -> str | None:
        """The error, unless it says that a token was wrong."""
        error = self.error
        return None if error is None or "satisfy the grammar" in error else error.split("\n")[0]

    @property
    def in_grammar(self) -> bool:
        """The mask is the grammar's alone, so that rows can be filled in parallel."""
        return self._state == "grammar"

    @property
    def is_terminated(self) -> bool:
        """Nothing may follow but the end of the output."""
        return self._state == "grammar" and self.ll.is_stopped() and not self.ll.is_error()

    @property
    def is_accepting(self) -> bool:
        """The output so far matches the grammar and may end here."""
        return self._state == "grammar" and self.ll.is_accepting()

    def fill(self, bitmask_row: np.ndarray) -> None:
        """Write the allowed tokens into int32 [ceil(V/32)], all ones on entry; bit 1 allows."""
        if self._state == "free":
            _clear(bitmask_row, self._eos)
            return
        self.ll.unsafe_compute_mask_ptr(bitmask_row.ctypes.data, bitmask_row.nbytes)
        if self._state == "undecided":
            first = self._opening[0]
            bitmask_row.view(np.uint32)[first // 32] |= np.uint32(1 << first % 32)

    def accept(self, token_id: int) -> bool:
        """Advance; False (and an error) if the grammar does not allow the token."""
        self._tokens.append(token_id)
        if self._state == "undecided":
            self._state = "free" if token_id == self._opening[0] else "grammar"
            self._num_free = int(self._state == "free")
            if self._state == "free":
                return True
        if self._state == "grammar":
            return self.ll.consume_token(token_id)
        self._num_free += 1
        self._look_for_marker(token_id)
        return True

    def rollback(self, num_tokens: int) -> bool:
        """Take back the last tokens; False if there are not so many or the matcher is in error."""
        kept = len(self._tokens) - num_tokens
        if kept < 0 or self.ll.is_error():
            return False
        if self._state == "grammar" and kept >= self._num_free:
            del self._tokens[kept:]
            return self.ll.rollback(num_tokens)
        tokens = self._tokens[:kept]
        self.ll.reset()
        self._tokens, self._num_free, self._tail, self._state = [], 0, b"", self._first_state()
        return all(self.accept(token) for token in tokens)

    def _look_for_marker(self, token_id: int) -> None:
        """By bytes, since a model may write the marker in other tokens than the tokenizer would."""
        keep = len(self._marker) - 1
        data = self._tail + self._token_bytes(token_id)
        if self._marker in data:
            self._state, self._tail = "grammar", b""
        else:
            self._tail = data[-keep:] if keep else b""


class TokenBytes:
    """The bytes of a token, special tokens as their text."""

    def __init__(self, tokenizer: llguidance.LLTokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token_id: int) -> bytes:
        return self._tokenizer.decode_bytes([token_id])


class MatcherFactory:
    """Makes matchers; compiled grammars are kept and copied for requests with the same one.

    vocab_size: the model's logits; masks have ceil(vocab_size / 32) words
    """

    CACHED_GRAMMARS = 64
    CACHED_SOURCE_BYTES = 4 << 20

    def __init__(self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer_json = tokenizer_json
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._building = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], llguidance.LLMatcher] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")

    def warm_up(self) -> Future[llguidance.LLTokenizer]:
        """Build the token trie in a thread."""
        return self._threads.submit(self._get_tokenizer)

    def submit(self, spec: GrammarSpec) -> Future[GrammarMatcher]:
        """Compile in a thread; the future raises InvalidSchemaError as `__call__` does."""
        return self._threads.submit(self, spec)

    def __call__(self, spec: GrammarSpec) -> GrammarMatcher:
        """Raises InvalidSchemaError for a grammar that cannot be built."""
        tokenizer = self._get_tokenizer()
        key = (spec.kind, spec.source)
        with self._cache_lock:
            base = self._cache.get(key)
            if base is not None:
                self._cache.move_to_end(key)
        if base is None:
            base = self._compile(tokenizer, spec)
            self._keep(key, base)
        return GrammarMatcher(base.deep_copy(), spec, self.eos_token_ids, TokenBytes(tokenizer))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _get_tokenizer(self) -> llguidance.LLTokenizer:
        with self._building:
            if self._tokenizer is None:
                self._tokenizer = build_tokenizer(self._tokenizer_json, self.vocab_size, list(self.eos_token_ids))
                self._tokenizer_json = ""
            return self._tokenizer

    def _compile(self, tokenizer: llguidance.LLTokenizer, spec: GrammarSpec) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(tokenizer, translate(spec), log_level=0, limits=parser_limits())
        if matcher.is_error():
            reason = matcher.get_error().split("<state>")[0].strip()
            raise InvalidSchemaError(f"this grammar cannot be enforced: {reason}", param="response_format")
        return matcher

    def _keep(self, key: tuple[str, str], matcher: llguidance.LLMatcher) -> None:
        with self._cache_lock:
            self._cache[key] = matcher
            size = sum(len(source) for _, source in self._cache)
            while len(self._cache) > self.CACHED_GRAMMARS or size > self.CACHED_SOURCE_BYTES:
                (_, source), _ = self._cache.popitem(last=False)
                size -= len(source)


def _clear(row: np.ndarray, token_ids: tuple[int, ...]) -> None:
    words = row.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
