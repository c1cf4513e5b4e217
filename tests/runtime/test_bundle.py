"""A bundle is taken as a whole or refused with its reason, in one line that says what to do."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.compile import run as compile_command
from jaxserve.config import Config
from jaxserve.engine.bundle_maker import make_bundle
from jaxserve.engine.factory import build_engine
from jaxserve.engine.server import BuiltEngine
from jaxserve.errors import ConfigError
from jaxserve.runtime.saved_programs.bundle import MANIFEST
from jaxserve.runtime.saved_programs.target import make_target
from jaxserve.types.page_keys import namespace_of
from jaxserve.types.sampling import EngineRequest, SamplingParams
from tests.models.lora import peft_config, peft_tensors, random_pairs
from tests.quick import quick_programs

# Weights of 4 bits and room for adapters, because a bundle must tell their form too.
LIMITS: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "quantization": "nvfp4", "slots": 1}


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quick_programs():
        yield


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bundle") / "made"
    made = make_bundle(Config.of(**LIMITS), directory, progress=lambda name, done, total: None)
    assert made.num_programs == len(json.loads((directory / MANIFEST).read_text())["programs"])
    return directory


@pytest.fixture
def copied(bundle: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    target = tmp_path / "copy"
    target.mkdir(mode=0o700)
    for path in bundle.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
        (target / path.name).chmod(0o600)
    return target


def start(bundle: Path, **keys: Any) -> BuiltEngine:
    return build_engine(Config.of(None, **LIMITS | {"bundle": bundle} | keys), lambda message: None)


def edit(**changes: str) -> Callable[[Path], None]:
    """Change what the manifest says that the programs were made for."""

    def change(bundle: Path) -> None:
        manifest = json.loads((bundle / MANIFEST).read_text())
        manifest["made_for"] |= changes
        (bundle / MANIFEST).write_text(json.dumps(manifest))

    return change


def on_program(act: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(bundle: Path) -> None:
        act(next(bundle.glob("*.program")))

    return change


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another jax": (edit(jax="0.10.1"), "was made for jax 0.10.1, and here it is"),
    "another processor": (edit(processor="x86_64 other"), "was made for processor x86_64 other, and here it is"),
    "another device": (edit(device="NVIDIA H200"), "was made for device NVIDIA H200, and here it is cpu"),
    "another mesh": (edit(mesh="data=1 tensor=2 expert=1"), "was made for mesh data=1 tensor=2 expert=1"),
    "other sources": (edit(sources="0"), "was made for sources 0, and here it is"),
    "a cut program": (on_program(cut), "was cut or changed"),
    "a changed program": (on_program(lambda path: path.write_bytes(path.read_bytes() + b"x")), "was cut or changed"),
    "a missing program": (on_program(lambda path: path.unlink()), "No such file"),
    "a program that others may write": (on_program(lambda path: path.chmod(0o662)), "other users can write"),
    "a directory that others may write": (lambda bundle: bundle.chmod(0o777), "other users can write"),
    "a manifest that others may write": (lambda bundle: (bundle / MANIFEST).chmod(0o606), "other users can write"),
    "a cut manifest": (lambda bundle: cut(bundle / MANIFEST), "is damaged: manifest.json"),
    "no manifest": (lambda bundle: (bundle / MANIFEST).unlink(), "is no bundle"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_refused_with_its_reason(fault: str, copied: Path) -> None:
    spoil, message = FAULTS[fault]
    spoil(copied)
    with pytest.raises(ConfigError, match=message) as refused:
        start(copied)
    assert refused.value.fix and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"max_num_seqs": 2}, "was made for max_num_seqs 1, and here it is 2"),
        ({"page_size": 32}, "was made for page_size 16, and here it is 32"),
        ({"slots": 2}, r"was made for lora\.slots 1, and here it is 2"),
        ({"slots": 0}, r"was made for lora\.slots 1, and here it is 0"),
        ({"max_rank": 17}, r"was made for lora\.max_rank 16, and here it is 32"),
        ({"num_pages": 300}, "was made for cache.num_pages 256, and here it is 300"),
        ({"max_model_len": 64}, "was made for model .*, and here it is|was made for model.max_model_len 2048"),
        ({"dtype": "float32"}, "was made for model LlamaForCausalLM of shape"),
        ({"quantization": "mxfp4"}, "was made for model LlamaForCausalLM of shape"),
        ({"attention": "xla", "dtype": "bfloat16"}, "was made for attention native, and here it is xla"),
    ],
)
def test_other_settings_are_refused_by_name(bundle: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(bundle, **keys)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("name", [MANIFEST, "*.program", "."])
def test_bundle_of_another_user_is_refused(name: str, copied: Path) -> None:
    os.chown(next(copied.glob(name)) if name != "." else copied, 54321, 54321)
    with pytest.raises(ConfigError, match=r"belongs to another user \(54321\)"):
        start(copied)


def test_no_bundle_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no bundle .*missing") as refused:
        start(tmp_path / "missing")
    assert "jaxserve compile" in (refused.value.fix or "")
    assert not (tmp_path / "missing").exists()


def test_start_with_a_bundle_compiles_nothing(bundle: Path) -> None:
    built = start(bundle)
    core, adapters = built.core, built.core.adapters
    assert adapters is not None
    layers = {"model.layers.0.self_attn.q_proj": (256, 256), "model.layers.1.mlp.down_proj": (256, 640)}
    tensors = peft_tensors(random_pairs(layers, 4, 1))
    digest = adapters.load_arrays("sql", tensors, peft_config(4), replace=False).digest
    found: list[list[int]] = []
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for adapter in ("", digest):
        spaces: dict[str, Any] = {"adapter": adapter, "namespace": namespace_of(adapter, "")}
        core.add(EngineRequest(request_id=f"with {adapter}", prompt_token_ids=[7, 8, 9], params=params, **spaces))
        found.append([])
        while core.has_work:
            found[-1] += [token for output in core.step() for token in output.token_ids]
    assert len(found[0]) == 4 and found[0] != found[1]
    assert built.info.num_compiled == 0
    assert core.runner.num_compiles() == 0


def test_directory_with_other_files_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match=r"has other files: letter.txt"):
        make_bundle(Config.of(**LIMITS), tmp_path, progress=lambda *each: None)


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no target 'gtx'"):
        make_target("gtx")
    with pytest.raises(ConfigError, match="there is no file"):
        compile_command(["-o", str(tmp_path / "b"), "--autotuning", str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="needs the device"):
        compile_command(["-o", str(tmp_path / "b"), "--target", "h200", "--save-autotuning", "f"])


def test_what_no_start_could_use_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")  # the command sets it
    target = str(tmp_path / "b")
    with pytest.raises(ConfigError, match="a bundle is for one host"):
        compile_command(["-o", target, "--nnodes", "2", "--master-addr", "127.0.0.1"])
    with pytest.raises(ConfigError, match=r"mesh\.data above 1 is not served"):
        compile_command(["-o", target, "--mesh.data", "2"])
    with pytest.raises(ConfigError, match="is for the devices of this machine"):
        compile_command(["-o", target, "--target", "h200", "--tensor", "auto"])
    with pytest.raises(ConfigError, match="autotuning results are for a GPU"):
        make_bundle(Config.of(**LIMITS), tmp_path / "b", tuning="with some", progress=lambda *each: None)
    with pytest.raises(ConfigError, match="--save-autotuning is for a GPU"):
        compile_command(["-o", target, "--save-autotuning", str(tmp_path / "results")])
    with pytest.raises(ConfigError, match="no file can be written"):
        compile_command(["-o", target, "--save-autotuning", str(tmp_path / "none" / "results")])
    assert not (tmp_path / "b").exists()
