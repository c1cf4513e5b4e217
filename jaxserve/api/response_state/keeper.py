"""Store a response before its client learns that it has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson

from jaxserve.api.response_state.items import stored_output
from jaxserve.store.records import NewResponse, ResponseStatus
from jaxserve.store.responses import ResponseStore

Json = dict[str, Any]


class StoreKeeper:
    """Puts one foreground response into the store when it has ended.

    new: the response before it has run
    release: unlocks its conversation, so that the client can continue it once it has read the final event
    """

    def __init__(self, store: ResponseStore, new: NewResponse, release: Callable[[], None]) -> None:
        self._store = store
        self.new = new
        self._release = release

    async def begin(self) -> None: ...

    async def finish(self, response: Json, output_items: list[Json]) -> None:
        """Raises StorageError if the disk refuses."""
        ended = replace(self.new, status=ResponseStatus(response["status"]), body=without_output(response))
        try:
            await self._store.insert(ended, stored_output(output_items))
        finally:
            self._release()


def without_output(response: Json) -> bytes:
    return orjson.dumps({name: value for name, value in response.items() if name != "output"})
