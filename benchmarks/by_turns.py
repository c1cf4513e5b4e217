"""Compare two running servers of one model, a stream at each by turns: python -m benchmarks.by_turns PORT PORT

Prints the medians of the time to the first chunk and of the mean time between chunks. Other work slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

WARM_UPS = 3
TOKENS = 65


async def measure(port: int, model: str) -> tuple[float, float]:
    """Read one stream. Returns milliseconds to the first chunk, and between two chunks."""
    messages = [{"role": "user", "content": "Tell me a story."}]
    fields = {"model": model, "messages": messages, "temperature": 0, "stream": True, "ignore_eos": True}
    body = json.dumps({**fields, "max_tokens": TOKENS}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost:\r\nconnection: close\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.perf_counter()
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    times: list[float] = []
    while data := await reader.read(65536):
        times += [time.perf_counter()] * data.count(b"data: {")
    writer.close()
    if len(times) < 2:
        raise SystemExit(f"port {port} answered no stream")
    return 1e3 * (times[0] - began), 1e3 * (times[-1] - times[0]) / (len(times) - 1)


async def compare(ports: list[int], model: str, rounds: int) -> list[str]:
    """Return a line for each server."""
    found: dict[int, list[tuple[float, float]]] = {port: [] for port in ports}
    for turn in range(WARM_UPS + rounds):
        for port in ports:
            measured = await measure(port, model)
            if turn >= WARM_UPS:
                found[port].append(measured)
    medians = {port: [statistics.median(each) for each in zip(*rows, strict=True)] for port, rows in found.items()}
    return [f"{port}: first chunk {first:.1f} ms, a chunk {gap:.2f} ms" for port, (first, gap) in medians.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ports", type=int, nargs=2)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    print("\n".join(asyncio.run(compare(args.ports, args.model, args.rounds))))


if __name__ == "__main__":
    main()
