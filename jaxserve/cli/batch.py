"""`jaxserve batch run|submit|status|cancel`: run a batch file in this process, or at a server."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from jaxserve.api.body_cost import max_line_bytes
from jaxserve.bench.load import root_url
from jaxserve.cli.batches.batch_server import BatchServer, until_reached
from jaxserve.cli.batches.offline_batch import OfflineBatch, run_offline, validate
from jaxserve.cli.options.arguments import api_key
from jaxserve.cli.options.settings import load_config
from jaxserve.cli.terminal.progress import StartProgress
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.config import Config
from jaxserve.errors import ConfigError, EngineDeadError, UnexpectedEndError
from jaxserve.log import configure_logging
from jaxserve.store import BatchRecord, BatchStatus

STATUS_INTERVAL = 1.0  # seconds between two requests for a batch's status
MAX_SHOWN_ERRORS = 20


def run(words: Sequence[str]) -> int:
    """Run the command `batch`. Raises ConfigError for an unknown argument."""
    options, rest = _parser().parse_known_args(words)
    if (output := getattr(options, "output", None)) is not None:
        _check_output(output)  # now, not once a batch has run
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
        starting.cancel()  # Ctrl-C: nobody would read its error
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
