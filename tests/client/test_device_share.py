"""What each engine process of a server may use."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from jaxserve.client.link import DeviceShare, device_shares, with_plan
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.system import count_devices
from jaxserve.text.tokenizer import Tokenizer
from tests.api.fakes import DEMO, demo_info


def test_engines_that_compute_prompts_have_a_lower_priority_on_a_cpu() -> None:
    config = Config.parse({"mesh": {"replicas": 3, "prefill_replicas": 1}})
    shares = device_shares(config, "cpu", cores=[0, 1, 2, 3])
    assert shares == [
        DeviceShare(cores=frozenset({0}), niceness=5),
        DeviceShare(cores=frozenset({1})),
        DeviceShare(cores=frozenset({2, 3})),
    ]
    joint = device_shares(config.replace(mesh={"prefill_replicas": 0}), "cpu", cores=[0, 1, 2])
    assert [share.niceness for share in joint] == [0, 0, 0]
    assert [share.niceness for share in device_shares(config, "gpu", {})] == [0, 0, 0]


def test_an_auto_mesh_shares_all_devices_equally() -> None:
    config = Config.parse({"mesh": {"replicas": 2, "tensor": "auto"}})

    def parts(name: str, environ: dict[str, str], count: int | None = None, shares: Config = config) -> list[str]:
        platform = "gpu" if name.startswith("CUDA") else "tpu"
        return [share.environment[name] for share in device_shares(shares, platform, environ, num_devices=count)]

    gpus, chips = "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"
    assert parts(gpus, {}, 9) == ["0,1,2,3", "4,5,6,7"]
    assert parts(gpus, {gpus: "7, 3,GPU-ab"}, 9) == ["7", "3"]
    assert parts(chips, {}, 6) == ["0,1", "2,3"], "three chips have no shape"
    with pytest.raises(ConfigError, match=r"mesh\.replicas is 2, and 1 devices are found"):
        parts(gpus, {}, 1)
    assert parts(gpus, {}, 8, config.replace(mesh={"tensor": 1, "expert": 3})) == ["0,1,2", "3,4,5"], "as it was"


def test_devices_are_counted_by_their_files(tmp_path: Path) -> None:
    (tmp_path / "vfio").mkdir()
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "accel0", "vfio/0", "vfio/3", "vfio/vfio"):
        (tmp_path / name).touch()
    assert (count_devices("gpu", tmp_path), count_devices("tpu", tmp_path)) == (2, 3)


def test_an_engine_that_is_started_again_keeps_its_mesh() -> None:
    info = msgspec.structs.replace(demo_info(Tokenizer.from_directory(DEMO)), tensor=2, expert=4)
    auto = with_plan(Config.parse({"mesh": {"tensor": "auto"}}), info)
    assert auto.mesh.split == (2, 4) and auto.cache.num_pages == info.num_pages
    assert Config.model_validate_json(auto.without_secrets().model_dump_json()).mesh.split == (2, 4)
    assert with_plan(Config.parse({"mesh": {"tensor": 3}}), info).mesh.split == (3, 1)
