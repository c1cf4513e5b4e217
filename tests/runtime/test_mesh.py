import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.runtime import mesh
from jaxserve.system import install_command


def test_a_mesh_of_one_device() -> None:
    made = mesh.make_mesh("cpu")
    assert (made.platform, made.tensor, made.mesh.axis_names) == ("cpu", 1, ("data", "tensor", "expert"))
    assert made.replicated.is_fully_replicated


def test_more_devices_than_there_are() -> None:
    message = r"asks for 64 devices \(data 1 x tensor 64 x expert 1\), and there are"
    with pytest.raises(ConfigError, match=message) as found:
        mesh.make_mesh("cpu", tensor=64)
    assert found.value.fix == "lower mesh.tensor or mesh.expert"
    with pytest.raises(ConfigError) as found:
        mesh.make_mesh("cpu", data=64)
    assert found.value.fix is not None and found.value.fix.startswith("set mesh.data to 1")


def test_a_platform_that_is_not_there_names_its_extra() -> None:
    with pytest.raises(ConfigError, match=r"mesh.device is 'tpu'") as caught:
        mesh.make_mesh("tpu")
    assert caught.value.fix == install_command("tpu")


def test_a_gpu_that_jax_cannot_use_is_not_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr(mesh, "NVIDIA_DRIVER", driver)
    with pytest.raises(ConfigError, match="JAX cannot use it") as caught:
        mesh.find_devices("auto")
    assert "--device cpu" in str(caught.value.fix)
    assert mesh.find_devices("cpu")


@pytest.mark.parametrize("name", mesh._FRACTION_NAMES)
def test_the_share_of_a_gpu_is_raised_unless_the_caller_chose_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in mesh._FRACTION_NAMES:
        monkeypatch.setenv(other, "")  # so that it is as before after the test
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, "0.5")
    mesh.find_devices("cpu")
    assert {key: os.environ[key] for key in mesh._FRACTION_NAMES if key in os.environ} == {name: "0.5"}
    monkeypatch.delenv(name)
    mesh.find_devices("cpu")
    assert float(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]) > 0.75


@pytest.mark.parametrize(
    ("kind", "found"),
    [("TPU v3", "xla"), ("TPU v4", "xla"), ("TPU v5 lite", "tpu"), ("TPU v5p", "tpu"), ("TPU v6 lite", "tpu")],
)
def test_a_tpu_with_little_vmem_has_the_experts_of_xla(kind: str, found: str) -> None:
    devices: Any = SimpleNamespace(platform="tpu", devices=[SimpleNamespace(device_kind=kind)])
    assert mesh.expert_kernels("auto", devices) == found
    assert mesh.expert_kernels("xla", devices) == "xla"


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_a_gpu_without_triton_has_the_experts_of_xla() -> None:
    """XLA has Triton from compute capability 8.0 on."""
    old, new = (SimpleNamespace(device_kind="", compute_capability=found) for found in ("7.5", "8.0"))
    devices: Any = SimpleNamespace(platform="gpu", devices=[old])
    assert mesh.expert_kernels("auto", devices) == "xla"
    with pytest.raises(ConfigError, match=r"compute capability 8\.0"):
        mesh.expert_kernels("triton", devices)
    assert mesh.expert_kernels("auto", SimpleNamespace(platform="gpu", devices=[new])) == "triton"  # type: ignore[arg-type]
