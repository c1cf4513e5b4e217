"""The engine of a host that is not the leader: joins the group, loads its part of the model, and follows.

A follower makes the leader's calls on its own devices, in the leader's order. It schedules nothing.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import jax

from jaxserve.config import Config
from jaxserve.engine.factory import NO_DRAFTS, Send, load, locate, make_runner
from jaxserve.engine.hosts import agreement
from jaxserve.engine.hosts.jax_group import join_devices, write_programs
from jaxserve.engine.hosts.leader import end_process, offer_of, with_sizes
from jaxserve.errors import ConfigError, ServerError
from jaxserve.models.checkpoint.adapter import read_adapter
from jaxserve.models.checkpoint.checkpoint import Checkpoint
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.safetensors_file import read_contents
from jaxserve.models.checkpoint.sentence_files import is_embedder
from jaxserve.models.checkpoint.weight_sources import NamedTensors, WeightSource, directory_source
from jaxserve.runtime.memory import MemoryPlan
from jaxserve.runtime.mesh import configured_mesh
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.runtime.weights import DeviceWeights
from jaxserve.transport.child import write
from jaxserve.transport.group import FollowerEnd, GroupConnectionError, connect
from jaxserve.types.group import (
    Done,
    Execute,
    HostFailed,
    LeaderEnds,
    Message,
    Operation,
    PlanOffer,
    Rejected,
    Sample,
    ToFollower,
    WarmedUp,
    WarmRun,
    Welcome,
)
from jaxserve.types.messages import Progress
from jaxserve.types.step import StepHandle

_Message = TypeVar("_Message", bound=Message)


def welcome(end: FollowerEnd) -> Welcome:
    """Wait until the group is complete. Raises ConfigError if the leader does not take this host in."""
    message = end.receive()
    if isinstance(message, Rejected):
        raise ConfigError(f"the leader refuses this host: {message.reason}", fix="start both with the same keys")
    return _expected(message, Welcome)


def agreed_plan(end: FollowerEnd, plan: MemoryPlan) -> MemoryPlan:
    """Tell the leader the sizes that fit here. Return the plan with the sizes that fit on all hosts."""
    end.send(offer_of(plan))
    return with_sizes(plan, _expected(end.receive(), PlanOffer))


def _expected(message: ToFollower, kind: type[_Message]) -> _Message:
    if not isinstance(message, kind):
        raise ServerError(f"the leader sent {type(message).__name__} where {kind.__name__} comes")
    return message


class Follower:
    """Makes the calls of the leader. served: files of the model"""

    def __init__(self, end: FollowerEnd, runner: ModelRunner, served: ModelFiles) -> None:
        self._end = end
        self._runner = runner
        self._operations = Operations(runner, DeviceWeights(runner, runner.structure), served)
        self._step: StepHandle | None = None

    def warm_up(self) -> None:
        """Make the first runs of the programs that the leader runs."""
        self._end.send(Done())
        while isinstance(message := self._end.receive(), WarmRun):
            self._runner.timed_run(message.family, message.size)
        _expected(message, WarmedUp)
        self._runner.end_warm_up()

    def run(self) -> None:
        """Make the leader's calls until it stops. An exception of a step is raised, and ends the group."""
        while not isinstance(message := self._end.receive(), LeaderEnds):
            self._make(message)

    def _make(self, message: ToFollower) -> None:
        match message:
            case Execute(output):
                self._step = self._runner.execute(output)
            case Sample():
                assert self._step is not None
                self._step.sample(message.array(), message.late)
            case Operation():
                self._step = None
                self._end.send(Done(self._operations.run(message)))
            case _:
                raise ServerError(f"the leader sent {type(message).__name__} while it serves")


class Operations:
    """The calls other than steps. Between `stage_...` and `replace` the new weights are in the host's memory."""

    def __init__(self, runner: ModelRunner, weights: DeviceWeights, served: ModelFiles) -> None:
        self._runner = runner
        self._weights = weights
        self._served = served
        self._staged: WeightSource | None = None
        self._file: IO[bytes] | None = None
        self._calls: dict[str, Callable[..., None]] = {
            "rebuild": self.rebuild,
            "release": runner.release,
            "to_host": weights.to_host,
            "to_device": weights.to_device,
            "drop": weights.drop,
            "stage_directory": self.stage_directory,
            "add_part": self.add_part,
            "stage_file": self.stage_file,
            "unstage": self.unstage,
            "replace": self.replace,
            "hold_adapter": self.hold_adapter,
        }

    def run(self, operation: Operation) -> str | None:
        """Make a call. Returns the reason if it failed, None if it succeeded."""
        try:
            self._calls[operation.name](**operation.args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def rebuild(self) -> None:
        """Wait for the steps on the devices, then allocate empty arrays. Failed steps left arrays without content."""
        with contextlib.suppress(Exception):
            jax.block_until_ready((self._runner.caches, self._runner.state, self._runner.hidden))
        self._runner.rebuild()

    def stage_directory(self, path: str) -> None:
        """Read a checkpoint directory of this host."""
        self._staged = self._weights.staged(directory_source(Path(path), self._weights.structure, self._served))

    def add_part(self, data: bytes) -> None:
        """Append bytes to a temporary file. It has no name, so nothing of it is left if this process is killed."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)
        write(self._file.fileno(), data)

    def stage_file(self, partial: bool) -> None:
        """Read the temporary file, a safetensors file, and remove it. Raises ServerError if there is none."""
        if self._file is None:
            raise ServerError("no file was sent")
        try:
            contents = list(read_contents(Path(f"/proc/self/fd/{self._file.fileno()}")))
            checkpoint = Checkpoint.of(Path("the update"), dict(contents), duplicate=())
            source: Any = NamedTensors(self._weights.structure, checkpoint, partial=partial)
            self._staged = self._weights.staged(source)
        finally:
            self.unstage_file()

    def unstage_file(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def unstage(self) -> None:
        """Forget staged weights."""
        self._staged = None
        self.unstage_file()

    def replace(self) -> None:
        """Use the staged weights. Raises ServerError if there are none."""
        if self._staged is None:
            raise ServerError("no weights are staged")
        staged, self._staged = self._staged, None
        self._weights.replace(staged)

    def hold_adapter(self, path: str, digest: str, held: list[str]) -> None:
        """Read an adapter from a directory of this host. The others that the leader holds stay, by their digests.

        Raises ModelLoadError, and ServerError if it has other tensors than the leader's.
        """
        own = self._runner.adapters
        assert own is not None
        adapter = read_adapter(Path(path), own.adapted)
        if adapter.digest != digest:
            raise ServerError(f"the adapter in {path} has other tensors on this host than on host 0")
        own.held = {name: own.held[name] for name in held if name in own.held} | {digest: adapter}


WAITING, SERVING = "waiting for the leader", "serving"  # phases


def follow(config: Config, send: Send) -> None:
    """Follow the leader until it stops. Waits for it as long as it takes; if it is lost then, this process ends.

    send: gets the progress; may be called by another thread. Raises ConfigError.
    """
    mesh = config.mesh
    agreement.check_hosts(config)
    key = agreement.group_key(mesh)
    send(Progress(WAITING))
    connection = connect(mesh.leader, key, lambda _: None)
    end = FollowerEnd(
        connection, agreement.hello(config), lambda reason: end_process(send, f"the leader is lost: {reason}")
    )
    with _told(end):
        first = welcome(end)
        follower = _built(agreement.followed(config, first.config), end, send, first.coordinator)
        follower.warm_up()
        send(Progress(SERVING))
        follower.run()
    end.close()


@contextlib.contextmanager
def _told(end: FollowerEnd) -> Iterator[None]:
    """Tell the leader why this host fails, if it does."""
    try:
        yield
    except Exception as error:
        fix = error.fix if isinstance(error, ConfigError) else None
        with contextlib.suppress(GroupConnectionError):
            end.send(HostFailed(f"{type(error).__name__}: {error}", fix))
        raise


def _built(config: Config, end: FollowerEnd, send: Send, coordinator: str) -> Follower:
    """Load this host's part of the model and compile. config: from `followed`"""
    section = config.mesh
    files = ModelFiles.open(locate(config))
    send(Progress("devices"))
    join_devices(coordinator, section.host_rank, section.hosts)
    mesh = configured_mesh(section)
    write_programs()
    send(Progress("weights", unit="bytes"))
    loaded = load(config, files, mesh, send)
    if is_embedder(files, loaded.config) or loaded.config.labels:
        config = config.replace(speculation=NO_DRAFTS)
    send(Progress("programs", unit="programs"))
    agree = functools.partial(agreed_plan, end)
    runner = make_runner(config, loaded, files, mesh, send, agree)
    assert isinstance(runner, ModelRunner)
    return Follower(end, runner, files)
