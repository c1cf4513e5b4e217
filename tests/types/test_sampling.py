"""SamplingParams by the names of other servers: each has its effect, or an answer that says what to use."""

from dataclasses import dataclass
from typing import Any

import pytest

from jaxserve.errors import InvalidValueError
from jaxserve.types.sampling import INSTEAD, OTHER_NAMES, GrammarSpec, SamplingParams

# the arguments of their SamplingParams
VLLM = """
n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids
ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start
logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
include_stop_str_in_output output_kind stream_interval skip_clone output_text_buffer_length structured_outputs
logit_bias allowed_token_ids extra_args bad_words skip_reading_prefix_cache thinking_token_budget repetition_detection
routed_experts_prompt_start trace_decode_token_ids
"""
SGLANG = """
max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty
repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos skip_special_tokens
spaces_between_special_tokens no_stop_trim custom_params stream_interval logit_bias sampling_seed
"""


def made(given: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**given)


@dataclass
class StructuredOutputsParams:
    """As vLLM's."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    disable_any_whitespace: bool = False


@pytest.mark.parametrize("name", sorted({*VLLM.split(), *SGLANG.split()}))
def test_every_name_of_others_is_known(name: str) -> None:
    assert made({name: None}) == SamplingParams(max_tokens=None if name.startswith("max_") else 16)
    if name in INSTEAD:
        usual, _ = INSTEAD[name]
        assert made({name: usual}) == SamplingParams()
        with pytest.raises(InvalidValueError, match=f"no sampling parameter {name}: (use|leave)") as error:
            made({name: [1]})
        assert error.value.param == name
    else:
        assert OTHER_NAMES.get(name, name) in SamplingParams.__struct_fields__


def test_every_answer_is_of_another_name() -> None:
    assert not (INSTEAD.keys() | OTHER_NAMES.keys()) & set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"max_new_tokens": 5, "min_new_tokens": 2}, {"max_tokens": 5, "min_tokens": 2}),
        ({"top_k": -1, "sampling_seed": 3}, {"top_k": 0, "seed": 3}),
        ({"seed": -1}, {"seed": None}),
        ({"stop": "a", "no_stop_trim": True}, {"stop": ("a",), "include_stop_str_in_output": True}),
        ({"regex": "a+"}, {"grammar": GrammarSpec(kind="regex", source="a+")}),
        ({"ebnf": 'root ::= "a"'}, {"grammar": GrammarSpec(kind="ebnf", source='root ::= "a"')}),
        ({"json_schema": {"type": "null"}}, {"grammar": GrammarSpec(kind="json_schema", source='{"type":"null"}')}),
        ({"structured_outputs": {"choice": ["a"]}}, {"grammar": GrammarSpec(kind="choice", source='["a"]')}),
        ({"structured_outputs": {"json_object": True}}, {"grammar": GrammarSpec(kind="json_object", source="")}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": GrammarSpec(kind="lark", source='start: "a"')}),
        (
            {"structured_outputs": StructuredOutputsParams(json="{}")},
            {"grammar": GrammarSpec(kind="json_schema", source="{}")},
        ),
    ],
)
def test_a_name_of_others_means_the_same(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert made(given) == made(ours)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_token": 5}, "'max_token', did you mean max_tokens"),
        ({"max_tokens": 5, "max_new_tokens": 5}, "max_tokens is given twice"),
        ({"regex": "a", "ebnf": "b"}, "grammar is given twice"),
        ({"regex": 3}, "regex is a text, not int"),
        ({"json_schema": object()}, "json_schema is a schema, not object"),
        ({"json_schema": {"a": object()}}, "json_schema is no JSON"),
        ({"structured_outputs": 3}, "StructuredOutputsParams or a mapping, not int"),
        ({"structured_outputs": {}}, "give one of json, .*, not none"),
        ({"structured_outputs": {"choice": "a"}}, "choice is a list of texts, not str"),
        ({"structured_outputs": {"structural_tag": {}}}, "not structural_tag"),
        (
            {"structured_outputs": StructuredOutputsParams(regex="a", disable_any_whitespace=True)},
            "not regex, disable_any_whitespace",
        ),
    ],
)
def test_a_wrong_parameter_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        made(given)


def test_parameters_have_names() -> None:
    with pytest.raises(InvalidValueError, match="given by name"):
        SamplingParams(0.8, 0.95)  # type: ignore[misc]
