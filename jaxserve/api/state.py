"""Hold the state that the routes of one server share. create_app makes it; routes reach it through the request.

`EngineProtocol` is the whole boundary between api/ and the engine. `AsyncEngine` implements it, and so does the fake of
the tests. The parts of the state follow: the grammar checker, the thread pools, the logged unknown fields and the live
requests. The last functions check the model's files at the start, for mistakes that only the first requests would show.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Unpack

from starlette.requests import Request

from jaxserve.api.body_cost import BodyLimits, BodySum
from jaxserve.api.encryption import Encryption, encryption_key
from jaxserve.api.keys import Caller, KeyRing, KeyUsages
from jaxserve.api.process_group import Peers, ProcessGroup, SessionsInMainProcess
from jaxserve.api.sessions import Sessions
from jaxserve.api.unread_streams import UnreadStreams
from jaxserve.api.work_pool import SizedPools, TextEncoder, TextWork, TokenTexts, Waiting, WorkPool
from jaxserve.client.async_engine import AbortSignal, GenerateOptions
from jaxserve.client.replicas import ReplicaState
from jaxserve.config import Config
from jaxserve.errors import ConfigError, HTTPError, InvalidValueError, ModelNotFoundError, NotReadyError
from jaxserve.grammar.checker import GrammarChecker
from jaxserve.media.fetch import Fetcher
from jaxserve.media.processor import read_settings
from jaxserve.media.reader import LONG_BYTES as LONG_PICTURE
from jaxserve.media.reader import PictureReader
from jaxserve.model_files import picture_processor
from jaxserve.store import Store
from jaxserve.telemetry.metrics import Metrics
from jaxserve.telemetry.tracing import Tracing
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.output_parser import ParserChoice, choose_parsers
from jaxserve.text.pairs import PairEncoder
from jaxserve.text.renderer import LONG_BYTES, Renderer
from jaxserve.text.template_worker import TemplateInput
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.calls import EngineCall
from jaxserve.types.messages import AdapterStatus, EngineInfo, EngineStats, Located, WaitingRequest
from jaxserve.types.sampling import GrammarSpec, SamplingParams

logger = logging.getLogger(__name__)

RELOADED = ("api_key", "admin_api_key", "keys", "request_timeout", "drain_timeout")  # of the section server


class StatusProtocol(Protocol):
    """The engine's progress. `done` of `total` counts in the unit of the current phase."""

    @property
    def phase(self) -> str: ...  # "loading" | "ready" | "draining" | "dead"
    @property
    def detail(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...


class EngineProtocol(Protocol):
    """An engine that may still be loading. Read `info` and `tokenizer` only once it is ready."""

    @property
    def config(self) -> Config: ...
    @property
    def located(self) -> Located | None: ...  # the directory of the tokenizer, once it is known
    @property
    def info(self) -> EngineInfo: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def status(self) -> StatusProtocol: ...
    @property
    def alive(self) -> bool: ...  # ready, and its loop is running

    @property
    def restarts(self) -> int: ...  # engine processes that died and were replaced
    @property
    def num_live(self) -> int: ...  # sequences accepted and not finished

    @property
    def replicas(self) -> Sequence[ReplicaState]: ...  # the state of each engine

    def stats(self) -> EngineStats: ...

    def check_ready(self) -> None:
        """Raise NotReadyError or EngineDeadError if requests are not accepted."""
        ...

    def check_queue(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
        """Raise QueueFullError if `n` more sequences of such a prompt do not fit into the queue."""
        ...

    def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of all choices of one prompt. Closing the iterator aborts. Raises an HTTPError."""
        ...

    async def waiting(self) -> list[WaitingRequest]:
        """Return the requests that have no slot yet, the first 1,024 of them, each with the reason why it waits."""
        ...

    async def call(self, call: EngineCall) -> Any:
        """Make a call to all engines of the server. Raises an HTTPError."""
        ...

    async def finish(self) -> bool:
        """Pause when the requests that have arrived so far have ended. Returns False if that was given up."""
        ...


class GrammarChecks:
    """The grammar checker of one server, created by `start` or by the first constrained request."""

    def __init__(self) -> None:
        self._checker: GrammarChecker | None = None
        self._making = asyncio.Lock()

    async def start(self, engine: EngineProtocol) -> None:
        """Start the checker's process, so that no request waits for it. The engine must be ready."""
        await (await self._made(engine)).start()

    async def check(self, spec: GrammarSpec, param: str, engine: EngineProtocol) -> GrammarSpec:
        """Return the spec with the text that was checked, for the engine.

        Raises InvalidSchemaError that names `param` if the grammar cannot be enforced.
        """
        return await (await self._made(engine)).check(spec, param=param)

    async def _made(self, engine: EngineProtocol) -> GrammarChecker:
        async with self._making:
            if self._checker is None:
                size, ids = engine.info.vocab_size, tuple(engine.info.eos_token_ids)
                text = await asyncio.to_thread(engine.tokenizer.to_json, size)  # megabytes
                self._checker = GrammarChecker(text, vocab_size=size, eos_token_ids=ids)
            return self._checker

    async def stop(self) -> None:
        if self._checker is not None:
            await self._checker.stop()


MAX_LOGGED_FIELDS = 256  # names come from clients, so their number is limited
MAX_FILE_PIECES = 256  # uploads and downloads that wait for asyncio's threads; a connection has at most one
MAX_WAITING_FILE_BYTES = 64 * 2**20  # bytes of these pieces
MAX_RENDERED_BYTES = 64 * 2**20  # bytes of bodies that wait for each of the two template workers
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
_SOME_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
_IN_TEMPLATES = ("messages.", "tools.", "functions.")  # rendered with all their fields


def body_pool() -> WorkPool:
    """Return a pool of one thread: decoding holds the GIL, so a second thread would not help.

    The limit on all bodies in memory bounds the pool's work.
    """
    return WorkPool("bodies", "bodies", threads=1, max_jobs=4096, max_size=2**31)


def template_pools() -> SizedPools:
    """Return pools with one thread for each template worker, which renders one conversation at a time."""
    limits = {"max_jobs": 4096, "max_size": MAX_RENDERED_BYTES}
    return SizedPools("templates", "conversations", long=LONG_BYTES, threads=1, **limits)


MAX_PICTURE_BYTES = 256 * 2**20  # of encoded pictures that wait for each of the two workers
MAX_FETCHES = 8  # pictures that are fetched at once; 256 more wait


def picture_pools() -> SizedPools:
    """Return pools with one thread for each picture worker, which reads one picture at a time."""
    limits = {"max_jobs": 4096, "max_size": MAX_PICTURE_BYTES}
    return SizedPools("pictures", "images", long=LONG_PICTURE, threads=1, **limits)


class UnknownFields:
    """Log each body field that is unknown or dropped once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, route: str, names: Sequence[str]) -> None:
        for name in names:
            if name in self._seen or len(self._seen) >= MAX_LOGGED_FIELDS or not _FIELD_NAME.fullmatch(name):
                continue
            self._seen.add(name)
            effect = "no effect unless the chat template reads it" if name.startswith(_IN_TEMPLATES) else "no effect"
            logger.warning("%s: the field %r is not served here and has %s", route, name, effect)


class LiveRequests:
    """The running requests by the ids that clients gave them, which may repeat, and their owners.

    tell: called with the number of running requests when it changes
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
    """The state of one server. The readiness gate ensures that the engine is ready before a cached part is read."""

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
    picture_work: SizedPools = field(default_factory=picture_pools)
    picture_fetches: WorkPool = field(
        default_factory=lambda: WorkPool("fetches", "images", threads=MAX_FETCHES, max_jobs=256, max_size=256)
    )
    file_work: Waiting = field(
        default_factory=lambda: Waiting("pieces of files", MAX_FILE_PIECES, MAX_WAITING_FILE_BYTES)
    )
    live: LiveRequests = field(default_factory=LiveRequests)
    sessions: Sessions = field(default_factory=Sessions)
    encryption: Encryption = field(default_factory=lambda: Encryption(encryption_key(None)))
    has_told_claude: bool = False
    _template_lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    startup_error: Exception | None = None  # why the application could not start
    created: int = field(default_factory=lambda: int(time.time()))
    group: ProcessGroup | None = None  # with server.workers
    peers: Peers | None = None  # the workers, in the main process

    def __post_init__(self) -> None:
        self.key_ring = KeyRing(self.config.server)
        if self.group is not None:
            self.bodies = self.group.bodies()
            self.live = LiveRequests(self.group.count_running)
            self.sessions = SessionsInMainProcess() if self.group.is_worker else self.sessions

    @property
    def num_running(self) -> int:
        """The number of requests, over all processes, that do not have their whole answer yet."""
        return len(self.live) if self.group is None else self.group.num_running

    def body_limits(self) -> BodyLimits:
        """Return the limits of bodies; before the model is known, the limits for a small model."""
        try:
            return self._body_limits
        except NotReadyError:
            return BodyLimits.of(self.config.server, 0)

    @cached_property
    def _body_limits(self) -> BodyLimits:
        info = self.engine.info
        return BodyLimits.of(self.config.server, info.max_model_len, takes_pictures=info.pictures is not None)

    @cached_property
    def key_usages(self) -> KeyUsages:
        usages = KeyUsages(self.config.server.keys, self.engine.info.max_num_seqs)
        if self.group is not None:
            self.group.join(usages)
        return usages

    def reload(self, config: Config) -> Config:
        """Use the keys and limits of a configuration that was read again; return the configuration that is now used.

        Raises ConfigError if they cannot change while the server runs; then nothing changes.
        """
        section = self.config.server
        taken = {name: getattr(config.server, name) for name in RELOADED}
        new = section.model_copy(update=taken)
        if new.needs_key != section.needs_key:
            what = "server.api_key and server.keys: whether clients need a key"
            raise ConfigError(f"{what} cannot change while the server runs", fix="restart it")
        if self.group is not None and any(getattr(section, name) != value for name, value in taken.items()):
            names = ", ".join(f"server.{name}" for name in RELOADED)
            raise ConfigError(f"with server.workers, {names} are read at the start only", fix="restart the server")
        self.config = self.config.model_copy(update={"server": new})
        self.key_ring = KeyRing(new)
        if "key_usages" in self.__dict__:  # else it is made from the new configuration
            self.key_usages.reload(new.keys)
        return self.config

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
        """The operator's template or the model's; None if there is neither.

        Read it on the event loop only after `load_template`.
        """
        with self._template_lock:
            return self._chat_template

    @cached_property
    def _chat_template(self) -> Renderer | None:
        return Renderer.load(self.engine.tokenizer, self.config.model.chat_template)

    async def load_template(self) -> None:
        """Load the chat template if it is not loaded, in a thread, because this may start a process."""
        if "takes_late_system" not in self.__dict__:
            await self.template_work.run(lambda: self.takes_late_system, 0)

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether the chat templates, with and without tools, show a system message that follows a user's.

        Read it on the event loop only after `load_template`.
        """
        template = self.chat_template
        if template is None:
            return False
        wanted = [None] if template.tools_source == template.source else [None, [_SOME_TOOL]]
        return all(_shows_late_system(template, tools) for tools in wanted)

    @property
    def takes_pictures(self) -> bool:
        """Whether the model reads pictures."""
        return self.engine.info.pictures is not None

    @cached_property
    def pictures(self) -> PictureReader:
        """The reader of pictures. Raises InvalidValueError if the model takes none, ConfigError as `read_settings`."""
        info = self.engine.info.pictures
        if info is None:
            raise InvalidValueError("This model takes no images.", param="messages")
        located = self.engine.located
        places = [Path(self.engine.info.model_path), *([] if located is None else [Path(located.tokenizer_dir)])]
        directory = next((each for each in places if picture_processor(each) is not None), places[-1])
        settings = read_settings(directory, info)
        metrics = self.metrics
        return PictureReader(
            self.config.media,
            settings,
            info.kind,
            on_hit=metrics.picture_hits.inc,
            on_end=metrics.picture_worker_ends.inc,
        )

    @cached_property
    def picture_fetcher(self) -> Fetcher:
        section = self.config.media
        return Fetcher(section.allowed_hosts, section.max_bytes)

    @cached_property
    def picture_placeholder(self) -> str:
        """The text of the token that stands for a picture. Raises ConfigError if it is not a special token."""
        info = self.engine.info.pictures
        text = None if info is None else self.engine.tokenizer.id_to_token(info.token_id)
        if text is None or text not in self.engine.tokenizer.special_texts:
            raise ConfigError(
                f"the placeholder of images, {text!r}, is no special token, so that any text could stand for an image",
                fix="use the tokenizer that the model was trained with (model.tokenizer)",
            )
        return text

    @cached_property
    def tools_show_pictures(self) -> bool:
        """Whether the chat template shows a picture in a tool's result. Read it in a thread: it renders."""
        template = self.chat_template
        messages = [*MESSAGES, _CALL, {"role": "tool", "tool_call_id": "callcall0", "content": [{"type": "image"}]}]
        try:
            return template is not None and self.picture_placeholder in template.render(TemplateInput(messages))
        except HTTPError:
            return False

    def stop_pictures(self) -> None:
        self.picture_work.stop()
        self.picture_fetches.stop()
        reader = self.__dict__.get("pictures")
        if reader is not None:
            reader.stop()

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

    @property
    def adapters(self) -> dict[str, AdapterStatus]:
        """The loaded adapters by name."""
        return {each.name: each for each in self.engine.stats().adapters}

    def find_adapter(self, name: str) -> AdapterStatus | None:
        """Return the adapter that a model name means: its own name, or MODEL:ADAPTER. None if there is none."""
        adapters, served = self.adapters, self.engine.info.served_names
        names = (name, *(name.removeprefix(f"{model}:") for model in served if name.startswith(f"{model}:")))
        return next((adapters[each] for each in names if each in adapters), None)

    def serves(self, name: str) -> bool:
        """Return whether a model name means the model or an adapter."""
        return name in self.engine.info.served_names or self.find_adapter(name) is not None

    def adapter_digest(self, name: str | None) -> str:
        """Return the digest of the adapter that a model name means; "" if it means the model itself.

        Raises ModelNotFoundError if it means neither, as after an unloading: no adapter's request gets the model alone.
        """
        served = self.engine.info.served_names
        if name is None or name in served:
            return ""
        if (adapter := self.find_adapter(name)) is None:
            shown = ", ".join((*served, *self.adapters))
            raise ModelNotFoundError(f"The model {name!r} does not exist. Served: {shown}.", param="model")
        return adapter.digest

    def check_model(self, name: str | None) -> str:
        """Return the model name to answer with; None means the first served name. Raises ModelNotFoundError."""
        self.adapter_digest(name)
        return self.engine.info.served_names[0] if name is None else name

    def check_messages(self, name: str | None) -> str:
        """As `check_generates`, for a route of Messages, where the name of an Anthropic model means the served model.

        Agents ask for claude-haiku and others for their small tasks, whichever model they were given.
        """
        if name is not None and name.startswith("claude-") and not self.serves(name):
            if not self.has_told_claude:
                logger.info("/v1/messages: %r is answered by %r", name, self.engine.info.served_names[0])
                self.has_told_claude = True
            name = None
        return self.check_generates(name)

    def check_generates(self, name: str | None) -> str:
        """As `check_model`, for a route that generates text. Raises InvalidValueError if the model generates none."""
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
    try:
        return late in template.render(TemplateInput([*messages, {"role": "user", "content": "Hello"}], tools))
    except HTTPError:
        return False


def server_state(request: Request) -> ServerState:
    return request.app.state.server


MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "callcall0", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
NO_TEMPLATE = "set model.chat_template to a template of this model that can"


def check_template(state: ServerState) -> None:
    """Load, compile and render the chat template. The tokenizer must be loaded.

    Raises ConfigError if the template is absent, does not parse or cannot render a plain conversation. If it cannot
    render tools, that is an error if model.tool_parser is set, else a warning.
    """
    template = state.chat_template
    if template is None:
        return
    _render(template, None)
    if state.parsers.tool is None:
        return
    try:
        _render(template, TOOLS)
    except ConfigError as error:
        if state.config.model.tool_parser != "auto":
            raise
        logger.warning("%s; requests with tools will be refused", error)


def _render(template: Renderer, tools: list[dict[str, Any]] | None) -> str:
    try:
        return template.render(TemplateInput(MESSAGES, tools))
    except InvalidValueError as error:
        what = "a conversation with tools" if tools else "a plain conversation"
        raise ConfigError(f"model.chat_template: {error.message}, trying {what}", fix=NO_TEMPLATE) from error


def check_pictures(state: ServerState) -> None:
    """Read how the model's pictures are processed. Raises ConfigError if this server cannot. The engine must be ready.

    Pillow is not imported, and no worker is started: the first picture does that.
    """
    if state.takes_pictures:
        _ = state.pictures, state.picture_placeholder


def check_vocabulary(state: ServerState) -> None:
    """Compare the tokenizer with the model's vocabulary, which may be padded. The engine must be ready.

    Raises ConfigError if a text could produce token ids that the model lacks. Unknown special tokens are only a
    warning: fine-tuned models are published with an added padding token that they never use.
    """
    tokenizer, known = state.engine.tokenizer, state.engine.info.vocab_size
    unknown = [i for i in range(known, tokenizer.vocab_size) if tokenizer.id_to_token(i) is not None]
    framed = tokenizer.encode("Hello") + _template_ids(state, tokenizer)
    wrong = [i for i in unknown if i not in tokenizer.special_ids or i in framed]
    if wrong:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, and the model's vocabulary has {known}: "
            f"{len(wrong)} tokens that texts use are unknown to the model, the first is {wrong[0]}",
            fix="use the tokenizer that the model was trained with (model.tokenizer)",
        )
    if unknown:
        logger.warning(
            "%d special tokens of the tokenizer are unknown to the model (ids %d to %d, its vocabulary has %d); "
            "a prompt with one of them is refused",
            *(len(unknown), unknown[0], unknown[-1], known),
        )


def _template_ids(state: ServerState, tokenizer: Tokenizer) -> list[int]:
    template = state.chat_template
    return [] if template is None else tokenizer.encode(_render(template, None), add_special_tokens=False)
