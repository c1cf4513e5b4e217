"""The process in which grammars are compiled for the first time: `python -m jaxserve.grammar.worker`.

It reads frames (4 bytes length, big endian, then msgpack) from stdin and writes them to stdout. The first frame is a
Setup. Each Check is run in a forked child with limits on time and memory that the kernel enforces, so that no schema
can hold up, exhaust or crash anything but its own child; forking keeps the tokenizer that was built once.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import struct
import sys
from typing import BinaryIO, NoReturn

import llguidance
import llguidance.numpy
import msgspec

from jaxserve.engine.request import GrammarSpec
from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.translate import translate

MAX_FRAME = 256 * 2**20  # a tokenizer.json may have 30 MB
STACK_BYTES = 4 << 20  # half of what the engine's threads have: what is too deep for them dies here first
MAX_MESSAGE = 1500  # characters; a verdict must fit into PIPE_BUF (4096 bytes) to be written in one piece


class Setup(msgspec.Struct, tag=True):
    """wall_seconds and cpu_seconds limit one check; memory_bytes is what it may take beside the tokenizer."""

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
    """Nobody waits for this check any more: end its child."""

    id: int


class Verdict(msgspec.Struct, tag=True):
    """error: None if the grammar was built and lets a first token through. failed: the worker's own fault.
    busy: the time on the wall ran out, which may be the machine's load and not the grammar."""

    id: int
    error: str | None = None
    busy: bool = False
    failed: bool = False


def parser_limits() -> llguidance.LLParserLimits:
    """llguidance's own bounds, the same where a grammar is checked and where it is used."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,  # 0.05 s of one core; it is the engine that waits
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def build_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]) -> llguidance.LLTokenizer:
    """vocab_size is the model's, which may be padded above the tokenizer's."""
    eos = eos_token_ids or None
    return llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos)


def compile_error(tokenizer: llguidance.LLTokenizer, spec: GrammarSpec) -> str | None:
    """Why this grammar cannot be used; None if it can."""
    try:
        grammar = translate(spec)
    except InvalidSchemaError as error:
        return error.message
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=parser_limits())
    if is_error:
        return "; ".join(messages)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    bitmask = llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)
    if not matcher.is_error():
        llguidance.numpy.fill_next_token_bitmask(matcher, bitmask, 0)
    if matcher.is_error():
        return _first_line(matcher.get_error())
    return None if bitmask.any() else "no text matches the grammar"


def _first_line(error: str) -> str:
    if "NoExtension" in error:
        return "no text matches the grammar"
    return error.split("<state>")[0].strip().split("\n")[0]


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None where the stream ends. The stream is unbuffered, so that select() tells the truth."""
    head = _read_exactly(stream, 4)
    if head is None:
        return None
    (size,) = struct.unpack(">I", head)
    if size > MAX_FRAME:
        raise ValueError("frame too large")
    return _read_exactly(stream, size)


def _read_exactly(stream: BinaryIO, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = stream.read(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack(">I", len(body)) + body


class _Server:
    def __init__(self, setup: Setup, stdin: BinaryIO, stdout: int) -> None:
        self.setup, self.stdin, self.stdout = setup, stdin, stdout
        self.tokenizer = build_tokenizer(setup.tokenizer_json, setup.vocab_size, setup.eos_token_ids)
        self.children: dict[int, int] = {}  # pid -> id of the check
        self.wake, wake_write = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self.stdin, self.wake], [], [])
            if self.wake in ready:
                os.read(self.wake, 4096)
                self.reap()
            if self.stdin in ready:
                body = read_frame(self.stdin)
                if body is None:
                    break
                self.handle(msgspec.msgpack.decode(body, type=Check | Cancel))
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)

    def handle(self, message: Check | Cancel) -> None:
        if isinstance(message, Check):
            return self.fork(message)
        for pid, check_id in self.children.items():
            if check_id == message.id:
                os.kill(pid, signal.SIGKILL)

    def fork(self, check: Check) -> None:
        pid = os.fork()
        if pid == 0:
            self.child(check)
        self.children[pid] = check.id

    def child(self, check: Check) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self.setup.wall_seconds)
            signal.setitimer(signal.ITIMER_PROF, self.setup.cpu_seconds)
            _limit_memory(self.setup.memory_bytes)
            resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
            error = compile_error(self.tokenizer, check.spec)
            self.send(Verdict(check.id, None if error is None else error[:MAX_MESSAGE]))
            os._exit(0)
        except BaseException as error:  # the child must not return into the server's loop
            self.send(Verdict(check.id, f"it cannot be compiled: {type(error).__name__}"))
            os._exit(0)

    def reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            check_id = self.children.pop(pid)
            if status != 0:
                busy = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
                self.send(Verdict(check_id, self._cause(status), busy=busy))

    def _cause(self, status: int) -> str:
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGPROF):
            return f"it takes more than {self.setup.wall_seconds:g} s to compile"
        return "it cannot be compiled within the limits on memory and depth"

    def send(self, verdict: Verdict) -> None:
        os.write(self.stdout, frame(verdict))  # below PIPE_BUF: children and server never interleave


def _limit_memory(extra: int) -> None:
    if not os.path.exists("/proc/self/statm"):
        return  # no such limit on this system
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + extra, now + extra))


def main() -> None:
    os.nice(5)  # checks share the cores with the engine
    stdout = os.dup(1)
    os.dup2(2, 1)  # whatever prints, prints to stderr
    stdin = os.fdopen(0, "rb", buffering=0)
    body = read_frame(stdin)
    if body is None:
        return
    _Server(msgspec.msgpack.decode(body, type=Setup), stdin, stdout).run()


if __name__ == "__main__":
    sys.exit(main())
