"""A small grammar of stories: it writes them, and it can tell whether a text is one of them."""

from __future__ import annotations

import random
import re

CHARACTERS = tuple(
    "cat,dog,fox,bear,rabbit,mouse,owl,lion,tiger,elephant,monkey,horse,frog,turtle,duck,bird,fish,whale,dragon,"
    "robot,king,queen,princess,prince,knight,wizard,farmer,baker,sailor,pirate,girl,boy,teacher,penguin,hedgehog,"
    "squirrel,bee,snail,ghost,giant".split(",")
)
NAMES = tuple("Tom,Mia,Leo,Luna,Max,Ruby,Sam,Nora,Finn,Ella,Ben,Lily,Otto,Zoe,Hugo,Ivy".split(","))
PLACES = tuple("forest,village,castle,garden,small town,valley,little house,big city".split(","))
THINGS = tuple("golden key,red ball,old map,shiny stone,blue box,magic lamp,tiny bell,green hat".split(","))
FRIENDS = tuple("bird,mouse,old woman,little boy,rabbit,frog,kind man,sheep".split(","))
MOODS = tuple("little,clever,brave,kind,lazy,curious,happy,shy".split(","))

# One sentence is drawn from each part, in order; {slots} keep their filling through the story.
PARTS: tuple[tuple[str, ...], ...] = (
    (
        "Once upon a time there was a {mood} {character} named {name}.",
        "There once was a {mood} {character} called {name}.",
    ),
    ("{name} lived in a {place}.", "{name} had a home in a {place}.", "The home of {name} was a {place}."),
    (
        "One day {name} found a {thing}.",
        "One morning {name} saw a {thing} on the ground.",
        "One evening {name} lost a {thing}.",
    ),
    (
        "{name} showed the {thing} to a {friend}.",
        "Then {name} met a {friend} who knew the {thing} well.",
        "A {friend} came and asked about the {thing}.",
    ),
    (
        "The {friend} was very glad, and they played all day.",
        "The {friend} smiled, and they walked home together.",
        "The {friend} was hungry, so {name} shared some bread.",
    ),
    ("From that day on they were best friends.", "Everyone in the {place} was happy.", "{name} slept well that night."),
    ("The end.",),
)


def with_article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def tell(rng: random.Random, character: str) -> str:
    """A story of seven sentences, 60 to 100 tokens, about `character`."""
    slots = {
        "character": character,
        "name": rng.choice(NAMES),
        "place": rng.choice(PLACES),
        "thing": rng.choice(THINGS),
        "friend": rng.choice([friend for friend in FRIENDS if friend != character]),
        "mood": rng.choice(MOODS),
    }
    sentences = " ".join(rng.choice(part).format(**slots) for part in PARTS)
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", sentences)


def _pattern(character: str) -> str:
    fillings = {"character": (character,), "name": NAMES, "place": PLACES, "thing": THINGS, "friend": FRIENDS}
    fillings["mood"] = MOODS
    choice = {key: f"(?:{'|'.join(values)})" for key, values in fillings.items()}
    parts = []
    for part in PARTS:
        escaped = [re.sub(r"\b([Aa]) \{", r"\1n? {", sentence.replace(".", r"\.")) for sentence in part]
        sentences = [sentence.format(**choice) for sentence in escaped]
        parts.append(f"(?:{'|'.join(sentences)})")
    return " ".join(parts)


def is_story(text: str, character: str | None) -> bool:
    """Whether `text` follows the grammar, is about `character` (any, if None) and keeps to one name and one thing."""
    about = character or f"(?:{'|'.join(CHARACTERS)})"
    if not re.fullmatch(_pattern(about), text):
        return False
    names = {name for name in NAMES if re.search(rf"\b{name}\b", text)}
    return len(names) == 1 and sum(thing in text for thing in THINGS) == 1
