"""A generator of model directories that somebody made to hurt: the demo model with one thing changed."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

DEMO = Path(str(files("jaxserve") / "assets" / "demo"))
DEEP = "[" * 200_000

Change = Callable[[Path], None]


class Mutant(NamedTuple):
    """change: what is done to a copy of the demo's directory."""

    name: str
    change: Change


def copy_demo(target: Path) -> Path:
    target.mkdir(parents=True)
    for file in DEMO.iterdir():
        shutil.copy(file, target)
    return target


def edit(name: str, change: Callable[[Any], Any]) -> Change:
    def apply(directory: Path) -> None:
        path = directory / name
        value = json.loads(path.read_text()) if path.exists() else {}
        change(value)
        path.write_text(json.dumps(value))

    return apply


def keys(name: str, **values: Any) -> Change:
    return edit(name, lambda value: value.update(values))


def text(name: str, content: str | bytes) -> Change:
    data = content.encode() if isinstance(content, str) else content

    def apply(directory: Path) -> None:
        (directory / name).write_bytes(data)

    return apply


def instead(name: str, make: Callable[[Path], Any]) -> Change:
    """Something else than a file under the file's name."""

    def apply(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return apply


def link(name: str, target: str) -> Change:
    return instead(name, lambda path: path.symlink_to(target))


def header(change: Callable[[dict[str, Any], str], Any]) -> Change:
    """The safetensors file with another table of contents; the change is given it and the name of a tensor."""

    def apply(directory: Path) -> None:
        path = directory / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        entries = json.loads(data[8 : 8 + length])
        change(entries, next(name for name in entries if name != "__metadata__"))
        written = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(written)) + written + data[8 + length :])

    return apply


def split(pattern: str) -> Change:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return keys("tokenizer.json", pre_tokenizer=step)


INTEGERS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
WRONG = (-1, 0, 10**12, 10**30, 1.5, "8", True, [], float("nan"))
WRONG_NUMBERS = (float("nan"), float("inf"), -1, 1e300, "hot", [1])
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")


def _replace(size: int, times: int) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * size}] * times


def few() -> list[Mutant]:
    """One of each kind that hung, ended raw or was served."""
    shown = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "q", "type_id": 0}}],
             "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
             "special_tokens": {"q": {"id": "q", "ids": [4_000_000_000], "tokens": ["q"]}}}  # fmt: skip
    return [
        Mutant("a number out of range", keys("config.json", num_hidden_layers=10**7)),
        Mutant("a number that is none", keys("config.json", rms_norm_eps=float("nan"))),
        Mutant("a rotation out of range", keys("config.json", partial_rotary_factor=1e9)),
        Mutant("a default out of range", keys("generation_config.json", do_sample=True, temperature=float("inf"))),
        Mutant("an id out of range", keys("generation_config.json", eos_token_id=[-1])),
        Mutant("a FIFO", instead("config.json", os.mkfifo)),
        Mutant("a link out of the directory", link("chat_template.jinja", "/etc/hostname")),
        Mutant("a link to a device", link("generation_config.json", "/dev/zero")),
        Mutant("deep JSON", text("generation_config.json", DEEP)),
        Mutant("a pattern that backtracks", split("(?:(?:[a-z]+)+)+!")),
        Mutant("a normalizer that doubles", keys("tokenizer.json", normalizer={"type": "Sequence", "normalizers": _replace(2, 40)})),  # noqa: E501
        Mutant("ids that are none", keys("tokenizer.json", post_processor=shown)),
        Mutant("a large template", text("chat_template.jinja", "{{ 1 }}" * 300_000)),
        Mutant("no template", keys("tokenizer_config.json", chat_template=[{"x": 1}])),
        Mutant("a dtype of many numbers", header(lambda entries, name: entries[name].update(dtype=[1] * 10_000))),
        Mutant("a tensor's name of many lines", header(lambda entries, name: entries.update({"x\n" * 5000: None}))),
        Mutant("a long architecture", keys("config.json", architectures=["a\n" * 5000])),
        Mutant("modules elsewhere", text("modules.json", json.dumps([{"type": "a.Pooling", "path": "/etc"}]))),
    ]  # fmt: skip


def many(count: int, seed: int = 0) -> list[Mutant]:
    """`few` and others of random families, all different."""
    rng = random.Random(seed)
    found = {mutant.name: mutant for mutant in few()}
    while len(found) < count:
        mutant = rng.choice((_integer, _number, _default, _bytes, _file, _header, _tokenizer))(rng)
        found[mutant.name] = mutant
    return list(found.values())[:count]


def _integer(rng: random.Random) -> Mutant:
    key, value = rng.choice(INTEGERS), rng.choice(WRONG)
    return Mutant(f"config {key}={value!r}", keys("config.json", **{key: value}))


def _number(rng: random.Random) -> Mutant:
    key, value = rng.choice(("rms_norm_eps", "rope_theta", "partial_rotary_factor")), rng.choice(WRONG_NUMBERS)
    return Mutant(f"config {key}={value!r}", keys("config.json", **{key: value}))


def _default(rng: random.Random) -> Mutant:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id", "bos_token_id")
    key, value = rng.choice(names), rng.choice(WRONG_NUMBERS)
    return Mutant(f"generation {key}={value!r}", keys("generation_config.json", do_sample=True, **{key: value}))


def _bytes(rng: random.Random) -> Mutant:
    """A few bytes of a small file changed, or its end cut off."""
    name, seed, cut = rng.choice(FILES[:4]), rng.randrange(10**6), rng.random() < 0.3

    def apply(directory: Path) -> None:
        data, own = bytearray((directory / name).read_bytes()), random.Random(seed)
        if cut:
            del data[own.randrange(len(data)) :]
        for _ in range(0 if cut else own.randrange(1, 8)):
            data[own.randrange(len(data))] = own.randrange(256)
        (directory / name).write_bytes(data)

    return Mutant(f"{name} damaged, seed {seed}, cut {cut}", apply)


def _file(rng: random.Random) -> Mutant:
    name = rng.choice(FILES)
    kinds: dict[str, Change] = {
        "a FIFO": instead(name, os.mkfifo),
        "a directory": instead(name, Path.mkdir),
        "a circle": link(name, name),
        "a link to nothing": link(name, "nothing"),
        "a link out": link(name, "/etc/passwd"),
        "empty": text(name, b""),
        "deep": text(name, DEEP),
        "not UTF-8": text(name, b"\xff\xfe{}"),
        "a list": text(name, "[]"),
    }
    kind = rng.choice(list(kinds))
    return Mutant(f"{name} is {kind}", kinds[kind])


def _header(rng: random.Random) -> Mutant:
    key = rng.choice(("shape", "data_offsets", "dtype"))
    value = rng.choice(([-1, -1], [0, 2**62], [1.5], ["x"], None, "F4", [], [1] * 10_000))
    shown = str(value)[:20]
    return Mutant(f"weights {key}={shown}", header(lambda entries, name: entries[name].update({key: value})))


def _tokenizer(rng: random.Random) -> Mutant:
    pattern = rng.choice(("(a|aa)*b", "a*a*a*b", r"(.)\1+", "(((a+)+)+)+", "(?:x{0,999}){0,999}", "(", "[a"))
    return Mutant(f"split by {pattern}", split(pattern))
