"""Makes a bundle: compiles every program of a configuration for this machine's devices, or for devices elsewhere.

Reads no weights and allocates nothing on a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxserve.config import Config
from jaxserve.engine.factory import choose_mesh, locate, read_model, refuse_data
from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.loader import inspect
from jaxserve.models.checkpoint.sentence_files import read_pooling
from jaxserve.models.checkpoint.structure import LoadedModel, ModelStructure, build
from jaxserve.models.sharding import for_mesh, param_sharding
from jaxserve.runtime import memory
from jaxserve.runtime.compilation import program_cache
from jaxserve.runtime.compilation.compiler import Program, Progress, compile_all, compiler_options
from jaxserve.runtime.fingerprint import fingerprint
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.numeric_check import check_place, numeric_programs, serving_cases
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.runner_setup import RunnerSetup
from jaxserve.runtime.saved_programs.bundle import TUNED, UNTUNED, BundleWriter, refuse_bundle, settings_of
from jaxserve.runtime.saved_programs.target import DevicelessProgram, Target, make_target


@dataclass(frozen=True)
class MadeBundle:
    """A bundle that was written. num_bytes: size of all files"""

    directory: Path
    device: str
    num_programs: int
    num_bytes: int
    tuning: str


def make_bundle(
    config: Config, directory: Path, *, target: str | None = None, tuning: str | None = None, progress: Progress
) -> MadeBundle:
    """Write a bundle into `directory`.

    target: devices that are not there, see make_target; None: this machine's devices
    tuning: the manifest's field for autotuning; None: TUNED for this machine's devices, else UNTUNED
    Raises ConfigError if the model does not fit, or the devices cannot be compiled for.
    """
    if config.runtime.bundle is not None:
        raise ConfigError("runtime.bundle is set, and this command writes one", fix="leave runtime.bundle out")
    if config.speculation.on_device:
        raise ConfigError("a bundle has neither a draft model nor a head yet", fix="leave the section speculation out")
    if config.mesh.hosts > 1:
        raise ConfigError("a bundle is for one host", fix="leave mesh.hosts out")
    refuse_data(config)
    source = ModelFiles.open(locate(config))
    if target is None:
        elsewhere = None
        config, mesh, _ = choose_mesh(config, source)
    elif config.mesh.is_auto:
        raise ConfigError(
            "auto of mesh.tensor and mesh.expert is for the devices of this machine, and --target names others",
            fix="set both; jaxserve plan MODEL --mesh N shows the splits of N devices that fit",
        )
    else:
        tensor, expert = config.mesh.split
        elsewhere = make_target(target, tensor=tensor, expert=expert)
        mesh = elsewhere.mesh
    if tuning is not None and mesh.platform in ("cpu", "tpu"):
        raise ConfigError("autotuning results are for a GPU", fix="leave --autotuning out")
    structure = _structure(config, source, mesh)
    if structure.config.bidirectional:
        raise ConfigError("an encoder has few programs and takes no bundle", fix="start it without one")
    refuse_bundle(structure.config)
    resolved = RunnerConfig.resolve(config, structure.config, mesh.platform, structure.activation_dtype)
    resolved = resolved.for_embeddings(read_pooling(source, structure.config), source)
    loaded = LoadedModel(structure, _leaves(structure, mesh), source.directory, 0, 0.0)
    setup = RunnerSetup.of(loaded, resolved, mesh)
    plan = setup.plan(elsewhere.device_bytes if elsewhere else None)
    programs = setup.program_set(plan.pages_by_group, plan.max_model_len)
    transfers = programs.transfers() if resolved.moves_pages else ()
    wanted = [*programs.all(), *transfers, *programs.write_adapter(), *_checks(setup)]
    settings = settings_of(structure, resolved, setup.backend.name)
    writer = BundleWriter(directory, fingerprint(mesh))
    with program_cache.unused():
        compiled = compile_all(_for(wanted, elsewhere), progress=progress, store=writer)
    scratch = max(map(memory.scratch_bytes, compiled.values())) * len(mesh.devices)
    _check_room(plan, scratch)
    said = tuning or (TUNED if elsewhere is None else UNTUNED)
    size = writer.finish(settings, said, plan.pages_by_group, plan.max_model_len)
    return MadeBundle(directory, mesh.devices[0].device_kind, len(compiled), size, said)


def _for(programs: list[Program], target: Target | None) -> list[Program]:
    return programs if target is None else [DevicelessProgram(**vars(program)) for program in programs]


def _structure(config: Config, source: ModelFiles, mesh: DeviceMesh) -> ModelStructure:
    model, dtype = read_model(config, source, mesh)
    model = for_mesh(model, mesh.mesh)
    return build(model, dtype) if config.model.load_format == "random" else inspect(source, dtype=dtype, config=model)


def _leaves(structure: ModelStructure, mesh: DeviceMesh) -> Any:
    return tuple(
        jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=param_sharding(spec, mesh.mesh))
        for spec in structure.specs
    )


def _checks(setup: RunnerSetup) -> list[Program]:
    """Return the programs of the numeric check at each start."""
    mesh, deterministic, dtype = setup.mesh, setup.config.deterministic, setup.loaded.structure.activation_dtype
    cases = serving_cases(
        setup.backend,
        mesh,
        dtype,
        deterministic=deterministic,
        of_experts=None if setup.loaded.config.moe is None else setup.config.experts,
        rounded=setup.steps.linear.rounded,
    )
    return numeric_programs(
        cases, check_place(mesh.devices[0]), compiler_options(mesh.platform, deterministic=deterministic)
    )


def _check_room(plan: memory.MemoryPlan, scratch: int) -> None:
    """Raise ConfigError if the programs need more memory than the plan left for them."""
    used = plan.weight_bytes + plan.state_bytes + plan.kv_bytes + scratch
    if plan.device_bytes and used > plan.device_bytes:
        over = -(-(used - plan.device_bytes) // max(1, plan.page_bytes))
        raise ConfigError(
            f"the programs need {scratch / memory.MIB:.0f} MiB, for which there is no room",
            fix=f"set cache.num_pages to at most {max(1, plan.num_pages - over)}",
        )
