"""The files beside a model's weights: opened once where a model is found, and passed on to everything that reads them.

A directory has its weights in one of three formats: safetensors files as published, a GGUF file, or the arrays that
`jaxserve convert` writes with Orbax. `text.tokenizer` reads the tokenizer's files: in the API's process too, and maybe
from another directory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import gguf_file, read_json, read_object
from jaxserve.models.checkpoint.gguf_models import published_config
from jaxserve.models.checkpoint.orbax_reader import is_converted, read_manifest
from jaxserve.models.checkpoint.read_config import Json, flattened

POOLING = "Pooling"
LOGIT_SCORE = "LogitScore"  # the module of a reranker that answers with a word
_BESIDE = MappingProxyType(
    {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
)


@dataclass(frozen=True)
class ModelFiles:
    """The files that describe a model. Each is read once, when it is first needed. Do not change the objects.

    directory: of the model, or its GGUF file
    config_file: the config.json or the GGUF file. A config.json may have any name

    Every property raises ModelLoadError for a damaged file.
    """

    directory: Path
    config_file: Path

    @classmethod
    def open(cls, model: Path | ModelFiles) -> ModelFiles:
        """Open a directory or a GGUF file. ModelFiles are returned as they are.

        Raises ModelLoadError for a directory with several GGUF files.
        """
        if isinstance(model, ModelFiles):
            return model
        return cls(model, gguf_file(model) or model / "config.json")

    @classmethod
    def of_config(cls, file: Path) -> ModelFiles:
        """Open a config.json of any name, with the files beside it."""
        return cls(file.parent, file)

    @cached_property
    def format(self) -> Literal["safetensors", "gguf", "orbax"]:
        """The format of the weights."""
        if is_converted(self.directory):
            return "orbax"
        return "gguf" if self.config_file.suffix.lower() == ".gguf" else "safetensors"

    @cached_property
    def config(self) -> Json:
        """The object of config.json, or the one that is made from a GGUF file's header."""
        return published_config(self.config_file)

    @cached_property
    def generation(self) -> Json:
        """The object of generation_config.json; {} without one."""
        return _object(self.config_file.with_name("generation_config.json"))

    @cached_property
    def quantization(self) -> Any:
        """The quantization entry of config.json, unchecked, or of the file beside it that has it; {} without one.

        modelopt, AutoGPTQ and AutoAWQ describe weights in a file beside it. If config.json is named NAME_config.json,
        the other begins with NAME_ too.
        """
        inside = flattened(self.config).get("quantization_config")
        if inside is not None:
            return inside
        for name, method in _BESIDE.items():
            file = self.config_file.with_name(self.config_file.name.removesuffix("config.json") + name)
            if not file.is_file():
                continue
            found = read_object(file)
            found = found.get("quantization") or {} if method == "modelopt" else found
            if not isinstance(found, dict):
                raise ModelLoadError(f"{file}: 'quantization' must be an object")
            return {"quant_method": method} | found if found else {}
        return {}

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest of converted weights, see `orbax_reader.read_manifest`."""
        return read_manifest(self.directory)

    @cached_property
    def modules(self) -> Mapping[str, str]:
        """{kind: path} of the modules of a sentence-transformers directory; {} for any other directory."""
        file = self.directory / "modules.json"
        if not file.is_file():
            return {}
        listed = read_json(file)
        if not isinstance(listed, list) or not all(
            isinstance(each, dict) and {"type", "path"} <= each.keys() for each in listed
        ):
            raise ModelLoadError(f"{file}: expected a list of modules with type and path")
        modules = {str(each["type"]).rsplit(".", 1)[-1]: str(each["path"]) for each in listed}
        for kind in (POOLING, LOGIT_SCORE):
            if not re.fullmatch(rf"\w+_{kind}", modules.get(kind, f"1_{kind}")):
                raise ModelLoadError(f"{file}: the path of {kind} must be a directory beside it, such as 1_{kind}")
        return modules

    def module_file(self, kind: str) -> Path:
        """Return the file of a module that `modules` has."""
        return self.directory / self.modules[kind] / "config.json"

    @cached_property
    def pooling(self) -> Json:
        """The settings of the module Pooling, which `modules` has."""
        return read_object(self.module_file(POOLING))

    @cached_property
    def sentence_transformers(self) -> Json:
        """The object of config_sentence_transformers.json; {} without one."""
        return _object(self.directory / "config_sentence_transformers.json")


def _object(file: Path) -> Json:
    return read_object(file) if file.is_file() else {}
