"""The API process's end of the transport to an engine in a child process, and the choice of its role and devices.

    Roles, check_roles   which replicas compute prompts, which produce tokens, and which requests need both
    DeviceShare          the devices of a replica: GPUs and TPU chips by an environment variable, cores by affinity
    EngineLink           the interface of a connection to an engine
    ProcessLink          owns the child process, its directory and its private sockets; does not interpret messages
    FollowerKeeper       keeps the engine process of a host whose leader runs elsewhere

No two replicas share a device. The choice is made before the child process starts, because JAX takes all devices that
it sees. Nothing here has been run on a TPU. No jax here.

A group ends if any host is lost, and then every host joins again. So a follower's process is started again when it
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import zmq
import zmq.asyncio

from jaxserve.config import Config
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.system import Platform, count_devices, platform_of
from jaxserve.transport.engine_child import ENGINE_MODULE, EngineChild
from jaxserve.transport.shared_state import Pulse
from jaxserve.transport.socket_directory import SHARED_MEMORY, sweep
from jaxserve.types.messages import (
    EngineInfo,
    EngineState,
    Failed,
    FromEngine,
    MessageError,
    Progress,
    Ready,
    RequestRefused,
    Stop,
    ToEngine,
    decode_from_engine,
    encode,
)
from jaxserve.types.sampling import SamplingParams

logger = logging.getLogger(__name__)

Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True)
class Roles:
    """How many replicas have which role, and which prompts need both.

    num_prefill: the first so many replicas only compute prompts; 0: each replica does both
    min_tokens: a prompt with fewer uncached tokens is computed by the replica that produces its tokens
    """

    num_prefill: int = 0
    min_tokens: int = 1

    @classmethod
    def of_config(cls, config: Config, count: int) -> Roles:
        """Return the roles of a server's `count` engines. One engine does both."""
        mesh = config.mesh
        return cls(mesh.prefill_replicas, mesh.prefill_min_tokens) if count > 1 else cls()

    def of(self, replica: int) -> Role:
        """Return the role of the replica with this index."""
        if not self.num_prefill:
            return "both"
        return "prefill" if replica < self.num_prefill else "decode"


def check_roles(config: Config) -> None:
    """Raise ConfigError if engines could not pass pages on."""
    if config.mesh.prefill_replicas and not config.cache.prefix_cache:
        raise ConfigError(
            "mesh.prefill_replicas passes pages from one prefix cache to another, and cache.prefix_cache is off",
            fix="leave one of them out",
        )


def ends_with_prompt(params: SamplingParams) -> bool:
    """Return whether the engine that computes the prompt also ends the request.

    It does if the request asks for at most one token, or for a value of every prompt token, which no page holds.
    """
    of_prompt = params.prompt_logprobs is not None or params.extras.of_prompt
    return params.embed or of_prompt or (params.max_tokens is not None and params.max_tokens <= 1)


_VISIBLE = {"gpu": "CUDA_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}  # by the number of chips of one process
_PREFILL_NICENESS = 5  # a prompt keeps a core busy, which the process that writes the streams may share
_LEAST_FRACTION = 0.01  # least value of cache.memory_fraction


@dataclass(frozen=True)
class DeviceShare:
    """The devices that one engine process may use.

    environment: variables added to its parent's. cores: cores of the CPU; None: all. niceness: by how much its priority
    is below its parent's
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    cores: frozenset[int] | None = None
    niceness: int = 0


def device_shares(
    config: Config,
    platform: Platform,
    environ: Mapping[str, str] = os.environ,
    cores: Sequence[int] | None = None,
    num_devices: int | None = None,
) -> list[DeviceShare]:
    """Return the share of each replica. Raises ConfigError if the devices are too few.

    If the mesh is auto, all devices are shared equally, and each engine chooses how to split its own.

    cores: cores that this process may use; None: ask the system
    num_devices: of the machine, if the environment does not name them; None: count their files
    """
    count = config.mesh.replicas
    if platform == "cpu":
        found = sorted(os.sched_getaffinity(0)) if cores is None else cores
        roles = Roles.of_config(config, count)
        return [
            DeviceShare(cores=frozenset(part), niceness=_PREFILL_NICENESS if roles.of(i) == "prefill" else 0)
            for i, part in enumerate(_cores(found, count))
        ]
    given = environ.get(_VISIBLE[platform])
    if config.mesh.is_auto:
        if given is None:
            given = ",".join(map(str, range(count_devices(platform) if num_devices is None else num_devices)))
        size = _equal_part(platform, len(_names(given)), count)
    else:
        size = config.mesh.data * math.prod(config.mesh.split)
    visible = _visible(given, count * size)
    parts = [visible[index * size : (index + 1) * size] for index in range(count)]
    return [DeviceShare(_environment(platform, part)) for part in parts]


def _cores(cores: Sequence[int], count: int) -> list[Sequence[int]]:
    if len(cores) < count:
        raise ConfigError(
            f"mesh.replicas is {count}, and there are {len(cores)} cores for them", fix="set it to that or less"
        )
    return [cores[index * len(cores) // count : (index + 1) * len(cores) // count] for index in range(count)]


def _visible(given: str | None, needed: int) -> list[str]:
    """Return the names of the devices. Without the variable they are numbers; an engine fails if one is missing."""
    if given is None:
        return [str(number) for number in range(needed)]
    names = _names(given)
    if len(names) < needed:
        raise ConfigError(
            f"the replicas need {needed} devices, and the environment shows {len(names)}",
            fix="lower mesh.replicas or mesh.tensor",
        )
    return names


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _equal_part(platform: Platform, num_devices: int, count: int) -> int:
    """Return the devices of each of `count` replicas. On a TPU it is a number that has a shape."""
    size = num_devices // count
    if not size:
        raise ConfigError(
            f"mesh.replicas is {count}, and {num_devices} devices are found for them",
            fix=f"lower mesh.replicas, or set mesh.tensor and mesh.expert, or {_VISIBLE[platform]}",
        )
    return max(shape for shape in _TPU_BOUNDS if shape <= size) if platform == "tpu" else size


def _environment(platform: Platform, names: Sequence[str]) -> dict[str, str]:
    variables = {_VISIBLE[platform]: ",".join(names)}
    if platform == "tpu":
        bounds = _TPU_BOUNDS.get(len(names))
        if bounds is None:
            raise ConfigError(f"a replica of {len(names)} TPU chips has no shape", fix="use 1, 2, 4 or 8 a replica")
        variables |= {"TPU_CHIPS_PER_PROCESS_BOUNDS": bounds, "TPU_PROCESS_BOUNDS": "1,1,1"}
    return variables


def replica_config(config: Config, platform: Platform, index: int) -> Config:
    """Return the configuration of one engine, with its platform, its share of the memory and a folder of its own."""
    cache = config.cache
    changes: dict[str, object] = {}
    if platform == "cpu":  # each engine sees all memory
        changes["memory_fraction"] = max(_LEAST_FRACTION, cache.memory_fraction / config.mesh.replicas)
    if cache.disk is not None:
        changes["disk"] = str(cache.disk / f"engine-{index}")
    return config.replace(mesh={"device": platform}, cache=changes)


STOP_TIMEOUT = 5.0  # seconds that a child has to exit by itself


class EngineLink(Protocol):
    """A connection to one engine. After EngineDeadError it can be started again."""

    def pulse(self) -> Pulse | None:
        """Heartbeat counters of the engine since its start; None for an engine in this process."""
        ...

    def in_work(self) -> list[str]:
        """Return the ids of the requests that the engine computes or receives, or did when it died; [] if unknown."""
        ...

    async def start(self) -> None: ...

    def send(self, message: ToEngine) -> None: ...

    async def receive(self) -> FromEngine | EngineState | RequestRefused:
        """Return the next message. Raises EngineDeadError if the engine has ended and no message is left."""
        ...

    def dump_stacks(self) -> None:
        """Ask the engine to write the stacks of its threads to its log."""
        ...

    def kill(self) -> None:
        """Kill the engine at once."""
        ...

    async def stop(self) -> None: ...


def with_plan(config: Config, info: EngineInfo) -> Config:
    """Return the configuration of a replacement engine: the same mesh and pages, even if less memory is free now.

    With fewer pages it would refuse requests that the previous engine had accepted. If memory is short its start
    fails, and is tried again after the delays between restarts.
    """
    groups = info.memory_plan.get("groups") or [{}]  # the first decides about the pages of the others
    pages = {"num_pages": info.num_pages, "num_window_pages": groups[0].get("num_pages")}
    pages["num_state_pages"] = info.memory_plan.get("num_state_pages")
    planned = {name: number for name, number in pages.items() if number}  # an encoder has no pages
    mesh = {"tensor": info.tensor, "expert": info.expert} if config.mesh.is_auto else {}
    sections = {"cache": config.cache.model_copy(update=planned), "mesh": config.mesh.model_copy(update=mesh)}
    return config.model_copy(update=sections)


class ProcessLink:
    """An engine in a child process.

    module: the module that the child runs. share: the devices that it may use. child: a child that runs already; None:
    `start` starts the first one too
    """

    def __init__(
        self,
        config: Config,
        module: str = ENGINE_MODULE,
        share: DeviceShare | None = None,
        child: EngineChild | None = None,
    ) -> None:
        self._config = config
        self._module = module
        self._share = share or DeviceShare()
        self._child: EngineChild | None = None
        self._next = child
        self._context: zmq.asyncio.Context | None = None
        self._ended: asyncio.Future[int] | None = None
        self._is_ready = False
        self._has_swept = False

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Start the child process with new sockets. An earlier child is stopped first."""
        await self.stop()
        self._sweep()
        self._is_ready = False
        self._child, self._next = self._next or self._new_child(), None
        self._ended = self._child.ended()
        self._context = zmq.asyncio.Context()
        self._outgoing = self._bind(self._context, zmq.PUSH, "to-engine")
        self._incoming = self._bind(self._context, zmq.PULL, "from-engine")

    def _new_child(self) -> EngineChild:
        config = self._config.without_secrets().model_dump_json()
        share = self._share
        return EngineChild(
            self._module, config, environment=share.environment, cores=share.cores, niceness=share.niceness
        )

    def _sweep(self) -> None:
        if not self._has_swept:
            self._has_swept = True
            if swept := [*sweep(), *sweep(SHARED_MEMORY)]:  # pages of prompts are passed on in shared memory
                logger.info("removed %d directories of killed servers", len(swept))

    def _bind(self, context: zmq.asyncio.Context, kind: int, name: str) -> zmq.asyncio.Socket:
        assert self._child is not None
        socket = context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{self._child.directory.path}/{name}")
        return socket

    def send(self, message: ToEngine) -> None:
        if self._child is None or not self._child.is_running:
            return  # receive() reports the death; lost messages are sent again after the restart
        with contextlib.suppress(zmq.Again):  # the child closed its end: it is exiting, see above
            zmq.Socket.send(self._outgoing, encode(message), zmq.NOBLOCK)

    async def receive(self) -> FromEngine:
        """Return the next message; invalid frames are skipped.

        Raises EngineDeadError if the process has ended and no message is left.
        """
        assert self._ended is not None
        while True:
            frame = asyncio.ensure_future(self._incoming.recv())
            await asyncio.wait((frame, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not frame.done():  # the child exited: only messages already in the socket can still come
                await asyncio.wait((frame,), timeout=0.1)
            if not frame.done():
                frame.cancel()
                raise EngineDeadError(f"the engine process ended with status {self._ended.result()}")
            try:
                message = decode_from_engine(await frame)
            except MessageError:
                continue
            if isinstance(message, Ready):
                self._is_ready = True
                self._config = with_plan(self._config, message.info)
            return message

    def pulse(self) -> Pulse | None:
        return Pulse(0, 0) if self._child is None else self._child.directory.state.pulse

    def in_work(self) -> list[str]:
        return [] if self._child is None else self._child.directory.state.in_work

    def dump_stacks(self) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)

    async def stop(self) -> None:
        """Stop the child: by a message if it is ready, by SIGKILL if it is loading or STOP_TIMEOUT has passed."""
        if self._child is not None and self._ended is not None:
            if self._is_ready:
                self.send(Stop())
            else:  # it reads no messages while it loads
                self.kill()
            await asyncio.wait((self._ended,), timeout=STOP_TIMEOUT)
            if not self._ended.done():
                self.kill()
                await self._ended
        self._close()

    def _close(self) -> None:
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._child is not None:
            self._child.close()
        self._child = self._context = None


def process_links(config: Config, module: str = ENGINE_MODULE) -> list[EngineLink]:
    """Return a link for each replica of a server. Raises ConfigError if there are too few devices."""
    if config.mesh.replicas == 1:
        return [ProcessLink(config, module)]
    check_roles(config)
    platform = platform_of(config)
    shares = device_shares(config, platform)
    return [ProcessLink(replica_config(config, platform, i), module, share) for i, share in enumerate(shares)]


SERVING = "serving"  # the phase of a follower that makes the leader's calls
RESTART_DELAY = 1.0  # seconds
ENGINE_LOOK_INTERVAL = 1.0  # seconds
ENGINE_SILENCE_LIMIT = 30.0  # seconds without a heartbeat of the engine process after which it is killed


class FollowerKeeper:
    """Starts the engine process of this host, again and again.

    config: names this host's rank and the leader's address. phase: the phase of the engine process
    """

    def __init__(self, config: Config) -> None:
        self.phase = "starting"
        self._rank = config.mesh.host_rank
        self._link = ProcessLink(config, "jaxserve.engine.hosts.follower_process")

    async def run(self) -> None:
        """Keep an engine process until cancelled, then end it.

        Raises ConfigError if one ends because of a mistake of the operator.
        """
        work = [asyncio.create_task(task) for task in (self._keep(), self._watch())]
        try:
            await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await self._link.stop()

    async def _keep(self) -> None:
        """Run one engine process after the other. Raises ConfigError."""
        await self._link.start()
        while True:
            with contextlib.suppress(EngineDeadError):
                while True:
                    self._take(await self._link.receive())
            self.phase = "restarting"
            logger.warning("the engine process of this host ended; it starts again and waits for the leader")
            await asyncio.sleep(RESTART_DELAY)
            await self._start_again()

    async def _start_again(self) -> None:
        """Start an engine process as soon as the system has a process and a folder for it."""
        while True:
            try:
                return await self._link.start()
            except (OSError, ConfigError) as error:
                logger.error("no engine process can be started: %s", error)
            await asyncio.sleep(RESTART_DELAY)

    def _take(self, message: object) -> None:
        match message:
            case Progress(phase):
                if phase != self.phase:
                    logger.info("host %d: %s", self._rank, phase)
                self.phase = phase
            case Failed(reason, fix, expected):
                if expected:
                    raise ConfigError(reason, fix=fix)

    async def _watch(self) -> None:
        """Kill an engine process that is stopped. The leader cannot: it may be on another machine."""
        seen, since = None, 0.0
        while True:
            await asyncio.sleep(ENGINE_LOOK_INTERVAL)
            pulse, now = self._link.pulse(), asyncio.get_running_loop().time()
            if pulse != seen or self.phase != SERVING:
                seen, since = pulse, now
            elif now - since > ENGINE_SILENCE_LIMIT:
                logger.error("the engine process shows no sign of life: killing it")
                self._link.kill()
