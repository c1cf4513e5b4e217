"""Write docs/configuration.md from the configuration tree.

python -m docgen.configuration > docs/configuration.md
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from jaxserve.api.openapi import type_text
from jaxserve.cli.options import COMMON, default, section_title, variable_of
from jaxserve.config import ApiKey, Config, ModelEntry, known_keys

_HEAD = """\
# Configuration

Made by `python -m docgen.configuration`; a test holds it to the code.

Every key can be set in a YAML file (`--config FILE`), in the environment and by a flag. A flag wins over the
environment, the environment over the file, and the file over the default. `null` unsets a key whose type includes it;
for API keys and the watermark key this works in the file only. `auto` is resolved when the model and the device are
known.

```yaml
model:
  path: ./my-checkpoint
scheduler:
  max_num_seqs: 64
```

The same as flags and in the environment:

```sh
jaxserve launch ./my-checkpoint --scheduler.max-num-seqs 64
JAXSERVE_MODEL__PATH=./my-checkpoint JAXSERVE_SCHEDULER__MAX_NUM_SEQS=64 jaxserve launch
```

An unknown key, flag or `JAXSERVE_*` variable is refused with a suggestion. `jaxserve config show` prints the whole
configuration without secrets, `jaxserve config validate FILE` checks a file, and `jaxserve config schema` prints a JSON
Schema for editors. Flags of vLLM, SGLang and llama-server: [flags.md](flags.md).
"""
_COLUMNS = "| key | type | default | environment variable | flag | meaning |\n|---|---|---|---|---|---|"
_ENTRIES = {"server.keys": ApiKey, "models.served": ModelEntry}
_ENTRY_COLUMNS = "| field | type | meaning |\n|---|---|---|"


def reference() -> str:
    """Return the whole page."""
    sections = [_HEAD, *(_section(name) for name in Config.model_fields)]
    for key, entry in _ENTRIES.items():
        sections += [f"## An entry of `{key}`", "", _ENTRY_COLUMNS, *_entry_fields(entry), ""]
    return "\n".join(sections)


def _section(section: str) -> str:
    schema = Config.model_json_schema()
    properties = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]]["properties"]
    rows = [_row(f"{section}.{name}", field) for name, field in properties.items()]
    return "\n".join([f"## {section}: {section_title(section)}", "", _COLUMNS, *rows, ""])


def _row(key: str, schema: dict[str, object]) -> str:
    field = known_keys()[key]
    flag = f"--{key.replace('_', '-')}"
    short = [COMMON[key]] if COMMON.get(key, flag) != flag else []
    flags = ", ".join(f"`{name}`" for name in [*short, flag])
    cells = [f"`{key}`", _type(schema), f"`{default(field)}`", f"`{variable_of(key)}`", flags, field.description or ""]
    return f"| {' | '.join(cells)} |"


def _type(schema: dict[str, object]) -> str:
    kind = type_text(schema)
    nullable = {"type": "null"} in schema.get("anyOf", ())  # type: ignore[operator]
    return f"{kind} or null" if nullable else kind or "null"


def _entry_fields(entry: type[BaseModel]) -> Iterator[str]:
    for name, schema in entry.model_json_schema()["properties"].items():
        yield f"| `{name}` | {_type(schema)} | {schema.get('description', '')} |"


if __name__ == "__main__":
    print(reference(), end="")
