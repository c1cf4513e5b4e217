"""The text that an embedding model's files put before each text."""

from __future__ import annotations

from pathlib import Path

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import read_object
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
