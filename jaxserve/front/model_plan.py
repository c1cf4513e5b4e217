"""What the front knows of a model before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxserve.config import Config, ModelEntry
from jaxserve.errors import ModelNotFoundError


@dataclass(frozen=True)
class ModelPlan:
    """One model: its entry, and the whole configuration of its processes. names: the entry's name, then others"""

    entry: ModelEntry
    config: Config
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.entry.name


class Catalog:
    """The models of a server by name; the first is the default."""

    def __init__(self, plans: Sequence[ModelPlan]) -> None:
        self.plans = tuple(plans)
        self._by_name: Mapping[str, ModelPlan] = {name: plan for plan in plans for name in plan.names}

    @property
    def default(self) -> ModelPlan:
        return self.plans[0]

    def find(self, name: str) -> ModelPlan:
        """Return the model of a name, which Ollama's clients may send with `:latest`. Raises ModelNotFoundError."""
        found = self._by_name.get(name) or self._by_name.get(name.removesuffix(":latest"))
        if found is None:
            shown = ", ".join(self._by_name)
            raise ModelNotFoundError(f"The model {name!r} does not exist. Served: {shown}.", param="model")
        return found
