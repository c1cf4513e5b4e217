"""Write docs/python.md, the reference of the names that `import jaxserve` offers, from their signatures and docstrings.

python -m docgen.python > docs/python.md
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec

import jaxserve
from jaxserve.engine.engine import Completions

_HEAD = """# In Python

Made by `python -m docgen.python`; a test holds it to the code.

```python
from jaxserve import Engine, SamplingParams

with Engine("DIR") as engine:
    for completions in engine.generate(["Once upon a time", "The"], SamplingParams(max_tokens=8, temperature=0.0)):
        print(completions.prompt, completions[0].text)
```

[examples/](https://github.com/jaxserve/jaxserve/tree/main/examples) has whole programs; [weights.md](weights.md) is
about weights that are replaced while the engine serves.

## From vLLM and SGLang

The constructor takes their arguments that mean the same (`tensor_parallel_size`, `dtype="half"`, ...); one that is None
is as if it were absent, one that has no effect here is logged, and any other is an error that says what to do
([flags.md](flags.md) lists all).

| there | here |
|---|---|
| `vllm.LLM(model, ...)` | `Engine(model, ...)` |
| `llm.generate(prompts, params)`, `[{"prompt_token_ids": ids}]` | the same; answers have `.prompt` and `.outputs` |
| `sampling_params=`, `use_tqdm=` | the same names; also `params`, `progress`. All methods that answer have the bar |
| `llm.get_default_sampling_params()` | the same |
| `llm.chat(messages, params)` | the same for one, `chat_all` for several; answers as OpenAI's |
| `llm.embed`, `llm.score`, `llm.classify` | the same names; arrays, numbers and labels instead of output objects |
| `llm.generate(..., lora_request=...)` | `load_adapter(name, path)`, then `generate(..., adapter=name)` |
| `llm.generate(..., multi_modal_data=...)` | `chat`, with the images in the messages ([images.md](images.md)) |
| `SamplingParams(structured_outputs=...)` | the same, with a mapping; also `regex=`, `json_schema=`, `ebnf=` |
| `llm.sleep(level)`, `llm.wake_up()` | the same; also `wake()` |
| `llm.collective_rpc`, `llm.apply_model` | `engine.runner` has the arrays and the compiled programs |
| `sglang.Engine(model_path=..., tp_size=...)` | `Engine(model_path=..., tp_size=...)` |
| `engine.generate(prompts, {"max_new_tokens": 8})` | the same; an answer is a list of completions, not a dict |
| `engine.generate(prompt=...)`, `engine.generate(input_ids=...)` | the same; others say what to use |
| `engine.async_generate`, `AsyncLLM` | `AsyncEngine`, with the methods of `Engine`; `generate` streams |
| `engine.encode(texts)` | `embed(texts)`, or `classify(texts)` for labels |
| `engine.update_weights_from_tensor(...)` | `update_weights(...)` with pairs of names and arrays |
| `engine.shutdown()` | the same; also `close()`, or `with Engine(...) as engine:` |
"""


def reference() -> str:
    """Return the whole page."""
    lines = [_HEAD.rstrip()]
    for name in ("Engine", "AsyncEngine", "SamplingParams", "GrammarSpec", "Completion", "RequestOutput"):
        lines += _section(name, getattr(jaxserve, name))
        if name == "Completion":
            lines += _section("Completions", Completions)
    lines += ["", "## launch_server", *_function(jaxserve.launch_server, "launch_server")]
    return "\n".join(lines) + "\n"


def _section(name: str, kind: type) -> Iterator[str]:
    yield from ("", f"## {name}", "", _text(kind))
    if issubclass(kind, msgspec.Struct):
        yield from _fields(kind)
        return
    for attribute, value in _public(kind):
        if isinstance(value, property):
            yield from ("", f"### {name}.{attribute}", "", _text(value))
        else:
            yield from ("", f"### {name}.{attribute}", *_function(value, attribute))


def _public(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that have a docstring, those of the class itself first."""
    seen: set[str] = set()
    for each in kind.__mro__:
        if not each.__module__.startswith("jaxserve."):
            continue
        for name, value in vars(each).items():
            is_shown = inspect.isfunction(value) or isinstance(value, property)
            if is_shown and not name.startswith("_") and name not in seen and inspect.getdoc(value):
                seen.add(name)
                yield name, value


def _function(function: Any, name: str) -> Iterator[str]:
    signature = inspect.signature(function)
    given = [each for each in signature.parameters.values() if each.name != "self"]
    shown = signature.replace(parameters=given)
    annotated = re.sub(r"(: |-> )'([^']*)'", r"\1\2", f"{name}{shown}")  # the annotations are texts
    annotated = re.sub(r"<function .*? at 0x[0-9a-f]+>", "...", annotated)  # its address differs each time
    yield from ("", "```python", annotated, "```", "", _text(function))


def _fields(kind: type[msgspec.Struct]) -> Iterator[str]:
    yield from ("", "| field | default |", "|---|---|")
    for each in msgspec.structs.fields(kind):
        default = "required" if each.default is msgspec.NODEFAULT else f"`{each.default!r}`"
        if each.default is msgspec.NODEFAULT and each.default_factory is not msgspec.NODEFAULT:
            default = f"`{each.default_factory()!r}`"
        yield f"| `{each.name}` | {default} |"


def _text(value: Any) -> str:
    """Return a docstring as paragraphs. A line about a parameter begins a line of its own."""
    found: list[str] = []
    for line in (inspect.getdoc(value) or "").split("\n"):
        begins = not found or not line or not found[-1] or re.match(r"[a-z_]+(, [a-z_]+)*: |Raises ", line.strip())
        if begins and found and line and found[-1]:
            found[-1] += "  "  # a line break
        if begins:
            found.append(line.strip())
        else:
            found[-1] += f" {line.strip()}"
    return "\n".join(found)


if __name__ == "__main__":
    print(reference(), end="")
