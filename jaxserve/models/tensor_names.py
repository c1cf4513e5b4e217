"""Names of tensors: from a checkpoint's names to the names of the modules here, and back.

A rule is a pair (there, here). One that begins with a dot, as (".shared_mlp.", ".mlp."), stands for these parts
anywhere in a name. Another stands for the beginning of a name; of these the first that fits counts.
"""

from __future__ import annotations

Rules = tuple[tuple[str, str], ...]


def renamed(name: str, rules: Rules) -> str:
    """Return the name here of a checkpoint's tensor."""
    start = next(((there, here) for there, here in rules if there[0] != "." and name.startswith(there)), ("", ""))
    name = start[1] + name.removeprefix(start[0])
    for there, here in rules:
        if there[0] == ".":
            if there in here:  # a name that is already the one here stays
                name = name.replace(here, there)
            name = name.replace(there, here)
    return name


def published_names(module: str, rules: Rules) -> list[str]:
    """Return the names that a module may have in a checkpoint, the module's own first."""
    inner = f"{module}."
    for there, here in reversed(rules):
        if there[0] == ".":
            inner = inner.replace(here, there)
    starts = [there + inner.removeprefix(here) for there, here in rules if there[0] != "." and inner.startswith(here)]
    return [module, *(name.removesuffix(".") for name in (inner, *starts))]
