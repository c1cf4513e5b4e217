"""The architectures that can be served, collected from the modules of this folder.

Every module here except this one declares a tuple FAMILIES.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import MappingProxyType

from jaxserve.errors import ModelLoadError
from jaxserve.models import families
from jaxserve.models.family import Family, Nested
from jaxserve.models.unserved import BY_ARCHITECTURE, refusal


def _declared() -> list[Family | Nested]:
    names = [module.name for module in pkgutil.iter_modules(families.__path__)]
    modules = [importlib.import_module(f"{families.__name__}.{name}") for name in names if name != "registry"]
    return [family for module in modules for family in module.FAMILIES]


ARCHITECTURES = MappingProxyType({each.architecture: each for each in _declared() if isinstance(each, Family)})
NESTED = MappingProxyType(
    {name: each for each in _declared() if isinstance(each, Nested) for name in each.architectures}
)


def family_of(architecture: str) -> Family:
    """Return the family of an architecture. Raises ModelLoadError that lists the supported ones."""
    if architecture not in ARCHITECTURES and architecture in BY_ARCHITECTURE:
        raise refusal(architecture)
    if architecture not in ARCHITECTURES:
        supported = ", ".join(sorted({*ARCHITECTURES, *NESTED} - BY_ARCHITECTURE.keys()))
        raise ModelLoadError(f"architecture {architecture!r} is not supported", fix=f"serve one of: {supported}")
    return ARCHITECTURES[architecture]
