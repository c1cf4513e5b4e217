"""A batch file run without a server: the engine, the routes and the batch runner in one process, nothing listening.

The store lies beside the output until the end, so that the same call after a crash goes on where it was.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from jaxserve.api.app import BATCH_ENDPOINTS, create_app
from jaxserve.api.batch.job import BatchSettings
from jaxserve.api.batch.lines import engine_ready
from jaxserve.api.batch.route_handler import route_handlers
from jaxserve.api.batch.runner import BatchRunner
from jaxserve.api.shared.body_cost import max_line_bytes
from jaxserve.api.shared.engine_protocol import EngineProtocol
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.store import BatchLine, BatchRecord, NewBatch, SqliteStore, Validation, Validator, normalize_url
from jaxserve.store.directory import FILES, TMP, remove
from jaxserve.store.jsonl import read_lines

NO_WINDOW_SECONDS = 100 * 365 * 24 * 3600  # no completion window: it takes as long as it takes
MAX_LINES = 10**9  # no limit either; what is kept of a line in memory is a digest of its id
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class OfflineBatch:
    """What to run. `errors` gets the lines that fail; each file is made only if it has a line."""

    input: Path
    output: Path
    errors: Path

    @property
    def directory(self) -> Path:
        """The store of the run while it lasts."""
        return self.output.with_name(self.output.name + ".jaxserve")

    def check(self) -> None:
        """Raises ConfigError if the files cannot be meant."""
        if not self.input.is_file():
            raise ConfigError(f"there is no file {self.input}")
        if not self.output.parent.is_dir():
            raise ConfigError(f"there is no directory {self.output.parent}")
        if self.directory.exists():
            return
        for path in (self.output, self.errors):
            if path.exists():
                raise ConfigError(f"{path} exists", fix="remove it, or name another output with -o")


def validate(batch: OfflineBatch, max_line_bytes: int) -> tuple[str, Validation]:
    """The endpoint that the first line names, and what is wrong with the file; the model is not looked at."""
    endpoint = _endpoint(batch.input, max_line_bytes)
    return endpoint, Validator(endpoint, lambda name: True, max_line_bytes, MAX_LINES).run(batch.input)


def _endpoint(path: Path, max_line_bytes: int) -> str:
    first = next(read_lines(path, max_line_bytes), None)
    try:
        url = normalize_url(msgspec.json.decode(first.data, type=BatchLine).url) if first and first.data else ""
    except msgspec.DecodeError:
        url = ""  # the pass over the whole file says what is wrong
    return url if url in BATCH_ENDPOINTS else next(iter(BATCH_ENDPOINTS))


async def run_offline(
    batch: OfflineBatch,
    endpoint: str,
    engine: EngineProtocol,
    config: Config,
    show: Callable[[BatchRecord], None],
) -> BatchRecord:
    """Run, or go on with, a batch on an engine that is ready; the finished batch. Cancelling keeps what is done."""
    store = SqliteStore(batch.directory)
    try:
        runner = _runner(store, engine, config)
        await runner.start()
        try:
            batch_id = await _ensure(batch, endpoint, runner)
            while not (record := await store.get_batch(batch_id)).status.terminal:
                show(record)
                await asyncio.sleep(POLL_SECONDS)
            show(record)
        finally:
            await runner.stop()
        await asyncio.to_thread(_deliver, batch, record)
    finally:
        await store.close()
    remove(batch.directory)
    return record


def _runner(store: SqliteStore, engine: EngineProtocol, config: Config) -> BatchRunner:
    settings = BatchSettings(
        known_model=lambda name: name in engine.info.served_names,
        ready=lambda: engine_ready(engine.check_ready),
        max_line_bytes=max_line_bytes(config.server),
        max_lines=MAX_LINES,
    )
    # A quarter more than fit: the next line is queued in the engine when a slot becomes free.
    places = engine.info.max_num_seqs * 5 // 4
    return BatchRunner(
        store, route_handlers(create_app(engine, config), BATCH_ENDPOINTS), settings, lambda lines: places
    )


async def _ensure(batch: OfflineBatch, endpoint: str, runner: BatchRunner) -> str:
    """The id of the batch in the directory, made if it is not there. Raises ConfigError for another input's."""
    digest = await asyncio.to_thread(_digest, batch.input)
    for known in (await runner.store.list_batches(limit=1)).items:
        if known.metadata != {"input_sha256": digest}:
            raise ConfigError(
                f"{batch.directory} holds an unfinished run of another input", fix="remove it to start anew"
            )
        return known.id
    incoming = runner.store.begin_upload()
    with open(batch.input, "rb") as file:
        while data := await asyncio.to_thread(file.read, 2**20):
            await incoming.write(data)
    stored = await incoming.finish(filename=batch.input.name, purpose="batch", expires_seconds=None)
    new = NewBatch(endpoint, stored.id, "24h", NO_WINDOW_SECONDS, {"input_sha256": digest})
    return (await runner.create(new, None, lambda record: record.id.encode())).decode()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _deliver(batch: OfflineBatch, record: BatchRecord) -> None:
    """Put the finished files where they were asked for, whole or not at all."""
    for file_id, target in ((record.output_file_id, batch.output), (record.error_file_id, batch.errors)):
        if file_id is None:
            continue
        temporary = batch.directory / TMP / secrets.token_hex(12)
        shutil.copyfile(batch.directory / FILES / file_id, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.rename(target)
