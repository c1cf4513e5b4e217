"""A draft model through an `Engine`, loaded and compiled as for a user: the output is that without drafts.

The draft model is the first layer of the demo model. It often guesses what the whole model writes. Whether that is
worth its time depends on the machine, so the rule that allots drafts gets the seconds of one on which it is. All else
is what a user runs.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from jsonschema import Draft202012Validator
from safetensors.numpy import load_file, save_file

from jaxserve import Engine, SamplingParams
from jaxserve.engine import factory
from jaxserve.types.sampling import GrammarSpec
from jaxserve.types.scheduling import StepTimes
from jaxserve.types.step import DraftCounters
from tests.api.fakes import DEMO
from tests.conftest import FEW_PAGES
from tests.quick import quick_programs

PAYS = StepTimes({4: 1.0}, {}, {32: 1.1}, {4: 0.1})
DRAFTS = 3  # of a row
STORY = "Once upon a time there was a kind tiger named Hugo. Hugo lived in a valley. One evening Hugo lost a red ball. "
ANSWER = r'\{"city": "[A-Za-z]{2,12}", "legs": [1-9][0-9]?\}'
GREEDY = {"temperature": 0.0, "max_tokens": 48}
REQUESTS = [
    (STORY, SamplingParams(**GREEDY, ignore_eos=True)),
    (STORY, SamplingParams(**GREEDY, stop=("little boy",))),
    (STORY, SamplingParams(n=2, temperature=0.7, seed=3, max_tokens=24, frequency_penalty=0.2)),
    (
        "The capital of France is",
        SamplingParams(**GREEDY, grammar=GrammarSpec(kind="regex", source=ANSWER)),
    ),
    ("A dog and a cat went to the sea. They", SamplingParams(**GREEDY, speculate=False)),
]
KEYS: dict[str, Any] = FEW_PAGES | {"dtype": "float32"}


@pytest.fixture(scope="module")
def first_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("draft") / "first-layer"
    shutil.copytree(DEMO, directory)
    config = json.loads((DEMO / "config.json").read_text()) | {"num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    left_out = tuple(f"model.layers.{layer}." for layer in range(1, 4))
    tensors = load_file(DEMO / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(left_out)}
    save_file(kept, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def engine(first_layer: Path, compile_cache: str) -> Iterator[Engine]:
    drafts = {"method": "draft_model", "draft_model": str(first_layer), "num_speculative_tokens": DRAFTS}
    warm_up = factory._warm_up
    with pytest.MonkeyPatch.context() as patch, quick_programs():
        patch.setattr(factory, "_warm_up", lambda *args: (warm_up(*args), PAYS)[1])
        with Engine(compile_cache=compile_cache, **KEYS, **drafts) as engine:
            yield engine


@pytest.fixture(scope="module")
def plain(compile_cache: str) -> list[list[Any]]:
    with quick_programs(), Engine(compile_cache=compile_cache, **KEYS) as engine:
        assert engine.core.stats().drafts is None and engine.info.drafter == ""
        return answers(engine)


def answers(engine: Engine) -> list[list[Any]]:
    found = engine.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS])
    assert not any(each.error for choices in found for each in choices)
    engine.core.scheduler.check_integrity()
    return [[(each.token_ids, each.text, each.finish_reason) for each in choices] for choices in found]


def drafts(engine: Engine) -> DraftCounters:
    found = engine.core.stats().drafts
    assert found is not None
    return found


def test_the_output_is_that_without_drafts(engine: Engine, plain: list[list[Any]]) -> None:
    """Greedy and sampled, with a stop string and a grammar, and again from cached prefixes."""
    assert engine.info.drafter.endswith(f"first-layer, at most {DRAFTS} tokens a step")
    assert answers(engine) == plain
    assert "little boy" in plain[0][0][1] and "little boy" not in plain[1][0][1]
    assert json.loads(plain[3][0][1]).keys() == {"city", "legs"}
    cached = engine.core.scheduler.counters.cached_tokens
    assert answers(engine) == plain
    assert engine.core.scheduler.counters.cached_tokens > cached + len(STORY) // 8
    found = drafts(engine)
    assert found.num_accepted_tokens > 50
    assert found.num_accepted_tokens < found.num_draft_tokens  # a model of one layer is not always right
    assert len(found.accepted_per_pos) == DRAFTS
    assert found.accepted_per_pos == sorted(found.accepted_per_pos, reverse=True) and found.accepted_per_pos[-1]
    assert engine.core.stats().compiles == 0


def schema_of(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A random JSON schema whose values are short."""
    kinds = ["string", "enum", "integer", "boolean", "null", *(["array", "object", "object"] if depth else [])]
    match rng.choice(kinds) if depth < 2 else "object":
        case "string":
            return {"type": "string", "maxLength": rng.randrange(1, 9)}
        case "enum":
            return {"enum": rng.sample(["red", "blue", 7, None, "Hugo", True], 3)}
        case "integer":
            return {"type": "integer", "minimum": -5, "maximum": rng.randrange(1, 500)}
        case "array":
            most = rng.randrange(1, 4)
            return {"type": "array", "items": schema_of(rng, depth - 1), "minItems": most - 1, "maxItems": most}
        case "object":
            names = rng.sample(["city", "name", "count", "open", "story", "capital"], rng.randrange(1, 4))
            properties = {name: schema_of(rng, depth - 1) for name in names}
            return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
        case kind:
            return {"type": kind}


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_every_answer_is_valid_by_its_schema_and_is_that_without_drafts(engine: Engine, count: int) -> None:
    rng, accepted = random.Random(count), drafts(engine).num_accepted_tokens
    schemas = [schema_of(rng) for _ in range(count)]
    # between JSON tokens there may be 32 of them, which so small a model likes to write
    spaces = {i: -100.0 for i in range(engine.info.vocab_size) if engine.tokenizer.decode([i]).isspace()}
    params = [
        SamplingParams(
            temperature=0.7 * (place % 2),
            seed=place,
            max_tokens=300,
            logit_bias=spaces,
            grammar=GrammarSpec(kind="json_schema", source=json.dumps(schema)),
        )
        for place, schema in enumerate(schemas)
    ]
    prompts = [f"Answer {place} in JSON:" for place in range(count)]
    plain = [msgspec.structs.replace(each, speculate=False) for each in params]
    found, wanted = ([each for [each] in engine.generate(prompts, given)] for given in (params, plain))
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert [each.finish_reason for each in found] == ["stop"] * count
    for schema, answer in zip(schemas, found, strict=True):
        Draft202012Validator(schema).validate(json.loads(answer.text))
    assert drafts(engine).num_accepted_tokens > accepted + count


@pytest.fixture
def never_right(engine: Engine) -> Iterator[list[jax.Array]]:
    """The draft model with random weights, and its own again afterwards."""
    own, rng = engine.runner.draft_leaves, np.random.default_rng(0)
    noise = [rng.normal(0, 0.1, leaf.shape).astype(leaf.dtype) for leaf in own]
    engine.runner.draft_leaves = tuple(map(jax.device_put, noise, (leaf.sharding for leaf in own)))
    yield list(own)
    engine.runner.draft_leaves = own


def test_a_draft_model_that_is_never_right_rests(engine: Engine, never_right: list[jax.Array]) -> None:
    """After 64 tokens steps leave it out. When it is right again, it takes part again, behind what it left out."""
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    alone = msgspec.structs.replace(params, speculate=False)
    [[wanted]] = engine.generate([STORY], [alone])
    before, steps = drafts(engine), engine.core.scheduler.counters.steps
    [[found]] = engine.generate([STORY], [params])
    assert found.token_ids == wanted.token_ids
    after = drafts(engine)
    assert 200 - 68 <= after.num_rest_steps - before.num_rest_steps <= 200 - 60
    assert engine.core.scheduler.counters.steps - steps > 190
    assert after.num_accepted_tokens - before.num_accepted_tokens < 10
    engine.runner.draft_leaves = tuple(never_right)
    longer = [STORY + found.text]
    assert engine.generate(longer, [params])[0][0].token_ids == engine.generate(longer, [alone])[0][0].token_ids
    assert drafts(engine).num_accepted_tokens > after.num_accepted_tokens
    assert engine.core.stats().compiles == 0


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_with_the_model(engine: Engine, plain: list[list[Any]], level: int) -> None:
    """An update has the model's weights only. The draft model has its own again."""
    accepted = drafts(engine).num_accepted_tokens
    engine.sleep(level)
    assert all(leaf.is_deleted() for leaf in (*engine.runner.leaves, *engine.runner.draft_leaves))
    engine.wake()
    if level == 2:
        assert engine.runner.draft_leaves[0].is_deleted()
        engine.update_weights(load_file(DEMO / "model.safetensors"))
    assert answers(engine) == plain
    assert drafts(engine).num_accepted_tokens > accepted + 25
    assert engine.core.stats().compiles == 0
