"""SGLang's sessions: requests that begin with the tokens of an earlier one, prompt and output, without sending them.

A session is a tree of turns: each is the whole context of one request. Only tokens are kept, in this process; that
their keys and values need not be computed again is the prefix cache's doing.
"""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from jaxserve.api.protocol.common import SessionParams
from jaxserve.api.protocol.sessions import OpenSessionRequest
from jaxserve.errors import InvalidValueError, NotFoundError, QueueFullError
from jaxserve.text.tokenizer import Tokenizer

MAX_SESSIONS = 4096
MAX_TOKENS = 2**23  # of all sessions together: 32 MiB

Abort = Callable[[str], Awaitable[bool]]


@dataclass(eq=False)
class Turn:
    """One request of a session. tokens: its prompt, and its output as far as it has come."""

    request_id: str
    tokens: array[int]
    num_prompt: int
    parent: Turn | None = None
    finished: bool = False


@dataclass(eq=False)
class Session:
    capacity: int
    streaming: bool
    timeout: float | None
    turns: dict[str, Turn] = field(default_factory=dict)
    used: float = field(default_factory=time.monotonic)

    @property
    def expired(self) -> bool:
        return self.timeout is not None and time.monotonic() > self.used + self.timeout

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns.values())

    def previous(self, wanted: SessionParams) -> Turn | None:
        """The turn that a request goes on from; None: from nothing. Raises InvalidValueError."""
        if self.streaming:
            return self._only(wanted)
        if wanted.rid is None:
            return None
        turn = self.turns.get(wanted.rid)
        if turn is None:
            raise _wrong("rid", f"the session has no request {wanted.rid!r}")
        if not (turn.finished or wanted.replace):
            raise _wrong("rid", f"the request {wanted.rid!r} has not ended")
        return turn

    def _only(self, wanted: SessionParams) -> Turn | None:
        for name in ("replace", "drop_previous_output", "offset"):
            if getattr(wanted, name):
                raise _wrong(name, "a streaming session only goes on")
        turns = list(self.turns.values())
        for turn in turns:
            if not turn.finished:
                raise _wrong("id", f"the request {turn.request_id!r} of this streaming session has not ended")
        return turns[-1] if turns else None

    def forget(self, wanted: SessionParams, before: Turn | None) -> list[Turn]:
        """Drop what the new request takes the place of; the turns that must be ended for it."""
        if not wanted.replace:
            return []
        dropped = [turn for turn in self.turns.values() if before is None or _descends(turn, before)]
        for turn in dropped:
            del self.turns[turn.request_id]
        return [turn for turn in [*dropped, *([before] if before else [])] if not turn.finished]


def _descends(turn: Turn, ancestor: Turn) -> bool:
    while turn.parent is not None:
        turn = turn.parent
        if turn is ancestor:
            return True
    return False


def _wrong(name: str, message: str) -> InvalidValueError:
    param = f"session_params.{name}"
    return InvalidValueError(f"{param}: {message}.", param=param)


class Sessions:
    """All of a server's. They end with `close`, their timeout, or the server."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def open(self, body: OpenSessionRequest) -> str:
        """The new session's id. Raises InvalidValueError for one in use, QueueFullError for one too many."""
        self._drop_expired()
        if len(self._sessions) >= MAX_SESSIONS:
            raise QueueFullError(f"There are {MAX_SESSIONS} sessions already.")
        session_id = body.session_id or uuid.uuid4().hex
        if session_id in self._sessions:
            raise InvalidValueError(f"The session {session_id!r} is open already.", param="session_id")
        self._sessions[session_id] = Session(body.capacity_of_str_len or 0, bool(body.streaming), body.timeout)
        return session_id

    def close(self, session_id: str) -> None:
        """Forget a session; requests of it that run go on. Raises NotFoundError."""
        if self._sessions.pop(session_id, None) is None:
            raise NotFoundError(f"There is no session {session_id!r}.", param="session_id")

    def context(self, wanted: SessionParams | None, token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
        """The prompt of a request that brings `token_ids`: its own without a session. Raises InvalidValueError."""
        if wanted is None:
            return token_ids
        session = self._find(wanted.id)
        before = session.previous(wanted)
        if before is None:
            context = token_ids
        else:
            old = before.tokens[: before.num_prompt] if wanted.drop_previous_output else before.tokens
            kept = old[: wanted.offset] if wanted.offset else old
            context = kept.tolist() + token_ids[int(token_ids[:1] == [tokenizer.bos_token_id]) :]
        if session.capacity and len(tokenizer.decode(context)) > session.capacity:
            raise _wrong("id", f"the context has more than the session's {session.capacity} characters")
        return context

    async def begin(self, wanted: SessionParams, request_id: str, prompt: list[int], abort: Abort) -> Turn:
        """Enter a request whose `prompt` is its context; requests that it takes the place of are aborted."""
        session = self._find(wanted.id)
        before = session.previous(wanted)
        if request_id in session.turns:
            raise InvalidValueError(f"The session has a request {request_id!r} already.", param="rid")
        if sum(each.num_tokens for each in self._sessions.values()) + len(prompt) > MAX_TOKENS:
            raise QueueFullError(f"The open sessions hold {MAX_TOKENS} tokens already: close some.")
        replaced = session.forget(wanted, before)
        session.used = time.monotonic()
        turn = session.turns[request_id] = Turn(request_id, array("i", prompt), len(prompt), before)
        for each in replaced:
            await abort(each.request_id)
        return turn

    def end(self, wanted: SessionParams, turn: Turn, *, failed: bool) -> None:
        """The turn's request is over. One that failed before it said anything never was."""
        turn.finished = True
        session = self._sessions.get(wanted.id)
        if session is None or session.turns.get(turn.request_id) is not turn:
            return
        if failed and len(turn.tokens) == turn.num_prompt:
            del session.turns[turn.request_id]
        elif session.streaming:
            session.turns = {turn.request_id: turn}

    def _find(self, session_id: str) -> Session:
        self._drop_expired()
        session = self._sessions.get(session_id)
        if session is None:
            raise _wrong("id", f"there is no session {session_id!r}")
        return session

    def _drop_expired(self) -> None:
        for session_id in [key for key, session in self._sessions.items() if session.expired]:
            del self._sessions[session_id]
