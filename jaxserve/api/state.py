"""What the routes of one server share. Made by create_app, reached through the request; no module holds state."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from starlette.requests import Request

from jaxserve.api.engine_protocol import EngineProtocol
from jaxserve.api.logprobs import TokenTexts
from jaxserve.config import Config
from jaxserve.errors import InvalidValueError, ModelNotFoundError
from jaxserve.metrics import Metrics
from jaxserve.text.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

MAX_LOGGED_FIELDS = 256  # names come from clients; remember no more of them
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class UnknownFields:
    """Logs each body field of no known API once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, route: str, names: Sequence[str]) -> None:
        for name in names:
            if name in self._seen or len(self._seen) >= MAX_LOGGED_FIELDS or not _FIELD_NAME.fullmatch(name):
                continue
            self._seen.add(name)
            logger.warning("%s: the field %r is of no API known here and has no effect", route, name)


class LiveRequests:
    """The requests that run, by the id their client knows, for duplicates and for /abort_request."""

    def __init__(self) -> None:
        self._engine_ids: dict[str, list[str]] = {}

    @contextmanager
    def running(self, request_id: str, engine_ids: list[str]) -> Iterator[None]:
        """Raises InvalidValueError if the id is in use."""
        if request_id in self._engine_ids:
            raise InvalidValueError(f"A request with the id {request_id!r} is running.", param="request_id")
        self._engine_ids[request_id] = engine_ids
        try:
            yield
        finally:
            del self._engine_ids[request_id]

    def matching(self, prefix: str) -> list[str]:
        """Engine ids of the requests whose id begins with `prefix`."""
        return [each for key, ids in self._engine_ids.items() if key.startswith(prefix) for each in ids]


@dataclass
class ServerState:
    """Read by every route. The cached parts exist once the engine is ready, which the readiness gate ensures."""

    engine: EngineProtocol
    config: Config
    metrics: Metrics
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    live: LiveRequests = field(default_factory=LiveRequests)
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.engine.tokenizer)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The operator's template or the model's; None if there is neither."""
        return ChatTemplate.load(self.engine.tokenizer, self.config.model.chat_template)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ModelNotFoundError; None means the first served name."""
        names = self.engine.info.served_names
        if name is None:
            return names[0]
        if name not in names:
            shown = ", ".join(names)
            raise ModelNotFoundError(f"The model {name!r} does not exist. Served: {shown}.", param="model")
        return name


def server_state(request: Request) -> ServerState:
    return request.app.state.server
