"""Chooses the form of a model's weights in memory, from the configuration and from the checkpoint's own form."""

from __future__ import annotations

from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.config import ModelConfig

QUANTIZATIONS = ("auto", "none", "int8", "fp8", "int4", "mxfp4", "nvfp4")


def choose_quantization(asked: str, model: ModelConfig, files: ModelFiles) -> str:
    """Return ModelConfig.quantization for one of QUANTIZATIONS. Raises ConfigError if it is not supported."""
    if files.format == "orbax":
        return _of_converted(asked, files)
    form = model.stored_form
    decoded = form is None or (model.bidirectional and not form.is_integer)
    if asked == "none" or (asked == "auto" and decoded):
        return "none"
    if model.bidirectional:
        raise ConfigError("an encoder's weights cannot be quantized", fix="set model.quantization: none")
    if asked == "auto" or (form is not None and asked == form.kind and form.is_float):
        return "stored"
    if form is not None and form.is_integer and not form.not_held():
        raise ConfigError(f"the checkpoint has {form.description} already", fix="set model.quantization: auto")
    return asked


def choose_head(asked: bool, quantization: str, files: ModelFiles) -> bool:
    """Return ModelConfig.quantized_head. quantization: the result of `choose_quantization`

    Raises ConfigError if the configuration asks for a quantized head and it is not quantized at load.
    """
    if files.format == "orbax":
        held = bool(files.manifest["quantized_head"])
        if asked and not held:
            raise ConfigError(
                f"{files.directory} is a converted checkpoint whose head is not quantized",
                fix="name the original checkpoint, or set model.quantize_head: false",
            )
        return held
    if asked and quantization in ("none", "stored"):
        raise ConfigError(
            "model.quantize_head is for weights that are quantized at load, and these are not",
            fix="set model.quantization: int8, fp8, int4, mxfp4 or nvfp4",
        )
    return asked


def _of_converted(asked: str, files: ModelFiles) -> str:
    held = files.manifest["quantization"]
    if asked in ("auto", held):
        return held
    what = "weights that are not quantized" if held == "none" else "quantized weights"
    raise ConfigError(
        f"{files.directory} is a converted checkpoint with {what}, which model.quantization: {asked} does not change",
        fix="name the original checkpoint, or set model.quantization: auto",
    )
