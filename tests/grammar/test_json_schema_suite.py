"""JSON-Schema-Test-Suite: how much llguidance takes, that we take as much, and that what is taken is enforced.

Run `pytest tests/grammar/test_json_schema_suite.py -m slow -s` for the whole suite and its report.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from jsonschema.validators import extend

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.matcher import GrammarMatcher, MatcherFactory
from jaxserve.grammar.translate import schema_spec
from jaxserve.grammar.worker import build_tokenizer, compile_grammar
from jaxserve.text.tokenizer import Tokenizer

SUITE = "json_schema/json_schema_test_suite.jsonl"
DRAFTS = {"draft4": jsonschema.Draft4Validator, "draft6": jsonschema.Draft6Validator,
          "draft7": jsonschema.Draft7Validator, "draft2019-09": jsonschema.Draft201909Validator,
          "draft2020-12": jsonschema.Draft202012Validator}  # fmt: skip


def ecma_pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """The patterns of JSON schemas are ECMAScript's, whose \\w and \\d are ASCII; Python's are not."""
    if isinstance(instance, str) and not any(re.search(pattern, instance, flags) for flags in (0, re.ASCII)):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


@dataclass
class Report:
    """Counts of schemas; `failed` holds outputs that were allowed and do not validate."""

    alone: int = 0  # compiled by llguidance with its own defaults
    accepted: int = 0
    refused: int = 0
    sampled: int = 0
    unfinished: int = 0
    unchecked: int = 0
    failed: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        head = f"llguidance alone {self.alone}, accepted {self.accepted}, refused {self.refused}"
        tail = f"unfinished {self.unfinished}, unchecked {self.unchecked}), failed {len(self.failed)}"
        return f"{head}, sampled {self.sampled} ({tail}"


def alone(tokenizer: llguidance.LLTokenizer, schema: dict[str, Any]) -> bool:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return not llguidance.LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)[0]


class Sampler:
    """Random outputs as at a high temperature, pulled to an end when they grow long."""

    def __init__(self, factory: MatcherFactory, tokenizer: Tokenizer) -> None:
        self.factory, self.tokenizer = factory, tokenizer
        self.closing = {i for text in '"}],:0123456789' for i in tokenizer.encode(text)}

    def sample(self, matcher: GrammarMatcher, rng: random.Random) -> str | None:
        tokens: list[int] = []
        while not matcher.is_terminated and len(tokens) < 300:
            row = np.full(10, -1, np.int32)
            matcher.fill(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            (eos,) = self.tokenizer.eos_token_ids
            likely = [i for i in allowed if i in self.closing] if rng.random() < min(0.95, len(tokens) / 40) else []
            token = eos if eos in allowed and rng.random() < 0.5 else rng.choice(likely or allowed)
            assert matcher.accept(token), matcher.error
            if token == eos:
                break
            tokens.append(token)
        return self.tokenizer.decode(tokens) if matcher.is_terminated else None


def measure(cases: list[dict[str, Any]], factory: MatcherFactory, tokenizer: Tokenizer, samples: int) -> Report:
    """Compile every schema, and validate `samples` outputs of each that was accepted."""
    report, sampler = Report(), Sampler(factory, tokenizer)
    backend = build_tokenizer(tokenizer.to_json(), 320, list(tokenizer.eos_token_ids))
    for number, case in enumerate(cases):
        schema = case["schema"]
        report.alone += isinstance(schema, dict) and alone(backend, schema)
        spec = schema_spec(schema)
        try:
            compile_grammar(backend, spec)
        except InvalidSchemaError as error:
            report.refused += 1
            report.reasons[error.message.split(":")[0][:60]] += 1
            continue
        report.accepted += 1
        validator = extend(DRAFTS[case["draft"]], {"pattern": ecma_pattern})(schema)
        for seed in range(samples):
            text = sampler.sample(factory(spec), random.Random(seed * 100_003 + number))
            report.sampled += 1
            report.unfinished += text is None
            valid = text is None or is_valid(validator, text)
            report.unchecked += valid is None
            if valid is False:
                report.failed.append(f"{case['draft']} {case['file']} {case['description']}: {schema} <- {text}")
    return report


def is_valid(validator: Any, text: str) -> bool | None:
    """None where the validator cannot read the schema: \\p{...} and the like are no Python."""
    try:
        return validator.is_valid(json.loads(text))
    except re.error:
        return None


def load(path: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def check(report: Report) -> None:
    print("\n", report, *report.reasons.most_common(12), *report.failed[:40], sep="\n")
    assert report.accepted >= report.alone
    assert report.failed == []
    assert report.unfinished < report.sampled / 4


def test_a_sample_of_the_suite(shared_data: Any, factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    check(measure(load(shared_data / SUITE)[::12], factory, tokenizer, samples=2))


@pytest.mark.slow
def test_the_whole_suite(shared_data: Any, factory: MatcherFactory, tokenizer: Tokenizer) -> None:
    check(measure(load(shared_data / SUITE), factory, tokenizer, samples=5))
