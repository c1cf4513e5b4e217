"""What the files of sentence-transformers say of texts: the longest one, and the prompt before each."""

from __future__ import annotations

from pathlib import Path

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import as_integer, read_object
from jaxserve.models.pooling import PoolingConfig, sentence_modules


def embedding_prompt(directory: Path, pooling: PoolingConfig) -> str:
    """Return the prompt that sentence-transformers puts before each text if a caller names none; "" without one.

    Raises ModelLoadError if the default prompt is not among the prompts, or the pooling leaves its tokens out.
    """
    file = directory / "config_sentence_transformers.json"
    modules = sentence_modules(directory)
    settings = read_object(file) if "Pooling" in modules and file.is_file() else {}
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts")
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise ModelLoadError(f"{file}: 'default_prompt_name' is {str(name)[:80]!r}, of which 'prompts' has no text")
    how = directory / modules["Pooling"] / "config.json"
    if prompt and pooling.kind not in ("cls", "last") and read_object(how).get("include_prompt") is False:
        raise ModelLoadError(f"{how}: 'include_prompt': false cannot be served with a default prompt")
    return prompt


def text_limit(directory: Path, pooling: PoolingConfig) -> int | None:
    """Return after how many tokens sentence-transformers cuts a text; None: nowhere. Raises ModelLoadError.

    A model without a limit of its own has the tokenizer's.
    """
    file = directory / "tokenizer_config.json"
    if "Pooling" not in sentence_modules(directory):
        return None
    if pooling.max_tokens is not None or not file.is_file():
        return pooling.max_tokens
    longest = as_integer(read_object(file).get("model_max_length"))
    return longest if longest is not None and longest > 0 else None
