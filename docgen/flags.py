"""Write docs/flags.md from the table of other servers' flags.

python -m docgen.flags > docs/flags.md
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.cli.foreign_flags import ROWS, Answer, Key, NoEffect, Refused

_HEAD = """# Flags of vLLM, SGLang and llama-server

Made by `python -m docgen.flags`; a test holds it to the code.

`jaxserve launch` (or `serve`) knows the launch flags of vLLM 0.32 and SGLang 0.5.23, and the usual ones of
llama-server. Each is in one of the three tables below. A flag is spelled with `-` or `_`, as `--flag value` or
`--flag=value`; `--no-flag` is the opposite of a switch. In the tables `*` stands for all flags with this beginning.
jaxserve's own keys: [configuration.md](configuration.md). What else differs: [vLLM and SGLang](coming_from_vllm.md),
[llama-server](coming_from_llama_server.md).
"""
_TAKEN = """
## Flags that set a key

| flag | key | value |
|---|---|---|"""
_WITHOUT = """
## Flags without effect

The server starts and prints the reason.

| flag | because |
|---|---|"""
_ANSWERED = """
## Flags that are refused

The server does not start and prints what to do instead.

| flag | what to do |
|---|---|"""


def reference() -> str:
    """Return the whole page."""
    lines = [_HEAD.rstrip(), _TAKEN, *_rows(Key), _WITHOUT, *_rows(NoEffect), _ANSWERED, *_rows(Refused)]
    return "\n".join(lines) + "\n"


def _rows(kind: type[Answer]) -> Iterator[str]:
    seen: dict[str, list[str]] = {}
    for names, answer in ROWS:
        if isinstance(answer, kind):
            seen.setdefault(_cells(answer), []).extend(names.split())
    for cells, names in seen.items():
        shown = ", ".join(f"`{name}`" for name in names)
        yield f"| {shown.replace('!', '')} | {cells} |"


def _cells(answer: Answer) -> str:
    if isinstance(answer, Refused):
        return answer.fix
    if isinstance(answer, NoEffect):
        only = f" (for {', '.join(_span(answer.values))}; else: {answer.fix})" if answer.values else ""
        return answer.reason + only
    values = [f"`{answer.const}`"] if answer.const is not None else []
    values += [f"`{theirs}` is `{ours}`" for theirs, ours in answer.words.items()]
    values += [f"any other word is `{answer.others}`"] if answer.others is not None else []
    values += [answer.note] if answer.note else []
    if answer.fields:
        keys = sorted(set(answer.fields.values()))
        key = keys[0] if len(keys) == 1 else f"{answer.key.partition('.')[0]}.*"
        return f"`{key}` | a JSON object with {', '.join(f'`{name}`' for name in answer.fields)}"
    return f"`{answer.key}` | {', '.join(values)}"


def _span(values: tuple[str, ...]) -> list[str]:
    return [f"`{value}`" for value in values] if len(values) <= 4 else [f"`{values[0]}` to `{values[-1]}`"]


if __name__ == "__main__":
    print(reference(), end="")
