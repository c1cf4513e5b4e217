"""What hosts agree on, and the order in which a leader's calls reach its followers."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxserve.config import Config
from jaxserve.engine.hosts.agreement import check_hosts, followed, for_followers, group_key, hello, objection
from jaxserve.engine.hosts.follower import Operations
from jaxserve.engine.hosts.leader import Leader, LeaderRunner, LeaderWeights
from jaxserve.errors import ConfigError, ConflictError, ServerError
from jaxserve.models.adapters import AdapterShape, adapt
from jaxserve.models.checkpoint.adapter import read_adapter
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.structure import build
from jaxserve.runtime.weights import DeviceWeights
from jaxserve.transport.group import FollowerEnd, LeaderEnd, connect
from jaxserve.types.extras import ExtraParams
from jaxserve.types.group import (
    Done,
    Execute,
    Hello,
    LeaderEnds,
    Message,
    Operation,
    PlanOffer,
    Sample,
    decode_to_follower,
    encode,
)
from jaxserve.types.sampling import GrammarSpec, SamplingParams
from jaxserve.types.step import ScheduledRow, SchedulerOutput, SlotInit, TableUpdate
from tests.models.checkpoints import TINY_LLAMA
from tests.models.lora import peft_config, random_pairs, write_adapter
from tests.waiting import LAST_RESORT

HOSTS = {"hosts": 2, "tensor": 2}


def config(**sections: Any) -> Config:
    return Config.parse({"mesh": HOSTS} | sections)


def follower(**sections: Any) -> Config:
    mesh = {"hosts": 2, "host_rank": 1} | sections.pop("mesh", {})
    return Config.parse({"mesh": mesh} | sections)


def test_a_follower_takes_the_leaders_keys_and_keeps_its_own_paths() -> None:
    leader = config(
        scheduler={"max_num_seqs": 7}, model={"path": "/leaders", "max_model_len": 99}, cache={"dtype": "int8"}
    )
    own = follower(model={"path": "/mine"}, runtime={"compile_cache": "/programs"})
    taken = followed(own, for_followers(leader))
    assert (taken.scheduler.max_num_seqs, taken.model.max_model_len, taken.cache.dtype) == (7, 99, "int8")
    assert (taken.model.path, str(taken.runtime.compile_cache), taken.mesh.host_rank) == ("/mine", "/programs", 1)
    assert taken.mesh.tensor == 2
    assert followed(follower(), for_followers(leader)).model.path == "/leaders"


def test_no_secret_goes_to_a_follower() -> None:
    leader = config(server={"api_key": "hidden-key", "admin_api_key": "other-key"})
    sections = {"mesh", "model", "cache", "scheduler", "runtime", "speculation", "lora"}
    assert set(json.loads(for_followers(leader))) <= sections


def test_a_follower_has_the_leaders_room_for_adapters_and_none_of_its_directories() -> None:
    leader = config(lora={"slots": 3, "adapters": [{"name": "sql", "path": "/leaders"}], "keep": True})
    taken = followed(follower(lora={"slots": 3}), for_followers(leader)).lora
    assert (taken.slots, taken.adapters, taken.keep) == (3, (), False)
    assert objection(leader, hello(follower())) is None
    assert objection(leader, hello(follower(lora={"slots": 2}))) == "lora.slots is 3 at the leader and 2 on host 1"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"scheduler": {"max_num_seqs": 7}}, None),
        ({"scheduler": {"max_num_seqs": 8}}, "scheduler.max_num_seqs is 7 at the leader and 8 on host 1"),
        ({"mesh": {"hosts": 3}}, "the leader has mesh.hosts 2, and host 1 3"),
        ({"mesh": {"tensor": 4}}, "mesh.tensor is 2 at the leader and 4 on host 1"),
        ({"server": {"port": 1}}, None),
    ],
)
def test_what_differs_is_named(changes: dict[str, Any], reason: str | None) -> None:
    assert objection(config(scheduler={"max_num_seqs": 7}), hello(follower(**changes))) == reason


def test_versions_must_be_equal() -> None:
    other = msgspec.structs.replace(hello(follower()), versions={"jax": "0.0.1"})
    assert "and host 1 0.0.1" in str(objection(config(), other))
    second_leader = msgspec.structs.replace(hello(follower()), rank=0)
    assert objection(config(), second_leader) == "the leader is host 0, and there is no host 0 among 2"


def test_only_a_loopback_leader_needs_no_key(tmp_path: Path) -> None:
    assert group_key(config().mesh) == b""
    with pytest.raises(ConfigError, match="there is no key"):
        check_hosts(config(mesh=HOSTS | {"leader_address": "10.0.0.1:5000"}))
    with pytest.raises(ConfigError, match="there is no key"):
        check_hosts(config(mesh=HOSTS | {"leader_address": "127.0.0.1.example.com"}))
    path = tmp_path / "key"
    reachable = HOSTS | {"leader_address": "10.0.0.1", "group_key_file": str(path)}
    with pytest.raises(ConfigError, match="cannot be read"):
        check_hosts(config(mesh=reachable))
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="has 5 characters, and 16 are needed"):
        check_hosts(config(mesh=reachable))
    path.write_text("long enough for a group\n")
    assert group_key(config(mesh=reachable).mesh) == b"long enough for a group"


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("mesh.replicas", {"mesh": HOSTS | {"replicas": 2}}),
        ("mesh.data", {"mesh": HOSTS | {"data": 2}}),
        ("auto of mesh.tensor and mesh.expert", {"mesh": HOSTS | {"tensor": "auto"}}),
        ("models.served", {"models": {"served": [{"name": "a"}]}}),
        ("cache.host_memory", {"cache": {"host_memory": "1GiB"}}),
        ("speculation.method mtp", {"speculation": {"method": "mtp"}}),
        ("speculation.method eagle3", {"speculation": {"method": "eagle3", "draft_model": "DIR"}}),
        ("speculation.method draft_model", {"speculation": {"method": "draft_model", "draft_model": "DIR"}}),
        ("speculation.draft_model", {"speculation": {"draft_model": "DIR"}}),
    ],
)
def test_what_does_not_work_over_hosts_is_refused_by_name(name: str, sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{name} does not work together with mesh.hosts above 1"):
        check_hosts(config(**sections))


def test_the_address_may_have_the_port() -> None:
    assert config().mesh.leader == ("127.0.0.1", 29500)
    assert config(mesh=HOSTS | {"leader_address": "node-0:77"}).mesh.leader == ("node-0", 77)
    assert config(mesh=HOSTS | {"leader_address": "node-0", "leader_port": 78}).mesh.leader == ("node-0", 78)
    for wrong in ({"leader_address": "node-0:77", "leader_port": 78}, {"leader_address": "a:b"}, {"host_rank": 2}):
        with pytest.raises(ConfigError, match="mesh"):
            config(mesh=HOSTS | wrong)


def a_step() -> SchedulerOutput:
    params = SamplingParams(
        temperature=0.5,
        logit_bias={3: 1.5, 70_000: -2.0},
        allowed_token_ids=(1, 2),
        bad_words_token_ids=((1, 2), (3,)),
        grammar=GrammarSpec(kind="regex", source="a+"),
        extras=ExtraParams(logprob_token_ids=(5,)),
    )
    rows = [
        ScheduledRow("a", 0, 17, 1, True, [], 2, [9], masked=True, logprobs=3, extras=params.extras, drafts=(4, 5)),
        ScheduledRow("b", 1, 0, 3, False, [7, 8, 9], 0, [1, 2]),
    ]
    init = SlotInit(1, params, 2**64 - 1, 3, [7, 8, 9], (0,))
    return SchedulerOutput(12, rows, 1, [init], [TableUpdate(0, 1, 1, [2])], 2)


def test_a_step_arrives_as_it_was_sent() -> None:
    step = a_step()
    assert decode_to_follower(encode(Execute(step))) == Execute(step)
    masks = np.array([[-1, 5], [-1, -1], [2**31 - 1, -(2**31)]], np.int32)
    sample = decode_to_follower(encode(Sample.of(masks, (1,))))
    assert isinstance(sample, Sample) and sample.late == (1,)
    assert sample.masked == (0, 2) and len(sample.bitmask) == 16
    np.testing.assert_array_equal(sample.array(), masks)


def test_the_parts_of_a_file_leave_nothing_if_the_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    local: Any = Local([])
    operations = Operations(local, local, ModelFiles.open(tmp_path))
    assert operations.run(Operation("add_part", {"data": b"no safetensors"})) is None
    assert not [*tmp_path.iterdir()]
    assert "no safetensors file" in str(operations.run(Operation("stage_file", {"partial": False})))
    assert "no file was sent" in str(operations.run(Operation("stage_file", {"partial": False})))


class End:
    """A LeaderEnd that notes the order of what happens, and answers for its followers."""

    def __init__(self, answer: PlanOffer | Done) -> None:
        self.events: list[Any] = []
        self.answer = answer

    def send(self, message: Message) -> None:
        self.events.append(message)

    def answers(self, timeout: float, tick: object = None) -> dict[int, PlanOffer | Done]:
        self.events.append("answers")
        return {1: self.answer}

    def lose(self, reason: str, fix: str | None = None) -> None:
        self.events.append(f"lost: {reason}")


class Local:
    """The runner or the weights of the leader."""

    def __init__(self, events: list[Any], error: Exception | None = None) -> None:
        self._events = events
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def call(*args: object) -> Any:
            self._events.append(name)
            if self._error is not None:
                raise self._error
            return self

        return call


def leader(answer: PlanOffer | Done) -> tuple[Leader, list[Any]]:
    end = End(answer)
    assert set(dir(LeaderEnd)) >= {"send", "answers", "lose"}
    return Leader(cast("LeaderEnd", end)), end.events


def test_followers_that_end_with_the_leader_are_not_lost() -> None:
    """They close their connections as soon as they are told, which may be before the leader closes its own."""
    lost: list[str] = []
    for _ in range(20):
        end = LeaderEnd(("127.0.0.1", 0), b"", 3, lambda hello: None, lambda reason, fix: lost.append(reason))
        followers = [
            FollowerEnd(connect(("127.0.0.1", end.port), b"", lambda reason: None), Hello(rank, 3, {}, {}), lost.append)
            for rank in (1, 2)
        ]
        end.gather(LAST_RESORT)
        with ThreadPoolExecutor() as pool:
            told = [pool.submit(lambda each=each: (each.receive(), each.close())[0]) for each in followers]
            Leader(end).stop()
        assert [each.result() for each in told] == [LeaderEnds(), LeaderEnds()]
        assert lost == []


def test_a_call_that_a_lost_host_fails_is_no_mistake_of_the_client() -> None:
    end = LeaderEnd(("127.0.0.1", 0), b"", 2, lambda hello: None, lambda reason, fix: None)
    follower = FollowerEnd(
        connect(("127.0.0.1", end.port), b"", lambda reason: None), Hello(1, 2, {}, {}), lambda reason: None
    )
    end.gather(LAST_RESORT)
    follower.close()
    with pytest.raises(ServerError, match="host 1"):
        Leader(end).on_followers("stage_directory", path="/weights")
    end.close()


def test_each_call_is_sent_before_it_is_made_here() -> None:
    leads, events = leader(Done())
    local: Any = Local(events)
    runner = LeaderRunner(leads, local)
    step = a_step()
    handle = runner.execute(step)
    masks = np.ones((2, 2), np.int32)
    handle.sample(masks, [1])
    runner.rebuild()
    assert events == [
        Execute(step),
        "execute",
        Sample.of(masks, (1,)),
        "sample",
        Operation("rebuild"),
        "rebuild",
        "answers",
    ]


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_call_that_fails_on_one_host_ends_the_group(where: str) -> None:
    leads, events = leader(Done(None if where == "here" else "no memory"))
    local: Any = Local(events, ServerError("no memory here") if where == "here" else None)
    with pytest.raises(ServerError, match="no memory"):
        LeaderWeights(leads, local).to_device()
    failed = "host 0: ServerError: no memory here" if where == "here" else "host 1: no memory"
    assert events[-1] == f"lost: to_device failed on {failed}"


def test_staging_that_fails_leaves_the_group_as_it_is() -> None:
    leads, events = leader(Done("no such directory"))
    with pytest.raises(ServerError, match="host 1: no such directory"):
        leads.on_followers("stage_directory", path="/weights")
    assert events == [Operation("stage_directory", {"path": "/weights"}), "answers"]


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_follower_holds_an_adapter_of_its_own_directory(where: str, tmp_path: Path) -> None:
    """Of the same tensors as the leader's. Those that the leader has forgotten go."""
    if where == "here":
        leads, events = leader(Done("ModelLoadError: /a has no adapter_config.json"))
        with pytest.raises(ServerError, match="host 1: ModelLoadError: /a has no"):
            leads.hold_adapter("/a", "1" * 32, ["2" * 32])
        assert events[0] == Operation("hold_adapter", {"path": "/a", "digest": "1" * 32, "held": ["2" * 32]})
        return
    adapted = adapt(build(from_hf(TINY_LLAMA), jnp.dtype("float32")), AdapterShape(1, 4))
    pairs = random_pairs({name: tensor.shape for name, tensor in adapted.tensors.items()}, 3, 1)
    write_adapter(tmp_path, pairs, peft_config(3))
    digest = read_adapter(tmp_path, adapted).digest
    own = SimpleNamespace(adapted=adapted, held={"kept": None, "forgotten": None})
    runner: Any = SimpleNamespace(adapters=own, release=None)
    local: Any = Local([])
    operations = Operations(runner, local, ModelFiles.open(tmp_path))
    hold = {"path": str(tmp_path), "digest": digest, "held": ["kept", "other"]}
    assert operations.run(Operation("hold_adapter", hold)) is None
    assert set(own.held) == {"kept", digest}
    assert "other tensors on this host" in str(operations.run(Operation("hold_adapter", hold | {"digest": "0" * 32})))
    assert "has no adapter" in str(operations.run(Operation("hold_adapter", hold | {"path": str(tmp_path / "no")})))
    assert set(own.held) == {"kept", digest}


def test_an_update_that_is_refused_leaves_the_group_as_it_is() -> None:
    """A part of the weights, after all of them were dropped."""
    leads, events = leader(Done())
    specs = [SimpleNamespace(wide=lambda name=name: SimpleNamespace(name=name)) for name in ("norm", "head")]
    local = DeviceWeights(
        cast("Any", SimpleNamespace(leaves=(), draft_leaves=())), cast("Any", SimpleNamespace(specs=specs))
    )
    weights = LeaderWeights(leads, local)
    weights.drop()
    events.clear()
    source: Any = SimpleNamespace(parameters=frozenset({"norm"}), arrays=())
    with pytest.raises(ConflictError, match="must have all of them"):
        weights.replace(source)
    assert events == []
