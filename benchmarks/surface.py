"""Measure the cost of the API on top of the engine: HTTP streams, and outputs under a JSON schema.

    python -m benchmarks.surface http [--streams 500] [--output-len 64] [--model DIR]
    python -m benchmarks.surface schema [--rows 32] [--rounds 5] [--model DIR]

`http`: the same streams through a server and through the engine in process. In both cases the engine runs on the first
half of the cores, and the API process and the clients on the rest, so that they take no time from the engine.
`schema`: tokens per second of rows without and with a schema, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import orjson

from benchmarks.compare import WAITING, Server, running
from jaxserve.bench.load import write_json
from jaxserve.engine.engine import TextEngine
from jaxserve.grammar.translate import schema_spec
from jaxserve.transport.child import child_environment, python_command
from jaxserve.types.sampling import GrammarSpec, SamplingParams

T = TypeVar("T")
PROMPT_TOKENS = 16
CITY = {"type": "string", "maxLength": 12}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
RECORD = {"type": "object", "properties": {"city": CITY, "n": NUMBER}, "required": ["city", "n"]}
# more records than fit into an output, so that every row decodes to its length
SCHEMA = {"type": "array", "minItems": 500, "items": RECORD | {"additionalProperties": False}}


@dataclass(frozen=True, slots=True)
class Constrained:
    """Tokens per second of `rows` rows, medians over rounds. ratio: median of the ratios of the rounds."""

    rows: int
    free: float
    schema: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Streams:
    """Tokens per second through HTTP and in process, and the CPU microseconds per token of the HTTP run."""

    streams: int
    http: float
    in_process: float
    ratio: float
    engine_us: float
    api_us: float
    client_us: float


def constrained(engine: TextEngine, rows: int, *, rounds: int = 5, steps: int = 150) -> Constrained:
    """Decode rows without and with a schema in turns, so that a drift of the machine affects both."""
    spec = schema_spec(SCHEMA)
    _decode_rate(engine, rows, steps=10, grammar=spec)  # compiles the grammar
    pairs = [(_decode_rate(engine, rows, steps, None), _decode_rate(engine, rows, steps, spec)) for _ in range(rounds)]
    free, schema = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    return Constrained(rows, round(free), round(schema), round(statistics.median(b / a for a, b in pairs), 3))


def _decode_rate(engine: TextEngine, rows: int, steps: int, grammar: GrammarSpec | None) -> float:
    """Return the tokens per second while all rows decode."""
    for i in range(rows):
        params = SamplingParams(seed=i, max_tokens=steps + 16, ignore_eos=grammar is None, grammar=grammar)
        engine.add_request(_prompt(i), params)
    while engine.core.stats().num_running < rows or engine.core.stats().num_waiting:
        engine.step()
    for _ in range(6):  # past the prefill
        engine.step()
    before, began, done = engine.core.stats().generation_tokens, time.perf_counter(), 0
    while done < steps and engine.core.stats().num_running == rows:
        engine.step()
        done += 1
    rate = (engine.core.stats().generation_tokens - before) / (time.perf_counter() - began)
    while engine.has_unfinished:
        engine.step()
    return rate


def _prompt(number: int) -> list[int]:
    return [300 + (number * 7 + i) % 1000 for i in range(PROMPT_TOKENS)]


def in_process_rate(engine: TextEngine, streams: int, output_len: int, rounds: int) -> float:
    """Return the tokens per second from the first request to the last token, with detokenization; median of rounds."""

    def run(count: int) -> float:
        began = time.perf_counter()
        for i in range(count):
            engine.add_request(_prompt(i), SamplingParams(seed=i, max_tokens=output_len, ignore_eos=True))
        while engine.has_unfinished:
            engine.step()
        return count * output_len / (time.perf_counter() - began)

    run(min(streams, 32))
    return statistics.median(run(streams) for _ in range(rounds))


def stream_rate(port: int, streams: int, output_len: int) -> float:
    """Return tokens per second of raw streams, read with as little work as possible.

    Raises RuntimeError if a stream breaks off.
    """
    selector = selectors.DefaultSelector()
    began = time.perf_counter()
    for i in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(_http_request(_prompt(i), i, output_len))
        selector.register(connection, selectors.EVENT_READ, [b""])
    chunks, left = 0, streams
    while left:
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(1 << 16)
            chunks += data.count(b'"choices"')
            tail = key.data[0] = (key.data[0] + data)[-40:]
            if b"[DONE]" in tail or not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                left -= 1
    seconds = time.perf_counter() - began
    if chunks < streams * output_len * 0.9:  # a token without a whole character makes no chunk
        raise RuntimeError(f"{chunks} chunks instead of {streams * output_len}")
    return streams * output_len / seconds


def _http_request(prompt: list[int], seed: int, output_len: int) -> bytes:
    body = {"model": "demo", "prompt": prompt, "seed": seed, "max_tokens": output_len, "stream": True}
    data = json.dumps(body | {"ignore_eos": True, "temperature": 1, "return_token_ids": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost:\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(data) + data


def http_streams(model: str | None, streams: int, output_len: int, rounds: int) -> Streams:
    """Measure both ways. Raises RuntimeError if a stream breaks off."""
    cores = sorted(os.sched_getaffinity(0))
    engine_cores, other_cores = cores[: max(1, len(cores) // 2)], cores[len(cores) // 2 :]
    words = [str(streams), str(output_len)]
    flags = ["--model", model] if model is not None else []
    inside = _on(engine_cores, lambda: float(_child("in-process", *words, str(rounds), *flags)))
    log = Path(tempfile.gettempdir()) / "jaxserve-surface.log"
    command = tuple(python_command("jaxserve", "launch", "--max-num-seqs", str(streams), *flags))
    os.sched_setaffinity(0, engine_cores)  # inherited by the server; its API process is moved below
    with running(Server("jaxserve", command, WAITING), log) as url:
        os.sched_setaffinity(0, cores)
        api, engine = _processes(url)
        _pin(api, other_cores)
        port = url.rpartition(":")[2]
        _on(other_cores, lambda: _child("client", port, "32", str(output_len)))
        runs = []
        for _ in range(rounds):
            before = _cpu(engine), _cpu(api)
            client = orjson.loads(_on(other_cores, lambda: _child("client", port, *words)))
            spent = _cpu(engine) - before[0], _cpu(api) - before[1], client["cpu"]
            runs.append((client["rate"], [each / (streams * output_len) * 1e6 for each in spent]))
    rate, (engine_us, api_us, client_us) = sorted(runs)[len(runs) // 2]
    figures = (round(x, 1) for x in (engine_us, api_us, client_us))
    return Streams(streams, round(rate), round(inside), round(rate / inside, 3), *figures)


def _on(cores: Sequence[int], work: Callable[[], T]) -> T:
    """Run `work`, which starts a process, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        return work()
    finally:
        os.sched_setaffinity(0, before)


def _child(*words: str) -> str:
    return subprocess.run(
        python_command("benchmarks.surface", *words),
        env=child_environment(),
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()[-1]


def _processes(url: str) -> tuple[int, int]:
    """Return the ids of the API process and the engine process of the server at `url`, a child of this process."""
    api = _children(os.getpid(), "jaxserve launch")
    engine = _children(api, "jaxserve.engine.process")
    return api, engine


def _children(parent: int, name: str) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
            if name in (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode():
                return int(entry.name)
    raise RuntimeError(f"no process {name!r} below {parent}")


def _pin(pid: int, cores: Sequence[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def _cpu(pid: int) -> float:
    """Return the CPU seconds of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(words: Sequence[str] | None = None) -> int:
    """Run the measurement of the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.surface")
    commands = parser.add_subparsers(required=True)
    http = commands.add_parser("http")
    http.add_argument("--streams", type=int, default=500)
    http.add_argument("--output-len", type=int, default=64)
    http.add_argument("--rounds", type=int, default=3)
    http.set_defaults(run=_http)
    schema = commands.add_parser("schema")
    schema.add_argument("--rows", type=int, default=32)
    schema.add_argument("--rounds", type=int, default=5)
    schema.set_defaults(run=_schema)
    inside = commands.add_parser("in-process")  # used by http
    inside.add_argument("numbers", type=int, nargs=3)
    inside.set_defaults(run=_in_process)
    client = commands.add_parser("client")  # used by http
    client.add_argument("numbers", type=int, nargs=3)
    client.set_defaults(run=_client)
    for command in (http, schema, inside):
        command.add_argument("--model", help="default: the embedded one")
    options = parser.parse_args(words)
    return options.run(options)


def _http(options: argparse.Namespace) -> int:
    found = http_streams(options.model, options.streams, options.output_len, options.rounds)
    print(f"{found.streams} streams: {found.http} tokens/s by HTTP, {found.in_process} in process: {found.ratio:.2f}")
    print(f"CPU per token of the HTTP run: engine {found.engine_us}, API {found.api_us}, client {found.client_us} us")
    write_json(asdict(found), None)
    return 0


def _schema(options: argparse.Namespace) -> int:
    found = constrained(TextEngine(options.model), options.rows, rounds=options.rounds)
    print(f"{found.rows} rows: {found.free} tokens/s free, {found.schema} under a schema: {found.ratio:.2f}")
    write_json(asdict(found), None)
    return 0


def _in_process(options: argparse.Namespace) -> int:
    streams, output_len, rounds = options.numbers
    print(in_process_rate(TextEngine(options.model, max_num_seqs=streams), streams, output_len, rounds))
    return 0


def _client(options: argparse.Namespace) -> int:
    began = time.process_time()
    rate = stream_rate(*options.numbers)
    print(orjson.dumps({"rate": rate, "cpu": time.process_time() - began}).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
