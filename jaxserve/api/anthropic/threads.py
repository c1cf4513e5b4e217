"""Keep threads of Messages. A request that continues a thread brings only the new messages.

It is answered as if it had brought the whole conversation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import orjson
from pydantic import TypeAdapter

from jaxserve.api.anthropic.protocol import (
    Blocks,
    CountTokensRequest,
    EarlierThread,
    InputMessage,
    MessagesRequest,
    MessageTool,
)
from jaxserve.api.anthropic.task import check_blocks, system_text
from jaxserve.api.body_cost import LARGE_BYTES
from jaxserve.api.fields import NestedObject
from jaxserve.api.keys import Caller
from jaxserve.api.process_group import NeedsMainProcessError
from jaxserve.api.ranges import MAX_MESSAGES
from jaxserve.api.state import ServerState
from jaxserve.errors import HTTPError, InvalidValueError, ThreadError, ThreadsUnsupportedError
from jaxserve.store.threads import ThreadHistory, ThreadStore

B = TypeVar("B", bound=CountTokensRequest)

_MESSAGES = TypeAdapter(list[InputMessage])


class ThreadHead(NestedObject):
    """The fields of a thread's first request that hold for the whole thread. Later requests leave them out."""

    system: str | Blocks | None = None
    tools: list[MessageTool] | None = None


def thread_store(body: CountTokensRequest, state: ServerState) -> ThreadStore | None:
    """Return the store of threads if the body has a thread; else None.

    Raises NeedsMainProcessError in a worker, because the main process has the store. Raises ThreadsUnsupportedError
    without a store.
    """
    if body.thread is None:
        return None
    if state.group is not None and state.group.is_worker:
        raise NeedsMainProcessError
    if state.store is None:
        message = "thread: this server runs without a store and keeps no threads. Send the whole conversation."
        raise ThreadsUnsupportedError(message, param="thread")
    return state.store.threads


async def read_history(body: CountTokensRequest, state: ServerState, caller: Caller) -> ThreadHistory | None:
    """Return the messages before the body's own; None unless it continues a thread. Raises a ThreadError."""
    store = thread_store(body, state)
    previous_id = _continued(body)
    return None if store is None or previous_id is None else await store.history(previous_id, owner=caller.sees)


def _continued(body: CountTokensRequest) -> str | None:
    """Return the id of the reply that the body continues; None if it continues none."""
    return body.thread.previous_message_id if isinstance(body.thread, EarlierThread) else None


async def whole_conversation(body: B, history: ThreadHistory | None, state: ServerState) -> B:
    """Return the body with its thread's fields and messages. Raises a RequestError that names the body's own field."""
    if history is None:
        return body
    # so that errors count only the client's own messages
    check_blocks(None, body.messages, lambda kind: None, takes_pictures=state.takes_pictures)

    def joined() -> B:
        head = ThreadHead.model_validate_json(history.head)
        if differing := _differing(body, head):
            message = f"thread: differing field(s): {', '.join(differing)}. The thread has them: leave them out."
            raise ThreadError(message, param="thread", code="thread_fingerprint_mismatch")
        messages = [each for turn in history.turns for each in _MESSAGES.validate_json(turn)] + body.messages
        if len(messages) > MAX_MESSAGES:
            message = f"messages: with its thread the request has more than {MAX_MESSAGES} messages."
            raise InvalidValueError(message, param="messages")
        whole = body.model_copy(update={"messages": messages, "system": head.system, "tools": head.tools})
        whole.note_size(body.size + history.size)
        return whole

    size = history.size
    return await state.body_work.run(joined, size) if size > LARGE_BYTES else joined()


def _differing(body: CountTokensRequest, head: ThreadHead) -> list[str]:
    """Return the names of the body's fields that differ from its thread. A field that it leaves out does not differ."""
    system = system_text(body.system)  # Claude Code still sends its header, which changes
    has_other_system = bool(system) and system != system_text(head.system)
    has_other_tools = body.tools is not None and _known(body.tools) != _known(head.tools or [])
    return ["system"] * has_other_system + ["tools"] * has_other_tools


def _known(tools: list[MessageTool]) -> list[dict[str, Any]]:
    """Return tools without marks such as cache_control, which may move."""
    return [tool.model_dump(include=set(MessageTool.model_fields)) for tool in tools]


@dataclass(frozen=True)
class KeptTurn:
    """One request of a thread, which is stored once it is answered.

    body: the body as the client sent it. release: lets another request continue the same reply
    """

    state: ServerState
    store: ThreadStore
    body: MessagesRequest
    owner: str
    release: Callable[[], None]

    @classmethod
    def of(cls, body: MessagesRequest, state: ServerState, caller: Caller) -> Self | None:
        """Claim the reply that the body continues; None if it has no thread. Raises ThreadError if it is claimed."""
        store = thread_store(body, state)
        previous_id = _continued(body)
        if store is None:
            return None
        release = (lambda: None) if previous_id is None else store.claim(previous_id)
        return cls(state, store, body, caller.owner, release)

    async def keep(self, reply_id: str, content: list[dict[str, Any]]) -> None:
        """Store the turn durably and release it.

        If the store refuses it, the answer is sent all the same. When the client continues the thread, an error says
        that it is unknown, and the client sends the whole conversation.
        """

        def turn() -> bytes:
            sent = [message.model_dump_json(exclude_unset=True).encode() for message in self.body.messages]
            return b"[%b]" % b",".join([*sent, orjson.dumps({"role": "assistant", "content": content})])

        size = self.body.size
        previous_id = _continued(self.body)
        try:
            body = await self.state.body_work.run(turn, size) if size > LARGE_BYTES else turn()
            if previous_id is not None:
                await self.store.extend(previous_id, reply_id, body)
            else:
                head = self.body.model_dump_json(include=set(ThreadHead.model_fields), exclude_unset=True).encode()
                await self.store.begin(reply_id, body, head, owner=self.owner)
        except HTTPError:
            pass  # the store has logged it
        finally:
            self.release()
