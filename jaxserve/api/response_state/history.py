"""Find what a request for a response continues: a chain of responses, or a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxserve.api.response_state.items import from_text, stored_items
from jaxserve.api.response_state.service import StoredResponses
from jaxserve.api.responses.protocol import ConversationName, InputItem, ResponsesRequest
from jaxserve.api.responses.task import EarlierItems, ResponseName
from jaxserve.api.shared.body_cost import LARGE_BYTES
from jaxserve.api.shared.keys import Caller
from jaxserve.api.shared.state import ServerState
from jaxserve.errors import InvalidValueError, NotFoundError
from jaxserve.store.records import History, NewResponse, ResponseStatus, StoredItem


@dataclass(frozen=True)
class OpenedResponse:
    """A request with all that it continues. Its conversation is locked until `release` is called."""

    name: ResponseName
    history: History
    earlier: EarlierItems
    release: Callable[[], None]


async def open_response(body: ResponsesRequest, caller: Caller, stored: StoredResponses | None) -> OpenedResponse:
    """Name a response, lock its conversation and read what is before it. Raises a RequestError."""
    keeps = stored is not None and body.store is not False
    if body.background and not keeps:
        raise InvalidValueError("background can only be used when `store` is true", param="background")
    conversation_id = _conversation_id(body)
    if conversation_id is not None and stored is not None and not keeps:
        raise InvalidValueError("conversation can only be used when `store` is true", param="conversation")
    if conversation_id is not None and stored is not None:  # before its lock: another key's is unknown, not locked
        await stored.store.get_conversation(conversation_id, owner=caller.sees)
    name = ResponseName(store=keeps, background=bool(body.background), conversation_id=conversation_id)
    release = (lambda: None) if stored is None else stored.locks.lock(conversation_id, name.id)
    try:
        history, earlier = await read_history(body, caller.sees, stored)
    except BaseException:
        release()
        raise
    return OpenedResponse(name, history, earlier, release)


def _conversation_id(body: ResponsesRequest) -> str | None:
    """Raises InvalidValueError if the body continues a response as well."""
    named = body.conversation
    if named is not None and body.previous_response_id is not None:
        message = "previous_response_id and conversation cannot be used together."
        raise InvalidValueError(message, param="previous_response_id")
    return named.id if isinstance(named, ConversationName) else named


async def read_history(
    body: ResponsesRequest, sees: str | None, stored: StoredResponses | None
) -> tuple[History, EarlierItems]:
    """Return what comes before a body's input, and the items that it refers to. sees: as Caller.sees

    Raises InvalidValueError for an unknown response or item, and NotFoundError for an unknown conversation.
    """
    history = await _history(body, sees, stored)
    references = _references(body)
    referred = await _referred(references, sees, stored)
    size = history.bytes + sum(len(referred[item_id]) for _, item_id in references)
    return history, EarlierItems([item.body for item in history.items], referred, size)


async def _history(body: ResponsesRequest, sees: str | None, stored: StoredResponses | None) -> History:
    previous_id, conversation_id = body.previous_response_id, _conversation_id(body)
    if previous_id is not None:
        if stored is not None:
            return await stored.store.chain(previous_id, owner=sees)
        message = f"Previous response with id '{previous_id}' not found."
        raise InvalidValueError(message, param="previous_response_id", code="previous_response_not_found")
    if conversation_id is not None:
        if stored is not None:
            return await stored.store.conversation_history(conversation_id, owner=sees)
        raise NotFoundError(f"Conversation with id '{conversation_id}' not found.", param="conversation")
    return History()


def _references(body: ResponsesRequest) -> list[tuple[str, str]]:
    """List (field, id of an item) of the references in a body."""
    items = body.input if isinstance(body.input, list) else []
    return [
        (f"input.{place}", item.id) for place, item in enumerate(items) if item.type == "item_reference" and item.id
    ]


async def _referred(
    references: Sequence[tuple[str, str]], sees: str | None, stored: StoredResponses | None
) -> Mapping[str, bytes]:
    if not references:
        return {}
    found = {} if stored is None else await stored.store.find_items([name for _, name in references], owner=sees)
    for param, item_id in references:
        if item_id not in found:
            raise InvalidValueError(f"Item with id '{item_id}' not found.", param=param)
    return found


async def new_response(
    body: ResponsesRequest, opened: OpenedResponse, state: ServerState, caller: Caller
) -> NewResponse:
    """Return the response as it is stored before it has run: its own input, with references replaced."""

    def work() -> tuple[StoredItem, ...]:
        items = [from_text(body.input)] if isinstance(body.input, str) else body.input or []
        return stored_items(_resolved(item, opened.earlier.referred) for item in items)

    return NewResponse(
        id=opened.name.id,
        status=ResponseStatus.QUEUED,
        body=b"{}",
        input=await state.body_work.run(work, body.size) if body.size > LARGE_BYTES else work(),
        owner=caller.owner,
        previous_id=body.previous_response_id,
        conversation_id=opened.name.conversation_id,
        history=History((), opened.history.turns, opened.history.bytes),
    )


def _resolved(item: InputItem, referred: Mapping[str, bytes]) -> InputItem:
    found = referred.get(item.id or "") if item.type == "item_reference" else None
    return item if found is None else InputItem.model_validate_json(found)
