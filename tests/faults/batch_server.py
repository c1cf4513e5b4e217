"""The batch side of a server as a process of its own, to be killed.

    python -m tests.faults.batch_server DIRECTORY KILL_AT LINES

It opens the store, uploads and creates a batch of so many lines if there is none, runs it to its end and leaves. The
process kills itself at border KILL_AT between two disk operations (never, if negative). Each computed line is logged.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import orjson

from jaxserve.api.batch.job import BatchSettings
from jaxserve.api.batch.request import Answered
from jaxserve.api.batch.runner import BatchRunner
from jaxserve.store import Disk, FileRecord, NewBatch, Store
from tests.store.disks import KillingDisk

ENDPOINT = "/v1/chat/completions"
PLACES = 8  # lines in flight
LINES = 1000


def input_file(count: int) -> bytes:
    rows = (
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": ENDPOINT,
            "body": {"model": "demo", "prompt": f"q{number}"},
        }
        for number in range(1, count + 1)
    )
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def expected_body(number: int) -> dict[str, object]:
    """What the line's answer says; every tenth line fails."""
    text = f"answer {number * 7919} " * 20
    return {"text": text, "usage": {"prompt_tokens": number, "completion_tokens": 3}}


class LoggingHandler:
    def __init__(self, log: Path) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def __call__(self, body: bytes, request_id: str, owner: str) -> Answered:
        number = int(orjson.loads(body)["prompt"][1:])
        os.write(self._log, b"%d\n" % number)
        await asyncio.sleep(random.uniform(0, 0.01))
        return Answered(400 if number % 10 == 0 else 200, orjson.dumps(expected_body(number)))


def make_runner(store: Store, log: Path) -> BatchRunner:
    settings = BatchSettings(lambda name: True, lambda: True, 2**20, tick=0.05, retry_delay=0.01)
    return BatchRunner(store, {ENDPOINT: LoggingHandler(log)}, settings, lambda lines: PLACES)


async def ensure_batch(runner: BatchRunner, count: int) -> str:
    """The batch's id. An earlier life may have made it, or its file."""
    if known := (await runner.store.list_batches(limit=1)).items:
        return known[0].id
    files = (await runner.store.list_files(limit=1)).items
    file = files[0] if files else await upload(runner.store, input_file(count))
    assert file.bytes == len(input_file(count))
    new = NewBatch(ENDPOINT, file.id, "24h", 24 * 3600)
    return (await runner.create(new, None, lambda record: record.id.encode())).decode()


async def upload(store: Store, data: bytes) -> FileRecord:
    incoming = store.begin_upload()
    await incoming.write(data)
    return await incoming.finish(filename="in.jsonl", purpose="batch", expires_seconds=None)


async def serve(directory: Path, disk: Disk, count: int) -> None:
    store = Store(directory / "store", disk=disk)
    runner = make_runner(store, directory / "calls.log")
    await runner.start()
    batch_id = await ensure_batch(runner, count)
    print("running", flush=True)
    while not (await store.get_batch(batch_id)).status.terminal:
        await asyncio.sleep(0.01)
    await runner.stop()
    await store.close()


if __name__ == "__main__":
    kill_at, count = int(sys.argv[2]), int(sys.argv[3])
    asyncio.run(serve(Path(sys.argv[1]), KillingDisk(kill_at) if kill_at >= 0 else Disk(), count))
