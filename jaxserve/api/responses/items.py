"""Give items their ids, and turn them into the form that the store keeps, and back."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from jaxserve.api.responses.protocol import InputItem
from jaxserve.store.records import StoredItem

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def new_item_id(kind: str | None) -> str:
    return f"{_PREFIXES.get(kind or 'message', 'item')}_{secrets.token_hex(24)}"


def from_text(text: str) -> InputItem:
    """Return the item that an input of plain text stands for."""
    return InputItem(type="message", role="user", content=text)


def stored_items(items: Iterable[InputItem]) -> tuple[StoredItem, ...]:
    """Return items as they were sent, each with an id. An item without one, or with an earlier one's, gets a new id."""
    seen: set[str] = set()
    found = []
    for item in items:
        if not item.id or item.id in seen:
            item = item.model_copy(update={"id": new_item_id(item.type)})
        assert item.id is not None
        seen.add(item.id)
        found.append(StoredItem(item.id, item.model_dump_json(exclude_unset=True).encode()))
    return tuple(found)


def stored_output(output: Sequence[dict[str, Any]]) -> tuple[StoredItem, ...]:
    return tuple(StoredItem(item["id"], orjson.dumps(item)) for item in output)


def loaded_items(items: Iterable[StoredItem]) -> list[InputItem]:
    return [InputItem.model_validate_json(item.body) for item in items]
