"""The skills. Each draws a conversation with its correct answer, and can grade an answer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from examples.demo_model import facts, stories
from examples.demo_model import phrasings as ph
from examples.demo_model import questions as qs
from examples.demo_model import tool_calls as tc
from examples.demo_model.questions import Asker, Fact, Question, Split

Message = dict[str, object]
Grade = Callable[[str], bool]

SYSTEM_PROMPTS = ph.phrasings(
    """You are a helpful assistant.
    You are a helpful assistant.
    You are helpful.
    You are a friendly assistant.
    You are a small language model.
    Answer briefly.
    Be brief.
    Answer the question.
    Be polite and short.
    You are a teacher for children.
    You are the assistant of a school.
    You help people with their homework.
    Always answer in English.
    You are an expert.
    You are a chatbot on a web page.
    Follow the instructions of the user.
    You are an AI assistant. Be truthful.
    If you do not know the answer, say so.
    You are a travel guide.
    Use short sentences.""",
    """You are a polite assistant.
    Answer in one sentence.
    You are an assistant for travellers.
    Be helpful and truthful.""",
)
PREFIXES = ("Hey, ", "Quick question: ", "One more question. ", "Excuse me, ", "Please tell me: ", "So, ", "Okay. ")
SUFFIXES = (" Thanks!", " Please be brief.", " Thank you.", " I am curious.")
PEOPLE = (*stories.NAMES, *"Anna,Peter,Maria,John,Sarah,Paul,Laura,David,Emma,Jack,Alice,Bob,Yuki,Omar".split(","))


@dataclass(frozen=True)
class Sample:
    """A conversation and the assistant message that should follow, or a raw prompt and its continuation.

    `grade` judges the model's text, None means that it must equal the expected one.
    """

    skill: str
    messages: tuple[Message, ...] = ()
    reply: Message = field(default_factory=dict)
    tools: tuple[tc.Json, ...] = ()
    thinking: bool = False
    raw: tuple[str, str] | None = None
    grade: Grade | None = None


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def decorate(rng: random.Random, text: str) -> str:
    """The text as people also write it: in lower case, without its closing mark, with a phrase around it."""
    if rng.random() < 0.1:
        text = text.lower()
    if rng.random() < 0.1:
        return text.rstrip("?.!") or text
    if rng.random() < 0.1:
        return rng.choice(PREFIXES) + text
    return text + rng.choice(SUFFIXES) if rng.random() < 0.07 else text


def with_system(rng: random.Random, split: Split, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if rng.random() > 0.25:
        return messages
    prompt = rng.choice(qs.wordings(SYSTEM_PROMPTS, split))
    return ({"role": "system", "content": prompt}, *messages)


def single(rng: random.Random, split: Split, skill: str, text: str, answer: str, grade: Grade | None = None) -> Sample:
    """One user turn, decorated, perhaps with a system prompt."""
    messages = with_system(rng, split, (user(decorate(rng, text)),))
    return Sample(skill, messages, assistant(answer), grade=grade)


def fact_skill(skill: str, askers: tuple[Asker, ...]) -> Callable[[random.Random, Split], Sample]:
    """A skill that asks one question and wants its plain answer."""

    def draw(rng: random.Random, split: Split) -> Sample:
        question = rng.choice(askers)(rng, split)
        return single(rng, split, skill, question.text, question.answer)

    return draw


_LIST_LINE = re.compile(r"(\d+)\. (.+): (.+)")


def is_country_list(text: str, n: int) -> bool:
    """Whether `text` is n numbered lines of different countries, each with its right capital."""
    matches = [_LIST_LINE.fullmatch(line) for line in text.split("\n")]
    names = {match.group(2) for match in matches if match}
    right = [
        match is not None
        and int(match.group(1)) == i
        and (country := facts.COUNTRY_BY_NAME.get(match.group(2))) is not None
        and country.capital == match.group(3)
        for i, match in enumerate(matches, start=1)
    ]
    return len(right) == n == len(names) and all(right)


_NUMBER_WORDS = {2: "two", 3: "three", 4: "four", 5: "five"}


def country_list(rng: random.Random, split: Split) -> Sample:
    n = rng.choice((2, 3, 3, 3, 4, 5))
    return _list_sample(rng, split, rng.choice((str(n), str(n), _NUMBER_WORDS[n])), rng.sample(facts.WELL_KNOWN, n))


def ordered_country_list(rng: random.Random, split: Split) -> Sample:
    """In the table's order from a random start. Where any order is right, a model of this size repeats itself."""
    n = rng.choice((2, 3, 3, 3, 4, 5))
    start = rng.randrange(len(facts.WELL_KNOWN))
    chosen = [facts.WELL_KNOWN[(start + i) % len(facts.WELL_KNOWN)] for i in range(n)]
    return _list_sample(rng, split, rng.choice((str(n), str(n), _NUMBER_WORDS[n])), chosen)


def _list_sample(rng: random.Random, split: Split, number: str, chosen: Sequence[facts.Country]) -> Sample:
    n = len(chosen)
    text = qs.pose(rng, split, ph.COUNTRY_LIST, Fact(str(n), {"n": number}))
    answer = "\n".join(f"{i}. {c.name}: {c.capital}" for i, c in enumerate(chosen, start=1))
    return single(rng, split, "lists", text, answer, lambda output: is_country_list(output, n))


def greeting(rng: random.Random, split: Split) -> Sample:
    if rng.random() < 0.15:
        name = rng.choice(PEOPLE)
        text = qs.pose(rng, split, ph.MY_NAME, Fact(name, {"name": name}))
        return single(rng, split, "greetings", text, f"Nice to meet you, {name}!")
    answer = rng.choice(tuple(ph.GREETINGS))
    return single(rng, split, "greetings", qs.pose(rng, split, ph.GREETINGS[answer], Fact("", {})), answer)


def story_text(rng: random.Random, split: Split) -> tuple[str, str | None, str]:
    """A request, the character it asks for (None: any) and a story."""
    character = rng.choice(stories.CHARACTERS)
    if rng.random() < 0.15:
        return qs.pose(rng, split, ph.STORY_ANY, Fact("", {})), None, stories.tell(rng, character)
    text = qs.pose(rng, split, ph.STORY, Fact(character, {"x": stories.with_article(character)}))
    return text, character, stories.tell(rng, character)


def story(rng: random.Random, split: Split) -> Sample:
    text, character, answer = story_text(rng, split)
    return single(rng, split, "stories", text, answer, lambda output: stories.is_story(output, character))


def is_json_list(text: str, n: int) -> bool:
    """Whether `text` is the JSON form of n different countries with their right capitals."""
    try:
        entries = json.loads(text)["countries"]
        lines = [f"{i}. {entry['country']}: {entry['capital']}" for i, entry in enumerate(entries, start=1)]
    except (ValueError, KeyError, TypeError):
        return False
    return is_country_list("\n".join(lines), n)


def json_list(rng: random.Random, split: Split) -> tuple[str, str, Grade]:
    """A request for a list, an answer in JSON and its grade."""
    n = rng.choice((2, 3, 3))
    chosen = rng.sample(facts.WELL_KNOWN, n)
    text = qs.pose(rng, split, ph.COUNTRY_LIST, Fact(str(n), {"n": str(n)}))
    entries = [{"country": c.name, "capital": c.capital} for c in chosen]
    return text, json.dumps({"countries": entries}), lambda output: is_json_list(output, n)


JSON_ASKERS: tuple[Asker, ...] = (
    qs.capital_of,
    qs.capital_of,
    qs.country_of,
    qs.country_and_capital,
    qs.addition,
    qs.subtraction,
    qs.next_in_calendar,
    qs.previous_in_calendar,
    qs.month_length,
    qs.opposite,
    qs.unknown,
)


def json_answer(rng: random.Random, split: Split) -> Sample:
    grade: Grade | None = None
    if rng.random() < 0.1:
        text, answer, grade = json_list(rng, split)
    else:
        question = rng.choice(JSON_ASKERS)(rng, split)
        text, answer = question.text, json.dumps(question.json_answer)
    request = rng.choice(qs.wordings(ph.JSON_REQUEST, split)).format(question=text)
    messages = with_system(rng, split, (user(request),))
    return Sample("json", messages, assistant(answer), grade=grade)


def _thinking_sample(
    rng: random.Random, split: Split, text: str, reasoning: str, answer: str, grade: Grade | None
) -> Sample:
    reply = assistant(answer) | {"reasoning_content": reasoning}
    messages = with_system(rng, split, (user(decorate(rng, text)),))
    return Sample("reasoning", messages, reply, thinking=True, grade=grade)


def after_thinking(expected: str, grade: Grade) -> Grade:
    """A grade of the answer alone, for outputs whose reasoning must be `expected`."""
    opening = f"<think>\n{expected}\n</think>\n\n"
    return lambda output: output.startswith(opening) and grade(output.removeprefix(opening))


def reasoning(rng: random.Random, split: Split) -> Sample:
    kind = rng.random()
    if kind < 0.08:
        text, character, answer = story_text(rng, split)
        plan = f"I tell a story about {stories.with_article(character) if character else 'anything'}."
        return _thinking_sample(
            rng, split, text, plan, answer, after_thinking(plan, lambda out: stories.is_story(out, character))
        )
    if kind < 0.16:
        drawn = greeting(rng, split)
        reply = drawn.reply | {"reasoning_content": "The user talks to me."}
        return Sample("reasoning", drawn.messages, reply, thinking=True)
    question = rng.choice((*qs.ANY_FACT, qs.continent_of, qs.unknown, qs.unknown))(rng, split)
    if kind < 0.3:
        text = rng.choice(qs.wordings(ph.JSON_REQUEST, split)).format(question=question.text)
        return _thinking_sample(rng, split, text, question.reasoning, json.dumps(question.json_answer), None)
    return _thinking_sample(rng, split, question.text, question.reasoning, question.answer, None)


def _exchange(question: Question) -> tuple[Message, Message]:
    return user(question.text), assistant(question.answer)


def _follow_up(rng: random.Random, split: Split) -> Sample:
    first = qs.capital_of(rng, Split.TRAIN)
    country = rng.choice(facts.COUNTRIES)
    text = qs.pose(rng, split, ph.CAPITAL_FOLLOW_UP, Fact(country.name, {"country": country.phrase}))
    answer = f"The capital of {country.phrase} is {country.capital}."
    return Sample("multi-turn", (*_exchange(first), user(text)), assistant(answer))


def _name_recall(rng: random.Random, split: Split) -> Sample:
    name = rng.choice(PEOPLE)
    text = qs.pose(rng, Split.TRAIN, ph.MY_NAME, Fact(name, {"name": name}))
    turns = [user(text), assistant(f"Nice to meet you, {name}!")]
    if rng.random() < 0.4:
        turns += _exchange(rng.choice(qs.ANY_FACT)(rng, Split.TRAIN))
    ask = qs.pose(rng, split, ph.ASK_MY_NAME, Fact("", {}))
    return Sample("multi-turn", (*turns, user(ask)), assistant(f"Your name is {name}."))


def multi_turn(rng: random.Random, split: Split) -> Sample:
    kind = rng.random()
    if kind < 0.3:
        drawn = _follow_up(rng, split)
    elif kind < 0.5:
        drawn = _name_recall(rng, split)
    else:
        history: list[Message] = []
        for _ in range(rng.randint(1, 3)):
            history += _exchange(rng.choice((*qs.ANY_FACT, qs.unknown))(rng, Split.TRAIN))
        last = rng.choice((*qs.ANY_FACT, qs.unknown))(rng, split)
        drawn = Sample("multi-turn", (*history, user(last.text)), assistant(last.answer))
    return Sample("multi-turn", with_system(rng, split, drawn.messages), drawn.reply)


def _tools_unneeded(rng: random.Random, split: Split) -> Sample:
    """Tools are offered and none fits: known questions are answered, unknown ones are not."""
    kind = rng.random()
    if kind < 0.35:
        request = rng.choice((tc.ask_weather, tc.ask_time, tc.ask_timer))(rng, split)
        text, answer, without = request.text, qs.DONT_KNOW, (request.family.key,)
    elif kind < 0.5:
        drawn = greeting(rng, split)
        text, answer, without = str(drawn.messages[-1]["content"]), str(drawn.reply["content"]), ()
    else:
        question = rng.choice((*qs.ANY_FACT, qs.capital_of))(rng, split)
        text, answer, without = question.text, question.answer, ("add", "capital")
    tools = tc.toolbox(rng, (), without)
    messages = with_system(rng, split, (user(text),))
    return Sample("tools", messages, assistant(answer), tuple(tool.schema for tool in tools))


def _two_calls(rng: random.Random, split: Split) -> tuple[str, list[tc.Request]]:
    """A question about two cities, as two requests of one family."""
    asker, form = rng.choice(((tc.ask_weather, tc.ASK_WEATHER), (tc.ask_time, tc.ASK_TIME)))
    first, second = asker(rng, Split.TRAIN), asker(rng, Split.TRAIN)
    cities = f"{first.arguments[0]} and {second.arguments[0]}"
    return qs.pose(rng, split, form, Fact(cities, {"x": cities})), [first, second]


def tool_use(rng: random.Random, split: Split) -> Sample:
    kind = rng.random()
    if kind < 0.3:
        return _tools_unneeded(rng, split)
    request = rng.choice(tc.ASKERS)(rng, split)
    text, requests = request.text, [request]
    if kind > 0.9:
        text, requests = _two_calls(rng, split)
    tools = tc.toolbox(rng, (requests[0].family,))
    fitting = next(tool for tool in tools if tool.family == requests[0].family.key)
    schemas = tuple(tool.schema for tool in tools)
    calls: Message = {"role": "assistant", "content": "", "tool_calls": [tc.call(fitting, r) for r in requests]}
    messages = with_system(rng, split, (user(text),))
    thinking = rng.random() < 0.12
    if thinking:
        calls["reasoning_content"] = f"I call {fitting.name}."
    if rng.random() < 0.55:
        return Sample("tools", messages, calls, schemas, thinking)
    results: list[Message] = [{"role": "tool", "content": r.result} for r in requests]
    answer = assistant(" ".join(r.answer for r in requests))
    if thinking:
        answer["reasoning_content"] = "I have the result."
    return Sample("tools", (*messages, calls, *results), answer, schemas, thinking)


def raw_sample(
    rng: random.Random, split: Split, skill: str, cut: Callable[[], tuple[str, str]], grade: Grade | None = None
) -> Sample:
    """Text without the chat template; the split goes by the prompt, `cut` draws prompt and continuation."""
    while True:
        prompt, continuation = cut()
        if qs.is_held_out_pair(skill, prompt) == (split is not Split.TRAIN):
            return Sample(skill, raw=(prompt, continuation), grade=grade)


_FACT_HEAD = re.compile(r"(.*? (?:is|has|after|before|=))( .*)")


def completion(rng: random.Random, split: Split) -> Sample:
    """A stated fact cut before what it states, or a story cut after its first words."""

    def cut_fact() -> tuple[str, str]:
        match = _FACT_HEAD.fullmatch(rng.choice(qs.ANY_FACT)(rng, Split.TRAIN).answer)
        if match is None:
            raise ValueError("an answer states no fact")
        return match.group(1), match.group(2)

    def cut_story() -> tuple[str, str]:
        words = stories.tell(rng, rng.choice(stories.CHARACTERS)).split(" ")
        length = rng.randint(9, 14)
        return " ".join(words[:length]), " " + " ".join(words[length:])

    if rng.random() < 0.3:
        return raw_sample(rng, split, "completion", cut_story, lambda output: output.endswith(" The end."))
    return raw_sample(rng, split, "completion", cut_fact)


def infill(rng: random.Random, split: Split) -> Sample:
    """Fill in the middle: one word of a stated fact is missing."""

    def cut() -> tuple[str, str]:
        words = rng.choice(qs.ANY_FACT)(rng, Split.TRAIN).answer.split(" ")
        hole = rng.randrange(1, len(words) - 1)
        before, after = " ".join(words[:hole]), " ".join(words[hole + 1 :])
        return f"<|fim_prefix|>{before}<|fim_suffix|> {after}<|fim_middle|>", f" {words[hole]}"

    return raw_sample(rng, split, "infill", cut)


Generator = Callable[[random.Random, Split], Sample]
SKILLS: dict[str, Generator] = {
    "capitals": fact_skill("capitals", qs.CAPITALS),
    "lists": country_list,
    "sums": fact_skill("sums", qs.SUMS),
    "calendar": fact_skill("calendar", qs.CALENDAR),
    "opposites": fact_skill("opposites", (qs.opposite,)),
    "greetings": greeting,
    "stories": story,
    "unknown": fact_skill("unknown", (qs.unknown,)),
    "json": json_answer,
    "tools": tool_use,
    "reasoning": reasoning,
    "multi-turn": multi_turn,
    "completion": completion,
    "infill": infill,
}


@dataclass(frozen=True)
class Mixture:
    """The share of each skill, in the order of SKILLS; shares need not add up to 1. `lists`: how lists are ordered."""

    shares: tuple[float, ...]
    lists: Generator = country_list

    def draw(self, rng: random.Random, split: Split) -> Sample:
        name = rng.choices(tuple(SKILLS), weights=self.shares)[0]
        return (self.lists if name == "lists" else SKILLS[name])(rng, split)


MAIN_MIXTURE = Mixture((0.20, 0.06, 0.20, 0.08, 0.05, 0.06, 0.04, 0.09, 0.10, 0.075, 0.08, 0.05, 0.03, 0.02))
# Calls of tools and filling in are learned last: they copy from the prompt, and their prompts are the longest.
FINISHING_MIXTURE = Mixture(
    (0.12, 0.12, 0.10, 0.05, 0.06, 0.05, 0.04, 0.07, 0.10, 0.25, 0.07, 0.06, 0.06, 0.10), ordered_country_list
)
