"""What an engine says about itself and its model when it is ready."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from jaxserve.config import Config
from jaxserve.engine.reranking import has_raw_scores, is_regression, label_token_ids
from jaxserve.model_files import gguf_file
from jaxserve.models.checkpoint.loader import LoadedModel
from jaxserve.models.config import ModelConfig
from jaxserve.models.pooling import PoolingConfig, is_embedder
from jaxserve.runtime.encoder_runner import EncoderRunner
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.messages import EngineInfo
from jaxserve.types.scheduling import StepTimes

DEMO_NAME = "demo"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*/?", re.ASCII)
# On a CPU at most this share of the saturating number of rows is kept busy with batch requests, because each of them
# lengthens the steps of online requests: twice as many made those of the demo model on 2 cores wait 1.5 times as long.
CPU_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A loaded model and what its files say about its use."""

    directory: Path
    loaded: LoadedModel
    tokenizer: Tokenizer
    pooling: PoolingConfig
    embedding_prompt: str = ""

    @property
    def embeds(self) -> bool:
        """Whether it makes embeddings and nothing else."""
        return is_embedder(self.directory, self.loaded.config)

    @property
    def generates(self) -> bool:
        """Whether it generates text."""
        return not (self.embeds or self.loaded.config.labels)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an output: the model's, and the tokenizer's `eos_token`, which alone may name a chat's.

        A GGUF file may name one of several: there all ends of the tokenizer count.
        """
        model, tokenizer = self.loaded.config, self.tokenizer
        own = tokenizer.eos_token_ids if gguf_file(self.directory) else (tokenizer.eos_token_id,)
        ids = (*model.eos_token_ids, *own)
        return tuple(dict.fromkeys(i for i in ids if i is not None and 0 <= i < model.vocab_size))


def served_names(config: Config) -> list[str]:
    """Return the names that clients may use: the configured ones, or the checkpoint's own name.

    A relative directory that is written as a hub id, Qwen/Qwen3-8B, may be called so too.
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
) -> EngineInfo:
    """Describe a ready engine.

    seconds: of the phases of its start. num_compiled: programs that no cache had
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
        regression=is_regression(found.directory),
        raw_scores=has_raw_scores(found.directory),
        label_token_ids=label_token_ids(config.model, found.directory, found.tokenizer) if found.generates else (),
        routed=_routed(model),
        num_compiled=num_compiled,
    )


def _useful_rows(runner: ModelRunner | EncoderRunner, times: StepTimes) -> int:
    """See EngineInfo.useful_rows."""
    most = runner.config.max_num_seqs
    return most if runner.mesh.platform != "cpu" else max(1, round(CPU_SHARE * times.full_rows(most)))


def _routed(config: ModelConfig) -> tuple[int, int]:
    """See EngineInfo.routed."""
    return (0, 0) if config.moe is None else (sum(config.moe.sparse_layers), config.moe.experts_per_token)
