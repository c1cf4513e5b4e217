"""The state that the routes of one server share. create_app makes it; routes reach it through the request."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from starlette.requests import Request

from jaxserve.api.shared.body_cost import BodyLimits, BodySum
from jaxserve.api.shared.encoding import TextEncoder, TextWork
from jaxserve.api.shared.engine_protocol import EngineProtocol
from jaxserve.api.shared.grammar_checks import GrammarChecks
from jaxserve.api.shared.key_usage import KeyUsages
from jaxserve.api.shared.keys import Caller
from jaxserve.api.shared.process_group import Peers, ProcessGroup, SessionsElsewhere
from jaxserve.api.shared.sealing import Seal, sealing_key
from jaxserve.api.shared.sessions import Sessions
from jaxserve.api.shared.token_texts import TokenTexts
from jaxserve.api.shared.unread import UnreadStreams
from jaxserve.api.shared.work_pool import SizedPools, Waiting, WorkPool
from jaxserve.client.async_engine import AbortSignal
from jaxserve.config import Config
from jaxserve.errors import HTTPError, InvalidValueError, ModelNotFoundError, NotReadyError
from jaxserve.store import Store
from jaxserve.telemetry.metrics import Metrics
from jaxserve.telemetry.tracing import Tracing
from jaxserve.text.output_parser import ParserChoice, choose_parsers
from jaxserve.text.pairs import PairEncoder
from jaxserve.text.renderer import LONG_BYTES, Renderer
from jaxserve.text.template_worker import TemplateInput

logger = logging.getLogger(__name__)

MAX_LOGGED_FIELDS = 256  # names come from clients, so their number is limited
MAX_FILE_PIECES = 256  # uploads and downloads that wait for asyncio's threads; a connection has at most one
MAX_WAITING_FILE_BYTES = 64 * 2**20  # in them
MAX_RENDERED_BYTES = 64 * 2**20  # of bodies that wait for each of the two template workers
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
_SOME_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
_IN_TEMPLATES = ("messages.", "tools.", "functions.")  # rendered with all their fields


def body_pool() -> WorkPool:
    """Return a pool of one thread: decoding holds the GIL, so a second thread would not help.

    The limit on all bodies in memory bounds the pool's work.
    """
    return WorkPool("bodies", "bodies", threads=1, max_jobs=4096, max_size=2**31)


def template_pools() -> SizedPools:
    """One thread for each template worker, which takes one conversation at a time."""
    limits = {"max_jobs": 4096, "max_size": MAX_RENDERED_BYTES}
    return SizedPools("templates", "conversations", long=LONG_BYTES, threads=1, **limits)


class UnknownFields:
    """Log each unknown body field once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, route: str, names: Sequence[str]) -> None:
        for name in names:
            if name in self._seen or len(self._seen) >= MAX_LOGGED_FIELDS or not _FIELD_NAME.fullmatch(name):
                continue
            self._seen.add(name)
            effect = "no effect unless the chat template reads it" if name.startswith(_IN_TEMPLATES) else "no effect"
            logger.warning("%s: the field %r is of no API known here and has %s", route, name, effect)


class LiveRequests:
    """The running requests with the ids that clients gave them, which may repeat, and their owners.

    tell: called with their number when it changes
    """

    def __init__(self, tell: Callable[[int], None] = lambda count: None) -> None:
        self._running: dict[AbortSignal, tuple[str, Caller]] = {}
        self._tell = tell

    def __len__(self) -> int:
        return len(self._running)

    def add(self, signal: AbortSignal, request_id: str, caller: Caller) -> None:
        self._running[signal] = request_id, caller
        self._tell(len(self._running))

    def remove(self, signal: AbortSignal) -> None:
        self._running.pop(signal, None)
        self._tell(len(self._running))

    def abort(self, prefix: str, owner: str | None = None) -> list[str]:
        """Abort the requests whose ids begin with a prefix, of one owner or of all; return their ids."""
        found = self._find(prefix, owner)
        for signal, _ in found:
            signal.set()
        return sorted({request_id for _, request_id in found})

    def _find(self, prefix: str, owner: str | None) -> list[tuple[AbortSignal, str]]:
        return [
            (signal, request_id)
            for signal, (request_id, caller) in self._running.items()
            if request_id.startswith(prefix) and owner in (None, caller.owner)
        ]


@dataclass
class ServerState:
    """Read by every route. The readiness gate ensures that the engine is ready before a cached part is read."""

    engine: EngineProtocol
    config: Config
    metrics: Metrics
    tracing: Tracing
    store: Store | None = None
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    text_work: TextWork = field(default_factory=TextWork)
    bodies: BodySum = field(default_factory=lambda: BodySum([0.0]))
    body_work: WorkPool = field(default_factory=body_pool)
    template_work: SizedPools = field(default_factory=template_pools)
    file_work: Waiting = field(
        default_factory=lambda: Waiting("pieces of files", MAX_FILE_PIECES, MAX_WAITING_FILE_BYTES)
    )
    live: LiveRequests = field(default_factory=LiveRequests)
    sessions: Sessions = field(default_factory=Sessions)
    seal: Seal = field(default_factory=lambda: Seal(sealing_key(None)))
    has_told_claude: bool = False
    _template_lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    startup_error: Exception | None = None  # why the application could not start
    created: int = field(default_factory=lambda: int(time.time()))
    group: ProcessGroup | None = None  # with server.workers
    peers: Peers | None = None  # the workers, in the main process

    def __post_init__(self) -> None:
        if self.group is not None:
            self.bodies = self.group.bodies()
            self.live = LiveRequests(self.group.count_running)
            self.sessions = SessionsElsewhere() if self.group.is_worker else self.sessions

    @property
    def num_running(self) -> int:
        """The requests of all processes of this server that have not been answered whole."""
        return len(self.live) if self.group is None else self.group.num_running

    def body_limits(self) -> BodyLimits:
        """Return the limits of bodies; before the model is known, those of a small model."""
        try:
            return self._body_limits
        except NotReadyError:
            return BodyLimits.of(self.config.server, 0)

    @cached_property
    def _body_limits(self) -> BodyLimits:
        return BodyLimits.of(self.config.server, self.engine.info.max_model_len)

    @cached_property
    def key_usages(self) -> KeyUsages:
        usages = KeyUsages(self.config.server.keys, self.engine.info.max_num_seqs)
        if self.group is not None:
            self.group.join(usages)
        return usages

    @cached_property
    def unread(self) -> UnreadStreams:
        return UnreadStreams(self.config.server.max_unread_bytes, self.metrics.count_error)

    @cached_property
    def encoder(self) -> TextEncoder:
        return TextEncoder(self.engine.tokenizer, self.text_work, self.engine.info.max_model_len)

    @cached_property
    def pair_encoder(self) -> PairEncoder:
        return PairEncoder(self.engine.tokenizer)

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.engine.tokenizer)

    @property
    def chat_template(self) -> Renderer | None:
        """The operator's template or the model's; None if there is neither. On the event loop only after
        `load_template`."""
        with self._template_lock:
            return self._chat_template

    @cached_property
    def _chat_template(self) -> Renderer | None:
        return Renderer.load(self.engine.tokenizer, self.config.model.chat_template)

    async def load_template(self) -> None:
        """Load the chat template if it is not loaded. Runs in a thread, because it can take as long as a process takes
        to start.
        """
        if "takes_late_system" not in self.__dict__:
            await self.template_work.run(lambda: self.takes_late_system, 0)

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether the chat template shows a system message that follows a user's, and so does the one for requests
        with tools, if there is one. On the event loop only after `load_template`."""
        template = self.chat_template
        if template is None:
            return False
        wanted = [None] if template.tools_source == template.source else [None, [_SOME_TOOL]]
        return all(_shows_late_system(template, tools) for tools in wanted)

    def stop_rendering(self) -> None:
        self.template_work.stop()
        template = self.__dict__.get("_chat_template")
        if template is not None:
            template.stop()

    @cached_property
    def parsers(self) -> ParserChoice:
        """Return the parsers of the model's output, chosen by name or from the chat template."""
        template, model = self.chat_template, self.config.model
        sources = () if template is None else (template.source, template.tools_source)
        return choose_parsers(*sources, tool=model.tool_parser, reasoning=model.reasoning_parser)

    @cached_property
    def reasoning_fields(self) -> tuple[str, ...]:
        """Return the names under which answers show the reasoning."""
        return ("reasoning_content", "reasoning")[: 2 if self.config.server.reasoning_field == "both" else 1]

    def check_model(self, name: str | None) -> str:
        """Return the model name to answer with; None means the first served name. Raises ModelNotFoundError."""
        names = self.engine.info.served_names
        if name is None:
            return names[0]
        if name not in names:
            shown = ", ".join(names)
            raise ModelNotFoundError(f"The model {name!r} does not exist. Served: {shown}.", param="model")
        return name

    def check_messages(self, name: str | None) -> str:
        """As `check_generates`, for a route of Messages: a name of Anthropic's models is the one that is served.

        Agents ask for claude-haiku and others for their small tasks, whichever model they were given.
        """
        if name is not None and name.startswith("claude-") and name not in self.engine.info.served_names:
            if not self.has_told_claude:
                logger.info("/v1/messages: %r is answered by %r", name, self.engine.info.served_names[0])
                self.has_told_claude = True
            name = None
        return self.check_generates(name)

    def check_generates(self, name: str | None) -> str:
        """As `check_model`, for a route that generates text. Raises InvalidValueError if the model makes none."""
        name = self.check_model(name)
        match self.engine.info.task:
            case "embed":
                message = f"The model {name!r} makes embeddings and generates no text. Use /v1/embeddings."
                raise InvalidValueError(message, param="model")
            case "classify":
                message = f"The model {name!r} classifies texts and generates none. Use /v1/classify or /v1/rerank."
                raise InvalidValueError(message, param="model")
        return name


def _shows_late_system(template: Renderer, tools: list[dict[str, Any]] | None) -> bool:
    late = "a late system message"
    messages = [{"role": role, "content": text} for role, text in (("user", "Hello"), ("system", late))]
    conversation = TemplateInput([*messages, {"role": "user", "content": "Hello"}], tools)
    try:
        return late in (template.render_here(conversation) or template.render(conversation))
    except HTTPError:
        return False


def server_state(request: Request) -> ServerState:
    return request.app.state.server
