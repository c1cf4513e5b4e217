"""Calls of an operator that fail: the engine answers them and serves on."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import pytest

from jaxserve.engine.core import engine_control
from jaxserve.engine.core.engine_control import EngineControl
from jaxserve.engine.server import BuiltEngine, EngineServer
from jaxserve.transport.shared_state import SharedState
from jaxserve.types.messages import Add, Call, Reply
from tests.engine.test_server import ListChannel, info
from tests.fakes import make_core, make_request, small_config


class FullMemory:
    """Weights on a host whose memory has no room for others."""

    place: Literal["device"] = "device"
    structure: Any = None

    def staged(self, source: Any, tick: Any = None) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED")


def test_an_update_that_cannot_be_read_or_held_leaves_an_engine_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_control, "directory_source", lambda *_: object())
    core: Any = make_core(small_config())
    weights: Any = FullMemory()
    control = EngineControl(core, core.runner, weights, tmp_path)
    updates = [
        Call(1, "update_from_directory", {"path": "x"}),
        Call(2, "update_from_file", {"path": str(tmp_path / "gone")}),
    ]
    channel = ListChannel([*updates], [Add.of(make_request("a", [1], max_tokens=2))])
    channel.core = core
    EngineServer(BuiltEngine(core, info(), lambda spec: Future(), control), channel, SharedState()).run()
    replies = [message for message in channel.sent if isinstance(message, Reply)]
    assert [(reply.call_id, reply.status) for reply in replies] == [(1, 500), (2, 500)]
    assert all("the old weights stay" in (reply.error or "") for reply in replies)
    assert len(channel.tokens("a")) == 2
