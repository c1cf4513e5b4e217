"""docs/recipes.md: what `jaxserve plan` prints, and flags that `jaxserve launch` takes for the same plan."""

import contextlib
import io
import json
import re
import shlex
import tempfile
from pathlib import Path

import pytest

from jaxserve.cli.main import main
from jaxserve.cli.options import find_flag, load_config
from tests.models.published import PUBLISHED

PAGE = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"```console\n\$ (jaxserve launch .*)\n\$ (jaxserve plan .*)\n((?:.*\n)+?)```", PAGE)
NAMES = {  # the hub's id and the shapes that are known of it
    "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B-Instruct": "Llama-3.1-70B",
    "meta-llama/Llama-3.1-405B-Instruct": "Llama-3.1-405B",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "Mixtral-8x7B",
    "google/gemma-2-27b-it": "Gemma-2-27B",
    "google/gemma-2-2b-it": "Gemma-2-2B",
    "google/gemma-3-1b-it": "Gemma-3-1B",
}
# of the published files
WINDOWS = {"Gemma-3-1B": 512, "gpt-oss-120b": 128}  # tokens
QUANTIZATIONS = {
    "gpt-oss-120b": {"quant_method": "mxfp4"},
    "DeepSeek-V3": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}


def planned(command: str) -> str:
    """Return what the command prints. Its model's config.json is of PUBLISHED."""
    _, _, model, *words = shlex.split(command)
    name = NAMES.get(model, model.rpartition("/")[2])
    window = {"sliding_window": WINDOWS[name]} if name in WINDOWS else {}
    form = {"quantization_config": QUANTIZATIONS[name]} if name in QUANTIZATIONS else {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        config = Path(folder, "config.json")
        config.write_text(json.dumps(PUBLISHED[name].hf | window | form))
        assert main(["plan", str(config), *words]) == 0
    return printed.getvalue()


@pytest.mark.parametrize(("command", "shown"), [recipe[1:] for recipe in RECIPES])
def test_what_a_plan_prints(command: str, shown: str) -> None:
    assert planned(command) == shown
    assert "does not fit" not in shown


@pytest.mark.parametrize(("launch", "plan"), [recipe[:2] for recipe in RECIPES])
def test_a_launch_is_what_was_planned(launch: str, plan: str) -> None:
    _, _, *words = shlex.split(launch)
    config = load_config(words, {}, notice=pytest.fail)
    _, _, model, *options = shlex.split(plan)
    flags = dict(zip(options[::2], options[1::2], strict=True))
    assert config.model.path == model
    assert (config.mesh.tensor, config.mesh.expert) == tuple(map(int, f"{flags['--mesh']}x1".split("x")[:2]))
    assert config.model.max_model_len == int(flags["--max-model-len"])
    assert config.model.quantization == flags.get("--quantization", "auto")


def test_every_family_with_known_shapes_has_one() -> None:
    assert PAGE.count("$ jaxserve") == 2 * len(RECIPES)
    shown = {shlex.split(plan)[2] for _, plan, _ in RECIPES}
    assert {NAMES.get(model, model.rpartition("/")[2]) for model in shown} >= {
        *("Llama-3.1-8B", "Qwen3-8B", "Qwen3-30B-A3B", "Mixtral-8x7B", "Gemma-2-2B", "Gemma-3-1B"),
        *("gpt-oss-120b", "DeepSeek-V3"),
    }


def test_flags_in_the_text_are_known() -> None:
    of_plan = {word for _, plan, _ in RECIPES for word in plan.split() if word.startswith("--")}
    for flag in set(re.findall(r"`(--[\w.-]+)", PAGE)) - of_plan:
        find_flag(flag)
