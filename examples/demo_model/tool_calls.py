"""The tools skill: functions offered in the system turn, calls of the fitting one, and answers from results."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from examples.demo_model import facts
from examples.demo_model import questions as qs
from examples.demo_model.phrasings import phrasings
from examples.demo_model.questions import Fact, Split

Json = dict[str, object]


@dataclass(frozen=True)
class Parameter:
    names: tuple[str, ...]
    type: str
    description: str = ""


@dataclass(frozen=True)
class Tool:
    """A function as offered in one conversation: names already drawn."""

    family: str
    name: str
    parameters: tuple[str, ...]
    schema: Json


@dataclass(frozen=True)
class Family:
    """Functions that do the same under several names."""

    key: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]


WEATHER = Family(
    "weather",
    ("get_weather", "get_weather", "get_current_weather", "weather", "lookup_weather", "weather_report"),
    ("Get the weather in a city.", "Get the current weather", "The weather of a place", "Weather lookup."),
    (Parameter(("city", "city", "location", "place"), "string", "Name of the city"),),
)
TIME = Family(
    "time",
    ("get_time", "get_time", "get_current_time", "local_time", "clock"),
    ("Get the time in a city.", "Get the current time", "The local time of a place"),
    (Parameter(("city", "city", "location", "timezone"), "string", "Name of the city"),),
)
ADD = Family(
    "add",
    ("add", "add", "add_numbers", "sum", "calculate_sum"),
    ("Add two numbers.", "The sum of two numbers", "Adds a and b"),
    (Parameter(("a", "a", "x", "first"), "integer"), Parameter(("b", "b", "y", "second"), "integer")),
)
CAPITAL = Family(
    "capital",
    ("get_capital", "get_capital", "capital_of", "find_capital"),
    ("Get the capital of a country.", "Find the capital city", "Capital lookup."),
    (Parameter(("country", "country", "name"), "string", "Name of the country"),),
)
TIMER = Family(
    "timer",
    ("set_timer", "set_timer", "start_timer", "timer"),
    ("Set a timer.", "Start a timer of some minutes", "Timer in minutes"),
    (Parameter(("minutes", "minutes", "duration"), "integer", "Minutes"),),
)
DISTRACTORS = (
    Family("email", ("send_email", "mail"), ("Send an email.",), (Parameter(("to",), "string"),)),
    Family("music", ("play_music", "play_song"), ("Play a song.",), (Parameter(("song", "title"), "string"),)),
    Family("search", ("search", "web_search"), ("Search the web.",), (Parameter(("query", "q"), "string"),)),
    Family("table", ("book_table",), ("Book a table.",), (Parameter(("people",), "integer"),)),
    Family("news", ("get_news",), ("Read the news.",), (Parameter(("topic",), "string"),)),
)
CALLABLE = (WEATHER, TIME, ADD, CAPITAL, TIMER)

ASK_WEATHER = phrasings(
    """What is the weather in {x}?
    What's the weather in {x}?
    What is the weather like in {x}?
    What's the weather like in {x}?
    How is the weather in {x}?
    Is it raining in {x}?
    Is it sunny in {x}?
    How warm is it in {x}?
    Tell me the weather in {x}.
    Weather in {x}?
    What is the current weather in {x}?
    What is the temperature in {x}?
    What's the weather like in {x} today?
    What is the weather in {x} now?
    Check the weather in {x}.
    Give me the weather for {x}.
    I am going to {x}. What is the weather there?
    Do I need an umbrella in {x}?
    Please look up the weather in {x}.""",
    """How is the weather in {x} today?
    Can you tell me the weather in {x}?
    Is it cold in {x}?
    Please check the weather in {x}.
    Look up the weather for {x}.""",
)
ASK_TIME = phrasings(
    """What time is it in {x}?
    What is the time in {x}?
    What's the time in {x}?
    Tell me the time in {x}.
    Time in {x}?
    How late is it in {x}?
    What is the current time in {x}?
    What is the local time in {x}?
    Give me the time in {x}.
    What time is it in {x} now?
    Check the time in {x}.
    Which time is it in {x}?""",
    """Can you tell me the time in {x}?
    What time do they have in {x}?
    Please tell me what time it is in {x}.""",
)
ASK_ADD = phrasings(
    """What is {a} + {b}?
    What is {a} plus {b}?
    Add {a} and {b}.
    Calculate {a} + {b}.
    Compute {a} plus {b}.
    How much is {a} + {b}?
    What is the sum of {a} and {b}?
    Use the tool to add {a} and {b}.
    Sum {a} and {b}.
    {a} + {b} = ?
    Please compute {a} + {b}.
    Can you add {a} and {b}?""",
    """Tell me what {a} + {b} is.
    How much do {a} and {b} make?
    Please add {a} and {b}.""",
)
ASK_CAPITAL = phrasings(
    """What is the capital of {x}?
    What's the capital of {x}?
    Which city is the capital of {x}?
    Tell me the capital of {x}.
    Name the capital of {x}.
    Find the capital of {x}.
    Look up the capital of {x}.
    Capital of {x}?
    Can you tell me the capital of {x}?
    What is the capital city of {x}?""",
    """Say the capital of {x}.
    I need the name of the capital of {x}.
    Please look up the capital of {x}.""",
)
ASK_TIMER = phrasings(
    """Set a timer for {x} minutes.
    Start a timer of {x} minutes.
    Please set a timer for {x} minutes.
    Timer for {x} minutes.
    Wake me in {x} minutes.
    I need a timer for {x} minutes.
    Can you set a timer for {x} minutes?
    Start a {x} minute timer.
    Set the timer to {x} minutes.""",
    """Could you set a timer for {x} minutes?
    Set a {x} minute timer.
    Please start a timer of {x} minutes.""",
)
CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy")


@dataclass(frozen=True)
class Request:
    """One thing asked of a tool: its arguments in the order of the parameters, a result and the answer from it."""

    family: Family
    text: str
    arguments: tuple[str | int, ...]
    result: str
    answer: str


def _maybe_json(rng: random.Random, key: str, value: str | int, **more: object) -> str:
    """A tool result as programs write it: an object (with more keys or not) or the bare value."""
    return rng.choice((json.dumps({key: value}), json.dumps({**more, key: value}), str(value)))


def _city(rng: random.Random) -> str:
    return rng.choice((rng.choice(facts.CITIES), rng.choice(facts.COUNTRIES).capital))


def ask_weather(rng: random.Random, split: Split) -> Request:
    city, degrees, condition = _city(rng), rng.randint(-9, 39), rng.choice(CONDITIONS)
    data: Json = {"temperature": degrees, "condition": condition}
    result = rng.choice((json.dumps(data), json.dumps({"city": city, **data}), f"{condition}, {degrees} degrees"))
    text = qs.pose(rng, split, ASK_WEATHER, Fact(city, {"x": city}))
    return Request(WEATHER, text, (city,), result, f"It is {condition} and {degrees} degrees in {city}.")


def ask_time(rng: random.Random, split: Split) -> Request:
    city, time = _city(rng), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    text = qs.pose(rng, split, ASK_TIME, Fact(city, {"x": city}))
    return Request(TIME, text, (city,), _maybe_json(rng, "time", time, city=city), f"It is {time} in {city}.")


def ask_add(rng: random.Random, split: Split) -> Request:
    limit = rng.choice((20, 99, 999))
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    text = qs.pose(rng, split, ASK_ADD, Fact(f"{a}+{b}", {"a": str(a), "b": str(b)}))
    return Request(ADD, text, (a, b), _maybe_json(rng, "result", a + b), f"The result is {a + b}.")


def ask_capital(rng: random.Random, split: Split) -> Request:
    country = rng.choice(facts.COUNTRIES)
    text = qs.pose(rng, split, ASK_CAPITAL, Fact(country.name, {"x": country.phrase}))
    result = _maybe_json(rng, "capital", country.capital, country=country.name)
    answer = f"The capital of {country.phrase} is {country.capital}."
    return Request(CAPITAL, text, (country.name,), result, answer)


def ask_timer(rng: random.Random, split: Split) -> Request:
    minutes = rng.randint(1, 60)
    text = qs.pose(rng, split, ASK_TIMER, Fact(str(minutes), {"x": str(minutes)}))
    return Request(TIMER, text, (minutes,), rng.choice(("ok", "done", '{"status": "ok"}')), "Done.")


ASKERS: tuple[Callable[[random.Random, Split], Request], ...] = (
    ask_weather,
    ask_weather,
    ask_time,
    ask_add,
    ask_capital,
    ask_timer,
)


def offer(rng: random.Random, family: Family) -> Tool:
    """The function's schema as an OpenAI client sends it, with or without its optional parts."""
    names = tuple(rng.choice(parameter.names) for parameter in family.parameters)
    described = rng.random() < 0.4
    properties: Json = {}
    for name, parameter in zip(names, family.parameters, strict=True):
        extra = {"description": parameter.description} if described and parameter.description else {}
        properties[name] = {"type": parameter.type} | extra
    if family is WEATHER and rng.random() < 0.15:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    schema: Json = {"type": "object", "properties": properties, "required": list(names)}
    function: Json = {"name": rng.choice(family.names), "parameters": schema}
    if rng.random() < 0.75:
        function = {"name": function["name"], "description": rng.choice(family.descriptions), "parameters": schema}
    return Tool(family.key, str(function["name"]), names, {"type": "function", "function": function})


def toolbox(rng: random.Random, families: tuple[Family, ...], without: tuple[str, ...] = ()) -> list[Tool]:
    """Tools of the given families and of up to two others, shuffled; none of the families named in `without`."""
    wanted = {family.key for family in families} | set(without)
    others = [family for family in (*CALLABLE, *DISTRACTORS) if family.key not in wanted]
    count = rng.choice((0, 0, 1, 1, 2)) if families else rng.choice((1, 1, 2))
    tools = [offer(rng, family) for family in (*families, *rng.sample(others, count))]
    rng.shuffle(tools)
    return tools


def call(tool: Tool, request: Request) -> Json:
    """An assistant message's entry in `tool_calls`."""
    arguments = dict(zip(tool.parameters, request.arguments, strict=True))
    return {"type": "function", "function": {"name": tool.name, "arguments": arguments}}
