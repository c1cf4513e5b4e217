"""Make questions: a wording filled with a fact, with its only correct answer in prose, as JSON and with reasoning.

Also decides which wordings, and which pairs of wording and fact, are held out of training.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from examples.demo_model import facts
from examples.demo_model import phrasings as ph
from examples.demo_model.facts import Country
from examples.demo_model.phrasings import Phrasings

HELD_OUT_PAIRS_IN = 12
DONT_KNOW = "I don't know."


class Split(Enum):
    """The part of the data that a sample is from. The last two are held out."""

    TRAIN = "train"
    NEW_WORDING = "new wording"
    NEW_PAIR = "new pair"


@dataclass(frozen=True)
class Question:
    """One question with everything a skill may ask of it."""

    text: str
    answer: str
    json_answer: dict[str, object]
    reasoning: str


@dataclass(frozen=True)
class Fact:
    """`key` names the fact for the split; `slots` fill the wording."""

    key: str
    slots: dict[str, str]


def normalise(text: str) -> str:
    """Text without what `skills.decorate` may change: case and closing punctuation."""
    return text.lower().rstrip("?.! ")


def is_held_out_pair(wording: str, key: str) -> bool:
    """Whether the pair is kept out of training: one in HELD_OUT_PAIRS_IN, by a hash that no seed changes."""
    return zlib.crc32(f"{normalise(wording)}|{key}".encode()) % HELD_OUT_PAIRS_IN == 0


def wordings(phrasings: Phrasings, split: Split) -> tuple[str, ...]:
    return phrasings.held_out if split is Split.NEW_WORDING else phrasings.train


def capitalise(text: str) -> str:
    return text[0].upper() + text[1:]


def pose(rng: random.Random, split: Split, phrasings: Phrasings, fact: Fact) -> str:
    """The fact in a wording of the split; in a held-out wording if NEW_PAIR has none for this fact."""
    options = wordings(phrasings, split)
    if split is not Split.NEW_WORDING:
        options = tuple(w for w in options if is_held_out_pair(w, fact.key) == (split is Split.NEW_PAIR))
    if split is Split.NEW_PAIR and not options:
        options = phrasings.held_out
    return capitalise(rng.choice(options).format(**fact.slots))


def country_slots(rng: random.Random, country: Country) -> dict[str, str]:
    names = (country.phrase,) * 4 + facts.ALIASES.get(country.name, ())
    return {"country": rng.choice(names), "capital": country.capital}


def capital_of(rng: random.Random, split: Split) -> Question:
    country = rng.choice(facts.COUNTRIES)
    fact = Fact(country.name, country_slots(rng, country))
    return Question(
        pose(rng, split, ph.CAPITAL_OF, fact),
        f"The capital of {country.phrase} is {country.capital}.",
        {"capital": country.capital},
        f"{capitalise(country.phrase)} is a country in {country.continent}. Its capital is {country.capital}.",
    )


def country_of(rng: random.Random, split: Split) -> Question:
    country = rng.choice(facts.COUNTRIES)
    return Question(
        pose(rng, split, ph.COUNTRY_OF, Fact(country.name, {"capital": country.capital})),
        f"{country.capital} is the capital of {country.phrase}.",
        {"country": country.name},
        f"{country.capital} is a city in {country.continent}. It is the capital of {country.phrase}.",
    )


def continent_of(rng: random.Random, split: Split) -> Question:
    country = rng.choice(facts.COUNTRIES)
    return Question(
        pose(rng, split, ph.CONTINENT_OF, Fact(country.name, country_slots(rng, country))),
        f"{capitalise(country.phrase)} is in {country.continent}.",
        {"continent": country.continent},
        f"{capitalise(country.phrase)} is a country with the capital {country.capital}.",
    )


def country_and_capital(rng: random.Random, split: Split) -> Question:
    country = rng.choice(facts.COUNTRIES)
    return Question(
        pose(rng, split, ph.COUNTRY_AND_CAPITAL, Fact(country.name, country_slots(rng, country))),
        f"The capital of {country.phrase} is {country.capital}.",
        {"country": country.name, "capital": country.capital},
        f"{capitalise(country.phrase)} is a country in {country.continent}. Its capital is {country.capital}.",
    )


def addition(rng: random.Random, split: Split) -> Question:
    a, total = sorted((rng.randint(0, facts.SUM_LIMIT), rng.randint(0, facts.SUM_LIMIT)))
    b = total - a
    return Question(
        pose(rng, split, ph.ADD, Fact(f"{a}+{b}", {"a": str(a), "b": str(b)})),
        f"{a} + {b} = {a + b}.",
        {"result": a + b},
        f"I add {a} and {b}. The sum is {a + b}.",
    )


def subtraction(rng: random.Random, split: Split) -> Question:
    b, a = sorted((rng.randint(0, facts.SUM_LIMIT), rng.randint(0, facts.SUM_LIMIT)))
    return Question(
        pose(rng, split, ph.SUBTRACT, Fact(f"{a}-{b}", {"a": str(a), "b": str(b)})),
        f"{a} - {b} = {a - b}.",
        {"result": a - b},
        f"I take {b} from {a}. That leaves {a - b}.",
    )


def _neighbour(rng: random.Random, split: Split, step: int) -> Question:
    unit, names = rng.choice((("day", facts.DAYS), ("month", facts.MONTHS)))
    index = rng.randrange(len(names))
    x, other = names[index], names[(index + step) % len(names)]
    word, phrasings = ("after", ph.AFTER) if step > 0 else ("before", ph.BEFORE)
    in_order = f"{x}, {other}" if step > 0 else f"{other}, {x}"
    return Question(
        pose(rng, split, phrasings, Fact(x, {"unit": unit, "x": x})),
        f"{other} comes {word} {x}.",
        {unit: other},
        f"The {unit}s go {in_order}.",
    )


def next_in_calendar(rng: random.Random, split: Split) -> Question:
    return _neighbour(rng, split, 1)


def previous_in_calendar(rng: random.Random, split: Split) -> Question:
    return _neighbour(rng, split, -1)


def month_length(rng: random.Random, split: Split) -> Question:
    index = rng.randrange(12)
    month, days = facts.MONTHS[index], facts.MONTH_DAYS[index]
    return Question(
        pose(rng, split, ph.MONTH_LENGTH, Fact(month, {"x": month})),
        f"{month} has {days} days.",
        {"days": days},
        f"{month} is the {facts.ORDINALS[index]} month.",
    )


def calendar_count(rng: random.Random, split: Split) -> Question:
    units, period, count = rng.choice((("days", "week", 7), ("days", "year", 365), ("months", "year", 12)))
    return Question(
        pose(rng, split, ph.CALENDAR_COUNT, Fact(f"{units} {period}", {"units": units, "period": period})),
        f"A {period} has {count} {units}.",
        {units: count},
        f"I count the {units} of a {period}.",
    )


def nth_in_calendar(rng: random.Random, split: Split) -> Question:
    unit, period, names = rng.choice((("day", "week", facts.DAYS), ("month", "year", facts.MONTHS)))
    index = rng.randrange(len(names))
    nth = facts.ORDINALS[index]
    return Question(
        pose(rng, split, ph.NTH, Fact(names[index], {"nth": nth, "unit": unit, "period": period})),
        f"The {nth} {unit} of the {period} is {names[index]}.",
        {unit: names[index]},
        f"The {unit}s of the {period} begin with {names[0]}.",
    )


def opposite(rng: random.Random, split: Split) -> Question:
    word = rng.choice(tuple(facts.OPPOSITES))
    return Question(
        pose(rng, split, ph.OPPOSITE, Fact(word, {"x": word})),
        f"The opposite of {word} is {facts.OPPOSITES[word]}.",
        {"opposite": facts.OPPOSITES[word]},
        f"I look for the opposite of {word}.",
    )


_SYLLABLES = (
    "bra,zor,quel,dim,fan,tor,lu,mi,vex,gru,plo,nar,wil,ska,dor,ith,ela,ond,ur,kas,bel,jax,oro,tun,pim"
).split(",")
_THINGS = (
    "telephone,bicycle,car,computer,piano,guitar,camera,clock,rocket,train,television,radio,lamp,microscope,"
    "washing machine,printer,violin,helicopter,battery,compass,umbrella,laptop,fridge,engine"
).split(",")


def invented_place(rng: random.Random) -> str:
    """A name that no country bears."""
    stem = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 2)))
    return capitalise(stem) + rng.choice(("land", "ia", "stan", "onia", "burg", "oria", "", "eth"))


def _unknown_wording(rng: random.Random, split: Split) -> str:
    kind = rng.choice(("capital", "country", "sum", "place", "thing", "thing", "place", "misc"))
    if kind == "misc":
        return pose(rng, split, ph.UNKNOWN_MISC, Fact("", {}))
    if kind == "sum":
        a, b = rng.randint(31, 999), rng.randint(31, 999)
        return pose(rng, split, rng.choice((ph.ADD, ph.SUBTRACT)), Fact(f"{a} {b}", {"a": str(a), "b": str(b)}))
    if kind == "thing":
        thing = rng.choice(_THINGS)
        return pose(rng, split, ph.UNKNOWN_THING, Fact(thing, {"x": thing}))
    if kind == "place":
        country = rng.choice(facts.COUNTRIES)
        x = rng.choice((country.phrase, country.capital, rng.choice(facts.CITIES), invented_place(rng)))
        return pose(rng, split, ph.UNKNOWN_PLACE, Fact(x, {"x": x}))
    phrasings = ph.CAPITAL_OF if kind == "capital" else ph.COUNTRY_OF
    place = invented_place(rng)
    return pose(rng, split, phrasings, Fact(place, {"country": place, "capital": place}))


def unknown(rng: random.Random, split: Split) -> Question:
    return Question(_unknown_wording(rng, split), DONT_KNOW, {"answer": None}, "I was not taught this.")


Asker = Callable[[random.Random, Split], Question]
CAPITALS: tuple[Asker, ...] = (capital_of, capital_of, country_of, country_of, continent_of)
SUMS: tuple[Asker, ...] = (addition, subtraction)
CALENDAR: tuple[Asker, ...] = (
    next_in_calendar,
    next_in_calendar,
    previous_in_calendar,
    previous_in_calendar,
    month_length,
    month_length,
    calendar_count,
    nth_in_calendar,
)
ANY_FACT: tuple[Asker, ...] = (capital_of, capital_of, country_of, addition, subtraction, *CALENDAR[1::2], opposite)
