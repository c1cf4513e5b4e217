"""`jaxserve launch` with `models.served`: a front process without an engine, and processes for each model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvloop

from jaxserve.cli.http_server import Server, bind, check_certificates, http_config, keep_heap_small, on_signals, url_of
from jaxserve.cli.options import read_yaml, validate
from jaxserve.cli.start import check_model_paths, tell_start
from jaxserve.config import DEFAULT_STORE, Config, ModelEntry, StoreSection, own_sections
from jaxserve.config_types import reveal
from jaxserve.errors import ConfigError, UnexpectedEndError
from jaxserve.front.app import create_front
from jaxserve.front.loaded_models import LoadedModels, ModelPlan
from jaxserve.log import fields, is_json, tell
from jaxserve.transport.socket_directory import SocketDirectory

# keys only for the front: a model's process listens on a Unix socket, and the front answers other origins
_FRONT_ONLY = {"host", "port", "ssl_certfile", "ssl_keyfile", "cors_origins"}

logger = logging.getLogger(__name__)


def serve(config: Config) -> int:
    """Serve until a signal and return the exit code. Raises ConfigError and UnexpectedEndError."""
    plans = make_plans(config)
    check_certificates(config.server)
    tell_start(f"{len(plans)} models")
    keep_heap_small()
    with bind(config.server) as listener:
        try:
            return uvloop.run(_Front(config, plans, listener).serve())
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C while Python ends


def make_plans(config: Config) -> Sequence[ModelPlan]:
    """Return the models with their whole configurations. Raises ConfigError that names the wrong model."""
    if config.model.path is not None:
        raise ConfigError("model.path is set beside models.served", fix="set it in the config of a model")
    store = store_directory(config.store)
    key = reveal(config.server.admin_api_key) or secrets.token_hex(32)
    plans = [_plan(config, entry, store, key) for entry in config.models.served]
    counts = Counter(name for plan in plans for name in plan.names)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(f"two models have the name {repeated[0]!r}", fix="change model.served_name of one of them")
    counts.update(each.name for plan in plans for each in plan.config.lora.adapters)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(f"two models or adapters have the name {repeated[0]!r}", fix="change it in lora.adapters")
    return plans


def _plan(config: Config, entry: ModelEntry, store: Path | None, admin_key: str) -> ModelPlan:
    """Return the configuration of one model's processes. Raises ConfigError that names the model."""
    try:
        tree: dict[str, Any] = config.model_dump(exclude_unset=True, exclude={"models"})
        for section, keys in _sections(entry).items():
            tree[section] = tree.get(section, {}) | (keys or {})
        server = {name: value for name, value in tree.get("server", {}).items() if name not in _FRONT_ONLY}
        tree["server"] = server | {"admin_api_key": admin_key, "allowed_hosts": ["*"]}  # the front checks hosts
        path = None if store is None else store / quote(entry.name, safe="")
        tree["store"] = tree.get("store", {}) | {"path": path}
        own = validate(tree)
        names = tuple(dict.fromkeys((entry.name, *own.model.served_name)))
        check_model_paths(own)
    except ConfigError as error:
        raise ConfigError(f"models.served, {entry.name}: {error}", fix=error.fix) from None
    return ModelPlan(entry, own.replace(model={"served_name": names}), names)


def _sections(entry: ModelEntry) -> dict[str, Any]:
    """Return the sections that the model sets for itself. Raises ConfigError."""
    if isinstance(entry.config, dict):
        return entry.config
    try:
        return own_sections(read_yaml(Path(entry.config).expanduser()))
    except ValueError as error:
        raise ConfigError(f"{entry.config}: {error}") from None


def store_directory(section: StoreSection) -> Path | None:
    """Return the directory that has a store for each model; None without stores."""
    if section.path != "auto":
        return section.path
    try:
        folder = Path(DEFAULT_STORE).expanduser() / "models"
        folder.mkdir(parents=True, exist_ok=True)
    except (RuntimeError, OSError) as error:  # RuntimeError: a user without a home
        logger.warning("no files and no batches: %s; set store.path", error)
        return None
    return folder


class _Front:
    """One run of the server."""

    def __init__(self, config: Config, plans: Sequence[ModelPlan], listener: socket.socket) -> None:
        self._config = config
        self._plans = plans
        self._listener = listener
        self._stop = asyncio.Event()
        self._signals = 0

    async def serve(self) -> int:
        """Serve until a signal. Raises UnexpectedEndError for any other end."""
        on_signals(self._on_signal)
        directory = SocketDirectory()
        loaded_models = LoadedModels(self._plans, self._config.models, self._config.server, directory.path)
        server = Server(http_config(create_front(loaded_models, self._config), self._config.server))
        http = asyncio.create_task(server.serve(sockets=[self._listener]))
        tasks = (http, asyncio.create_task(loaded_models.run()), asyncio.create_task(self._stop.wait()))
        ready = asyncio.create_task(self._show_ready(loaded_models))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if http in done:
                raise UnexpectedEndError("the HTTP server ended", fix="see the lines above")
            return 0
        finally:
            ready.cancel()
            await loaded_models.stop()
            server.should_exit = True
            tasks[1].cancel()
            await asyncio.gather(*tasks[:2], return_exceptions=True)
            directory.remove()

    async def _show_ready(self, loaded_models: LoadedModels) -> None:
        await loaded_models.started.wait()
        rows = [f"model       {each.plan.name} ({each.state})" for each in loaded_models.all]
        url = url_of(self._listener, self._config.server)
        models = {each.plan.name: each.state for each in loaded_models.all}
        if is_json():
            return logger.info("jaxserve is ready", extra=fields(event="ready", url=url, models=models))
        print("\n".join(["jaxserve is ready", f"URL         {url}/v1", *rows]), flush=True)

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(130)  # the processes of the models end too, because their stdin is closed
        with contextlib.suppress(OSError):  # the terminal may be gone
            line = f"{number.name}: draining; a second signal ends it at once"
            tell(line, event="drain", signal=number.name)
        self._stop.set()
