"""Measure a server of pictures, and how long text streams wait beside it.

Text streams run alone first, then beside chats with pictures: fresh ones, one repeated, chats that grow by a picture a
turn, or hostile files that must be refused. The pictures are made here, as PNG files and without Pillow.
"""

from __future__ import annotations

import asyncio
import base64
import random
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from typing import Any

import httpx2
import numpy as np

from jaxserve.bench.load import (
    LoadReport,
    LoadRequest,
    LoadTarget,
    Timing,
    client_of,
    random_prompt,
    send,
    summarize,
    table,
)

KINDS = ("fresh", "repeated", "growing", "hostile")
TURNS = 4  # of a growing chat
_ENCODE_SECONDS = "jaxserve:image_encode_seconds"
_PNG = b"\x89PNG\r\n\x1a\n"
Chat = Sequence[LoadRequest]  # sent one after the other


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _png(width: int, height: int, data: bytes, *extra: bytes) -> bytes:
    """Return an RGB file. data: the compressed rows. extra: chunks before them"""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"".join((_PNG, head, *extra, _chunk(b"IDAT", data), _chunk(b"IEND", b"")))


def png(width: int, height: int, seed: int) -> bytes:
    """Return a PNG of slopes and stripes that no other seed makes."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    factors, shifts = rng.integers(1, 9, (3, 2)), rng.integers(0, 256, 3)
    planes = [x * int(a) // 3 + y * int(b) // 3 + int(shift) for (a, b), shift in zip(factors, shifts, strict=True)]
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row begins with the number of its filter, 0
    rows[:, 1:] = np.stack(planes, axis=-1).astype(np.uint8).reshape(height, -1)
    return _png(width, height, zlib.compress(rows.tobytes(), 1))


def hostile_files() -> list[bytes]:
    """Return files that a server must refuse: other formats, bombs, sizes that lie, pixels that are missing."""
    bomb = zlib.compress(bytes(64 * 2**20), 9)
    row = bytes(1 + 3 * 6000)
    return [
        b'<svg xmlns="http://www.w3.org/2000/svg"/>',
        _PNG + b"<svg/>",
        _png(31_623, 31_623, zlib.compress(b"")),
        _png(1, 10_000, zlib.compress(bytes(4 * 10_000))),
        _png(8, 8, zlib.compress(b""), _chunk(b"zTXt", b"a\0\0" + bomb)),
        _png(8, 8, zlib.compress(b""), _chunk(b"iCCP", b"a\0\0" + bomb)),
        _png(8, 8, zlib.compress(b""), _chunk(b"eXIf", b"MM\0*" + b"\xff" * 2**20)),
        # 36 million pixels without the last rows. A stream that ended there soundly would be read, its last rows black.
        _png(6000, 6000, zlib.compress(row * 5900)[:-8]),
        png(512, 512, 0)[:-2000],
    ]


def _message(file: bytes, text: str) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
    }


def picture_chats(kind: str, number: int, *, size: tuple[int, int], output_len: int, seed: int = 0) -> list[Chat]:
    """Return chats with about `number` requests, each of `output_len` tokens. kind: of KINDS. size: width and height"""
    seeds = count(1000 * seed)

    def asked(*messages: dict[str, Any]) -> LoadRequest:
        return LoadRequest("", None, output_len, messages=list(messages))

    if kind == "hostile":
        return [[asked(_message(file, "What is this?"))] for file in islice(cycle(hostile_files()), number)]
    if kind == "repeated":
        same = _message(png(*size, next(seeds)), "What is this?")
        return [[asked(same)] for _ in range(number)]
    if kind == "fresh":
        return [[asked(_message(png(*size, next(seeds)), "What is this?"))] for _ in range(number)]
    chats: list[Chat] = []
    for _ in range(max(1, number // TURNS)):
        messages: list[dict[str, Any]] = []
        turns = []
        for turn in range(TURNS):
            messages.append(_message(png(*size, next(seeds)), f"And what is picture {turn + 1}?"))
            turns.append(asked(*messages))
            messages.append({"role": "assistant", "content": "It has slopes and stripes."})
        chats.append(turns)
    return chats


@dataclass(frozen=True, slots=True)
class PictureReport:
    """Text streams alone and beside the pictures. A refusal is a request that was answered with 400."""

    text_alone: LoadReport
    text_beside: LoadReport
    pictures: LoadReport
    refused: int
    slowest_refusal: float | None  # seconds
    encode_share: float | None  # of the time; None: the server does not tell
    p99_ratio: float | None  # of the gaps of text streams, beside and alone
    longest_gap_ms: float | None  # of text streams, beside

    @property
    def failed(self) -> int:
        return self.text_alone.failed + self.text_beside.failed + self.pictures.failed


async def measure_pictures(
    target: LoadTarget,
    chats: Sequence[Chat],
    *,
    streams: int,
    input_len: int,
    output_len: int,
    vocab_size: int,
    seconds: float,
    concurrency: int,
    seed: int = 0,
) -> PictureReport:
    """Run text streams alone for `seconds`, then beside the chats.

    streams: text requests that run at all times, of `input_len` random tokens and `output_len` answered ones.
    concurrency: chats at once
    """
    rng = random.Random(seed)

    def texts() -> Iterator[LoadRequest]:
        while True:
            yield LoadRequest(random_prompt(rng, input_len, vocab_size), input_len, output_len)

    async with client_of(target) as client:
        alone, _, spent = await _run(client, target, texts(), streams, (), seconds, concurrency)
        before = await _encode_seconds(client, target)
        beside, pictures, took = await _run(client, target, texts(), streams, chats, 0.0, concurrency)
        after = await _encode_seconds(client, target)
    refusals = [each for each in pictures if (each.error or "").startswith("400:")]
    answered = [each for each in pictures if each not in refusals]
    text_alone, text_beside = summarize(alone, spent), summarize(beside, took)
    gaps = text_alone.itl_ms, text_beside.itl_ms
    return PictureReport(
        text_alone=text_alone,
        text_beside=text_beside,
        pictures=summarize(answered, took),
        refused=len(refusals),
        slowest_refusal=max((each.ended - each.sent for each in refusals), default=None),
        encode_share=None if before is None or after is None else round((after - before) / took, 4),
        p99_ratio=None if gaps[0] is None or gaps[1] is None else round(gaps[1].p99 / gaps[0].p99, 3),
        longest_gap_ms=None if gaps[1] is None else gaps[1].max,
    )


async def _run(
    client: httpx2.AsyncClient,
    target: LoadTarget,
    texts: Iterator[LoadRequest],
    streams: int,
    chats: Sequence[Chat],
    seconds: float,
    concurrency: int,
) -> tuple[list[Timing], list[Timing], float]:
    """Run streams until the chats have ended, or for `seconds` if there are none.

    Returns the timings of texts and chats, and the seconds that it took. Later tokens of the streams do not count.
    """
    start, over, gate = time.perf_counter(), asyncio.Event(), asyncio.Semaphore(concurrency)
    found: list[Timing] = []
    pictures: list[Timing] = []

    async def stream() -> None:
        while not over.is_set():
            found.append(await send(client, target, next(texts), start))

    async def converse(chat: Chat) -> None:
        async with gate:
            for request in chat:
                pictures.append(await send(client, target, request, start))

    running = [asyncio.create_task(stream()) for _ in range(streams)]
    if chats:
        await asyncio.gather(*map(converse, chats))
    else:
        await asyncio.sleep(seconds)
    took = time.perf_counter() - start
    over.set()
    await asyncio.gather(*running)
    cut = [replace(each, token_times=[at for at in each.token_times if at <= took]) for each in found]
    return [each for each in cut if each.token_times or each.error], pictures, took


async def _encode_seconds(client: httpx2.AsyncClient, target: LoadTarget) -> float | None:
    """Return for how long the server's steps have waited for its tower; None: it does not tell."""
    try:
        reply = await client.get(f"{target.base_url}/metrics")
    except httpx2.HTTPError:
        return None
    found = [line.rpartition(" ")[2] for line in reply.text.splitlines() if line.startswith(_ENCODE_SECONDS)]
    return sum(map(float, found)) if found and reply.status_code == 200 else None


def picture_table(report: PictureReport) -> str:
    """Return the report as aligned lines."""
    parts = {"text alone": report.text_alone, "text beside": report.text_beside, "pictures": report.pictures}
    lines = [line for name, part in parts.items() for line in (f"--- {name}", table(part))]
    said: dict[str, tuple[float | None, Callable[[float], str]]] = {
        "encode share": (report.encode_share, lambda share: f"{share:.1%}"),
        "p99 gap beside / alone": (report.p99_ratio, lambda ratio: f"{ratio:.2f}"),
        "longest gap beside": (report.longest_gap_ms, lambda gap: f"{gap:.0f} ms"),
        "slowest refusal": (report.slowest_refusal, lambda taken: f"{taken:.2f} s, of {report.refused}"),
    }
    lines += [f"{name:28}{write(value)}" for name, (value, write) in said.items() if value is not None]
    return "\n".join(lines)
