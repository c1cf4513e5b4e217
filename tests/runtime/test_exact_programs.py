"""A model in float32 on an accelerator: XLA is told not to round what products multiply."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.models.pooling import PoolingConfig
from jaxserve.runtime import encoder_runner
from jaxserve.runtime.compilation.compiler import Program
from jaxserve.runtime.encoder_runner import EncoderRunner
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.program_set import ProgramSet
from jaxserve.runtime.runner_setup import ExactProgramSet, RunnerSetup
from tests.models.checkpoints import random_tensors, write_checkpoint
from tests.models.families import ENCODERS
from tests.runtime.conftest import CONFIG


def precisions(program: Program, platform: str) -> set[str]:
    """The precision of the operands of each product in a program that is lowered for a platform."""
    traced = jax.jit(program.function).trace(*program.args)
    text = traced.lower(lowering_platforms=("cuda" if platform == "gpu" else "tpu",)).as_text()
    found = re.findall(r"dot_general .*", text)
    assert len(found) > 1, program.name
    named = {tuple(re.findall(r"HIGHEST|HIGH|DEFAULT", line)) for line in found}
    return {name for names in named for name in names or ("DEFAULT",)}


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_programs_of_a_decoder(
    platform: str, tiny_model: LoadedModel, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = RunnerSetup.of(tiny_model, dataclasses.replace(CONFIG, attention="xla"), mesh)
    monkeypatch.setattr(DeviceMesh, "platform", platform)
    programs = setup.program_set((4, 0), 32)
    if platform == "cpu":  # it computes float32 as it is, and the text of its programs stays
        assert type(programs) is ProgramSet
        return
    assert type(programs) is ExactProgramSet
    for program in (programs.decode(1), programs.extend(programs.buckets.extend[0])):
        assert precisions(program, platform) == {"HIGHEST"}


def test_programs_in_bfloat16_stay(tiny_model: LoadedModel, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(tiny_model.directory, dtype=jnp.dtype("bfloat16"), mesh=mesh.mesh)
    setup = RunnerSetup.of(loaded, dataclasses.replace(CONFIG, attention="xla"), mesh)
    monkeypatch.setattr(DeviceMesh, "platform", "gpu")
    assert type(setup.program_set((4, 0), 32)) is ProgramSet


def test_the_programs_of_an_encoder(
    tmp_path_factory: pytest.TempPathFactory, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, found = ENCODERS["bert"], []

    def keep(programs: list[Program], **_: object) -> None:
        found.extend(programs)
        raise InterruptedError

    monkeypatch.setattr(encoder_runner, "compile_all", keep)
    monkeypatch.setattr(DeviceMesh, "platform", "gpu")
    loaded = load_model(
        write_checkpoint(tmp_path_factory.mktemp("bert"), hf, random_tensors(hf)),
        dtype=jnp.dtype("float32"),
        mesh=mesh.mesh,
    )
    with pytest.raises(InterruptedError):
        EncoderRunner(loaded, PoolingConfig("mean"), dataclasses.replace(CONFIG, max_model_len=32), mesh)
    assert precisions(found[0], "gpu") == {"HIGHEST"}
