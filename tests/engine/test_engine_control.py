"""Calls of an operator that fail: the engine answers them and serves on."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import pytest

from jaxserve.engine import control as engine_control
from jaxserve.engine.control import EngineControl
from jaxserve.engine.hosts.leader import GroupControl
from jaxserve.engine.server import BuiltEngine, EngineServer
from jaxserve.errors import ConflictError
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.transport.shared_state import SharedState
from jaxserve.types.calls import SetWeightVersion, Sleep, UpdateFromDirectory, UpdateFromFile
from jaxserve.types.group import Done, Operation
from jaxserve.types.messages import Add, Call, Outputs, Reply
from jaxserve.types.step import FinishReason, RequestStatus
from tests.engine.test_hosts import leader
from tests.engine.test_server import ListChannel, info
from tests.fakes import alone, make_core, make_request, run_all, small_config
from tests.faults.fake_pages import handover


class FullMemory:
    """Weights on a host whose memory has no room for others."""

    place: Literal["device"] = "device"
    structure: Any = None

    def staged(self, source: Any, tick: Any = None) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    def to_host(self) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED")


def serve(channel: ListChannel, core: Any, control: EngineControl) -> list[Reply]:
    channel.core = core
    EngineServer(BuiltEngine(core, info(), lambda spec: Future(), control), channel, SharedState()).run()
    return [message for message in channel.sent if isinstance(message, Reply)]


def test_an_update_that_cannot_be_read_or_held_leaves_an_engine_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_control, "directory_source", lambda *_: object())
    core: Any = make_core(small_config())
    weights: Any = FullMemory()
    control = EngineControl(core, core.runner, weights, ModelFiles.open(tmp_path))
    updates = [
        Call(1, UpdateFromDirectory(path="x")),
        Call(2, UpdateFromFile(path=str(tmp_path / "gone"))),
    ]
    channel = ListChannel([*updates], [Add.of(make_request("a", [1], max_tokens=2))])
    replies = serve(channel, core, control)
    assert [(reply.call_id, reply.status) for reply in replies] == [(1, 500), (2, 500)]
    assert all("the old weights stay" in (reply.error or "") for reply in replies)
    assert len(channel.tokens("a")) == 2


class AnyWeights(FullMemory):
    """Weights that take every update."""

    def staged(self, source: Any, tick: Any = None) -> Any:
        return source

    def replace(self, source: Any, tick: Any = None) -> None:
        """Nothing is kept."""


def test_pages_from_before_an_update_are_refused_whatever_the_label_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_control, "directory_source", lambda *_: object())
    core: Any = make_core(small_config())
    weights: Any = AnyWeights()
    control, pages, path = (
        EngineControl(core, core.runner, weights, ModelFiles.open(tmp_path)),
        handover(core, core.runner),
        tmp_path / "p",
    )
    prompt = list(range(20))
    run_all(core, [make_request("before", prompt, max_tokens=1)])
    assert pages.write(str(path), prompt) == pages.read(str(path)) == 20
    control.update_from_directory(UpdateFromDirectory(path="x", version=core.serving.version))
    with pytest.raises(ConflictError, match="other weights"):
        pages.read(str(path))
    run_all(core, [make_request("after", prompt, max_tokens=1)])
    assert pages.write(str(path), prompt) == pages.read(str(path)) == 20
    control.update_from_directory(UpdateFromDirectory(path="x", version=core.serving.version, number=7))
    core.serving.updated = 0.0  # as if the file were written after it, by an engine that did not have it yet
    with pytest.raises(ConflictError, match="other weights"):
        pages.read(str(path))


def test_outputs_name_their_weights_by_label_and_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_control, "directory_source", lambda *_: object())
    core: Any = make_core(small_config())
    weights: Any = AnyWeights()
    control = EngineControl(core, core.runner, weights, ModelFiles.open(tmp_path))
    calls = [Call(i, UpdateFromDirectory(path="x", version="a", number=i)) for i in (1, 2)]
    scored = make_request("scored", [1, 2], max_tokens=0, prompt_logprobs=0)
    channel = ListChannel(
        [Add.of(make_request("first", [1], max_tokens=1))], [], [], [*calls], [Add.of(scored)], [], []
    )
    serve(channel, core, control)
    outputs = [output for message in channel.sent if isinstance(message, Outputs) for output in message.outputs]
    named = {output.request_id: (output.weight_versions, output.weights) for output in outputs if output.finish_reason}
    assert named == {"first": ((), 0), "scored": (("a",), 2)}


def test_a_sleep_without_room_for_the_weights_leaves_an_engine_that_serves(tmp_path: Path) -> None:
    core: Any = make_core(small_config())
    weights: Any = FullMemory()
    control = EngineControl(core, core.runner, weights, ModelFiles.open(tmp_path))
    request = make_request("a", [1, 2, 3], max_tokens=8)
    channel = ListChannel([Add.of(request)], [Call(1, Sleep(mode="retract"))])
    (reply,) = serve(channel, core, control)
    assert reply.status == 500 and "the engine cannot sleep" in (reply.error or "")
    assert channel.tokens("a") == alone([1, 2, 3], request.params)[0]
    core.scheduler.check_integrity()


def test_a_label_that_is_refused_ends_no_request(tmp_path: Path) -> None:
    core: Any = make_core(small_config())
    weights: Any = FullMemory()
    control = EngineControl(core, core.runner, weights, ModelFiles.open(tmp_path))
    call = Call(1, SetWeightVersion("", "abort"))
    channel = ListChannel([Add.of(make_request("a", [1], max_tokens=8))], [call])
    (reply,) = serve(channel, core, control)
    assert reply.status == 400
    assert len(channel.tokens("a")) == 8


def test_a_file_of_weights_that_is_gone_leaves_a_group_that_serves(tmp_path: Path) -> None:
    core: Any = make_core(small_config())
    leads, events = leader(Done())
    weights: Any = FullMemory()
    control = GroupControl(leads, core, core.runner, weights, ModelFiles.open(tmp_path))
    call = Call(1, UpdateFromFile(path=str(tmp_path / "gone")))
    channel = ListChannel([call], [Add.of(make_request("a", [1], max_tokens=2))])
    (reply,) = serve(channel, core, control)
    assert reply.status == 500 and "the old weights stay" in (reply.error or "")
    assert events == [Operation("unstage"), "answers"]
    assert len(channel.tokens("a")) == 2


def test_no_prompt_is_computed_by_two_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place a request goes on with its old KV. Numbers of a prompt, such as an embedding, would be of neither."""
    monkeypatch.setattr(engine_control, "directory_source", lambda *_: object())
    core: Any = make_core(small_config())
    weights: Any = AnyWeights()
    control = EngineControl(core, core.runner, weights, ModelFiles.open(tmp_path))
    core.add(make_request("decodes", [1], max_tokens=20))
    for _ in range(3):
        core.step()
    core.add(make_request("prompt", list(range(60)), max_tokens=2, prompt_logprobs=0))
    while not core.scheduler.find("prompt").num_computed_tokens:
        core.step()
    control.update_from_directory(UpdateFromDirectory(path="x", running="in_place"))
    prompt, decodes = map(core.scheduler.find, ("prompt", "decodes"))
    assert (prompt.status, decodes.status) == (RequestStatus.PREEMPTED, RequestStatus.RUNNING)
    outputs = [output for _ in range(30) for output in core.step()]
    core.scheduler.check_integrity()
    ended = {each.request_id for each in outputs if each.finish_reason is FinishReason.LENGTH}
    assert ended == {"prompt", "decodes"}
