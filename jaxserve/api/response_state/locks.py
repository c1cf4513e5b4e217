"""Which conversations a response works on now. One server owns a store, so its memory suffices."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.errors import InvalidValueError


class ConversationLocks:
    """Each conversation is locked by at most one response."""

    def __init__(self) -> None:
        self._holders: dict[str, str] = {}

    def lock(self, conversation_id: str | None, response_id: str) -> Callable[[], None]:
        """Lock a conversation, if there is one; returns what unlocks it. Raises InvalidValueError if it is locked."""
        if conversation_id is None:
            return lambda: None
        if conversation_id in self._holders:
            message = "Another response is working on this conversation. Try again when it has ended."
            raise InvalidValueError(message, param="conversation", code="conversation_locked")
        self._holders[conversation_id] = response_id
        return lambda: self.unlock(conversation_id, response_id)

    def unlock(self, conversation_id: str | None, response_id: str) -> None:
        """Unlock a conversation if this response locked it."""
        if conversation_id is not None and self._holders.get(conversation_id) == response_id:
            del self._holders[conversation_id]
