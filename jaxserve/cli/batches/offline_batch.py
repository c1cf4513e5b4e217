"""Run a batch file without a server: the engine, the routes and the batch runner in one process, without a socket.

The store is a directory beside the output and is removed at the end, so that the same call resumes after a crash.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from jaxserve.api.app import BATCH_ENDPOINTS, create_app
from jaxserve.api.batch.job import BatchSettings
from jaxserve.api.batch.request import engine_ready, route_handlers
from jaxserve.api.batch.runner import BatchRunner
from jaxserve.api.body_cost import max_line_bytes
from jaxserve.api.state import EngineProtocol
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.store import BATCH_LINE, BatchRecord, NewBatch, Store, Validation, Validator, normalize_url
from jaxserve.store.directory import FILES, remove
from jaxserve.store.jsonl import read_lines

UNLIMITED_SECONDS = 100 * 365 * 24 * 3600  # completion window
UNLIMITED_REQUESTS = 10**9  # only a digest of each id is kept in memory
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class OfflineBatch:
    """The files of a run. `errors` gets the requests that failed. A file without a line is not created."""

    input: Path
    output: Path
    errors: Path

    @property
    def directory(self) -> Path:
        """Directory of the store during the run."""
        return self.output.with_name(self.output.name + ".jaxserve")

    def check(self) -> None:
        """Raises ConfigError if the input or a directory is missing, if both outputs are one file, or if one exists
        that the run did not begin.
        """
        if not self.input.is_file():
            raise ConfigError(f"there is no file {self.input}", fix="name the input before the flags of launch")
        for path in (self.output, self.errors):
            if not path.parent.is_dir():
                raise ConfigError(f"there is no directory {path.parent}")
        if self.output.resolve() == self.errors.resolve():
            raise ConfigError(f"{self.output} is named for the output and for the errors", fix="name another --errors")
        if self.directory.exists():
            return
        for path in (self.output, self.errors):
            if path.exists():
                raise ConfigError(f"{path} exists", fix="remove it, or name another output with -o")


def validate(batch: OfflineBatch, max_line_bytes: int) -> tuple[str, Validation]:
    """Return the endpoint of the first request, and the errors of the file. The model's name is not checked."""
    endpoint = _endpoint(batch.input, max_line_bytes)
    return endpoint, Validator(endpoint, lambda name: True, max_line_bytes, UNLIMITED_REQUESTS).run(batch.input)


def _endpoint(path: Path, max_line_bytes: int) -> str:
    first = next(read_lines(path, max_line_bytes), None)
    try:
        url = normalize_url(BATCH_LINE.decode(first.data).url) if first and first.data else ""
    except msgspec.DecodeError:
        url = ""  # Validator reports the error
    return url if url in BATCH_ENDPOINTS else next(iter(BATCH_ENDPOINTS))


async def run_offline(
    batch: OfflineBatch,
    endpoint: str,
    engine: EngineProtocol,
    config: Config,
    show: Callable[[BatchRecord], None],
) -> BatchRecord:
    """Run or resume a batch on an engine that is ready, and return it finished.

    If the task is cancelled, finished results are kept in the store.
    """
    store = Store(batch.directory)
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


def _runner(store: Store, engine: EngineProtocol, config: Config) -> BatchRunner:
    settings = BatchSettings(
        known_model=lambda name: name in engine.info.served_names,
        ready=lambda: engine_ready(engine.check_ready),
        max_line_bytes=max_line_bytes(config.server),
        max_lines=UNLIMITED_REQUESTS,
    )
    # A quarter more than the engine runs, so that the next request is queued when a slot becomes free.
    num_in_flight = engine.info.max_num_seqs * 5 // 4
    return BatchRunner(
        store, route_handlers(create_app(engine, config), BATCH_ENDPOINTS), settings, lambda lines: num_in_flight
    )


async def _ensure(batch: OfflineBatch, endpoint: str, runner: BatchRunner) -> str:
    """Return the id of the batch in the store; create it if there is none.

    Raises ConfigError if the store holds a batch of another input.
    """
    digest = await asyncio.to_thread(_digest, batch.input)
    for known in (await runner.store.list_batches(limit=1)).items:
        if known.metadata != {"input_sha256": digest}:
            raise ConfigError(
                f"{batch.directory} holds an unfinished run of another input", fix="remove it to start again"
            )
        return known.id
    incoming = runner.store.begin_upload()
    with open(batch.input, "rb") as file:
        while data := await asyncio.to_thread(file.read, 2**20):
            await incoming.write(data)
    stored = await incoming.finish(filename=batch.input.name, purpose="batch", expires_seconds=None)
    new = NewBatch(endpoint, stored.id, "24h", UNLIMITED_SECONDS, {"input_sha256": digest})
    return (await runner.create(new, None, lambda record: record.id.encode())).decode()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _deliver(batch: OfflineBatch, record: BatchRecord) -> None:
    """Move the finished files to their targets, each whole or not at all. Raises ConfigError if that fails."""
    for file_id, target in ((record.output_file_id, batch.output), (record.error_file_id, batch.errors)):
        if file_id is None:
            continue
        # Beside the target, which may be on another file system. The name is always the same, for the next call.
        temporary = target.with_name(f"{target.name}.jaxserve-part")
        try:
            shutil.copyfile(batch.directory / FILES / file_id, temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            temporary.rename(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            fix = "mend that and call again: the results are kept"
            raise ConfigError(f"cannot write {target}: {error.strerror}", fix=fix) from None
