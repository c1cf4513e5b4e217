"""Measure what an engine over several hosts adds to a step: the leader's sending, and until every follower has it.

    python -m benchmarks.broadcast --rows 1 64 256 1024 --hosts 2 4

The leader is this process; each follower is a process of its own, connected by loopback as hosts are by a network. They
send and decode real steps, and compute nothing. `send` is how long the leader's step waits, `there` the time until the
last follower has decoded it. The masks of grammars are sent before a step is sampled.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from benchmarks.scheduler import decoding_scheduler, fake_tokens
from jaxserve.transport.group import FollowerEnd, LeaderEnd, connect
from jaxserve.types.group import Execute, Hello, LeaderEnds, Message, Sample, encode
from jaxserve.types.step import SchedulerOutput

KEY = b"a key of this measurement"
PAUSE = 0.002  # seconds between two steps: a step of a small model
Sent = tuple[float, float]  # when a message was given to the connection, and when it had left


def steps(num_rows: int, count: int) -> Iterator[SchedulerOutput]:
    """Yield steps in which all rows decode."""
    scheduler = decoding_scheduler(num_rows, count + 8, None)
    for _ in range(count):
        output = scheduler.schedule(0.0)
        assert output is not None
        yield output
        scheduler.update(output, fake_tokens(output), 0.0)


def masks(num_rows: int, vocab_size: int, count: int) -> Iterator[Sample]:
    """Yield the masks of steps of 256 rows, of which `num_rows` have a grammar."""
    bitmask = np.full((max(256, num_rows), -(-vocab_size // 32)), -1, np.int32)
    bitmask[:num_rows] = np.random.default_rng(0).integers(-(2**31), 2**31, bitmask[:num_rows].shape, np.int32)
    for _ in range(count):
        yield Sample.of(bitmask, ())


def follow(port: int, rank: int, num_hosts: int) -> None:
    """Receive until the leader stops, then write the times at which the messages were there, as float64."""
    end = FollowerEnd(connect(("127.0.0.1", port), KEY, lambda _: None), Hello(rank, num_hosts, {}, {}), _fail)
    times = array("d")
    while not isinstance(end.receive(), LeaderEnds):
        times.append(time.monotonic())
    end.close()
    sys.stdout.buffer.write(times.tobytes())


def _fail(reason: str) -> None:
    os.write(2, f"{reason}\n".encode())
    os._exit(1)


@contextmanager
def followers(port: int, num_hosts: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the followers; they have ended when the block is left."""
    words = [sys.executable, "-m", "benchmarks.broadcast", "--follow", str(port)]
    processes = [
        subprocess.Popen([*words, str(rank), str(num_hosts)], stdout=subprocess.PIPE) for rank in range(1, num_hosts)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(messages: Sequence[Message], num_hosts: int) -> tuple[list[float], list[float]]:
    """Return for each message the seconds of `send`, and those until it was decoded everywhere."""
    # followers that have stopped count as lost; one that ends before makes `send` fail
    end = LeaderEnd(("127.0.0.1", 0), KEY, num_hosts, lambda hello: None, lambda reason, fix: None)
    with followers(end.port, num_hosts) as processes:
        end.gather(60.0)
        sent: list[Sent] = []
        for message in messages:
            began = time.monotonic()
            end.send(message)
            sent.append((began, time.monotonic()))
            time.sleep(PAUSE)
        end.send(LeaderEnds())
        arrived = np.array([np.frombuffer(process.communicate(timeout=60)[0]) for process in processes])
        end.close()
    begun = np.array([began for began, _ in sent])
    return [after - before for before, after in sent], (arrived.max(axis=0) - begun).tolist()


def line(label: str, num_hosts: int, messages: Sequence[Message]) -> str:
    """Measure, and return a row of the table."""
    send, there = measure(messages, num_hosts)
    middle, high = statistics.median(there), statistics.quantiles(there, n=20)[-1]
    cells = (
        label,
        str(num_hosts),
        f"{len(encode(messages[-1])):,}",
        *(f"{1e6 * s:.0f}" for s in (_mid(send), middle, high)),
    )
    return f"| {' | '.join(cells)} |"


def _mid(values: list[float]) -> float:
    return statistics.median(values)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--masks", type=int, nargs="+", default=[1, 16, 256], help="rows that have a grammar")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--vocab", type=int, default=128_256, help="size of the vocabulary, for the masks")
    parser.add_argument("--follow", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.follow is not None:
        return follow(*options.follow)
    print("| a step of | hosts | bytes | send, us | there, us | there, us, p95 |\n|---|---|---|---|---|---|")
    for num_hosts in options.hosts:
        for rows in options.rows:
            made = [Execute(output) for output in steps(rows, options.steps)]
            print(line(f"{rows} rows", num_hosts, made), flush=True)
        for rows in options.masks:
            made = list(masks(rows, options.vocab, max(20, options.steps // 10)))
            print(line(f"masks of {rows} rows", num_hosts, made), flush=True)


if __name__ == "__main__":
    main()
