"""Read how a model makes embeddings from the files that sentence-transformers writes beside its weights.

modules.json names the modules. `read_pooling` reads the module Pooling, `embedding_prompt` the text that goes before
each text, and `text_limit` the length after which texts are cut.
"""

from __future__ import annotations

from pathlib import Path

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import as_integer, read_object, sentence_settings
from jaxserve.models.checkpoint.files import LOGIT_SCORE, POOLING, ModelFiles
from jaxserve.models.checkpoint.read_config import Json
from jaxserve.models.config import ModelConfig
from jaxserve.models.pooling import Kind, PoolingConfig

# the values of `pooling_mode`, which newer sentence-transformers write, and the keys of its older files
_MODES: dict[str, Kind] = {
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
}
_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


def read_pooling(files: ModelFiles, config: ModelConfig) -> PoolingConfig:
    """Read the pooling of a sentence-transformers directory.

    Any other directory gets the mean for an encoder and the last token for a decoder. Raises ModelLoadError for a
    damaged file or a pooling that is not supported.
    """
    modules = files.modules
    if not modules or LOGIT_SCORE in modules or config.labels:
        return PoolingConfig("mean" if config.bidirectional else "last")
    unknown = modules.keys() - {"Transformer", POOLING, "Normalize"}
    if unknown or POOLING not in modules:
        file = files.directory / "modules.json"
        raise ModelLoadError(f"{file}: cannot serve the modules {', '.join(sorted(modules))[:200]}")
    path = files.module_file(POOLING)
    kind = _kind(files.pooling, path)
    limits = sentence_settings(files.directory)
    given = None if limits is None else read_object(limits).get("max_seq_length")
    longest = as_integer(given)
    if given is not None and (longest is None or not 0 < longest < 2**31):
        raise ModelLoadError(f"{limits}: 'max_seq_length' must be a positive integer")
    if kind != "last" and not config.bidirectional:
        raise ModelLoadError(f"{path}: a decoder's embedding is its last token's state, not {kind!r}")
    return PoolingConfig(kind, "Normalize" in modules, longest)


def _kind(settings: Json, path: Path) -> Kind:
    """Return the pooling that its file names. Raises ModelLoadError if it is unknown."""
    modes = settings.get("pooling_mode", [mode for key, mode in _KEYS.items() if settings.get(key)])
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _MODES:
        raise ModelLoadError(f"{path}: expected one pooling mode of {', '.join(_MODES)}, not {str(modes)[:200]}")
    return _MODES[modes[0]]


def is_embedder(files: ModelFiles, config: ModelConfig) -> bool:
    """Return whether the model makes embeddings: an encoder, or a sentence-transformers directory.

    A model with a classification head makes none.
    """
    if config.labels:
        return False
    return config.bidirectional or bool(files.modules and LOGIT_SCORE not in files.modules)


def embedding_prompt(files: ModelFiles, pooling: PoolingConfig) -> str:
    """Return the prompt that sentence-transformers puts before each text by default; "" if there is none.

    Raises ModelLoadError if the default prompt is not among the prompts, or the pooling leaves its tokens out.
    """
    settings = files.sentence_transformers if POOLING in files.modules else {}
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts")
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        file = files.directory / "config_sentence_transformers.json"
        raise ModelLoadError(f"{file}: 'default_prompt_name' is {str(name)[:80]!r}, of which 'prompts' has no text")
    if prompt and pooling.kind not in ("cls", "last") and files.pooling.get("include_prompt") is False:
        raise ModelLoadError(
            f"{files.module_file(POOLING)}: 'include_prompt': false cannot be served with a default prompt"
        )
    return prompt


def text_limit(files: ModelFiles, pooling: PoolingConfig) -> int | None:
    """Return the number of tokens after which sentence-transformers cuts a text; None: no limit.

    A model without a limit of its own has the tokenizer's limit. Raises ModelLoadError.
    """
    file = files.directory / "tokenizer_config.json"
    if POOLING not in files.modules:
        return None
    if pooling.max_tokens is not None or not file.is_file():
        return pooling.max_tokens
    longest = as_integer(read_object(file).get("model_max_length"))
    return longest if longest is not None and longest > 0 else None
