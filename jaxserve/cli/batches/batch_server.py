"""Files and batches of a server, for `jaxserve batch submit|status|cancel`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2

from jaxserve.errors import ConfigError

RETRY_INTERVAL = 2.0  # seconds between two attempts to reach a server that was reached before
RETRY_SECONDS = 600.0  # a start with a cold cache takes minutes
_AWAY = (502, 503, 504)  # statuses of a server, or of the proxy before it, that is started again
_BATCH = ("id", "status", "request_counts", "errors", "usage", "output_file_id", "error_file_id", "metadata")

T = TypeVar("T")


class NotReachedError(ConfigError):
    """The server is not reached, or not ready. It may be later."""


class BatchServer:
    """Client of a server's files and batches. Raises ConfigError with the server's message.

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
    """Return what `call` returns. If the server is not reached, try again for RETRY_SECONDS. Raises ConfigError."""
    end, told = time.monotonic() + RETRY_SECONDS, False
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
