"""The architectures that can be served, collected from the modules of this folder.

Every module here except this one declares a tuple FAMILIES.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import MappingProxyType

from jaxserve.errors import ModelLoadError
from jaxserve.models import families
from jaxserve.models.family import Family


def _declared() -> dict[str, Family]:
    names = [module.name for module in pkgutil.iter_modules(families.__path__)]
    modules = [importlib.import_module(f"{families.__name__}.{name}") for name in names if name != "registry"]
    return {family.architecture: family for module in modules for family in module.FAMILIES}


ARCHITECTURES = MappingProxyType(_declared())


def family_of(architecture: str) -> Family:
    """Return the family of an architecture. Raises ModelLoadError that lists the supported ones."""
    if architecture not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise ModelLoadError(f"architecture {architecture!r} is not supported", fix=f"serve one of: {supported}")
    return ARCHITECTURES[architecture]
