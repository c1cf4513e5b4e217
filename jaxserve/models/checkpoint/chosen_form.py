"""Chooses the form of a model's weights in memory, from the configuration and from the checkpoint's own form."""

from __future__ import annotations

from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.orbax_reader import held_quantization, is_converted, read_manifest
from jaxserve.models.config import ModelConfig

QUANTIZATIONS = ("auto", "none", "int8", "fp8", "int4")


def choose_quantization(asked: str, model: ModelConfig, directory: Path) -> str:
    """Return ModelConfig.quantization for one of QUANTIZATIONS. Raises ConfigError if it is not supported."""
    if is_converted(directory):
        return _of_converted(asked, directory)
    form = model.stored_form
    decoded = form is None or (model.bidirectional and not form.is_integer)
    if asked == "none" or (asked == "auto" and decoded):
        return "none"
    if model.bidirectional:
        raise ConfigError("an encoder's weights cannot be quantised", fix="set model.quantization: none")
    if asked == "auto" or (form is not None and asked == form.method):
        return "stored"
    if form is not None and form.is_integer and not form.not_held():
        raise ConfigError(f"the checkpoint has {form.description} already", fix="set model.quantization: auto")
    return asked


def choose_head(asked: bool, quantization: str, directory: Path) -> bool:
    """Return ModelConfig.quantized_head. quantization: the result of `choose_quantization`

    Raises ConfigError if the configuration asks for a quantized head and it is not quantized at load.
    """
    if is_converted(directory):
        held = bool(read_manifest(directory)["quantized_head"])
        if asked and not held:
            raise ConfigError(
                f"{directory} is a converted checkpoint whose head is not quantised",
                fix="name the original checkpoint, or set model.quantize_head: false",
            )
        return held
    if asked and quantization in ("none", "stored"):
        raise ConfigError(
            "model.quantize_head is for weights that are quantised at load, and these are not",
            fix="set model.quantization: int8, fp8 or int4",
        )
    return asked


def _of_converted(asked: str, directory: Path) -> str:
    held = held_quantization(directory)
    if asked in ("auto", held):
        return held
    what = "weights that are not quantised" if held == "none" else "quantised weights"
    raise ConfigError(
        f"{directory} is a converted checkpoint with {what}, which model.quantization: {asked} does not change",
        fix="name the original checkpoint, or set model.quantization: auto",
    )
