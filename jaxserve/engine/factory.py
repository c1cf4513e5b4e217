"""Builds an engine from a Config: finds and loads the checkpoint, compiles the programs, creates the scheduler.

Configuration, models, runtime and scheduler meet only here. The progress is reported as messages.

A model can be a reranker: its files, its template or the configuration then name the tokens for relevant and not
relevant. `engine_info` describes the finished engine and its model to the API process.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxserve.config import Config, ModelSection, SpeculationSection
from jaxserve.engine.adapters import Adapters
from jaxserve.engine.control import EngineControl
from jaxserve.engine.core import CoreOptions, EngineCore
from jaxserve.engine.hosts.leader import GroupControl, Leader, LeaderRunner, LeaderWeights, lead
from jaxserve.engine.late_start import LateStart
from jaxserve.engine.page_handover import PageHandover, check_handover
from jaxserve.engine.server import BuiltEngine
from jaxserve.errors import ConfigError, HTTPError, ModelLoadError
from jaxserve.grammar.mask_table import mask_threads
from jaxserve.grammar.matcher import BitmaskFiller, MatcherFactory
from jaxserve.model_files import read_object
from jaxserve.models.checkpoint.chosen_form import choose_head, choose_quantization
from jaxserve.models.checkpoint.files import LOGIT_SCORE, ModelFiles
from jaxserve.models.checkpoint.hf_config import EAGLE3, read_config, read_eagle
from jaxserve.models.checkpoint.hub import resolve
from jaxserve.models.checkpoint.loader import LoadedModel, load_model, open_weights, random_model
from jaxserve.models.checkpoint.read_config import architecture_of
from jaxserve.models.checkpoint.sentence_files import embedding_prompt, is_embedder, read_pooling
from jaxserve.models.checkpoint.structure import ModelStructure, build
from jaxserve.models.config import ModelConfig
from jaxserve.models.draft_head import predictor_config, with_taps
from jaxserve.models.pooling import PoolingConfig
from jaxserve.ops.paged_attention import Backend, get_backend
from jaxserve.runtime.compilation import program_cache
from jaxserve.runtime.compilation.attention_sizes import serving_backend
from jaxserve.runtime.compilation.compiler import CompileCounter, ProgramStorage
from jaxserve.runtime.draft_model import check_draft_model
from jaxserve.runtime.encoder_runner import EncoderRunner
from jaxserve.runtime.fingerprint import describe
from jaxserve.runtime.memory import MemoryPlan, device_memory
from jaxserve.runtime.mesh import DeviceMesh, configured_mesh
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.runtime.numeric_check import check_numbers, serving_cases
from jaxserve.runtime.page_file import PageFileConfig, fingerprint, remove_unused
from jaxserve.runtime.runner_config import RunnerConfig, resolve_dtypes
from jaxserve.runtime.runner_setup import chosen_rounding, native_products
from jaxserve.runtime.saved_programs.bundle import UNTUNED, Bundle, refuse_bundle
from jaxserve.runtime.saved_programs.executable import UnrunnableProgramError
from jaxserve.runtime.saved_programs.program_store import discarding, open_store
from jaxserve.runtime.shape_plan import DeviceSize, ShapePlanner, SplitSearch
from jaxserve.runtime.weights import DeviceWeights
from jaxserve.speculation.device import DeviceDrafts, Size, speedup
from jaxserve.speculation.ngram import WORTH, Drafter, NGramDrafter
from jaxserve.text.chat_template import template_sources
from jaxserve.text.pairs import has_pair_roles
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.messages import EngineInfo, FromEngine, Located, Progress
from jaxserve.types.picture import PictureInfo
from jaxserve.types.scheduling import UNTIMED, SchedulerConfig, StateSizes, StepTimes
from jaxserve.version import __version__

logger = logging.getLogger(__name__)

WORDS = ("no", "yes")  # of a template that names no others
_ACTIVATIONS = ("activation_fn", "sbert_ce_default_activation_function")


def label_token_ids(section: ModelSection, files: ModelFiles, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids for not relevant and relevant; () if the model is not such a reranker.

    The configuration decides, else the module LogitScore of sentence-transformers, else a chat template with the roles
    `query` and `document` and the words yes and no. Raises ConfigError for words that are not two tokens, and
    ModelLoadError for a LogitScore that names no two.
    """
    if section.classifier_from_token:
        return _tokens(section.classifier_from_token, tokenizer)
    if LOGIT_SCORE in files.modules:
        return _published(files.module_file(LOGIT_SCORE), tokenizer.vocab_size)
    sources = template_sources(tokenizer, section.chat_template)
    template = sources[0] if sources is not None else ""
    if has_pair_roles(template) and all(re.search(rf"""["']{word}["']""", template) for word in WORDS):
        return _tokens(WORDS, tokenizer)
    return ()


def has_raw_scores(files: ModelFiles) -> bool:
    """Return whether a cross-encoder's files say that its scores are used without a sigmoid."""
    names = []
    for found in (files.config, files.sentence_transformers):
        inner = found.get("sentence_transformers")
        names += [each.get(key) for each in (found, inner if isinstance(inner, dict) else {}) for key in _ACTIVATIONS]
    return any(isinstance(name, str) and name.endswith("Identity") for name in names)


def is_regression(files: ModelFiles) -> bool:
    """Return whether a classification head predicts values, which transformers returns without a softmax."""
    return files.config.get("problem_type") == "regression"


def _tokens(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = [tokenizer.token_to_id(word) for word in words]
    if len(set(ids)) != 2 or len(ids) != 2 or None in ids:
        raise ConfigError(
            f"model.classifier_from_token: {', '.join(words)} must be two words that are one token each",
            fix="name the words for not relevant and relevant, for example no,yes",
        )
    return tuple(each for each in ids if each is not None)


def _published(file: Path, vocab_size: int) -> tuple[int, ...]:
    """Read the file of a LogitScore module. Raises ModelLoadError unless it names two tokens."""
    settings = read_object(file)
    given = [settings.get(f"{name}_token_id") for name in ("false", "true")]
    ids = [each for each in given if isinstance(each, int) and 0 <= each < vocab_size]
    if len(ids) != 2:
        raise ModelLoadError(f"{file}: expected false_token_id and true_token_id")
    return tuple(ids)


DEMO_NAME = "demo"
NO_DRAFTS = {"method": "off", "draft_model": None, "draft_revision": None}  # of SpeculationSection
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*/?", re.ASCII)
# On a CPU at most this share of the saturating number of rows is kept busy with batch requests, because each of them
# lengthens the steps of online requests: twice as many made the demo model's on 2 cores wait 1.5 times as long.
CPU_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A loaded model, and its properties that the files of its directory give."""

    files: ModelFiles
    loaded: LoadedModel
    tokenizer: Tokenizer
    pooling: PoolingConfig
    embedding_prompt: str = ""

    @property
    def embeds(self) -> bool:
        """Return whether it makes embeddings and nothing else."""
        return is_embedder(self.files, self.loaded.config)

    @property
    def generates(self) -> bool:
        """Return whether it generates text."""
        return not (self.embeds or self.loaded.config.labels)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the token ids that end an output: the model's, and the tokenizer's `eos_token`.

        Some models name the end of a chat turn in `eos_token` only. A GGUF file may name only one of several ends, so
        there all end tokens of the tokenizer count.
        """
        model, tokenizer = self.loaded.config, self.tokenizer
        own = tokenizer.eos_token_ids if self.files.format == "gguf" else (tokenizer.eos_token_id,)
        ids = (*model.eos_token_ids, *own)
        return tuple(dict.fromkeys(i for i in ids if i is not None and 0 <= i < model.vocab_size))


def served_names(config: Config) -> list[str]:
    """Return the names that clients may use: the configured ones, or the checkpoint's own name.

    If a relative directory is written like a hub id, Qwen/Qwen3-8B, that is a name too.
    """
    if config.model.served_name:
        return list(config.model.served_name)
    path = config.model.path
    if path is None:
        return [DEMO_NAME]
    found = Path(path).expanduser()
    if found.is_dir():
        return [found.resolve().name, *([path.rstrip("/")] if _HUB_ID.fullmatch(path) else [])]
    return [found.stem if found.is_file() else path]


def engine_info(
    config: Config,
    found: ServedModel,
    runner: ModelRunner | EncoderRunner,
    times: StepTimes,
    seconds: dict[str, float],
    num_compiled: int,
    drafter: str,
    split: str = "",
) -> EngineInfo:
    """Describe a ready engine.

    seconds: duration of each phase of its start. num_compiled: programs that were in no cache
    drafter, split: see EngineInfo
    """
    model = found.loaded.config
    defaults = dataclasses.asdict(model.generation)
    return EngineInfo(
        model_path=config.model.path or DEMO_NAME,
        served_names=served_names(config),
        architecture=model.architecture,
        dtype=config.model.dtype if config.model.dtype != "auto" else str(runner.leaves[0].dtype),
        vocab_size=model.vocab_size,
        max_model_len=runner.plan.max_model_len,
        page_size=runner.plan.page_size,
        num_pages=runner.plan.num_pages,
        max_num_seqs=runner.config.max_num_seqs,
        max_num_batched_tokens=runner.config.max_num_batched_tokens,
        useful_rows=_useful_rows(runner, times),
        attention=runner.backend.name if isinstance(runner, ModelRunner) else "dense",
        devices=[f"{device.platform}:{device.id} {device.device_kind}" for device in runner.mesh.devices],
        tensor=runner.mesh.tensor,
        expert=runner.mesh.mesh.shape["expert"],
        split=split,
        num_programs=runner.num_programs,
        eos_token_ids=list(found.eos_token_ids),
        generation_defaults={name: value for name, value in defaults.items() if value is not None},
        memory_plan=runner.plan.as_dict(),
        seconds=seconds,
        is_embedding=found.embeds,
        embedding_size=model.hidden_size,
        embedding_normalized=found.pooling.normalize,
        embedding_prompt=found.embedding_prompt,
        labels=list(model.labels),
        multi_label=model.multi_label,
        regression=is_regression(found.files),
        raw_scores=has_raw_scores(found.files),
        label_token_ids=label_token_ids(config.model, found.files, found.tokenizer) if found.generates else (),
        lora_slots=config.lora.slots,
        routed=_routed(model),
        num_compiled=num_compiled,
        pictures=_pictures(runner),
        drafter=drafter,
    )


def with_drafts(config: Config, served: LoadedModel, platform: str) -> tuple[Config, str]:
    """Decide where drafts come from -> (the configuration with that method, EngineInfo.drafter).

    auto takes a draft model only if it makes one row WORTH times as fast by the estimate from the models' sizes.
    """
    section, note = config.speculation, ""
    if section.method == "auto":
        if section.draft_model is not None:
            draft = _read_draft_model(ModelFiles.open(locate(_of_draft_model(config))))
            structure = build(draft, served.structure.activation_dtype)
            sizes = _read_size(served.config, served.structure), _read_size(draft, structure)
            gain = speedup(platform, *sizes, section.max_drafts)
            if gain < WORTH:
                return config.replace(speculation=NO_DRAFTS), f"none: {section.draft_model} would make {gain:.2f} x"
            note = f", by its size {gain:.1f} x for one row"
        config = config.replace(speculation={"method": section.source})
        section = config.speculation
    source = _source(section)
    return config, f"{source}, at most {section.max_drafts} tokens a step{note}" if source else ""


def _read_size(model: ModelConfig, structure: ModelStructure) -> Size:
    """Return the size of the part of a model that a step of one token reads."""
    embedding = structure.specs[0]  # of which a token reads one row, unless it is the head too
    unread = 0 if model.tie_word_embeddings else embedding.num_parameters * jnp.dtype(embedding.dtype).itemsize
    experts = (1, 1) if model.moe is None else (model.moe.num_experts, model.moe.experts_per_token)
    return Size(model.num_layers, structure.num_bytes - unread, experts)


def _source(section: SpeculationSection) -> str:
    """Return the source of drafts in words; "" if there is none."""
    of_method = {"off": "", "ngram": "n-grams", "mtp": "the checkpoint's own head (MTP)"}
    return of_method.get(section.source) or section.draft_model or ""


def _pictures(runner: ModelRunner | EncoderRunner) -> PictureInfo | None:
    """Describe the pictures that the tower takes; None: the model has none, or it was not loaded."""
    limits = runner.tower_limits if isinstance(runner, ModelRunner) else None
    if limits is None or not isinstance(runner, ModelRunner) or runner.structure.config.vision is None:
        return None
    return runner.structure.config.vision.info(min(limits.sizes[-1] // limits.merge**2, runner.plan.max_model_len))


def _useful_rows(runner: ModelRunner | EncoderRunner, times: StepTimes) -> int:
    """Return EngineInfo.useful_rows."""
    most = runner.config.max_num_seqs
    return most if runner.mesh.platform != "cpu" else max(1, round(CPU_SHARE * times.full_rows(most)))


def _routed(config: ModelConfig) -> tuple[int, int]:
    """Return EngineInfo.routed."""
    return (0, 0) if config.moe is None else (sum(config.moe.sparse_layers), config.moe.experts_per_token)


Send = Callable[[FromEngine], None]


class Phases:
    """Durations of the start-up phases, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now


def build_process(config: Config, send: Send) -> BuiltEngine:
    """Return the engine of an engine process, which may be the leader of several hosts. Raises ConfigError."""
    group = lead(config, send) if config.mesh.hosts > 1 else None
    return build_engine(config, send, group=group, early=True)


def build_engine(
    config: Config, send: Send, seed: int = 0, group: Leader | None = None, *, early: bool = False
) -> BuiltEngine:
    """Return a ready engine and its properties. Raises ConfigError with a cause and a fix.

    seed: the seeds of requests without one are derived from it; AsyncEngine always sets a seed
    group: the other hosts, whose devices are joined with the devices of this process; None: there are none
    early: return before all programs are compiled, unless the configuration waits for them
    """
    phases = Phases()
    _refuse_mesh(config, group)
    compiles = CompileCounter()
    send(Progress("model files"))
    files = ModelFiles.open(locate(config))
    tokenizer_dir = _tokenizer_dir(config, files.directory)
    send(Located(str(tokenizer_dir)))
    send(Progress("devices"))
    config, mesh, split = choose_mesh(config, files)
    phases.end("devices")
    if config.speculation.method == "mtp":
        _own_head(config, files, mesh)  # before the weights, which take minutes
    send(Progress("weights", unit="bytes"))
    loaded = load(config, files, mesh, send)
    phases.end("weights")
    send(Progress("programs", unit="programs"))
    tokenizer = Tokenizer.from_directory(tokenizer_dir)
    pooling = read_pooling(files, loaded.config)
    model = ServedModel(files, loaded, tokenizer, pooling, embedding_prompt(files, pooling))
    check_handover(config, loaded.config, generates=model.generates)
    config = config if model.generates else config.replace(speculation=NO_DRAFTS)
    config = config if early else config.replace(runtime={"wait_for_programs": True})
    config, drafter = with_drafts(config, loaded, mesh.platform)
    draft = load_draft_model(config, loaded, files, mesh, send)
    vocab_size, eos_token_ids = loaded.config.vocab_size, model.eos_token_ids
    matchers = MatcherFactory(tokenizer.to_json(vocab_size), vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    if model.generates:
        matchers.warm_up()  # runs in a thread while the programs compile

    def ready() -> tuple[ModelRunner | EncoderRunner, ModelRunner | LeaderRunner | EncoderRunner, StepTimes]:
        agree = (lambda plan: plan) if group is None else group.agree
        runner = make_runner(config, loaded, files, mesh, send, agree, draft)
        calls = runner if group is None or isinstance(runner, EncoderRunner) else LeaderRunner(group, runner)
        return runner, calls, _warm_up(runner, calls)

    first = None
    try:
        first = ready()
    except UnrunnableProgramError as error:
        logger.warning("%s", error)
    runner, calls, times = first or ready()  # not above, where the error still holds the arrays of the first try
    phases.end("programs")
    options = CoreOptions(
        generates=model.generates,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        seed=seed,
        make_matcher=matchers,
        on_close=matchers.close,
        fill_masks=BitmaskFiller().fill,
        mask_threads=mask_threads(),
        drafter=_drafter(config.speculation, vocab_size),
        pictures=_pictures(runner),
    )
    core = EngineCore(calls, _scheduler_config(config, runner, times), options)
    _load_adapters(core, config, runner, group)
    _restore_pages(core, runner)
    discard = list if runner.store is None else runner.store.discard
    info = engine_info(config, model, runner, times, phases.seconds, compiles.count, drafter, split)
    compiles.close()
    weights = DeviceWeights(runner, loaded.structure)
    if group is not None:
        control = GroupControl(group, core, calls, LeaderWeights(group, weights), files)
        return BuiltEngine(core, info, matchers.submit, control, end=group.stop, discard=discard)
    handover = late = None
    if isinstance(runner, ModelRunner):
        late = LateStart(core, runner, times, CPU_SHARE) if runner.config.early else None
        handover = PageHandover(core, runner, pages_name(config, runner.config, loaded, mesh, files.directory, draft))
    control = EngineControl(core, calls, weights, files)
    return BuiltEngine(core, info, matchers.submit, control, handover, late=late, discard=discard)


def _load_adapters(core: EngineCore, config: Config, runner: ModelRunner | EncoderRunner, group: Leader | None) -> None:
    """Give the core the adapters of its runner, and load the configured ones. Raises ConfigError."""
    if not isinstance(runner, ModelRunner) or runner.adapters is None:
        return
    share = {} if group is None else {"share": group.hold_adapter}
    adapters = Adapters(runner.adapters, core.scheduler.adapters, tuple(served_names(config)), **share)
    core.adapters = adapters
    for entry in config.lora.adapters:
        try:
            adapters.load_directory(entry.name, str(entry.path), pinned=entry.pinned)
        except HTTPError as error:
            raise ConfigError(f"lora.adapters: {error.message}", fix="correct the entry or leave it out") from error


def _refuse_mesh(config: Config, group: Leader | None) -> None:
    if group is None and config.mesh.hosts > 1:
        raise ConfigError("mesh.hosts above 1 needs a server", fix="start jaxserve launch on each host")
    refuse_data(config)


def refuse_data(config: Config) -> None:
    """Raise ConfigError if the configuration asks for a mesh with an axis of data."""
    if config.mesh.data > 1:
        raise ConfigError("mesh.data above 1 is not served yet", fix="set mesh.replicas, which serves more requests")


def choose_mesh(config: Config, files: ModelFiles) -> tuple[Config, DeviceMesh, str]:
    """Make the engine's mesh -> (the configuration with its numbers, the mesh, EngineInfo.split).

    If mesh.tensor or mesh.expert is auto, it is the best mesh of this process's devices, see `SplitSearch.best`. The
    room for a draft model or head is not counted. Raises ConfigError if the model does not fit. Its fix then names a
    number of devices that would do.
    """
    mesh = configured_mesh(config.mesh)
    if not config.mesh.is_auto:
        return config, mesh, ""
    planner, size = _to_plan(config, files, mesh)
    count, platform = len(mesh.devices), mesh.platform
    tensor, expert = (None if asked == "auto" else asked for asked in (config.mesh.tensor, config.mesh.expert))
    if (given := tensor or expert or 1) > count:
        name = "tensor" if expert is None else "expert"
        raise ConfigError(f"mesh.{name} is {given}, and there are {count} of {platform}", fix=f"lower mesh.{name}")
    search = SplitSearch(planner, size, tensor=tensor, expert=expert)
    plan = search.best(count)
    tokens, contexts = (0, 0.0) if isinstance(plan, ConfigError) else size.room(plan)
    may_shrink = tokens > 0 and config.model.max_model_len is None
    if isinstance(plan, ConfigError) or not (contexts >= 1 or may_shrink):
        fewest = None if platform == "cpu" else search.fewest()  # the devices of a CPU share its memory
        use = [f"use {fewest.num_devices} devices"] if fewest else []
        if isinstance(plan, ConfigError):
            raise type(plan)(str(plan), fix=use[0] if use else plan.fix)
        others = "lower model.max_model_len", "set model.quantization", "or take a smaller model"
        raise ConfigError(
            f"{count} of {platform} with {size.num_bytes / 2**30:.1f} GiB each have room for {tokens} tokens beside "
            f"the weights of {planner.config.architecture}, and a full context has {size.context}",
            fix=", ".join([*use, *others]),
        )
    which = f"tensor {plan.tensor}, expert {plan.expert}: {plan.num_devices} of {count} devices"
    split = f"{which}, the split with room for the most tokens ({tokens})"
    logger.info("mesh: %s", split)
    config = config.replace(mesh={"tensor": plan.tensor, "expert": plan.expert})
    return config, configured_mesh(config.mesh), split


def _to_plan(config: Config, files: ModelFiles, mesh: DeviceMesh) -> tuple[ShapePlanner, DeviceSize]:
    """Return what plans the model, and what it is to fit, for `choose_mesh`. mesh: of all devices"""
    model, dtype = read_model(config, files, mesh)
    if model.bidirectional:
        raise ConfigError(
            "auto of mesh.tensor and mesh.expert is for models with a KV cache", fix="set both, or leave them out"
        )
    if config.model.load_format != "random":
        model = open_weights(files, model, config.model.load_format).complete(model)
    uncached = config.replace(runtime={"compile_cache": None})  # whose directory is checked, and told of, later
    resolved = RunnerConfig.resolve(uncached, model, mesh.platform, jnp.dtype(model.activation_dtype))
    memory = device_memory(mesh.devices) // len(mesh.devices)
    if not memory:
        raise ConfigError(
            f"the devices of {mesh.platform} do not say how much memory they have",
            fix="set mesh.tensor and mesh.expert",
        )
    size = DeviceSize(memory, resolved.max_model_len, resolved.max_num_seqs, resolved.memory_fraction)
    return ShapePlanner(model, dtype, cache_dtype=resolved.cache_dtype, lora=resolved.lora), size


def locate(config: Config) -> Path:
    """Return the checkpoint's directory: the embedded demo model's, a local one, or one downloaded from the hub.

    The demo model's name selects it if no directory has this name.
    """
    path = config.model.path
    if path is None or (path == DEMO_NAME and not Path(path).exists()):
        return Path(str(files("jaxserve") / "assets" / "demo"))
    return resolve(path, revision=config.model.revision)


def _tokenizer_dir(config: Config, directory: Path) -> Path:
    return directory if config.model.tokenizer is None else resolve(config.model.tokenizer)


def read_model(
    config: Config, files: ModelFiles, mesh: DeviceMesh, found: ModelConfig | None = None
) -> tuple[ModelConfig, jnp.dtype]:
    """Return the model's configuration as it is served on `mesh`, and the dtype of its weights. Raises ConfigError.

    found: the configuration as published; None: it is read
    """
    model_config = found or read_config(files)
    if model_config.vision is not None and config.mesh.hosts > 1:
        logger.warning("pictures are not served over several hosts: the model is served as text")
    if not config.media.max_items or config.mesh.hosts > 1:
        model_config = model_config.without_tower()
    dtype, activations = _dtypes(config, model_config, files, mesh)
    quantization = choose_quantization(config.model.quantization, model_config, files)
    head = choose_head(config.model.quantize_head, quantization, files)
    model_config = model_config.replace(
        activation_dtype=activations.name, quantization=quantization, quantized_head=head
    )
    if config.model.max_model_len is not None:
        model_config = model_config.for_context(config.model.max_model_len)
    return model_config, dtype


def load(config: Config, files: ModelFiles, mesh: DeviceMesh, send: Send) -> LoadedModel:
    """Load the weights, quantized if the configuration asks for it. Raises ConfigError."""
    return _loaded(config, files, *read_model(config, files, mesh), mesh, send)


def _loaded(
    config: Config, files: ModelFiles, model_config: ModelConfig, dtype: jnp.dtype, mesh: DeviceMesh, send: Send
) -> LoadedModel:
    load_format, seed = config.model.load_format, config.runtime.random_seed or 0
    if load_format == "random":
        return random_model(files, dtype=dtype, config=model_config, mesh=mesh.mesh, seed=seed)
    return load_model(
        files,
        dtype=dtype,
        config=model_config,
        mesh=mesh.mesh,
        progress=lambda done, total: send(Progress("weights", done, total, "bytes")),
        load_format=load_format,
    )


def load_draft_model(
    config: Config, served: LoadedModel, files: ModelFiles, mesh: DeviceMesh, send: Send
) -> LoadedModel | None:
    """Load the draft model or head of `speculation`; None if there is none. files: of the served model

    Raises ConfigError, also if it does not fit the served model.
    """
    section = config.speculation
    if not section.on_device:
        return None
    if section.method == "mtp":
        draft = _loaded(config, files, *_own_head(config, files, mesh), mesh, send)
    else:
        as_published = {"quantization": "auto", "quantize_head": False, "max_model_len": None}
        if section.method == "eagle3":  # it reads the model's hidden states
            as_published["dtype"] = served.structure.activation_dtype.name
        config = _of_draft_model(config, as_published)
        files = ModelFiles.open(locate(config))
        is_head = section.method == "eagle3"
        found = with_taps(read_eagle(files), served.config) if is_head else _read_draft_model(files)
        check_draft_model(found, served.config)
        model, dtype = read_model(config, files, mesh, found)
        draft = _loaded(config, files, model, dtype, mesh, send)
    source, count = _source(section), section.max_drafts
    size = f"{draft.structure.num_parameters / 1e6:.1f} million parameters"
    logger.info("speculation: %s proposes %d tokens a step, %s", source, count, size)
    return draft


def _of_draft_model(config: Config, changes: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """Return the configuration with the draft model in the place of the model."""
    section = config.speculation
    return config.replace(model={"path": section.draft_model, "revision": section.draft_revision, **changes})


def _read_draft_model(files: ModelFiles) -> ModelConfig:
    """Read the configuration of a draft model. Raises ConfigError if it is a head."""
    if architecture_of(files.config) in EAGLE3:
        raise ConfigError(
            f"speculation.draft_model: {files.directory} is a head in EAGLE-3's form",
            fix="set speculation.method to eagle3",
        )
    return read_config(files)


def _own_head(config: Config, files: ModelFiles, mesh: DeviceMesh) -> tuple[ModelConfig, jnp.dtype]:
    """Return the configuration of the checkpoint's own head, and the dtype of its weights. Raises ConfigError."""
    model, dtype = read_model(config, files, mesh)
    head = predictor_config(model)
    if head is None or files.format != "safetensors":
        raise ConfigError(
            f"speculation.method mtp: {model.architecture} in {files.directory} has no head that is served",
            fix="leave speculation.method out, or set it to ngram; docs/models.md lists the heads that are served",
        )
    return head, dtype


def _dtypes(config: Config, model: ModelConfig, files: ModelFiles, mesh: DeviceMesh) -> tuple[jnp.dtype, jnp.dtype]:
    """Return the dtypes of weights and activations. An encoder's are the same."""
    asked, platform = config.model.dtype, mesh.platform
    published = model.dtype == "bfloat16" and not files.quantization
    keeps = published and platform == "cpu" and asked == "auto" and not model.bidirectional
    keeps = keeps and native_products(get_backend(config.runtime.attention, platform), mesh)
    weights, activations = resolve_dtypes(asked, platform, keeps_bfloat16=keeps)
    return weights, weights if model.bidirectional else activations


def make_runner(
    config: Config,
    loaded: LoadedModel,
    files: ModelFiles,
    mesh: DeviceMesh,
    send: Send,
    agree: Callable[[MemoryPlan], MemoryPlan],
    draft: LoadedModel | None = None,
) -> ModelRunner | EncoderRunner:
    """Check that this machine computes correctly, and return a runner. Raises ConfigError.

    agree, draft: as in ModelRunner
    """
    resolved = RunnerConfig.resolve(config, loaded.config, mesh.platform, loaded.structure.activation_dtype)
    pooling = read_pooling(files, loaded.config)
    resolved = resolved.for_embeddings(pooling, files)
    if config.cache.disk is not None:
        name = pages_name(config, resolved, loaded, mesh, loaded.directory, draft)
        remove_unused(config.cache.disk, config.mesh.replicas)
        resolved = dataclasses.replace(resolved, page_file=PageFileConfig(config.cache.disk, name))
    dtype, device, model = loaded.structure.activation_dtype, mesh.devices[0], loaded.config
    backend = None
    if not model.bidirectional:
        layers = model.attention_layers + (() if draft is None else draft.config.attention_layers)
        backend = serving_backend(resolved.attention, device, layers, dtype, mesh.tensor)
    if config.runtime.bundle is None:
        store = _program_store(config, resolved, mesh)
    else:
        if config.mesh.hosts > 1:
            raise ConfigError("a bundle is for one host", fix="leave runtime.bundle out")
        store, resolved = _bundle(config.runtime.bundle, loaded, resolved, mesh, backend, draft)
    cases = serving_cases(
        backend,
        mesh,
        dtype,
        deterministic=resolved.deterministic,
        of_experts=None if loaded.config.moe is None else resolved.experts,
        rounded=chosen_rounding(resolved, loaded, mesh, backend),
    )

    def progress(name: str, done: int, total: int) -> None:
        send(Progress("programs", done, total, "programs"))

    if model.bidirectional:
        if resolved.host_memory is not None:
            raise ConfigError("an encoder has no KV cache", fix="leave cache.host_memory out")
        if config.mesh.hosts > 1:
            raise ConfigError("an encoder does not run over several hosts", fix="leave mesh.hosts out")
    with discarding(store):
        check_numbers(cases, mesh, deterministic=resolved.deterministic, store=store)
        if model.bidirectional:
            return EncoderRunner(loaded, pooling, resolved, mesh, progress=progress, store=store)
        return ModelRunner(loaded, resolved, mesh, progress=progress, agree=agree, store=store, draft=draft)


def _program_store(config: Config, resolved: RunnerConfig, mesh: DeviceMesh) -> ProgramStorage | None:
    """Return the store of compiled programs; None if they are in JAX's own cache only, or in none."""
    # The programs of several processes are kept by JAX's own cache only.
    store = None if config.mesh.hosts > 1 else open_store(resolved.compile_cache, mesh)
    if resolved.compile_cache is not None and (store is None or mesh.platform != "cpu"):
        program_cache.enable(resolved.compile_cache)  # a CPU's program from JAX's cache cannot be stored again
    return store


def _bundle(
    path: Path,
    loaded: LoadedModel,
    resolved: RunnerConfig,
    mesh: DeviceMesh,
    backend: Backend | None,
    draft: LoadedModel | None,
) -> tuple[Bundle, RunnerConfig]:
    """Open a bundle. Returns it and the configuration with its pages. Raises ConfigError if it does not fit."""
    refuse_bundle(loaded.config)
    if draft is not None:
        raise ConfigError(
            "a bundle has neither a draft model nor a head yet",
            fix="leave runtime.bundle or the section speculation out",
        )
    if backend is None:
        raise ConfigError("an encoder takes no bundle", fix="leave runtime.bundle out")
    bundle = Bundle.open(path, mesh)
    if bundle.manifest.tuning == UNTUNED:
        logger.warning("the bundle %s was compiled %s", path, UNTUNED)
    return bundle, bundle.resolved(loaded.structure, resolved, backend.name)


def _warm_up(runner: ModelRunner | EncoderRunner, calls: ModelRunner | LeaderRunner | EncoderRunner) -> StepTimes:
    try:
        with discarding(runner.store):
            return UNTIMED if isinstance(calls, EncoderRunner) else calls.warm_up()
    except BaseException:
        runner.close()
        raise


def pages_name(
    config: Config,
    resolved: RunnerConfig,
    loaded: LoadedModel,
    mesh: DeviceMesh,
    directory: Path,
    draft: LoadedModel | None = None,
) -> str:
    """Return a name for the model's KV pages. It differs if anything differs that changes their content.

    draft: a draft model, whose K and V are on the pages too
    """
    weights = config.model.load_format, config.runtime.random_seed, loaded.leaves[0].dtype.name, describe(loaded.config)
    numbers = resolved.cache_dtype.name, resolved.page_size
    kernels = resolved.attention, resolved.experts, resolved.deterministic, resolved.activations
    devices = mesh.devices[0].device_kind, len(mesh.devices), mesh.tensor
    parts = __version__, weights, numbers, kernels, devices
    if draft is not None:
        parts = (*parts, fingerprint(draft.directory, describe(draft.config)))
    return fingerprint(directory, *parts)


def _restore_pages(core: EngineCore, runner: ModelRunner | EncoderRunner) -> None:
    """Let the prefix cache find the pages of an earlier process."""
    host = core.scheduler.kv.host
    if host is None or not isinstance(runner, ModelRunner):
        return
    for tier, file in zip(host.tiers, runner.host.files, strict=False):
        if file is not None:
            tier.restore(file.to_check, file.checked)


def _scheduler_config(config: Config, runner: ModelRunner | EncoderRunner, times: StepTimes) -> SchedulerConfig:
    section, encoder = config.scheduler, isinstance(runner, EncoderRunner)
    return SchedulerConfig(
        # an encoder keeps no KV: one page per slot, large enough for a whole text, is always enough
        num_pages=runner.config.max_num_seqs if encoder else runner.plan.num_pages,
        page_size=runner.plan.page_size,
        max_num_seqs=runner.config.max_num_seqs,
        max_num_batched_tokens=runner.config.max_num_batched_tokens,
        max_model_len=runner.plan.max_model_len,
        max_drafts=runner.config.max_drafts,
        verify_sizes=runner.buckets.verify if isinstance(runner, ModelRunner) else (),
        draft_rows=max(runner.buckets.draft, default=0) if isinstance(runner, ModelRunner) else 0,
        num_host_pages=runner.plan.num_host_pages,
        groups=runner.plan.group_sizes,
        states=_state_sizes(runner),
        page_events=config.mesh.replicas > 1,
        policy=section.policy,
        prefix_cache=config.cache.prefix_cache and not encoder,
        step_sizes=_step_sizes(runner),
        batch_policy="yield" if runner.mesh.platform == "cpu" else "priority",
        step_times=times,
        whole_prompts=encoder,
        num_adapter_slots=0 if encoder or runner.config.lora is None else runner.config.lora.slots,
        new_token_ratio=section.new_token_ratio,
        prefill_chunk_size=section.prefill_chunk_size,
        pictures=runner.tower_limits if isinstance(runner, ModelRunner) else None,
        aging_steps=section.aging_steps,
        queue_timeout=config.server.queue_timeout,
    )


def _state_sizes(runner: ModelRunner | EncoderRunner) -> StateSizes | None:
    count, config = runner.plan.num_state_pages, runner.config
    return StateSizes(count, config.state_interval, config.state_border) if count else None


def _drafter(section: SpeculationSection, vocab_size: int) -> Drafter | None:
    match section.source:
        case "off":
            return None
        case "ngram":
            return NGramDrafter(section.prompt_lookup_min, section.prompt_lookup_max)
        case "draft_model" | "mtp" | "eagle3":
            return DeviceDrafts(vocab_size)


def _step_sizes(runner: ModelRunner | EncoderRunner) -> tuple[int, ...]:
    """Return the step sizes, in tokens, to round prefill down to. Only on a CPU, where padding costs compute.

    On a GPU a 256-token step takes as long as one with 128 tokens, because it reads the same weights.
    """
    if isinstance(runner, EncoderRunner) or runner.mesh.platform != "cpu":
        return ()
    return runner.buckets.extend
