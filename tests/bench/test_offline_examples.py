"""The program that runs other engines' examples changes what it says, and reads how they end."""

from argparse import ArgumentParser

import pytest

from benchmarks.offline_examples import MODEL, EngineArgs, Outcome, changed, kind_of, outcome

SOURCE = """\
import othermodule, sglang as sgl
from vllm import (
    LLM,
    SamplingParams as Params,
)
from vllm.sampling_params import StructuredOutputsParams
from vllm.logger import init_logger
from vllm.v1.engine import AsyncLLM, AsyncEngineArgs

llm = LLM(model="one/model-1.5B", path="a/b c")  # é
engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="two/model"))
"""
STDERR = """\
WARNING: something
Traceback (most recent call last):
  File "/tmp/x/example.py", line 9, in <module>
    main()
  File "/tmp/x/example.py", line 7, in main
    engine.no_such
  File "/src/jaxserve/library/in_process.py", line 90, in __getattr__
"""


def test_imports_models_and_parsers_are_changed() -> None:
    text = changed(SOURCE, "/m")
    assert text.splitlines() == [
        "import othermodule, jaxserve as sgl",
        "from jaxserve import Engine as LLM; from jaxserve import SamplingParams as Params",
        *("", "", ""),
        "StructuredOutputsParams = dict",
        "from logging import getLogger as init_logger",
        "from jaxserve import AsyncEngine as AsyncLLM; "
        "from benchmarks.offline_examples import AsyncEngineArgs as AsyncEngineArgs",
        "",
        "llm = LLM(model='/m', path=\"a/b c\")  # é",
        "engine = AsyncLLM(**vars(AsyncEngineArgs(model='/m')))",
    ]
    assert [kind_of(text) for text in ("a.embed(b)", "a.score(b)", "tokenizer.encode(b)")] == [
        *("embedder", "scorer", "demo")
    ]


def test_an_end_is_read() -> None:
    ours = "jaxserve.errors.InvalidValueError: use chat_all"
    assert outcome(0, "", "example.py") == Outcome("yes")
    assert outcome(1, f"{STDERR}{ours}\n", "example.py") == Outcome("no", 7, "use chat_all")
    with_fix = f"{STDERR}jaxserve.errors.ConfigError: no x\n-> set y\n"
    assert outcome(1, with_fix, "example.py") == Outcome("no", 7, "no x -> set y")
    other = f"{STDERR}TypeError: 'a|b' is not\n"
    assert outcome(1, other, "example.py").row("e") == "| `e` | no | line 7: TypeError: 'a\\|b' is not |"
    assert outcome(1, f"{STDERR}ModuleNotFoundError: No module named 'torch'\n", "example.py").why == "it needs torch"
    wanted = "usage: x\nexample.py: error: the following arguments are required: --output/-o\n"
    assert outcome(2, wanted, "example.py") == Outcome("not tried", why="it needs --output/-o")
    method = f"{STDERR}AttributeError: AsyncEngine has no encode: use embed(texts)\n"
    assert outcome(1, method, "example.py").why == "AsyncEngine has no encode: use embed(texts)"
    assert outcome(-9, "killed\n", "example.py") == Outcome("no", 0, "killed")


def test_arguments_of_the_example_are_no_arguments_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODEL, "/m")
    parser = EngineArgs.add_cli_args(ArgumentParser())
    parser.add_argument("--prompt", default="Hello")
    parser.set_defaults(load_format="sharded_state")
    found = EngineArgs.from_cli_args(parser.parse_args([]))
    expected = {"model": "/m", "tensor_parallel_size": 1, "enable_lora": False, "load_format": "sharded_state"}
    assert vars(found) == expected
