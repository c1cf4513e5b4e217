"""The process that compiles grammars for the first time: `python -m jaxserve.grammar.worker`.

Reads frames (4 bytes of length, big-endian, then msgpack) from stdin and writes frames to stdout. The first frame is a
GrammarSetup. Each Check runs in a forked child with time and memory limits enforced by the kernel. A bad schema can
only exhaust or crash its own child. Forking shares the tokenizer, which is built once.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import sys
from typing import Any, BinaryIO, NoReturn

import llguidance
import llguidance.numpy
import msgspec

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.translate import hidden_name, shown_names, translate
from jaxserve.transport.child import frame, limit_memory, read_frame, take_pipes, write
from jaxserve.types.sampling import GrammarSpec

STACK_BYTES = 4 << 20  # half of the stack of the engine's threads: a grammar that would overflow them fails here first
MAX_MESSAGE = 1500  # characters of an error message
MAX_GRAMMAR_BYTES = 4 << 20  # bytes of a grammar for the engine; escapes make a source up to six times as long
PIPE_BYTES = 1 << 16  # bytes per read


class GrammarSetup(msgspec.Struct, tag=True):
    """The tokenizer and the limits of one check. memory_bytes: memory that it may use beside the tokenizer"""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: list[int]
    wall_seconds: float
    cpu_seconds: float
    memory_bytes: int


class Check(msgspec.Struct, tag=True):
    id: int
    spec: GrammarSpec


class Cancel(msgspec.Struct, tag=True):
    """Cancels a check, whose child is killed."""

    id: int


class Verdict(msgspec.Struct, tag=True):
    """The result of a check.

    error: why it failed; None if the grammar was built and allows a first token. The engine then uses `grammar`.
    failed: the worker itself failed. busy: wall_seconds ran out, which may be due to the machine's load
    """

    id: int
    error: str | None = None
    grammar: str = ""
    busy: bool = False
    failed: bool = False


_END_NAMES = frozenset({"</s>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>"})
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")  # sentencepiece writes characters without a piece in them
_SETUP = msgspec.msgpack.Decoder(GrammarSetup)
_MESSAGE = msgspec.msgpack.Decoder(Check | Cancel)


def parser_limits() -> llguidance.LLParserLimits:
    """Return llguidance's own limits. The same ones apply where a grammar is checked and where it is used."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=5_000,  # 0.03 s of one core for a mask and 0.02 s for a token; four times as many take 0.8 s
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def build_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]) -> llguidance.LLTokenizer:
    """Return the tokenizer for matchers. No text becomes a special token in it; a grammar names one by its id or name.

    vocab_size: number of the model's logits, which may be padded beyond the tokenizer's vocabulary
    eos_token_ids: if empty, the ids of tokens whose texts usually end an output
    """
    text, ends = _with_hidden_tokens(tokenizer_json)
    return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids or ends or None)


def _with_hidden_tokens(tokenizer_json: str) -> tuple[str, list[int]]:
    """Return tokenizer.json with other names for its special tokens, and the ids of the usual ends of an output.

    llguidance tokenizes the text that a grammar prescribes, and expects exactly these tokens. The characters of a
    special token are not text to the grammar. Under its own name it would be among these tokens wherever a client's
    text spells it.
    """
    tree = json.loads(tokenizer_json)
    special = [token for token in tree["added_tokens"] if _is_special(token)]
    ends = [token["id"] for token in special if token["content"] in _END_NAMES]
    names = {token["content"]: hidden_name(token["content"]) for token in special}
    for token in special:
        token |= {"content": names[token["content"]], "special": True}
    model = tree["model"]
    if isinstance(vocab := model["vocab"], dict):
        model["vocab"] = {names.get(text, text): i for text, i in vocab.items()}
    else:  # Unigram's pieces with their scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [
            pair for pair in model["merges"] if "".join(pair) not in names and names.keys().isdisjoint(pair)
        ]
    return json.dumps(tree, ensure_ascii=False), ends


def _is_special(token: dict[str, Any]) -> bool:
    """Return whether llguidance treats the characters of an added token as something else than text."""
    text = token["content"]
    return (token["special"] or (text.startswith("<") and text.endswith(">"))) and not _BYTE_TOKEN.fullmatch(text)


def compile_grammar(tokenizer: llguidance.LLTokenizer, spec: GrammarSpec) -> str:
    """Return the text for llguidance.LLMatcher. It builds and allows a first token. Raises InvalidSchemaError."""
    grammar = translate(spec)
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise InvalidSchemaError(f"the grammar becomes larger than {MAX_GRAMMAR_BYTES} bytes")
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=parser_limits())
    if is_error:
        raise InvalidSchemaError(shown_names("; ".join(messages)))
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    bitmask = llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)
    if not matcher.is_error():
        llguidance.numpy.fill_next_token_bitmask(matcher, bitmask, 0)
    if matcher.is_error():
        raise InvalidSchemaError(_first_line(matcher.get_error()))
    if not bitmask.any():
        raise InvalidSchemaError("no text matches the grammar")
    return grammar


def _first_line(error: str) -> str:
    if "NoExtension" in error:
        return "no text matches the grammar"
    return shown_names(error.split("<state>")[0].strip().split("\n")[0])


class _Child:
    """A running check: its process, and the bytes from its pipe so far. The pipe ends with the process."""

    def __init__(self, pid: int, check_id: int, pipe: int) -> None:
        self.pid = pid
        self.check_id = check_id
        self.pipe = pipe
        self.data = bytearray()


class _GrammarServer:
    def __init__(self, setup: GrammarSetup, stdin: BinaryIO, stdout: int) -> None:
        self.setup, self.stdin, self.stdout = setup, stdin, stdout
        self.tokenizer = build_tokenizer(setup.tokenizer_json, setup.vocab_size, setup.eos_token_ids)
        self.children: dict[int, _Child] = {}  # by the read end of the pipe

    def run(self) -> None:
        """Serve until stdin ends, then kill the running children."""
        while True:
            ready, _, _ = select.select([self.stdin, *self.children], [], [])
            for pipe in self.children.keys() & set(ready):
                self.read(self.children[pipe])
            if self.stdin in ready:
                body = read_frame(self.stdin)
                if body is None:
                    break
                self.handle(_MESSAGE.decode(body))
        for child in self.children.values():
            os.kill(child.pid, signal.SIGKILL)

    def handle(self, message: Check | Cancel) -> None:
        if isinstance(message, Check):
            return self.fork(message)
        for child in self.children.values():
            if child.check_id == message.id:
                os.kill(child.pid, signal.SIGKILL)

    def fork(self, check: Check) -> None:
        pipe, end = os.pipe()
        pid = os.fork()
        if pid == 0:
            self.child(check, end)
        os.close(end)
        self.children[pipe] = _Child(pid, check.id, pipe)

    def child(self, check: Check, end: int) -> NoReturn:
        """Run a check in this forked child, write the verdict to `end` and exit."""
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self.setup.wall_seconds)
            signal.setitimer(signal.ITIMER_PROF, self.setup.cpu_seconds)
            limit_memory(self.setup.memory_bytes)
            resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
            write(end, frame(self.verdict(check)))
        finally:  # the child must not return into the server's loop
            os._exit(0)

    def verdict(self, check: Check) -> Verdict:
        try:
            return Verdict(check.id, grammar=compile_grammar(self.tokenizer, check.spec))
        except InvalidSchemaError as error:
            return Verdict(check.id, error.message[:MAX_MESSAGE])
        except BaseException as error:
            return Verdict(check.id, f"it cannot be compiled: {type(error).__name__}")

    def read(self, child: _Child) -> None:
        """Read from a child's pipe. At its end, send the verdict, or the reason why the child died without one."""
        piece = os.read(child.pipe, PIPE_BYTES)
        if piece:
            child.data += piece
            return
        del self.children[child.pipe]
        os.close(child.pipe)
        _, status = os.waitpid(child.pid, 0)
        if status == 0 and child.data:
            return write(self.stdout, child.data)
        busy = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        write(self.stdout, frame(Verdict(child.check_id, self._cause(status), busy=busy)))

    def _cause(self, status: int) -> str:
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if ended_by == signal.SIGPROF:
            return f"it takes more than {self.setup.cpu_seconds:g} s of a processor to compile"
        if ended_by == signal.SIGALRM:
            return f"it takes more than {self.setup.wall_seconds:g} s to compile"
        return "it cannot be compiled within the limits on memory and depth"


def main() -> None:
    """Read the GrammarSetup from stdin and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops this process after draining
    os.nice(5)  # checks share the cores with the engine
    stdin, stdout = take_pipes()
    body = read_frame(stdin)
    if body is None:
        return
    _GrammarServer(_SETUP.decode(body), stdin, stdout).run()


if __name__ == "__main__":
    sys.exit(main())
