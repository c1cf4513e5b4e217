"""The embedded demo model's files and the generator that its training set comes from. The engine's tests run it."""

import random
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxserve
from examples.demo_model import data, facts, phrasings, skills, stories, tool_calls
from examples.demo_model import questions as qs
from examples.demo_model.data import SampleEncoder
from examples.demo_model.model import DemoConfig, param_shapes
from examples.demo_model.questions import Fact, Split
from examples.demo_model.skills import SKILLS, Sample
from examples.demo_model.tokenizer import CONTROL_TOKENS, MARKERS, TEMPLATE_PATH, VOCAB_SIZE

ASSETS = Path(jaxserve.__file__).parent / "assets" / "demo"
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def encoder() -> SampleEncoder:
    return SampleEncoder(ASSETS)


def render(encoder: SampleEncoder, messages: list[dict[str, object]], **settings: object) -> str:
    text = encoder.tokenizer.apply_chat_template(messages, tokenize=False, **settings)  # type: ignore[arg-type]
    assert isinstance(text, str)
    return text


class TestTokenizer:
    @pytest.mark.parametrize(
        "text",
        [
            "What is the capital of France?",
            "🦊👩🏽‍🚀 emoji, 日本語のテキスト, e\u0301 a\u0308 combining, ﬁ ligature, \u200b zero width",
            " leading,  double, trailing \n\n\t tabs\r\n",
            "".join(map(chr, range(256))),
            "',.!?'ll I'm don't 3.14 1e-5 {}[]()<>",
        ],
    )
    def test_text_survives_a_round_trip(self, encoder: SampleEncoder, text: str) -> None:
        assert encoder.tokenizer.decode(encoder.ids(text), skip_special_tokens=False) == text

    def test_every_byte_has_a_token(self, encoder: SampleEncoder) -> None:
        backend = encoder.tokenizer.backend_tokenizer
        single_characters = [token for token in backend.get_vocab() if len(token) == 1]
        assert len(single_characters) == 256

    def test_vocabulary_is_exactly_the_models(self, encoder: SampleEncoder) -> None:
        assert len(encoder.tokenizer) == VOCAB_SIZE == DemoConfig().vocab_size

    @pytest.mark.parametrize("token", [*CONTROL_TOKENS, *MARKERS])
    def test_marks_are_single_tokens(self, encoder: SampleEncoder, token: str) -> None:
        assert len(encoder.ids(token)) == 1

    def test_only_control_tokens_vanish_from_text(self, encoder: SampleEncoder) -> None:
        ids = encoder.ids("<|im_start|><think>\nx\n</think><tool_call><|im_end|>")
        assert encoder.tokenizer.decode(ids, skip_special_tokens=True) == "<think>\nx\n</think><tool_call>"


class TestChatTemplate:
    def test_shipped_template_is_the_training_one(self) -> None:
        assert (ASSETS / "chat_template.jinja").read_text() == TEMPLATE_PATH.read_text()

    def test_plain_turn(self, encoder: SampleEncoder) -> None:
        text = render(encoder, [{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"

    def test_content_parts_and_developer_role(self, encoder: SampleEncoder) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        text = render(encoder, [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
        assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"

    def test_tools_stand_in_the_system_turn(self, encoder: SampleEncoder) -> None:
        text = render(encoder, [{"role": "user", "content": "Hi"}], tools=[WEATHER_TOOL])
        system, user = text.split("<|im_end|>\n")[:2]
        assert "<tools>" in system and '"name": "get_weather"' in system and "</tools>" in system
        assert user == "<|im_start|>user\nHi"

    @pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
    def test_calls_and_results(self, encoder: SampleEncoder, arguments: object) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        messages: list[dict[str, object]] = [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "1", "content": "rainy"},
        ]
        written = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        assert render(encoder, messages) == (
            "<|im_start|>user\nWeather?<|im_end|>\n"
            f"<|im_start|>assistant\n{written}\n{written}<|im_end|>\n"
            "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n"
            "<tool_response>\nrainy\n</tool_response><|im_end|>\n"
        )

    @pytest.mark.parametrize(
        ("settings", "thinks"),
        [
            ({}, False),
            ({"enable_thinking": False}, False),
            ({"enable_thinking": True}, True),
            ({"reasoning_effort": "low"}, True),
            ({"reasoning_effort": "none"}, False),
            ({"reasoning_effort": "high", "enable_thinking": False}, False),
        ],
    )
    def test_thinking_is_asked_for_in_the_system_turn(
        self, encoder: SampleEncoder, settings: dict[str, object], thinks: bool
    ) -> None:
        text = render(encoder, [{"role": "user", "content": "Hi"}], **settings)
        assert text.startswith("<|im_start|>system\n/think<|im_end|>\n") == thinks
        assert ("/think" in text) == thinks

    def test_reasoning_of_the_running_turn_alone_is_kept(self, encoder: SampleEncoder) -> None:
        answer: dict[str, object] = {"role": "assistant", "content": "7", "reasoning_content": "3 and 4"}
        question: dict[str, object] = {"role": "user", "content": "3 + 4"}
        embedded: dict[str, object] = {"role": "assistant", "content": "<think>\n3 and 4\n</think>\n\n7"}
        kept = "<|im_start|>assistant\n<think>\n3 and 4\n</think>\n\n7<|im_end|>\n"
        for message in (answer, embedded):
            assert render(encoder, [question, message]).endswith(kept)
            assert "3 and 4" not in render(encoder, [question, message, question])


class TestAssets:
    def test_weights_are_a_small_bfloat16_llama(self) -> None:
        path = ASSETS / "model.safetensors"
        assert path.stat().st_size <= 10_000_000
        weights = load_file(path)
        assert {name: tensor.shape for name, tensor in weights.items()} == param_shapes(DemoConfig())
        assert {tensor.dtype for tensor in weights.values()} == {np.dtype(ml_dtypes.bfloat16)}
        assert 2_000_000 <= sum(tensor.size for tensor in weights.values()) <= 5_000_000
        assert all(np.isfinite(tensor.astype(np.float32)).all() for tensor in weights.values())

    def test_the_other_files_are_there(self) -> None:
        names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "MODEL_CARD.md"]
        assert [name for name in names if not (ASSETS / name).is_file()] == []


class TestFacts:
    def test_countries_are_complete_and_distinct(self) -> None:
        assert len(facts.COUNTRIES) == len(facts.COUNTRY_BY_NAME) == 196
        assert len({country.capital for country in facts.COUNTRIES}) == 196

    def test_invented_places_are_no_countries(self) -> None:
        rng = random.Random(0)
        real = {name for c in facts.COUNTRIES for name in (c.name, c.capital)} | set(facts.CITIES)
        assert not real & {qs.invented_place(rng) for _ in range(20_000)}


class TestGenerator:
    def test_the_same_seed_gives_the_same_batch(self, encoder: SampleEncoder) -> None:
        first, second, other = (data.training_batch(encoder, skills.MAIN_MIXTURE, 0, step, 4) for step in (7, 7, 8))
        np.testing.assert_array_equal(first.tokens, second.tokens)
        np.testing.assert_array_equal(first.weights, second.weights)
        assert (np.asarray(first.tokens) != np.asarray(other.tokens)).any()

    def test_packed_answers_are_the_samples_answers(self, encoder: SampleEncoder) -> None:
        sample = Sample("capitals", ({"role": "user", "content": "Hi"},), {"role": "assistant", "content": "Hello!"})
        batch = data.rows_of_one([encoder.encode(sample)])
        answer = np.asarray(batch.targets)[np.asarray(batch.weights) == 1.0]
        assert encoder.tokenizer.decode(answer) == "Hello!<|im_end|>"

    def test_phrasings_are_disjoint(self) -> None:
        tables = [value for value in vars(phrasings).values() if isinstance(value, phrasings.Phrasings)]
        for table in (*tables, *phrasings.GREETINGS.values()):
            trained = {qs.normalise(wording) for wording in table.train}
            assert not trained & {qs.normalise(wording) for wording in table.held_out}

    def test_no_phrase_around_a_training_wording_makes_a_held_out_one(self) -> None:
        modules = (phrasings, tool_calls)
        tables = [v for module in modules for v in vars(module).values() if isinstance(v, phrasings.Phrasings)]
        tables += phrasings.GREETINGS.values()
        held_out = {qs.normalise(wording) for table in tables for wording in table.held_out}
        for wording in (wording for table in tables for wording in table.train):
            decorated = [prefix + wording for prefix in skills.PREFIXES]
            decorated += [wording + suffix for suffix in skills.SUFFIXES]
            assert not held_out & {qs.normalise(text) for text in decorated}

    def test_a_pair_is_trained_or_held_out_never_both(self) -> None:
        rng = random.Random(0)
        fact = Fact("France", {"country": "France"})
        trained = {qs.pose(rng, Split.TRAIN, phrasings.CAPITAL_OF, fact) for _ in range(500)}
        held_out = {qs.pose(rng, Split.NEW_PAIR, phrasings.CAPITAL_OF, fact) for _ in range(500)}
        assert held_out and len(trained) > 20 and not trained & held_out

    def test_held_out_prompts_are_not_in_a_training_sample(self, encoder: SampleEncoder) -> None:
        rng = random.Random(0)
        trained = {encoder.texts(skills.MAIN_MIXTURE.draw(rng, Split.TRAIN))[0].lower() for _ in range(2000)}
        held_out = data.held_out_samples(0, per_skill=20)
        assert [s.skill for s in held_out if encoder.texts(s)[0].lower() in trained] == []

    @pytest.mark.parametrize("skill", list(SKILLS))
    def test_grades_accept_the_expected_answer_and_no_other(self, encoder: SampleEncoder, skill: str) -> None:
        rng = random.Random(0)
        for split in Split:
            sample = SKILLS[skill](rng, split)
            assert sample.skill == skill
            prompt, answer = encoder.texts(sample)
            assert answer.endswith(("<|im_end|>", "<|endoftext|>")) and prompt
            if sample.grade is not None:
                text = answer.removesuffix("<|im_end|>").removesuffix("<|endoftext|>")
                assert sample.grade(text)
                assert not sample.grade(text[: len(text) // 2])

    def test_lists_are_held_to_the_facts(self) -> None:
        assert skills.is_country_list("1. France: Paris\n2. Japan: Tokyo", 2)
        assert not skills.is_country_list("1. France: Paris\n2. France: Paris", 2)
        assert not skills.is_country_list("1. France: Tokyo\n2. Japan: Paris", 2)
        assert not skills.is_country_list("1. France: Paris", 2)

    def test_stories_keep_to_their_character_and_name(self) -> None:
        story = stories.tell(random.Random(0), "owl")
        name = next(name for name in stories.NAMES if name in story)
        other = next(other for other in stories.NAMES if other != name)
        assert stories.is_story(story, "owl") and not stories.is_story(story, "cat")
        assert not stories.is_story(story.replace(name, other, 1), "owl")
