"""What the routes of one server share. Made by create_app, reached through the request; no module holds state."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from starlette.requests import Request

from jaxserve.api.constraints import GrammarChecks
from jaxserve.api.engine_protocol import EngineProtocol
from jaxserve.api.logprobs import TokenTexts
from jaxserve.api.sessions import Sessions
from jaxserve.config import Config
from jaxserve.errors import InvalidValueError, ModelNotFoundError
from jaxserve.metrics import Metrics
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.output_parser import ParserChoice, choose_parsers
from jaxserve.tracing import Tracing

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


class LiveRequests(set[str]):
    """Engine ids of the requests that run. They begin with the id that the client knows."""

    @property
    def count(self) -> int:
        return len(self)

    def matching(self, prefix: str) -> list[str]:
        return sorted(each for each in self if each.startswith(prefix))


@dataclass
class ServerState:
    """Read by every route. The cached parts exist once the engine is ready, which the readiness gate ensures."""

    engine: EngineProtocol
    config: Config
    metrics: Metrics
    tracing: Tracing
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    live: LiveRequests = field(default_factory=LiveRequests)
    sessions: Sessions = field(default_factory=Sessions)
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.engine.tokenizer)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The operator's template or the model's; None if there is neither."""
        return ChatTemplate.load(self.engine.tokenizer, self.config.model.chat_template)

    @cached_property
    def parsers(self) -> ParserChoice:
        """What reads the model's output: by name, or found by the chat template."""
        source = self.chat_template.source if self.chat_template is not None else None
        model = self.config.model
        return choose_parsers(source, tool=model.tool_parser, reasoning=model.reasoning_parser)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ModelNotFoundError; None means the first served name."""
        names = self.engine.info.served_names
        if name is None:
            return names[0]
        if name not in names:
            shown = ", ".join(names)
            raise ModelNotFoundError(f"The model {name!r} does not exist. Served: {shown}.", param="model")
        return name

    def check_generates(self, name: str | None) -> str:
        """`check_model` of a route that makes text. Raises InvalidValueError where the model makes embeddings only."""
        name = self.check_model(name)
        if self.engine.info.is_embedding:
            message = f"The model {name!r} makes embeddings and generates no text. Use /v1/embeddings."
            raise InvalidValueError(message, param="model")
        return name


def server_state(request: Request) -> ServerState:
    return request.app.state.server
