"""`jaxserve batch run|submit|status|cancel`: run a batch file in this process, or at a server.

`run` has the engine, the routes and the batch runner in this process, without a socket. It keeps its state in a
directory beside the output until the end, so that the same call resumes after a crash. The other commands send the file
to a server, show the progress of a batch there, and cancel it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar
from urllib.parse import quote

import httpx2
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from jaxserve.api.app import BATCH_ENDPOINTS, create_app
from jaxserve.api.batch.job import BatchSettings
from jaxserve.api.batch.request import engine_ready, route_handlers
from jaxserve.api.batch.runner import BatchRunner
from jaxserve.api.body_cost import max_line_bytes
from jaxserve.api.state import EngineProtocol, ServerState
from jaxserve.bench.load import root_url
from jaxserve.cli.options import api_key, load_config
from jaxserve.cli.progress import StartProgress
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.config import Config
from jaxserve.errors import ConfigError, EngineDeadError, UnexpectedEndError
from jaxserve.log import configure_logging
from jaxserve.store import BATCH_LINE, BatchRecord, BatchStatus, NewBatch, Store, Validation, Validator, normalize_url
from jaxserve.store.directory import FILES, remove
from jaxserve.store.jsonl import read_lines

RETRY_INTERVAL = 2.0  # seconds between two attempts to reach a server that was reached before
RETRY_SECONDS = 600.0  # seconds of attempts; a server's start with an empty cache takes minutes
_AWAY = (502, 503, 504)  # statuses of a server that restarts, or of the proxy in front of it
_BATCH = ("id", "status", "request_counts", "errors", "usage", "output_file_id", "error_file_id", "metadata")

T = TypeVar("T")


class NotReachedError(ConfigError):
    """The server cannot be reached or is not ready now. It may be later."""


class BatchServer:
    """A client of a server's files and batches. Its methods raise ConfigError with the server's message.

    options: base_url and api_key of the command
    """

    def __init__(self, options: argparse.Namespace) -> None:
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._base_url = options.base_url
        try:
            self._http = httpx2.Client(base_url=f"{self._base_url}/v1", headers=headers, timeout=600)
        except httpx2.InvalidURL as error:
            raise self._not_reached(error) from None

    def __enter__(self) -> BatchServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def upload(self, path: Path) -> str:
        """Upload the input of a batch and return its id. Raises ConfigError."""
        try:
            data = open(path, "rb")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        with data:
            parts = {"file": (path.name, data)}
            return self._call("POST", "/files", ("id",), data={"purpose": "batch"}, files=parts)["id"]

    def create(self, body: dict[str, Any], key: str) -> dict[str, Any]:
        """Create a batch. A second call with the same key returns the same batch. Raises ConfigError."""
        return self._call("POST", "/batches", _BATCH, json=body, headers={"Idempotency-Key": key})

    def batch(self, batch_id: str) -> dict[str, Any]:
        """Return the state of a batch."""
        return self._call("GET", f"/batches/{quote(batch_id, safe='')}", _BATCH)

    def cancel(self, batch_id: str) -> str:
        """Cancel a batch and return its status."""
        return self._call("POST", f"/batches/{quote(batch_id, safe='')}/cancel", _BATCH)["status"]

    def download(self, file_id: str, target: Path) -> None:
        """Write a file of the server to `target`, whole or not at all. Raises ConfigError."""
        temporary = target.with_name(f"{target.name}.part")
        try:
            with self._http.stream("GET", f"/files/{file_id}/content") as answer, open(temporary, "wb") as file:
                if answer.status_code != httpx2.codes.OK:
                    answer.read()
                    self._check(answer)
                for data in answer.iter_bytes():
                    file.write(data)
            temporary.rename(target)
        except httpx2.HTTPError as error:
            raise self._not_reached(error) from None
        except OSError as error:
            raise ConfigError(f"cannot write {target}: {error.strerror}", fix="name another output with -o") from None
        finally:
            temporary.unlink(missing_ok=True)

    def _call(self, method: str, path: str, needed: tuple[str, ...], **keys: Any) -> dict[str, Any]:
        """Return the server's answer, which must have the fields `needed`."""
        try:
            answer = self._http.request(method, path, **keys)
        except httpx2.HTTPError as error:
            raise self._not_reached(error) from None
        self._check(answer)
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict) or any(name not in found for name in needed):
            raise ConfigError(f"what answers at {self._base_url} is no such server", fix="set --base-url")
        return found

    def _check(self, answer: httpx2.Response) -> None:
        if answer.status_code >= httpx2.codes.BAD_REQUEST:
            kind = NotReachedError if answer.status_code in _AWAY else ConfigError
            raise kind(f"the server answered {answer.status_code}: {_message(answer)}")

    def _not_reached(self, error: Exception) -> NotReachedError:
        return NotReachedError(f"cannot reach {self._base_url}: {error}", fix="set --base-url")


def _message(answer: httpx2.Response) -> str:
    try:
        return answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return " ".join(answer.text[:200].split())


def until_reached(call: Callable[[], T], note: Callable[[str], None], batch_id: str) -> T:
    """Return the result of `call`. While the server cannot be reached, try again for RETRY_SECONDS.

    Raises ConfigError.
    """
    end = time.monotonic() + RETRY_SECONDS
    told = False
    while True:
        try:
            found = call()
        except NotReachedError as error:
            if time.monotonic() >= end:
                again = f"follow it later: jaxserve batch status {batch_id} --wait"
                raise ConfigError(f"{error}, for {RETRY_SECONDS:.0f} s", fix=again) from None
            if not told:
                note(f"{error}; it is tried again")
            told = True
            time.sleep(RETRY_INTERVAL)
        else:
            if told:
                note("the server is reached again")
            return found


UNLIMITED_SECONDS = 100 * 365 * 24 * 3600  # seconds of the completion window
UNLIMITED_REQUESTS = 10**9  # requests of a file; only a digest of each id is kept in memory
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class OfflineBatch:
    """The files of a run. `errors` gets the failed requests. A file without a line is not created."""

    input: Path
    output: Path
    errors: Path

    @property
    def directory(self) -> Path:
        """Directory of the store during the run."""
        return self.output.with_name(self.output.name + ".jaxserve")

    def check(self) -> None:
        """Raise ConfigError if the files cannot be used.

        The input or a directory is missing, both outputs are one file, or an output exists that this run did not begin.
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
    """Return the endpoint of the first request, and the errors in the file. The model's name is not checked."""
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
    app = create_app(engine, config)
    state: ServerState = app.state.server
    settings = BatchSettings(
        known_model=state.serves,
        ready=lambda: engine_ready(engine.check_ready),
        max_line_bytes=max_line_bytes(config.server),
        max_lines=UNLIMITED_REQUESTS,
    )
    # A quarter more requests than the engine runs, so that the next one is queued when a slot becomes free.
    num_in_flight = engine.info.max_num_seqs * 5 // 4
    return BatchRunner(store, route_handlers(app, BATCH_ENDPOINTS), settings, lambda lines: num_in_flight)


async def _ensure(batch: OfflineBatch, endpoint: str, runner: BatchRunner) -> str:
    """Return the id of the batch in the store. Create the batch if there is none.

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
        # Beside the target, which may be on another file system. The name is the same in the next call.
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


STATUS_INTERVAL = 1.0  # seconds between two requests for a batch's status
MAX_SHOWN_ERRORS = 20


def run(words: Sequence[str]) -> int:
    """Run the command `batch`. Raises ConfigError for an unknown argument."""
    options, rest = _parser().parse_known_args(words)
    if (output := getattr(options, "output", None)) is not None:
        _check_output(output)  # before a batch runs, not after it
    if rest and options.run is not _run:
        raise ConfigError(f"unknown argument {rest[0]}", fix="see jaxserve batch --help")
    return options.run(options, rest)


def _check_output(output: Path) -> None:
    """Raise ConfigError if no file can be written at `output`."""
    if not output.name:
        raise ConfigError(f"-o {str(output)!r} is no name of a file")
    if not output.parent.is_dir():
        raise ConfigError(f"there is no directory {output.parent}")
    for path in (output, errors_path(output)):
        if path.is_dir():
            raise ConfigError(f"cannot write {path}: it is a directory", fix="name another output with -o")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"should be KEY=VALUE, not {text!r}")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxserve batch", description=__doc__)
    commands = parser.add_subparsers(required=True)

    run = commands.add_parser("run", help="run a file without a server; takes the flags of launch", allow_abbrev=False)
    run.add_argument("input", type=Path, help="JSONL, one request per line")
    run.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        help="output file; after a crash the same call resumes, with the state kept in OUTPUT.jaxserve",
    )
    run.add_argument(
        "--errors", type=Path, help="file for failed requests; default: OUTPUT with .errors before its suffix"
    )
    run.set_defaults(run=_run)

    submit = commands.add_parser("submit", help="upload a file to a server and run it there")
    submit.add_argument("input", type=Path)
    submit.add_argument("--endpoint", default="/v1/chat/completions")
    submit.add_argument("--metadata", action="append", type=_pair, default=[], metavar="KEY=VALUE")
    submit.add_argument("--wait", action="store_true", help="show the progress until the end")
    submit.add_argument("-o", "--output", type=Path, help="download the output here; implies --wait")
    submit.set_defaults(run=_submit)

    status = commands.add_parser("status", help="show the progress of a batch at a server")
    status.add_argument("batch_id")
    status.add_argument("--wait", action="store_true")
    status.add_argument("-o", "--output", type=Path, help="download the output here; implies --wait")
    status.set_defaults(run=_status)

    cancel = commands.add_parser("cancel", help="cancel a batch at a server; finished results are kept")
    cancel.add_argument("batch_id")
    cancel.set_defaults(run=_cancel)

    for command in (submit, status, cancel):
        command.add_argument("--base-url", type=root_url, default="http://127.0.0.1:8000", help="with or without /v1")
        command.add_argument("--api-key", type=api_key, default=os.environ.get("JAXSERVE_SERVER__API_KEY"))
    return parser


# in this process


def _run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    config = load_config(rest, os.environ)
    configure_logging(config.logging)
    batch = OfflineBatch(options.input, options.output, options.errors or errors_path(options.output))
    batch.check()
    endpoint, found = validate(batch, max_line_bytes(config.server))
    if found.errors:
        _show_errors([asdict(error) for error in found.errors], sys.stderr)
        return 1
    record = asyncio.run(_run_here(batch, endpoint, config))
    _show_errors([asdict(error) for error in record.errors], sys.stderr)
    print(
        f"{record.status}: {record.completed} of {record.total} in {batch.output}"
        + (f", {record.failed} failed in {batch.errors}" if record.failed else "")
    )
    return 0 if record.status == "completed" and not record.failed else 1


async def _run_here(batch: OfflineBatch, endpoint: str, config: Config) -> BatchRecord:
    engine = AsyncEngine(config)

    def _show_record(record: BatchRecord) -> None:
        if engine.status.phase == "dead":
            raise engine.failure or UnexpectedEndError(
                f"the engine is dead: {engine.status.detail}",
                fix="see the lines above; finished requests are kept, and the same call goes on",
            )
        bar.show(record.total, record.completed, record.failed)

    try:
        try:
            await _start(engine)
        except EngineDeadError as error:
            raise UnexpectedEndError(str(error), fix="see the lines above") from None
        with _Bar() as bar:
            return await run_offline(batch, endpoint, engine, config, _show_record)
    finally:
        await engine.stop()


async def _start(engine: AsyncEngine) -> None:
    starting = asyncio.create_task(engine.start())
    try:
        with StartProgress() as progress:
            while not starting.done():
                change = asyncio.ensure_future(engine.next_status())
                await asyncio.wait((starting, change), return_when=asyncio.FIRST_COMPLETED)
                if change.done():
                    progress.show(change.result())
                change.cancel()
    finally:
        starting.cancel()  # after Ctrl-C nothing would read its error
    await starting


def errors_path(output: Path) -> Path:
    """Return the default file for failed requests."""
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def _show_errors(errors: Sequence[Mapping[str, Any]], file: TextIO) -> None:
    for error in errors[:MAX_SHOWN_ERRORS]:
        where = "" if error["line"] is None else f"line {error['line']}: "
        print(f"jaxserve: {where}{error['code']}: {error['message']}", file=file)
    if len(errors) > MAX_SHOWN_ERRORS:
        print(f"jaxserve: and {len(errors) - MAX_SHOWN_ERRORS} more", file=file)


class _Bar:
    """A progress bar of finished requests. It prints nothing if stderr is not a terminal."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("batch", total=None, failed="")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """Write a line above the bar."""
        self._progress.console.print(f"jaxserve: {text}", markup=False, highlight=False, soft_wrap=True)

    def show(self, total: int, completed: int, failed: int) -> None:
        note = f"{failed} failed" if failed else ""
        self._progress.update(self._task, total=total or None, completed=completed + failed, failed=note)


# at a server


def _submit(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if not options.input.is_file():
        raise ConfigError(f"there is no file {options.input}")
    with BatchServer(options) as server:
        body = {
            "endpoint": options.endpoint,
            "completion_window": "24h",
            "metadata": dict(options.metadata) or None,
            "input_file_id": server.upload(options.input),
        }
        batch = server.create(body, uuid.uuid4().hex)
        print(batch["id"], flush=True)  # for another command, while this one waits
        return _follow(server, batch, options) if options.wait or options.output else 0


def _status(options: argparse.Namespace, rest: Sequence[str]) -> int:
    with BatchServer(options) as server:
        batch = server.batch(options.batch_id)
        if options.wait or options.output:
            return _follow(server, batch, options)
    _show(batch)
    return 0


def _cancel(options: argparse.Namespace, rest: Sequence[str]) -> int:
    with BatchServer(options) as server:
        print(server.cancel(options.batch_id))
    return 0


def _follow(server: BatchServer, batch: dict[str, Any], options: argparse.Namespace) -> int:
    """Show a batch until its end, then download its files. Return 0 if every request succeeded, else 1."""
    shown_pause = ""
    with _Bar() as bar:
        while not BatchStatus(batch["status"]).terminal:
            bar.show(**batch["request_counts"])
            pause = " ".join(error["message"] for error in _errors(batch))
            if pause != shown_pause:
                bar.note(pause or "the batch goes on")
            shown_pause = pause
            time.sleep(STATUS_INTERVAL)
            batch = until_reached(partial(server.batch, batch["id"]), bar.note, batch["id"])
        bar.show(**batch["request_counts"])
    _show(batch)
    if options.output:
        targets = {"output_file_id": options.output, "error_file_id": errors_path(options.output)}
        for file_id, target in ((batch[name], target) for name, target in targets.items()):
            if file_id is not None:
                until_reached(partial(server.download, file_id, target), _note, batch["id"])
    return 0 if batch["status"] == "completed" and not batch["request_counts"]["failed"] else 1


def _note(text: str) -> None:
    print(f"jaxserve: {text}", file=sys.stderr)


def _errors(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the errors of a batch. If it has not ended, they are the reasons why it is paused."""
    return (batch["errors"] or {"data": []})["data"]


def _show(batch: dict[str, Any]) -> None:
    counts = batch["request_counts"]
    usage = batch["usage"]
    rows = {
        "batch": batch["id"],
        "status": batch["status"],
        "requests": f"{counts['completed']} completed, {counts['failed']} failed of {counts['total']}",
        "tokens": f"{usage['input_tokens']} in, {usage['output_tokens']} out" if usage else None,
        "output": batch["output_file_id"],
        "errors": batch["error_file_id"],
        "metadata": json.dumps(batch["metadata"]) if batch["metadata"] else None,
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, str(value))
    Console(markup=False).print(table)
    _show_errors(_errors(batch), sys.stdout)
