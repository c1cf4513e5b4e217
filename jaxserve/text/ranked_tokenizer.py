"""Reads tokenizers that are a list of byte strings by rank: Kimi's tiktoken.model and Mistral's tekken.json.

The text is cut by a pattern. In each piece the two neighbours that make the string of the lowest rank are joined, again
and again, as tiktoken does. A rank is a token id; in tekken.json the ids of the special tokens come before the ranks.
The special tokens of a tiktoken.model are in tokenizer_config.json. Its pattern is in the code of the checkpoint, which
is never run, so only Kimi's pattern is known here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import MAX_BYTES, read_object
from jaxserve.text.tokenizer_limits import MAX_ADDED, MAX_VOCABULARY

TIKTOKEN, TEKKEN = "tiktoken.model", "tekken.json"
_CONVERT = (
    "where you trust the checkpoint's code, make a tokenizer.json with "
    "transformers.integrations.tiktoken.convert_tiktoken_to_fast(encoding, directory) and put it into the directory; "
    "or set model.tokenizer to a directory with one"
)
_TAKE = "put the model's tokenizer.json beside it, or set model.tokenizer to a directory with one"

# Kimi K2 and later (tokenizer_class TikTokenTokenizer)
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_KIMI_RESERVED = 256  # ids of special tokens behind the ranks


def read_ranked(file: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Read a tekken.json or a tiktoken.model. config: the tokenizer_config.json beside it

    Returns the tokenizer, and what it adds to `config`: the roles of special tokens. Raises ModelLoadError, which names
    the file and says what to convert.
    """
    return _read_tekken(file) if file.name == TEKKEN else (_read_tiktoken(file, config), {})


def _read_tiktoken(file: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    if config.get("tokenizer_class") != "TikTokenTokenizer":
        what = f"{file}: the pattern that cuts texts is in the code of {config.get('tokenizer_class')!r}"
        raise ModelLoadError(f"{what}, which is never run", fix=_CONVERT)
    if file.stat().st_size > MAX_BYTES:
        raise ModelLoadError(f"{file} has more than {MAX_BYTES} bytes")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ModelLoadError(f"{file}: line {number} is no token with its rank", fix=_TAKE) from None
    size = len(ranks)
    _check_ranks(file, ranks)
    named = config.get("added_tokens_decoder")
    named = named if isinstance(named, dict) else {}
    special: dict[int, AddedToken] = {}
    for i in range(size, size + _KIMI_RESERVED):
        entry = named.get(str(i))
        text = entry.get("content") if isinstance(entry, dict) else None
        is_special = not isinstance(entry, dict) or entry.get("special", True) is not False
        name = text if isinstance(text, str) and text else f"<|reserved_token_{i}|>"
        special[i] = AddedToken(name, special=is_special, normalized=False)
    outside = [i for i in named if not i.isdecimal() or int(i) not in special]
    if outside:
        raise ModelLoadError(f"{file.with_name('tokenizer_config.json')}: no special token has id {outside[0]}")
    return _backend(ranks, special, KIMI_PATTERN, file)


def _read_tekken(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    found = read_object(file)
    try:
        settings, listed = found["config"], found["special_tokens"]
        count, total = int(settings["default_num_special_tokens"]), int(settings["default_vocab_size"])
        if not isinstance(listed, list) or not 0 <= count <= min(MAX_ADDED, total) or total > MAX_VOCABULARY:
            raise ValueError("its sizes or its special tokens")
        names = {int(each["rank"]): str(each["token_str"]) for each in listed}
        vocabulary = sorted(found["vocab"], key=lambda each: int(each["rank"]))[: total - count]
        tokens = [base64.b64decode(each["token_bytes"], validate=True) for each in vocabulary]
        pattern = str(settings["pattern"])
    except (KeyError, TypeError, ValueError, OverflowError, binascii.Error) as error:
        why = f"{file} cannot be read: {error!r} (version 7 and later are, which list their special tokens)"
        raise ModelLoadError(why, fix=_TAKE) from None
    ranks = {token: count + rank for rank, token in enumerate(tokens)}
    _check_ranks(file, ranks, first=count)
    special = {i: AddedToken(names.get(i, f"<SPECIAL_{i}>"), special=True, normalized=False) for i in range(count)}
    backend = _backend(ranks, special, pattern, file)
    roles = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
    if "<s>" in names.values():
        begin = ("<s>", next(i for i, name in names.items() if name == "<s>"))
        backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="<s> $A", pair="<s> $A $B:1", special_tokens=[begin]
        )
    return backend, {f"{role}_token": text for role, text in roles.items() if text in names.values()}


def _check_ranks(file: Path, ranks: Mapping[bytes, int], first: int = 0) -> None:
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(first, first + len(ranks))):
        raise ModelLoadError(f"{file} is damaged: its ranks have gaps, or a byte is missing", fix=_TAKE)


def _backend(
    ranks: Mapping[bytes, int], special: Mapping[int, AddedToken], pattern: str, file: Path
) -> tokenizers.Tokenizer:
    """Return the tokenizer. ranks: from byte strings to ids. special: added tokens by their ids"""
    texts = {token: "".join(BYTE_CHARACTERS[byte] for byte in token) for token in ranks}
    names = {token.content: i for i, token in special.items()}
    if len(names) < len(special):
        raise ModelLoadError(f"{file}: two special tokens have the same text", fix=_TAKE)
    # the library knows a token by its text: a byte string that spells a special token is written in two
    spelled = {token for token, text in texts.items() if text in names}
    ordinary = {token: rank for token, rank in ranks.items() if token not in spelled}
    vocabulary = {texts[token]: rank for token, rank in ordinary.items()} | names
    merges = [(texts[left], texts[right]) for left, right in _joins(ordinary)]
    try:
        backend = tokenizers.Tokenizer(BPE(vocabulary, merges, ignore_merges=True))
        cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{file} cannot be read: {str(error)[:300]}", fix=_TAKE) from error
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_only])  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_tokens([special[i] for i in sorted(special)])
    return backend


def _joins(ranks: Mapping[bytes, int]) -> Iterable[tuple[bytes, bytes]]:
    """Yield the pairs of strings that may be joined, those with the lower rank of the joined string first."""
    for token in sorted(ranks, key=ranks.__getitem__):
        for at in range(1, len(token)):
            if token[:at] in ranks and token[at:] in ranks:
                yield token[:at], token[at:]


def _alphabet() -> dict[int, str]:
    """Return the character of each byte in GPT-2's map from bytes to printable characters."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


BYTE_CHARACTERS = _alphabet()
