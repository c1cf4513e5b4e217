"""Keep SGLang's sessions: a request continues from the tokens of an earlier one without sending them again.

A session is a tree of turns. A *turn* is one request: its prompt and its output. This process keeps only token ids; the
prefix cache saves the computation. A session is identified by its id and the API key that opened it, so two keys may
choose the same id.
"""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from jaxserve.api import ranges
from jaxserve.api.fields import Body, SessionParams
from jaxserve.client.async_engine import AbortSignal
from jaxserve.errors import InvalidValueError, NotFoundError, QueueFullError
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.step import FinishReason


class OpenSessionRequest(Body):
    session_id: ranges.Identifier | None = Field(None, description="Default: a new id.")
    capacity_of_str_len: ranges.TokenCountOrZero | None = Field(
        None, description="Maximum characters of a request's context; 0, the default: no limit."
    )
    streaming: bool | None = Field(None, description="Each request is appended to the previous one.")
    timeout: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = Field(
        None, description="Close the session after this many seconds without a request."
    )


class CloseSessionRequest(Body):
    session_id: ranges.Identifier


MAX_SESSIONS = 4096
MAX_SESSION_TOKENS = 2**23  # tokens of all sessions together: 32 MiB


@dataclass(eq=False)
class SessionTurn:
    """One request of a session. tokens: its prompt and its output so far; empty once the turn is dropped"""

    session: Session
    request_id: str
    tokens: array[int]
    num_prompt: int
    parent: SessionTurn | None = None
    finished: bool = False
    forgotten: bool = False
    signal: AbortSignal = field(default_factory=AbortSignal)  # aborts the request


@dataclass(eq=False)
class Session:
    capacity: int
    streaming: bool
    timeout: float | None
    turns: dict[str, SessionTurn] = field(default_factory=dict)
    used: float = field(default_factory=time.monotonic)

    @property
    def expired(self) -> bool:
        """Whether no request has run for the timeout."""
        if self.timeout is None or time.monotonic() <= self.used + self.timeout:
            return False
        return all(turn.finished for turn in self.turns.values())

    def previous(self, wanted: SessionParams) -> SessionTurn | None:
        """Return the turn that a request continues; None if it begins the session. Raises InvalidValueError."""
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

    def _only(self, wanted: SessionParams) -> SessionTurn | None:
        for name in ("replace", "drop_previous_output", "offset"):
            if getattr(wanted, name):
                raise _wrong(name, "a streaming session only goes on")
        turns = list(self.turns.values())
        for turn in turns:
            if not turn.finished:
                raise _wrong("id", f"the request {turn.request_id!r} of this streaming session has not ended")
        return turns[-1] if turns else None

    def after(self, before: SessionTurn | None) -> list[SessionTurn]:
        """List the turns that continue from `before`, directly or not, in the order of their age; None: all turns."""
        found: dict[SessionTurn, None] = {}
        for turn in self.turns.values():
            if before is None or turn.parent is before or turn.parent in found:
                found[turn] = None
        return list(found)


def _wrong(name: str, message: str) -> InvalidValueError:
    param = f"session_params.{name}"
    return InvalidValueError(f"{param}: {message}.", param=param)


class Sessions:
    """All sessions of a server. A session ends by `close`, by its timeout, or with the server."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[str, str], Session] = {}  # by owner and id
        self._num_tokens = 0  # tokens of all turns that are kept

    def open(self, body: OpenSessionRequest, owner: str = "") -> str:
        """Return the new session's id.

        Raises InvalidValueError if the id is in use, QueueFullError if there are too many sessions.
        """
        self._drop_expired()
        if len(self._sessions) >= MAX_SESSIONS:
            raise QueueFullError(f"There are {MAX_SESSIONS} sessions already.")
        session_id = body.session_id or uuid.uuid4().hex
        if (owner, session_id) in self._sessions:
            raise InvalidValueError(f"The session {session_id!r} is open already.", param="session_id")
        self._sessions[owner, session_id] = Session(body.capacity_of_str_len or 0, bool(body.streaming), body.timeout)
        return session_id

    def close(self, session_id: str, owner: str = "") -> None:
        """Drop a session. Its running requests continue. Raises NotFoundError."""
        session = self._sessions.pop((owner, session_id), None)
        if session is None:
            raise NotFoundError(f"There is no session {session_id!r}.", param="session_id")
        self._forget(session.turns.values())

    def context(
        self, wanted: SessionParams | None, token_ids: list[int], tokenizer: Tokenizer, owner: str = ""
    ) -> list[int]:
        """Return the whole prompt of a request that sends `token_ids`; without a session, `token_ids` alone.

        Raises InvalidValueError if the request cannot continue its session.
        """
        if wanted is None:
            return token_ids
        session = self._find(wanted.id, owner)
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

    def begin(
        self, wanted: SessionParams, request_id: str, prompt: list[int], signal: AbortSignal, owner: str = ""
    ) -> SessionTurn:
        """Register a request with the whole prompt `prompt`, and abort the requests that it replaces.

        signal: aborts this request
        Raises InvalidValueError if the id is taken, QueueFullError if all sessions have too many tokens.
        """
        session = self._find(wanted.id, owner)
        before = session.previous(wanted)
        if request_id in session.turns:
            raise InvalidValueError(f"The session has a request {request_id!r} already.", param="rid")
        if self._num_tokens + len(prompt) > MAX_SESSION_TOKENS:
            raise QueueFullError(f"The open sessions hold {MAX_SESSION_TOKENS} tokens already: close some.")
        replaced = session.after(before) if wanted.replace else []
        self._remove(replaced)
        session.used = time.monotonic()
        parent = None if session.streaming else before  # a streaming session keeps only its last turn
        turn = session.turns[request_id] = SessionTurn(
            session, request_id, array("i", prompt), len(prompt), parent, signal=signal
        )
        self._num_tokens += len(prompt)
        running = [*replaced, *([before] if wanted.replace and before else [])]
        for each in running:
            if not each.finished:
                each.signal.set()
        return turn

    def extend(self, turn: SessionTurn, token_ids: list[int]) -> None:
        """Append to a turn's output. Does nothing if the turn was dropped."""
        if not turn.forgotten:
            turn.tokens.extend(token_ids)
            self._num_tokens += len(token_ids)

    def end(self, turn: SessionTurn, reason: FinishReason | None) -> None:
        """End the turn's request. reason: finish reason of its output; None: it failed, or the client disconnected

        A turn without output is dropped. A streaming session drops every turn that did not end by itself, so that it
        continues from its last complete turn.
        """
        turn.finished = True
        turn.session.used = time.monotonic()
        if turn.forgotten:
            return
        whole = reason not in (None, FinishReason.ABORT)
        said_nothing = reason is None and len(turn.tokens) == turn.num_prompt
        streaming = turn.session.streaming
        if said_nothing or (streaming and not whole):
            self._remove([turn])
        elif streaming:
            self._remove([each for each in turn.session.turns.values() if each is not turn])

    def _remove(self, turns: list[SessionTurn]) -> None:
        """Remove turns from their session."""
        for turn in turns:
            del turn.session.turns[turn.request_id]
        self._forget(turns)

    def _forget(self, turns: Iterable[SessionTurn]) -> None:
        for turn in turns:
            turn.forgotten = True
            self._num_tokens -= len(turn.tokens)

    def _find(self, session_id: str, owner: str) -> Session:
        self._drop_expired()
        session = self._sessions.get((owner, session_id))
        if session is None:
            raise _wrong("id", f"there is no session {session_id!r}")
        return session

    def _drop_expired(self) -> None:
        for key in [key for key, session in self._sessions.items() if session.expired]:
            self._forget(self._sessions.pop(key).turns.values())
