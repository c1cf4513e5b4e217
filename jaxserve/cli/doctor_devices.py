"""Run the checks of `jaxserve doctor` that import jax: devices, drivers, kernels, their results, the model's files."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.cli.doctor import Finding, examined
from jaxserve.config import Config
from jaxserve.engine.factory import choose_mesh, locate, read_model
from jaxserve.errors import ConfigError, ModelLoadError
from jaxserve.model_files import check_directory, local_directory
from jaxserve.models.adapters import adapt
from jaxserve.models.checkpoint.adapter import read_adapter
from jaxserve.models.checkpoint.checkpoint import open_checkpoint
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.loader import inspect
from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.models.config import ModelConfig
from jaxserve.ops.paged_attention import backend_names, get_backend
from jaxserve.runtime.compilation.attention_sizes import serving_backend
from jaxserve.runtime.compilation.compiler import compiler_options
from jaxserve.runtime.memory import CPU_POOL_FLOOR, device_memory, enough_states
from jaxserve.runtime.mesh import DeviceMesh, configured_mesh, make_mesh
from jaxserve.runtime.numeric_check import NumericCase, attention_case, serving_cases, wrong_numbers
from jaxserve.runtime.runner_config import RunnerConfig, context_length, resolve_dtypes, room_for_adapters
from jaxserve.runtime.shape_plan import ShapePlanner
from jaxserve.system import NVIDIA_DRIVER
from jaxserve.text.tokenizer import Tokenizer

_GIB = 2**30


def findings(config: Config, *, with_model: bool = True) -> Iterator[Finding]:
    """Yield the findings on the devices and in the model's files. with_model: whether to check the files"""
    try:
        mesh = configured_mesh(config.mesh)
    except (ConfigError, RuntimeError) as error:  # RuntimeError: jax cannot start the platform
        yield Finding.of("devices", error)
        mesh = None
    if mesh is not None:
        yield from examined("devices", lambda: _devices(mesh))
        yield from examined("kernels", lambda: _kernels(config, mesh))
    if with_model:
        yield from examined("model", lambda: _model(config, mesh))


def _devices(mesh: DeviceMesh) -> Iterator[Finding]:
    kinds = ", ".join(f"{device.platform}:{device.id} {device.device_kind}" for device in mesh.devices)
    yield Finding("devices", "ok", f"{kinds}, {device_memory(mesh.devices) / _GIB:.1f} GiB")
    if NVIDIA_DRIVER.exists():
        yield Finding(
            "devices", "ok", f"driver: {NVIDIA_DRIVER.read_text().splitlines()[0].removeprefix('NVRM version: ')}"
        )


def _kernels(config: Config, mesh: DeviceMesh) -> Iterator[Finding]:
    """Check the results of the kernels that would serve, then of each other attention backend of the platform."""
    device = mesh.devices[0]
    _, dtype = resolve_dtypes(config.model.dtype, mesh.platform)
    try:
        backend = serving_backend(config.runtime.attention, device, (), dtype)
    except ConfigError as error:
        yield Finding.of("kernels", error)
        backend = get_backend("xla", mesh.platform)
    deterministic = config.runtime.deterministic
    experts = config.runtime.experts
    for case in serving_cases(backend, mesh, dtype, deterministic=deterministic, of_experts=experts):
        yield from _numbers(case, mesh, deterministic=deterministic)
    for name in backend_names(mesh.platform):
        if name == backend.name:
            continue
        try:
            other = serving_backend(name, device, (), dtype)
        except ConfigError as error:  # the backend does not work here
            slower = name == "native" and "install gcc or clang for faster kernels"
            yield Finding("kernels", "warn", str(error), slower or error.fix or "")
            continue
        check = functools.partial(_numbers, attention_case(other, mesh, dtype), mesh, deterministic=deterministic)
        yield from examined("numbers", check)


def _numbers(case: NumericCase, mesh: DeviceMesh, *, deterministic: bool) -> Iterator[Finding]:
    options = compiler_options(mesh.platform, deterministic=deterministic)
    wrong = wrong_numbers([case], mesh.devices[0], options)
    fix = f"do not serve with jax {jax.__version__} here: try another version of jax, the driver or the C compiler"
    if wrong:
        yield Finding("numbers", "bad", f"wrong {wrong[0]}", fix)
    else:
        yield Finding("numbers", "ok", f"{case.name}: as numpy's")


def _model(config: Config, mesh: DeviceMesh | None) -> Iterator[Finding]:
    """Check config.json, the tokenizer and the names and sizes of the weights. Downloads nothing."""
    path = config.model.path
    directory = locate(config) if path is None else local_directory(path)
    if directory is None:
        yield Finding("model", "ok", f"{path} is a hub id: its files are checked at launch")
        return
    check_directory(directory)
    named = config.model.tokenizer
    tokens = directory if named is None else Path(named)
    tokenizer = Tokenizer.from_directory(tokens)
    files = ModelFiles.open(directory)
    if mesh is not None and config.mesh.is_auto:
        config, mesh, split = choose_mesh(config, files)
        yield Finding("model", "ok", f"mesh: {split}")
    model, dtype = read_model(config, files, make_mesh("cpu") if mesh is None else mesh)
    context_length(config.model.max_model_len, model)
    structure = inspect(files, dtype=dtype, config=model)
    size = structure.num_bytes
    text = f"{model.architecture} in {directory}: {size / _GIB:.2f} GiB of weights"
    if mesh is not None and size > config.cache.memory_fraction * device_memory(mesh.devices):
        fix = "use more devices, model.quantization, or a smaller model; jaxserve plan shows what fits"
        yield Finding("model", "bad", f"{text}, more than the devices hold", fix)
    else:
        yield Finding("model", "ok", text)
        yield from _states(config, model, dtype, mesh, size)
    if files.format != "orbax":
        for text in open_checkpoint(directory).aside:
            yield Finding("model", "warn", f"{directory}: {text}", "remove it if it is not meant")
    if (tokens / "tokenizer.json").is_file():
        yield from beside_transformers(tokens, tokenizer)
    yield from examined("adapters", lambda: _adapters(config, structure))


def _states(
    config: Config, model: ModelConfig, dtype: jnp.dtype, mesh: DeviceMesh | None, weights: int
) -> Iterator[Finding]:
    """Compare the recurrent states of all requests with the cache's memory, of which they may take half.

    weights: their bytes on all devices
    """
    if mesh is None or not any(model.layer_states):
        return
    resolved = RunnerConfig.resolve(config, model, mesh.platform, dtype)
    state = ShapePlanner(model, dtype).plan(mesh.tensor, mesh.mesh.shape["expert"]).state_bytes * len(mesh.devices)
    room = int(config.cache.memory_fraction * device_memory(mesh.devices)) - weights
    if mesh.platform == "cpu":
        room = min(room, max(CPU_POOL_FLOOR, weights))
    wanted = resolved.num_state_pages or enough_states(resolved.max_num_seqs)
    fit = max(2, room // 2 // state)
    text = f"a recurrent state takes {state / 2**20:.2f} MiB; {fit} take half of the cache's memory, and {wanted} are"
    if wanted > fit:
        fix = "lower scheduler.max_num_seqs, or set cache.num_state_pages"
        yield Finding("states", "warn", f"{text} wanted: few prefixes stay cached", fix)
    else:
        yield Finding("states", "ok", f"{text} made")


def _adapters(config: Config, structure: ModelStructure) -> Iterator[Finding]:
    """Read the configured adapters, and check that they fit the model."""
    room = room_for_adapters(config.lora.slots, config.lora.max_rank)
    if room is None or structure.config.bidirectional:
        return
    adapted = adapt(structure, room)
    for entry in config.lora.adapters:
        try:
            rank = read_adapter(Path(entry.path), adapted).rank
        except ModelLoadError as error:
            yield Finding.of("adapters", error)
        else:
            yield Finding("adapters", "ok", f"{entry.name}: rank {rank}, in {entry.path}")


_PROBE = "Hello world, 12345 times!\n\n  Größe 日本\tdon't"


def beside_transformers(directory: Path, tokenizer: Tokenizer) -> Iterator[Finding]:
    """Yield the differences to transformers in a directory with a tokenizer.json: tokens, and the ids of a text."""
    from transformers import AutoTokenizer  # noqa: PLC0415  # takes 2 s to import

    try:
        published = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
        theirs = {token.content: i for i, token in published.backend_tokenizer.get_added_tokens_decoder().items()}
    except Exception as error:  # the libraries below may raise any error
        why = " ".join(str(error).split())[:200]
        yield Finding("tokenizer", "warn", f"transformers does not read {directory}, so nothing is compared: {why}")
        return
    ours = {token.content: i for i, token in tokenizer.backend.get_added_tokens_decoder().items()}
    differ = sorted(text for text in ours.keys() | theirs.keys() if ours.get(text) != theirs.get(text))
    texts = [f"{text!r} is {ours.get(text)}, there {theirs.get(text)}" for text in differ]
    if tokenizer.encode(_PROBE, add_special_tokens=False) != published.encode(_PROBE, add_special_tokens=False):
        texts.append("a text has other ids")
    if texts:
        shown = "; ".join(texts[:5]) + (f"; and {len(texts) - 5} more" if len(texts) > 5 else "")
        fix = "make the files of the tokenizer agree, or set model.tokenizer"
        yield Finding("tokenizer", "warn", f"transformers reads {directory} otherwise: {shown}", fix)
    else:
        yield Finding("tokenizer", "ok", f"{len(ours)} added tokens, and the ids of a text, as transformers reads them")
