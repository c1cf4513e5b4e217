"""The help of `jaxserve launch`, made from the configuration tree so that it cannot be wrong."""

from __future__ import annotations

from jaxserve.cli.settings import ALIASES, ENV_PREFIX, known_keys

COMMON = ("--model", "--port", "--host", "--tensor", "--dtype", "--max-model-len", "--api-key")


def launch_help(*, everything: bool) -> str:
    """The short help, or every key with its default, its variable and its aliases."""
    head = "usage: jaxserve launch [--config FILE] [flags]\n\nWithout a model: the embedded demo model.\n"
    keys = known_keys()
    if not everything:
        lines = [f"  {flag:18} {keys[ALIASES[flag]].description or ALIASES[flag]}" for flag in COMMON]
        return "\n".join([head, *lines, "\n  --help-all         every key, its default and its other spellings"])
    lines = [head, "Order: flags, environment, file, default.\n"]
    for key, field in keys.items():
        others = [flag for flag, target in ALIASES.items() if target == key]
        variable = f"{ENV_PREFIX}{key.upper().replace('.', '__')}"
        lines.append(f"  --{key.replace('_', '-')} (default {field.default})")
        lines.append(f"      {field.description or ''} [{', '.join([variable, *others])}]")
    return "\n".join(lines)
