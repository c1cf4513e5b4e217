"""The state of a grammar within one output: which tokens may come next. Runs in the engine process.

    factory = MatcherFactory(tokenizer.to_json(), vocab_size=..., eos_token_ids=...)
    factory.warm_up()                       # builds the token trie in a thread: 0.3 to 1 s for 150k tokens
    matcher = factory(spec)                 # or factory.submit(spec) -> Future: compiling may take up to 1 s
    matcher.fill(row); matcher.accept(token_id); matcher.is_terminated

An error of a matcher ends its own request: from then on `accept` is False and `error` has the reason. The factory keeps
compiled grammars in a `GrammarCache` for later requests with the same text. A `BitmaskFiller` fills the token masks of
many rows at once, on all cores and without the GIL.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance
import llguidance.numpy
import numpy as np

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.token_mask import Matcher
from jaxserve.grammar.translate import HIDDEN, shown_names, translate
from jaxserve.grammar.worker import build_tokenizer, parser_limits
from jaxserve.types.sampling import GrammarSpec

Key = tuple[str, str]  # kind and source of a GrammarSpec


class CachedGrammar:
    """A compiled grammar. Its copies share one lexer, to which states are only added.

    The library does not report the number of states, so it is estimated from the CPU time spent: 50,000 states take
    35 MB and 0.3 s. A mask that adds no states is quicker than QUICK.

    is_full    a copy has reached the limit on states, so every further copy would fail too
    is_slow    one of the last NUM_QUICK masks of all copies took longer than SLOW
    """

    QUICK = 0.0002
    SLOW = 0.001
    NUM_QUICK = 64
    BYTES_PER_SECOND = 128 << 20
    MAX_LEXER_BYTES = 40 << 20

    def __init__(self, base: llguidance.LLMatcher, source: str, compile_seconds: float) -> None:
        self.is_full = False
        self.is_slow = False
        self._num_quick = 0
        self._base = base
        self._source_bytes = len(source)
        self._seconds = compile_seconds

    def copy(self) -> llguidance.LLMatcher:
        return self._base.deep_copy()

    def charge(self, seconds: float) -> None:
        """Add the CPU time of one mask."""
        if seconds > self.QUICK:
            self._seconds += seconds
        self._num_quick = 0 if seconds > self.SLOW else self._num_quick + 1
        self.is_slow = seconds > self.SLOW or (self.is_slow and self._num_quick < self.NUM_QUICK)

    @property
    def num_bytes(self) -> int:
        return self._source_bytes + min(int(self._seconds * self.BYTES_PER_SECOND), self.MAX_LEXER_BYTES)


class GrammarCache:
    """Cache of at most max_entries grammars and max_bytes. Evicts the least recently used ones. Thread-safe."""

    def __init__(self, max_entries: int = 64, max_bytes: int = 256 << 20) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, CachedGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._entries.values())

    def get(self, key: Key) -> CachedGrammar | None:
        """Return the grammar; None if it is absent or full. The caller compiles a full one again."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None and found.is_full:
                del self._entries[key]
                return None
            if found is not None:
                self._entries.move_to_end(key)
            self._shrink()  # entries grow while they are used
            return found

    def put(self, key: Key, grammar: CachedGrammar) -> None:
        with self._lock:
            self._entries[key] = grammar
            self._shrink()

    def _shrink(self) -> None:
        while self._entries and (len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes):
            self._entries.popitem(last=False)


class GrammarMatcher:
    """The state of a grammar within one output.

    Before the marker `begin_after` every token is allowed, except the end of the output and tokens that contain the
    end of the marker and text after it, because that text would belong to the grammar. If the marker is text and then a
    special token, only that token may follow the text: gpt-oss writes `<|channel|>final <|constrain|>json<|message|>`
    too, and the grammar would never begin. With `begin_unless` the first token decides: this token begins the free
    part, any other one begins the grammar.
    """

    def __init__(
        self, grammar: CachedGrammar, spec: GrammarSpec, eos_token_ids: tuple[int, ...], token_bytes: TokenBytes
    ) -> None:
        self.ll = grammar.copy()
        self._grammar = grammar
        self._eos = eos_token_ids
        self._token_bytes = token_bytes
        self._opening = spec.begin_unless
        self._marker = b"".join(token_bytes(i) for i in spec.begin_after)
        self._crossing = token_bytes.crossing(self._marker) if self._marker else {}
        *before, self._last = spec.begin_after or (-1,)
        is_decided = bool(before) and token_bytes.is_special(self._last)
        self._before_last = b"".join(map(token_bytes, before)) if is_decided else None
        self._tokens: list[int] = []
        self._num_free = 0  # output tokens before the grammar's first token
        self._tail = b""
        self._state = self._first_state()

    def _first_state(self) -> str:
        return "grammar" if not self._marker else "undecided" if self._opening else "free"

    @property
    def error(self) -> str | None:
        """The reason why the grammar failed: a token that it does not allow, or a limit of the parser; else None."""
        return self.ll.get_error().split("<state>")[0].strip() if self.ll.is_error() else None

    @property
    def limit_error(self) -> str | None:
        """The error if it is a limit of the parser and not a wrong token; else None."""
        error = self.error
        if error is None or "satisfy the grammar" in error:
            return None
        if error.startswith("lexer error"):
            self._grammar.is_full = True
        return error.split("\n")[0]

    @property
    def was_slow(self) -> bool:
        """Whether an earlier mask of this grammar was slow, in any output."""
        return self._grammar.is_slow

    @property
    def in_grammar(self) -> bool:
        """Whether the mask only depends on the grammar, so that rows can be filled in parallel."""
        return self._state == "grammar"

    @property
    def is_terminated(self) -> bool:
        """Whether only the end of the output may follow."""
        return self._state == "grammar" and self.ll.is_stopped() and not self.ll.is_error()

    @property
    def is_accepting(self) -> bool:
        """Whether the output so far matches the grammar and may end here."""
        return self._state == "grammar" and self.ll.is_accepting()

    def fill(self, bitmask_row: np.ndarray) -> None:
        """Write the allowed tokens into int32 [ceil(V/32)], all ones on entry; bit 1 allows."""
        if self._state == "free" and self._before_last is not None and self._tail.endswith(self._before_last):
            bitmask_row[:] = 0
            _set(bitmask_row, self._last)
            return
        if self._state == "free":
            _clear(bitmask_row, self._eos)
            for before, others in self._crossing.items():
                if self._tail.endswith(before):
                    bitmask_row[: len(others)] &= others
            return
        began = time.thread_time()
        self.ll.unsafe_compute_mask_ptr(bitmask_row.ctypes.data, bitmask_row.nbytes)
        self._grammar.charge(time.thread_time() - began)
        if self._state == "undecided":
            _set(bitmask_row, self._opening[0])

    def accept(self, token_id: int) -> bool:
        """Advance by a token. Returns False and sets an error if the grammar does not allow it."""
        self._tokens.append(token_id)
        if self._state == "undecided":
            self._state = "free" if token_id == self._opening[0] else "grammar"
            self._num_free = int(self._state == "free")
            if self._state == "free":
                return True
        if self._state == "grammar":
            return self.ll.consume_token(token_id)
        self._num_free += 1
        return self._look_for_marker(token_id)

    @property
    def drafts_allowed(self) -> bool:
        """Whether tokens can be taken back quickly here, which is not so before the grammar's first token."""
        return self._state == "grammar" and not self.ll.is_error()

    def prefix(self, token_ids: Sequence[int]) -> int:
        """Return how many of the next tokens the grammar allows. Changes nothing."""
        return self.ll.validate_tokens(list(token_ids))

    def forced(self) -> list[int]:
        """Return the tokens that the grammar prescribes next."""
        return self.ll.compute_ff_tokens()

    def rollback(self, num_tokens: int) -> bool:
        """Take back the last tokens. Returns False if there are fewer or the matcher has failed."""
        kept = len(self._tokens) - num_tokens
        if kept < 0 or self.ll.is_error():
            return False
        if self._state == "grammar" and kept >= self._num_free:
            del self._tokens[kept:]
            return self.ll.rollback(num_tokens)
        tokens = self._tokens[:kept]
        self.ll.reset()
        self._tokens = []
        self._num_free = 0
        self._tail = b""
        self._state = self._first_state()
        return all(self.accept(token) for token in tokens)

    def _look_for_marker(self, token_id: int) -> bool:
        """Look for the marker by bytes, because a model may write it in other tokens than the tokenizer would.

        Returns False if the grammar does not allow the text that the token has after the marker.
        """
        keep = len(self._marker) - 1
        data = self._tail + self._token_bytes(token_id)
        _, marker, rest = data.partition(self._marker)
        if not marker:
            self._tail = data[-keep:] if keep else b""
            return True
        self._state, self._tail = "grammar", b""
        return not rest or self.ll.consume_tokens(self._token_bytes.tokenize(rest))


class TokenBytes:
    """The bytes of a token. Special tokens count as their text."""

    def __init__(self, tokenizer: llguidance.LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._crossing: dict[bytes, dict[bytes, np.ndarray]] = {}  # by marker; a server uses few markers

    def __call__(self, token_id: int) -> bytes:
        data = self._tokenizer.decode_bytes([token_id])
        return data.replace(HIDDEN.encode(), b"") if self.is_special(token_id) else data

    def is_special(self, token_id: int) -> bool:
        return self._tokenizer.is_special_token(token_id)

    def tokenize(self, data: bytes) -> list[int]:
        """Tokenize bytes."""
        return self._tokenizer.tokenize_bytes(data)

    def crossing(self, marker: bytes) -> dict[bytes, np.ndarray]:
        """Return the tokens that contain the end of the marker and more text after it.

        Key: the text before them. Value: int32 [ceil(V/32)], bit 0 for each such token.
        """
        if marker not in self._crossing:
            found: dict[bytes, list[int]] = {}
            ends = tuple(marker[first:] for first in range(1, len(marker)))
            for token_id in range(self._tokenizer.vocab_size):
                data = self(token_id)
                if data.partition(marker)[2]:
                    found.setdefault(b"", []).append(token_id)
                elif data.startswith(ends):
                    for end in ends:
                        if data.startswith(end) and data != end:
                            found.setdefault(marker[: -len(end)], []).append(token_id)
            self._crossing[marker] = {before: self._without(ids) for before, ids in found.items()}
        return self._crossing[marker]

    def _without(self, token_ids: list[int]) -> np.ndarray:
        words = np.full(-(-self._tokenizer.vocab_size // 32), -1, np.int32)
        _clear(words, token_ids)
        return words


class MatcherFactory:
    """Makes matchers. Compiled grammars are cached and copied for requests with the same grammar.

    vocab_size: number of the model's logits; masks have ceil(vocab_size / 32) words
    """

    def __init__(self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer_json = tokenizer_json
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._token_bytes: TokenBytes | None = None
        self._building = threading.Lock()
        self._cache = GrammarCache()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")

    def warm_up(self) -> Future[llguidance.LLTokenizer]:
        """Build the token trie in a thread."""
        return self._threads.submit(self._get_tokenizer)

    def submit(self, spec: GrammarSpec) -> Future[GrammarMatcher]:
        """Compile in a thread. The future raises InvalidSchemaError like `__call__`."""
        return self._threads.submit(self, spec)

    def __call__(self, spec: GrammarSpec) -> GrammarMatcher:
        """Return a matcher. Raises InvalidSchemaError for a grammar that cannot be built."""
        tokenizer = self._get_tokenizer()
        key = (spec.kind, spec.source)
        grammar = self._cache.get(key)
        if grammar is None:
            grammar = self._compile(tokenizer, spec)
            self._cache.put(key, grammar)
        return GrammarMatcher(grammar, spec, self.eos_token_ids, self._get_token_bytes(tokenizer))

    def close(self) -> None:
        """End the threads, after what they compile now."""
        self._threads.shutdown(cancel_futures=True)

    def _get_tokenizer(self) -> llguidance.LLTokenizer:
        with self._building:
            if self._tokenizer is None:
                self._tokenizer = build_tokenizer(self._tokenizer_json, self.vocab_size, list(self.eos_token_ids))
                self._tokenizer_json = ""
            return self._tokenizer

    def _get_token_bytes(self, tokenizer: llguidance.LLTokenizer) -> TokenBytes:
        if self._token_bytes is None:
            self._token_bytes = TokenBytes(tokenizer)
        return self._token_bytes

    def _compile(self, tokenizer: llguidance.LLTokenizer, spec: GrammarSpec) -> CachedGrammar:
        began = time.thread_time()
        matcher = llguidance.LLMatcher(tokenizer, translate(spec), log_level=0, limits=parser_limits())
        if matcher.is_error():
            reason = shown_names(matcher.get_error().split("<state>")[0].strip())
            raise InvalidSchemaError(f"this grammar cannot be enforced: {reason}", param="response_format")
        return CachedGrammar(matcher, spec.source, time.thread_time() - began)


def _clear(row: np.ndarray, token_ids: Sequence[int]) -> None:
    words = row.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] &= ~np.uint32(1 << token_id % 32)


def _set(row: np.ndarray, token_id: int) -> None:
    row.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


class BitmaskFiller:
    """Fills masks in threads of llguidance. num_threads: None takes 80 % of the cores, at most 32."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._executor = llguidance.LLExecutor(num_threads)

    def fill(self, rows: Sequence[tuple[Matcher, int]], bitmask: np.ndarray) -> None:
        """Fill row r of bitmask int32 [R, ceil(V/32)] (all ones on entry, C-contiguous) for each (matcher, r).

        Has the signature FillRows. Rows whose mask depends only on the grammar are filled in parallel, the others on
        this thread.
        """
        parallel = []
        for matcher, row in rows:
            if isinstance(matcher, GrammarMatcher) and matcher.in_grammar:
                parallel.append((matcher.ll, row))
            else:
                matcher.fill(bitmask[row])
        if parallel:
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, parallel, bitmask)
