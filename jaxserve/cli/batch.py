"""`jaxserve batch run|submit|status|cancel`: run a batch file in this process, or at a server."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import httpx2
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from jaxserve.api.shared.body_cost import max_line_bytes
from jaxserve.bench.load import root_url
from jaxserve.cli.offline_batch import OfflineBatch, run_offline, validate
from jaxserve.cli.options.settings import load_config
from jaxserve.cli.terminal.progress import StartProgress
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.log import configure_logging
from jaxserve.store import BatchRecord, BatchStatus

STATUS_INTERVAL = 1.0  # seconds between two requests for a batch's status
MAX_SHOWN_ERRORS = 20


def run(words: Sequence[str]) -> int:
    """Run the command `batch`. Raises ConfigError for an unknown argument."""
    options, rest = _parser().parse_known_args(words)
    if (output := getattr(options, "output", None)) is not None and not output.parent.is_dir():
        raise ConfigError(f"there is no directory {output.parent}")  # now, not once a batch has run
    if rest and options.run is not _run:
        raise ConfigError(f"unknown argument {rest[0]}", fix="see jaxserve batch --help")
    return options.run(options, rest)


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
    submit.add_argument("--metadata", action="append", default=[], metavar="KEY=VALUE")
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
        command.add_argument("--api-key", default=os.environ.get("JAXSERVE_SERVER__API_KEY"))
    return parser


# in this process


def _run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    config = load_config(rest, os.environ)
    configure_logging(config.logging)
    batch = OfflineBatch(options.input, options.output, options.errors or _errors_path(options.output))
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
    try:
        await _start(engine)
        with _Bar() as bar:
            return await run_offline(
                batch, endpoint, engine, config, lambda record: bar.show(record.total, record.completed, record.failed)
            )
    finally:
        await engine.stop()


async def _start(engine: AsyncEngine) -> None:
    starting = asyncio.create_task(engine.start())
    with StartProgress() as progress:
        while not starting.done():
            change = asyncio.ensure_future(engine.next_status())
            await asyncio.wait((starting, change), return_when=asyncio.FIRST_COMPLETED)
            if change.done():
                progress.show(change.result())
            change.cancel()
    await starting


def _errors_path(output: Path) -> Path:
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def _show_errors(errors: Sequence[Mapping[str, Any]], file: TextIO) -> None:
    for error in errors[:MAX_SHOWN_ERRORS]:
        where = "" if error["line"] is None else f"line {error['line']}: "
        print(f"jaxserve: {where}{error['code']}: {error['message']}", file=file)
    if len(errors) > MAX_SHOWN_ERRORS:
        print(f"jaxserve: and {len(errors) - MAX_SHOWN_ERRORS} more", file=file)


class _Bar:
    """A progress bar of finished requests. Prints nothing if stderr is no terminal."""

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


class _BatchClient:
    """Client of a server's files and batches. Raises ConfigError with the server's message."""

    def __init__(self, options: argparse.Namespace) -> None:
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._base_url = options.base_url
        try:
            self._http = httpx2.Client(base_url=f"{self._base_url}/v1", headers=headers, timeout=600)
        except httpx2.InvalidURL as error:
            raise ConfigError(f"cannot reach {self._base_url}: {error}", fix="set --base-url") from None

    def __enter__(self) -> _BatchClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def call(self, method: str, path: str, **keys: Any) -> dict[str, Any]:
        """Return the server's answer. Raises ConfigError if it refuses, is not reached, or answers no JSON."""
        answer = self._checked(lambda: self._http.request(method, path, **keys))
        try:
            return answer.json()
        except ValueError:
            raise ConfigError(f"what answers at {self._base_url} is no such server", fix="set --base-url") from None

    def download(self, file_id: str, target: Path) -> None:
        """Write a file of the server to `target`. Raises ConfigError if the server refuses, or it cannot be written."""
        temporary = target.with_name(f"{target.name}.part")
        try:
            with self._http.stream("GET", f"/files/{file_id}/content") as answer, open(temporary, "wb") as file:
                if answer.status_code != 200:
                    raise ConfigError(f"the server answered {answer.status_code} for {file_id}")
                for data in answer.iter_bytes():
                    file.write(data)
            temporary.rename(target)
        except httpx2.HTTPError as error:
            raise ConfigError(f"cannot reach {self._base_url}: {error}", fix="set --base-url") from None
        except OSError as error:
            raise ConfigError(f"cannot write {target}: {error.strerror}", fix="name another output with -o") from None
        finally:
            temporary.unlink(missing_ok=True)

    def _checked(self, send: Callable[[], httpx2.Response]) -> httpx2.Response:
        try:
            answer = send()
        except httpx2.HTTPError as error:
            raise ConfigError(f"cannot reach {self._base_url}: {error}", fix="set --base-url") from None
        if answer.status_code >= 400:
            raise ConfigError(f"the server answered {answer.status_code}: {_message(answer)}")
        return answer


def _message(answer: httpx2.Response) -> str:
    try:
        return answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


def _submit(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if not options.input.is_file():
        raise ConfigError(f"there is no file {options.input}")
    body = {
        "endpoint": options.endpoint,
        "completion_window": "24h",
        "metadata": dict(pair.partition("=")[::2] for pair in options.metadata) or None,
    }
    with _BatchClient(options) as server:
        with open(options.input, "rb") as data:
            parts = {"file": (options.input.name, data)}
            body["input_file_id"] = server.call("POST", "/files", data={"purpose": "batch"}, files=parts)["id"]
        batch = server.call("POST", "/batches", json=body, headers={"Idempotency-Key": uuid.uuid4().hex})
        print(batch["id"])
        return _follow(server, batch, options) if options.wait or options.output else 0


def _status(options: argparse.Namespace, rest: Sequence[str]) -> int:
    with _BatchClient(options) as server:
        batch = server.call("GET", f"/batches/{options.batch_id}")
        if options.wait or options.output:
            return _follow(server, batch, options)
    _show(batch)
    return 0


def _cancel(options: argparse.Namespace, rest: Sequence[str]) -> int:
    with _BatchClient(options) as server:
        print(server.call("POST", f"/batches/{options.batch_id}/cancel")["status"])
    return 0


def _follow(server: _BatchClient, batch: dict[str, Any], options: argparse.Namespace) -> int:
    """Show a batch until its end, then download its files. Returns 0 if every request succeeded, else 1."""
    shown_pause = ""
    with _Bar() as bar:
        while not BatchStatus(batch["status"]).terminal:
            bar.show(**batch["request_counts"])
            pause = " ".join(error["message"] for error in _errors(batch))
            if pause != shown_pause:
                bar.note(pause or "the batch goes on")
            shown_pause = pause
            time.sleep(STATUS_INTERVAL)
            batch = server.call("GET", f"/batches/{batch['id']}")
        bar.show(**batch["request_counts"])
    _show(batch)
    if options.output:
        targets = {"output_file_id": options.output, "error_file_id": _errors_path(options.output)}
        for file_id, target in ((batch[name], target) for name, target in targets.items()):
            if file_id is not None:
                server.download(file_id, target)
    return 0 if batch["status"] == "completed" and not batch["request_counts"]["failed"] else 1


def _errors(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the errors of a batch; of one that has not ended, the reasons why it is paused."""
    return (batch["errors"] or {"data": []})["data"]


def _show(batch: dict[str, Any]) -> None:
    counts, usage = batch["request_counts"], batch["usage"]
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
