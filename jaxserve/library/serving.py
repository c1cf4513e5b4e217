"""Run a server from notebooks and tests: `with launch_server("DIR") as server: ... server.url`.

The HTTP side runs in a thread of this process, the engine in a child process, as under `jaxserve launch`. `LoopThread`
runs coroutines in a thread for callers that may be inside a running event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from jaxserve.cli.options import own_word, parse_flags
from jaxserve.client.link import EngineLink
from jaxserve.config import RENAMED, Config, known_keys
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.transport.socket_directory import scratch_directory

if TYPE_CHECKING:
    from jaxserve.cli.launch import Launch

logger = logging.getLogger(__name__)

MakeLink = Callable[[Config], EngineLink | Sequence[EngineLink]]  # several: one for each replica

_FLAG = re.compile(r"--(?!help)(?:[a-z]+\.)?([a-z0-9-]+)")  # a section's name is left out

START_TIMEOUT = 600.0  # seconds; compiling a large model without a cache takes minutes


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A ready server. `url` has no trailing slash and no /v1."""

    url: str
    config: Config
    launch: Launch


def config_of(model: str | None, keys: Mapping[str, Any], config: Config | None = None) -> Config:
    """Build a Config from keys without their section, and from arguments of vLLM's LLM and SGLang's Engine.

    config: the whole configuration, in place of all other arguments
    An argument without effect here is logged. An argument of theirs that is None or empty, and a key that is None and
    cannot be null, are as if absent. Raises ConfigError for a name that neither has, or one that is refused.
    """
    if config is not None:
        if given := [*(["model"] if model is not None else []), *keys]:
            raise ConfigError(f"config is given, and {', '.join(given)} beside it", fix="set all of them in the config")
        return config
    own = {key.partition(".")[2]: known_keys()[RENAMED.get(key, key)] for key in [*known_keys(), *RENAMED]}
    peers = {f"--{name.replace('_', '-')}": name for name in keys if name not in own}
    try:
        flags = parse_flags(f"{flag}={_word(keys[name])}" for flag, name in peers.items() if _is_given(keys[name]))
    except ConfigError as error:
        raise ConfigError(_as_arguments(str(error)), fix=_as_arguments(error.fix or "") or None) from None
    for notice in flags.notices:
        logger.warning("%s", _as_arguments(notice))
    given = flags.values.pop("model.path", None)
    if model is not None and given not in (None, model):
        raise ConfigError(f"two models are given, {model} and {given}", fix="leave one out")
    values = {name: own_word(name, value) if isinstance(value, str) else value for name, value in keys.items()}
    nulls = {name for name, field in own.items() if type(None) in get_args(field.annotation)}
    config = Config.of(
        given if model is None else model,
        **{name: value for name, value in values.items() if name in (own if value is not None else nulls)},
    )
    sections: dict[str, dict[str, Any]] = {}
    for key, value in flags.values.items():
        section, _, name = key.partition(".")
        if name in getattr(config, section).model_fields_set:
            raise ConfigError(f"{name} is given twice, once by another server's name", fix="leave one of them out")
        sections.setdefault(section, {})[name] = value
    return config.replace(**sections)


def _is_given(value: Any) -> bool:
    """Whether another engine's argument asks for anything: their defaults are None and empty mappings and lists."""
    return value is not None and not (isinstance(value, dict | list | tuple) and not value)


def _word(value: Any) -> str:
    """Return a value as a word of a command line. A value that JSON lacks, such as a class, becomes text."""
    return json.dumps(value, default=str) if isinstance(value, bool | dict | list) else str(value)


def _as_arguments(text: str) -> str:
    """Return a text about flags as one about arguments."""
    text = _FLAG.sub(lambda found: found[1].replace("-", "_"), text)
    return text.replace("unknown flag", "unknown argument").replace("is no flag of", "is no argument of")


@contextlib.contextmanager
def launch_server(
    model: str | None = None,
    *,
    config: Config | None = None,
    make_link: MakeLink | None = None,
    **keys: Any,
) -> Iterator[RunningServer]:
    """Start a server on 127.0.0.1, wait until it is ready, and stop it at the end.

    The arguments are the same as for Engine. The port is a free one unless it is given. Files and batches last as long
    as the server unless store.path is given.
    make_link: makes the connection to the engine; None: the engine is a child process
    Raises ConfigError if the server cannot start.
    """
    from jaxserve.cli.http_server import bind  # noqa: PLC0415  uvicorn, which an Engine in process does not need

    config = config_of(model, keys if config is not None else {"port": 0} | keys, config)
    with scratch_directory() as directory:
        if config.store.path == "auto":
            config = config.replace(store={"path": str(directory / "store")})
        with bind(config.server) as listener, _Thread(config, listener, make_link) as server:
            yield server


class _Thread:
    def __init__(self, config: Config, listener: socket.socket, make_link: MakeLink | None) -> None:
        self._config = config
        self._listener = listener
        self._make_link = make_link
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxserve-http", daemon=True)
        self._launch: Launch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._is_left = False  # whether `_stop` was called

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        from jaxserve.cli.launch import Launch  # noqa: PLC0415  the routes, which an Engine does not need

        self._loop = asyncio.get_running_loop()
        self._launch = Launch(self._config, self._listener, quiet=True, make_link=self._make_link)
        if self._is_left:
            self._launch.stop()
        await self._launch.serve(on_ready=self._started.set)

    def __enter__(self) -> RunningServer:
        self._thread.start()
        try:
            return self._ready()
        except BaseException:  # an interrupt or a timeout: nothing else would end the engine process
            self._stop()
            raise

    def _ready(self) -> RunningServer:
        if not self._started.wait(START_TIMEOUT):
            raise ConfigError(
                f"the server was not ready within {START_TIMEOUT:.0f} s", fix="see in its log what took so long"
            )
        if self._error is not None:
            raise self._error
        if self._launch is None or not self._thread.is_alive():
            raise JaxserveError("the server ended before it was ready")
        return RunningServer(self._launch.url, self._config, self._launch)

    def __exit__(self, *exc: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self._is_left = True
        if self._loop is not None and self._launch is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._launch.stop)
        self._thread.join()


T = TypeVar("T")


class LoopThread:
    """Run coroutines while the caller waits. The thread is a daemon: it does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result. If the caller is interrupted, `work` is cancelled before this raises."""
        tasks: list[asyncio.Task[T]] = []
        ended = threading.Event()

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda _: ended.set())

        self._loop.call_soon_threadsafe(start)
        try:
            ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            ended.wait()
            raise
        return tasks[0].result()

    def settle(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which releases something.

        The garbage collector may call this in the loop's own thread. There `work` is only begun.
        """
        if threading.current_thread() is self._thread:
            self._pending = self._loop.create_task(work)
        elif self._thread.is_alive():
            self.run(work)
        else:
            work.close()

    def close(self) -> None:
        """Stop the thread. Running work is dropped and open generators are closed."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
