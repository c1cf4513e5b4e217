"""The list of models that one server serves behind one address, each by processes of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from jaxserve.config_sections.value_types import WEEK, Float, Int, Seconds, Section, Text, json_list

MAX_MODELS = 64
OWN_SECTIONS = ("model", "mesh", "cache", "scheduler", "runtime", "speculation")  # what each model may set for itself


def own_sections(value: Any) -> Any:
    """Check what one model sets for itself, a path or sections. Raises ValueError."""
    if not isinstance(value, str | dict):
        raise ValueError("should be the path of a YAML file, or sections")
    if isinstance(value, dict) and (shared := [name for name in value if name not in OWN_SECTIONS]):
        raise ValueError(f"the section {str(shared[0])[:40]!r} is for all models: set it beside `models`")
    if isinstance(value, dict) and (
        bare := [name for name, keys in value.items() if not isinstance(keys, dict | None)]
    ):
        raise ValueError(f"the section {bare[0]!r} should be a mapping")
    return value


class ModelEntry(BaseModel):
    """One of several models."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}$", description="Name that requests send as `model`."
    )
    config: Annotated[Text | dict[str, Any], BeforeValidator(own_sections)] = Field(
        default_factory=dict,
        description="Path of a YAML file, or the sections themselves: what differs from the sections of the main file.",
    )
    load: Literal["start", "demand"] = Field(
        "demand", description="start: loaded with the server. demand: by the first request."
    )
    idle_seconds: Seconds | None = Field(
        None, description="Unload the model after this many seconds without a request. null: never."
    )


def _distinct(entries: Sequence[ModelEntry]) -> Sequence[ModelEntry]:
    counts = Counter(entry.name for entry in entries)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"the name {repeated[0]!r} is given twice")
    return entries


ModelEntries = Annotated[
    tuple[ModelEntry, ...], BeforeValidator(json_list), AfterValidator(_distinct), Field(max_length=MAX_MODELS)
]


class ModelsSection(Section):
    """Several models behind one address, each served by processes of its own."""

    served: ModelEntries = Field(
        (),
        description="The models: [{name, config, load, idle_seconds}]; the first is the default. Empty: one model, "
        "that of the section `model`.",
    )
    max_loaded: Annotated[Int, Field(ge=1, le=64)] | None = Field(
        None,
        description="Maximum number of models that are loaded at once. For one more, the one without requests that "
        "was used longest ago is unloaded. null: no limit.",
    )
    wait_seconds: Float = Field(
        300.0, ge=0, le=WEEK, description="Seconds that a request waits for its model to load before status 503."
    )

    @field_validator("max_loaded")
    @classmethod
    def _has_room(cls, most: int | None, info: ValidationInfo) -> int | None:
        at_start = sum(entry.load == "start" for entry in info.data.get("served", ()))
        if most is not None and most < at_start:
            raise ValueError(f"{at_start} models are loaded at the start")
        return most
