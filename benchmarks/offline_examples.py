"""Run the offline examples of vLLM or SGLang with the import changed, and print a table of what runs and why not.

    python -m benchmarks.offline_examples FOLDER [--limit 120]

FOLDER holds the other repository's files, which are not here. Every file that imports vllm or sglang is run, in a
folder of its own, beside the folders that it has there. What is changed, and nothing else:

- imports: a name is imported from jaxserve, `LLM` and `LLMEngine` as Engine, `AsyncLLM` as AsyncEngine. A class that
  only holds fields (`StructuredOutputsParams`) becomes `dict`. What prints or frees memory becomes nothing, and
  `init_logger` becomes logging.getLogger
- the name of a model on a hub: the demo model, or a tiny random encoder if the file embeds, classifies or scores
- argument parsers: `EngineArgs` and `ServerArgs` hold what they are given and the name of the model,
  and `X.from_engine_args(args)` becomes `X(**vars(args))`

Line numbers are those of the original. A file that ends with an error is shown with its own last line of the
traceback and the message, whose text is jaxserve's unless it begins with the name of an exception of Python.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from jaxserve.cli.foreign_flags import ROWS

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "jaxserve" / "assets" / "demo"
PEERS = ("sglang", "vllm")
OURS = {"LLM": "Engine", "LLMEngine": "Engine", "AsyncLLM": "AsyncEngine", "AsyncLLMEngine": "AsyncEngine"}
DICTS = ("GuidedDecodingParams", "StructuredOutputsParams", "TextPrompt", "TokensPrompt")
STAND_INS = ("AsyncEngineArgs", "EngineArgs", "FlexibleArgumentParser", "ServerArgs")
NOTHING = ("cleanup_dist_env_and_memory", "print_embeddings")
MODEL = "JAXSERVE_EXAMPLE_MODEL"  # environment variable: the directory of the model

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# calls in a file -> the kind of its model
_KINDS = (
    ("scorer", r"\.score\("),
    ("classifier", r"\.(classify|reward)\("),
    ("embedder", r"(?<!tokenizer)\.(embed|encode)\("),
)

FlexibleArgumentParser = argparse.ArgumentParser


class EngineArgs(SimpleNamespace):
    """vLLM's arguments of an engine, without its defaults."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--model", default=os.environ[MODEL])
        parser.add_argument("--tensor-parallel-size", default=1)
        parser.add_argument("--enable-lora", action="store_true")
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Keep the arguments that are of an engine, and not those of the example, such as its prompt."""
        flags = " ".join(names for names, _ in ROWS).replace("!", "").split()
        return cls(**{name: value for name, value in vars(args).items() if f"--{name.replace('_', '-')}" in flags})


AsyncEngineArgs = EngineArgs


@dataclass
class ServerArgs:
    """SGLang's arguments of an engine, without its defaults."""

    model_path: str

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model-path", default=os.environ[MODEL])

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        return cls(args.model_path)


def nothing(*_args: Any, **_named: Any) -> None: ...


def changed(source: str, model: str) -> str:
    """Return a file with its imports, names of models and argument parsers changed. Its lines keep their numbers."""
    text = source.encode()
    starts = [0, *accumulate(len(line) for line in text.splitlines(keepends=True))]
    for begin, end, new in sorted(_edits(ast.parse(source), model), reverse=True):
        broken = b"\n" * (end[0] - begin[0])
        text = text[: starts[begin[0] - 1] + begin[1]] + new.encode() + broken + text[starts[end[0] - 1] + end[1] :]
    return text.decode()


Place = tuple[int, int]  # line from 1, byte in the line from 0


def _edits(tree: ast.Module, model: str) -> Iterator[tuple[Place, Place, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import() if any(each.name.split(".")[0] in PEERS for each in node.names):
                yield _begin(node), _end(node), "import " + ", ".join(_module(each) for each in node.names)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PEERS:
                yield _begin(node), _end(node), "; ".join(_imported(each) for each in node.names)
            case ast.Constant(value=str(value)) if _HUB_NAME.fullmatch(value):
                yield _begin(node), _end(node), repr(model)
            case ast.Call(func=ast.Attribute(value=kind, attr="from_engine_args") as func, args=[args]):
                yield _end(kind), _end(func), ""
                yield _begin(args), _begin(args), "**vars("
                yield _end(args), _end(args), ")"


def _begin(node: ast.expr | ast.stmt) -> Place:
    return node.lineno, node.col_offset


def _end(node: ast.expr | ast.stmt) -> Place:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def _module(name: ast.alias) -> str:
    peer = name.name.split(".")[0]
    if peer not in PEERS:
        return name.name + (f" as {name.asname}" if name.asname else "")
    return f"jaxserve as {name.asname or peer}"


def _imported(name: ast.alias) -> str:
    theirs, bound = name.name, name.asname or name.name
    if theirs in DICTS:
        return f"{bound} = dict"
    if theirs == "init_logger":
        return f"from logging import getLogger as {bound}"
    if theirs in (*STAND_INS, *NOTHING):
        return f"from benchmarks.offline_examples import {'nothing' if theirs in NOTHING else theirs} as {bound}"
    return f"from jaxserve import {OURS.get(theirs, theirs)} as {bound}"


def kind_of(source: str) -> str:
    """Return the kind of model that an example is about."""
    return next((kind for kind, calls in _KINDS if re.search(calls, source)), "demo")


def make_models(directory: Path) -> dict[str, Path]:
    """Write a tiny random model of every kind."""
    from tests.models.checkpoints import random_tensors, write_checkpoint, write_words  # noqa: PLC0415  they import jax
    from tests.models.families import CLASSIFIERS, ENCODERS, VOCAB  # noqa: PLC0415

    long = {"max_position_embeddings": 1024}  # most that an example asks for
    one = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    bert = CLASSIFIERS["bert_classifier"] | long
    models = {"demo": DEMO}
    for kind, hf in (("embedder", ENCODERS["bert"] | long), ("classifier", bert), ("scorer", bert | one)):
        models[kind] = write_words(write_checkpoint(directory / kind, hf, random_tensors(hf)), VOCAB)
    return models


@dataclass(frozen=True)
class Outcome:
    """What came of an example. line: its last line in the traceback, 0 if there is none"""

    result: str
    line: int = 0
    why: str = ""

    def row(self, name: str) -> str:
        """Return a row of the table."""
        why = f"line {self.line}: {self.why}" if self.line else self.why
        why = why.replace("|", "\\|").replace("<", "&lt;")
        return f"| `{name}` | {self.result} | {why} |"


def run(file: Path, source: str, limit: float, model: Path) -> Outcome:
    """Run an example for at most `limit` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        copy.write_text(changed(source, str(model)), encoding="utf-8")
        for each in file.parent.iterdir():
            if each.is_dir():
                (copy.parent / each.name).symlink_to(each.absolute())
        environment = os.environ | {MODEL: str(model), "PYTHONPATH": str(ROOT)}
        try:
            ended = subprocess.run(
                [sys.executable, str(copy)],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=limit,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return Outcome("no", why=f"it did not end within {limit:.0f} s")
    return outcome(ended.returncode, ended.stderr.replace(str(model), "MODEL"), file.name)


def outcome(code: int, stderr: str, name: str) -> Outcome:
    """Read how an example ended from its exit status and stderr."""
    if code == 0:
        return Outcome("yes")
    frames = re.findall(rf'^  File "[^"]*{re.escape(name)}", line (\d+)', stderr, re.MULTILINE)
    _, has_trace, trace = stderr.rpartition("Traceback")
    errors = re.findall(r"^([A-Za-z_][\w.]*)(?:: (.*))?$(\n-> .*)?", trace, re.MULTILINE) if has_trace else []
    kind, message, fix = errors[-1] if errors else ("", stderr.strip().rpartition("\n")[2], "")
    message += fix.replace("\n", " ")
    missing = re.fullmatch(r"No module named '([^']+)'", message)
    arguments = re.search(r"error: the following arguments are required: (.+)", message)
    if needed := missing or arguments:
        return Outcome("not tried", why=f"it needs {needed[1]}")
    is_ours = kind.startswith("jaxserve.") or re.match(r"(jaxserve|Engine|AsyncEngine) has no ", message)
    return Outcome("no", int(frames[-1]) if frames else 0, message if is_ours or not kind else f"{kind}: {message}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=float, default=120, help="seconds for each file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        models = make_models(Path(directory))
        print("| example | runs | why not |\n|---|---|---|", flush=True)
        for file in sorted(args.folder.rglob("*.py")):
            source = file.read_text(encoding="utf-8")
            if re.search(rf"^\s*(import|from) ({'|'.join(PEERS)})\b", source, re.MULTILINE):
                found = run(file, source, args.limit, models[kind_of(source)])
                print(found.row(file.name), flush=True)


if __name__ == "__main__":
    main()
