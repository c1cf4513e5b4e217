"""The tokenizer of a model directory or GGUF file: text to token ids and back, and the bytes of every token.

Knows everything that the files of a tokenizer, `generation_config.json` and `config.json` say about tokens. Knows
nothing of requests, of the meaning of templates, or of the device.

    tokenizer = Tokenizer.from_directory(path)
    ids = tokenizer.encode(prompt)                                  # a completion's prompt: BOS as the model wants it
    ids = tokenizer.encode(rendered, add_special_tokens=False)      # a rendered chat template writes its own BOS
    text = tokenizer.escape(user_text)                              # its special-token texts will stay plain text
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

import tokenizers
from tokenizers import AddedToken, normalizers
from tokenizers.models import BPE

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import (
    MAX_BYTES,
    MAX_TEMPLATE_BYTES,
    as_integer,
    gguf_file,
    read_object,
    read_text,
    sentence_settings,
)
from jaxserve.text.gguf_tokenizer import read_gguf_tokenizer
from jaxserve.text.ranked_tokenizer import BYTE_CHARACTERS, TEKKEN, TIKTOKEN, read_ranked
from jaxserve.text.tokenizer_limits import MAX_ADDED, refuse_costly

# A Unicode noncharacter, not allowed in interchange. It marks the places where a special token must not be read.
ESCAPE_MARK = "\ufdd0"


class SpecialTokenEscaper:
    """Escapes the texts of special tokens in users' texts, so that they are encoded as plain text after rendering.

    texts: the texts of the special tokens. pattern: finds one of them
    """

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted(texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def text(self, text: str) -> str:
        """Return a text with its special tokens escaped. Marks that it already has are dropped."""
        text = text.replace(ESCAPE_MARK, "")
        return self.pattern.sub(lambda match: match[0][0] + ESCAPE_MARK + match[0][1:], text)

    def value(self, value: Any) -> Any:
        """Return a JSON value with the special tokens in its strings escaped, except below the keys role and type."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {key: item if key in ("role", "type") else self.value(item) for key, item in value.items()}
        return value


LONG_TEXT = 4096  # characters
LONGEST_GAP = 1024  # ids without a token

_VOCABULARIES = ("tokenizer.json", TEKKEN, TIKTOKEN, "vocab.json", "tokenizer.model", "vocab.txt")
# the roles of special tokens, in the order in which transformers adds them, and the keys of further ones
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_MORE_SPECIAL = ("extra_special_tokens", "additional_special_tokens")

DecoderKind = Literal["byte_level", "byte_fallback", "other"]


class Tokenizer:
    """A `tokenizers.Tokenizer` with the facts around it. Safe to use from several threads.

    strips_first_space: a decoded text drops the space that its first token carries (sentencepiece)
    vocab_size: number of tokens, or the largest id of an added token plus 1 if that is more. The model's number may be
      larger, and so may an id if the vocabulary has gaps.
    special_ids: ids that `skip_special_tokens` drops
    bos_token, eos_token, pad_token, unk_token: their texts, or None
    eos_token_ids: ids that end a sequence: the tokenizer's first, then the model's
    chat_templates: name to Jinja text; the usual one is called "default"
    decoder_kind: how token strings map to bytes; "other": only a whole sequence can be decoded
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict[str, Any] | None = None,
        *,
        chat_templates: dict[str, str] | None = None,
        extra_eos_ids: Sequence[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.config = config or {}
        self.chat_templates = dict(chat_templates or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = (
            _token_text(self.config.get(f"{name}_token")) for name in ("bos", "eos", "pad", "unk")
        )
        self.bos_token_id = self._id(self.bos_token)
        self.pad_token_id = self._id(self.pad_token)
        self.eos_token_id = own = self._id(self.eos_token)
        ids = ([] if own is None else [own]) + [i for i in extra_eos_ids if self.id_to_token(i) is not None]
        self.eos_token_ids = tuple(dict.fromkeys(ids))
        steps = _decoder_steps(backend)
        self.decoder_kind: DecoderKind = _decoder_kind(steps)
        self.strips_first_space = any(step["type"] == "Strip" and step.get("start") for step in steps)
        self._added_text = {i: token.content for i, token in added.items()}
        self._bytes: dict[int, bytes] = {}
        self._special_ids_by_text = {added[i].content: i for i in self.special_ids if added[i].content}
        self._escaper = SpecialTokenEscaper(self._special_ids_by_text)
        self._lock = threading.Lock()

    @classmethod
    def from_directory(cls, path: str | Path) -> Self:
        """Read the tokenizer of a model directory or GGUF file.

        The files beside a GGUF file win. Without them its own tokenizer is read.

        Raises ModelLoadError with the missing or damaged file.
        """
        given, path = Path(path), Path(path).parent if Path(path).is_file() else Path(path)
        if not any((path / name).is_file() for name in _VOCABULARIES) and (file := gguf_file(given)) is not None:
            return cls._from_gguf(file)
        config = _read_json(path / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # an older form, whose special tokens are in a file of their own
            config |= _special_tokens(path / "special_tokens_map.json", config)
        eos_ids = _eos_ids(path / "generation_config.json") + _eos_ids(path / "config.json")
        templates = _chat_templates(path, config)
        backend, config = _load_backend(path, config)
        return cls(backend, config, chat_templates=templates, extra_eos_ids=eos_ids)

    @classmethod
    def _from_gguf(cls, file: Path) -> Self:
        """Read the tokenizer inside a GGUF file. A chat template in a file beside it wins over those inside."""
        found = read_gguf_tokenizer(file)
        refuse_costly(found.backend, file)
        templates = _checked(file, found.chat_templates) | _chat_templates(file.parent, {})
        ends = [*found.end_ids, *_eos_ids(file.parent / "generation_config.json")]
        return cls(found.backend, found.config, chat_templates=templates, extra_eos_ids=ends)

    def encode(self, text: str, *, add_special_tokens: bool = True, plain: bool = False) -> list[int]:
        """Return the token ids of `text`.

        add_special_tokens: add BOS and the like where the tokenizer's post-processor does
        plain: read no special token in the text at all; escaped ones are never read
        """
        if not plain and ESCAPE_MARK not in text:
            return _encode(self.backend, text, add_special_tokens)
        if plain:
            return _encode(self.plain_backend(), text.replace(ESCAPE_MARK, ""), add_special_tokens)
        return self._encode_escaped(text, add_special_tokens)

    def escape(self, text: str) -> str:
        """Return `text` with marks, so that the special tokens in it are encoded as plain text after rendering.

        A text without any is returned unchanged. Noncharacters U+FDD0 in it are dropped.
        """
        return self._escaper.text(text)

    @property
    def special_texts(self) -> list[str]:
        """The texts that `escape` marks."""
        return list(self._special_ids_by_text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that this token adds to the output; b"" for an id outside the vocabulary.

        The bytes of all tokens make the text, also if a character is split between tokens. With decoder_kind "other"
        they do not: these are the bytes of the token decoded alone.
        """
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute_bytes(token_id)
        return found

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it: with Ġ or ▁ for a space."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def special_tokens_map(self) -> dict[str, str]:
        """Return the special tokens by the names that chat templates use: bos_token, eos_token, ... if they are set."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
        texts = {name: _token_text(self.config.get(name)) for name in names}
        return {name: text for name, text in texts.items() if text is not None}

    def to_json(self, vocab_size: int | None = None) -> str:
        """Return the text of tokenizer.json, for libraries that build their own tokenizer from it.

        vocab_size: number of rows of the model's embedding. Added tokens without a row are left out.
        """
        text, gaps = self.backend.to_str(), self._gaps()
        if not gaps and (vocab_size is None or vocab_size >= self.vocab_size):
            return text
        tree = json.loads(text)
        added = [token for token in tree["added_tokens"] if vocab_size is None or token["id"] < vocab_size]
        tree["added_tokens"] = [*(_unused(i) for i in gaps), *added]
        if gaps:
            tree["model"]["vocab"] |= {_unused(i)["content"]: i for i in gaps}
        return json.dumps(tree)

    def _gaps(self) -> list[int]:
        """Return the ids below the largest one that have no token. llguidance sees no token behind a long gap.

        To be quick, a gap is looked for at the end of as many ids as there are tokens.
        """
        count = self.backend.get_vocab_size(with_added_tokens=True)
        ends = map(self.backend.id_to_token, range(count, count + LONGEST_GAP))
        if count and self.backend.id_to_token(count - 1) is not None and not any(end is not None for end in ends):
            return []
        ids = set(self.backend.get_vocab(with_added_tokens=True).values())
        return [i for i in range(max(ids, default=0)) if i not in ids]

    def plain_backend(self) -> tokenizers.Tokenizer:
        """Return the backend that reads special tokens as text."""
        with self._lock:  # the cached property must be made once
            return self._plain

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A second backend that reads special tokens as text, because that switch is state of a backend."""
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def _id(self, text: str | None) -> int | None:
        return None if text is None else self.backend.token_to_id(text)

    def _encode_escaped(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encode the special tokens of the template as such, and the text between them with the plain backend."""
        frame = self.backend.encode("", add_special_tokens=add_special_tokens).ids
        ids, position = list(frame), 0
        for match in self._escaper.pattern.finditer(text):
            ids += self._plain_ids(text[position : match.start()])
            ids.append(self._special_ids_by_text[match[0]])
            position = match.end()
        return ids + self._plain_ids(text[position:])

    def _plain_ids(self, text: str) -> list[int]:
        return _encode(self.plain_backend(), text.replace(ESCAPE_MARK, ""), False) if text else []

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if self.decoder_kind == "byte_level":
            return _byte_level_bytes(token)
        if self.decoder_kind == "byte_fallback" and token_id not in self._added_text:
            return _byte_fallback_bytes(token)
        if self.decoder_kind == "other":
            return self.backend.decode([token_id], skip_special_tokens=False).encode()
        return token.encode()


def _unused(token_id: int) -> dict[str, Any]:
    """Return an entry of tokenizer.json for an id without a token."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": f"<|no token {token_id}|>", "special": True} | plain


def _token_text(value: Any) -> str | None:
    """Return the text of a token that tokenizer_config.json writes as its text or as an AddedToken object."""
    return value.get("content") if isinstance(value, dict) else value


_ALPHABET = {character: byte for byte, character in BYTE_CHARACTERS.items()}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_bytes(token: str) -> bytes:
    """Return a token's bytes as the tokenizers library does: its text if a character is outside the alphabet."""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_fallback_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the decoder's part of tokenizer.json; the whole file may have megabytes of vocabulary."""
    if backend.decoder is None:
        return []
    blank = tokenizers.Tokenizer(BPE())
    blank.decoder = backend.decoder
    decoder = json.loads(blank.to_str())["decoder"]
    return decoder.get("decoders", [decoder])


def _decoder_kind(steps: list[dict[str, Any]]) -> DecoderKind:
    kinds = {step["type"] for step in steps}
    if kinds <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
        return "byte_level"
    plain = all(step.get("pattern") == {"String": "▁"} for step in steps if step["type"] == "Replace")
    if plain and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"} and kinds >= {"Replace", "ByteFallback"}:
        return "byte_fallback"
    return "other"


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _special_tokens(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Read special_tokens_map.json: {name: text}, and its list of other special tokens if `config` has none."""
    found = _read_json(path)
    texts = {name: _token_text(value) for name, value in found.items() if isinstance(value, str | dict)}
    special: dict[str, Any] = {name: text for name, text in texts.items() if isinstance(text, str)}
    more = [found.get(key) for key in _MORE_SPECIAL if isinstance(found.get(key), list)]
    if more and not any(config.get(key) for key in _MORE_SPECIAL):
        special[_MORE_SPECIAL[0]] = more[0]
    return special


def _eos_ids(path: Path) -> list[int]:
    found = _read_json(path)
    text = found.get("text_config")  # of a language model inside a nested configuration
    value = found.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
    given = value if isinstance(value, list) else [] if value is None else [value]
    ids = [number for each in given if (number := as_integer(each)) is not None]
    if len(ids) < len(given):
        raise ModelLoadError(f"{path}: 'eos_token_id' must be a token id or a list of them")
    return ids


def _load_backend(path: Path, config: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Read the tokenizer of a directory, and add the tokens that only other files name.

    config: tokenizer_config.json. It is returned with the roles of special tokens that a ranked tokenizer has
    """
    file = next((path / name for name in ("tokenizer.json", TEKKEN, TIKTOKEN) if (path / name).is_file()), None)
    if file is None:
        return _convert_backend(path), config
    if file.name == "tokenizer.json":
        backend = _read_backend(file)
    else:
        backend, roles = read_ranked(file, config)
        config = roles | config
    backend.add_tokens(_tokens_beside(path, config, backend.get_added_tokens_decoder()))
    refuse_costly(backend, file)
    return _lowercased(backend, sentence_settings(path)), config


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    if file.stat().st_size > MAX_BYTES:
        raise ModelLoadError(f"{file} has more than {MAX_BYTES} bytes")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{file} cannot be read: {str(error)[:300]}") from error


def _tokens_beside(path: Path, config: dict[str, Any], known: dict[int, AddedToken]) -> list[AddedToken]:
    """Return the tokens that other files than tokenizer.json name, in the order in which transformers adds them.

    known: the added tokens of tokenizer.json. A token of tokenizer_config.json that differs from the one in `known`
    takes its place. An id that a file names only decides the order: the library gives the next free one. Raises
    ModelLoadError for a damaged entry.
    """
    file, entries = path / "tokenizer_config.json", config.get("added_tokens_decoder")
    named, more = _special_beside(file, config)
    if entries is None:
        file, special = path / "added_tokens.json", {token.content for token in (*named, *more)}
        found = [(i, _added_token(text, file, special=text in special)) for text, i in _read_json(file).items()]
    elif isinstance(entries, dict):
        found = [(i, _added_token(value, file)) for i, value in entries.items()]
    else:
        raise ModelLoadError(f"{file}: 'added_tokens_decoder' must be an object of tokens by their ids")
    if len(found) + len(named) + len(more) > MAX_ADDED:
        raise ModelLoadError(f"{file} has more than {MAX_ADDED} added tokens")
    try:
        by_id = {int(i): token for i, token in found} | (known if entries is None else {})
    except (TypeError, ValueError):
        raise ModelLoadError(f"{file}: the ids of its added tokens must be numbers") from None
    same, roles = {repr(token) for token in known.values()}, {token.content for token in named}
    added = {by_id[i].content: by_id[i] for i in sorted(by_id) if repr(by_id[i]) not in same}
    for token in added.values():
        token.special = token.special or token.content in roles
    there = {token.content for token in known.values()} | added.keys()
    new = {token.content: token for token in (*named, *more) if token.content not in there}
    return [*added.values(), *new.values()]


def _special_beside(file: Path, config: dict[str, Any]) -> tuple[list[AddedToken], list[AddedToken]]:
    """Return the special tokens of tokenizer_config.json: the tokens with a role, and the additional ones."""
    named = {f"{name}_token": config.get(f"{name}_token") for name in _SPECIAL}
    named |= {key: text for key, text in config.items() if key.endswith("_token") and isinstance(text, str)}
    more = next(filter(None, map(config.get, _MORE_SPECIAL)), [])
    if isinstance(more, dict):  # roles of other models, such as image_token
        named, more = named | more, []
    if not isinstance(more, list):
        raise ModelLoadError(f"{file}: {' and '.join(_MORE_SPECIAL)} must be lists of tokens")
    values = [value for value in named.values() if value], more
    of_roles, further = ([_added_token(value, file, special=True) for value in each] for each in values)
    return of_roles, further


def _added_token(value: Any, file: Path, *, special: bool | None = None) -> AddedToken:
    """Return a token made from its text or from the object in a file. special: None: as the object says"""
    entry = value if isinstance(value, dict) else {"content": value}
    flags = {key: entry[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in entry}
    if special is not None:
        flags["special"] = special
    text = entry.get("content")
    if not isinstance(text, str) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise ModelLoadError(f"{file}: {str(value)[:80]!r} is no added token")
    return AddedToken(text, **flags)


def _lowercased(backend: tokenizers.Tokenizer, settings: Path | None) -> tokenizers.Tokenizer:
    """Return the tokenizer, reading texts in lower case if the file of sentence-transformers says so."""
    if settings is not None and read_object(settings).get("do_lower_case"):
        own = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])  # type: ignore[assignment]
    return backend


def _convert_backend(path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of an older form (vocab.json with merges.txt, tokenizer.model), which transformers reads."""
    if not any((path / name).is_file() for name in _VOCABULARIES):
        raise ModelLoadError(f"no tokenizer.json in {path}", fix="name a directory with one, or set model.tokenizer")
    from transformers import AutoTokenizer  # noqa: PLC0415  # takes 2 s to import and is rarely needed

    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False).backend_tokenizer
    except Exception as error:  # the libraries below raise anything
        fix = "put the model's tokenizer.json beside it, or set model.tokenizer to a directory with one"
        if (path / "tokenizer.model").is_file() and find_spec("sentencepiece") is None:
            why = f"{path} has its tokenizer only as tokenizer.model, which needs sentencepiece"
            raise ModelLoadError(why, fix=f"{fix}, or pip install sentencepiece protobuf") from error
        why = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"the tokenizer in {path} cannot be converted: {why}", fix=fix) from error


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name.

    chat_template.jinja wins over tokenizer_config.json; additional_chat_templates/*.jinja add further ones.
    """
    value = config.get("chat_template")
    if isinstance(value, str):
        templates = {"default": value}
    else:
        templates = _named_templates(path, value)
    legacy = _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        templates["default"] = legacy
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    templates |= {name: read_text(file, MAX_TEMPLATE_BYTES) for name, file in files.items() if file.is_file()}
    return _checked(path, templates)


def _checked(path: Path, templates: dict[str, str]) -> dict[str, str]:
    """Return the templates. Raises ModelLoadError if one would take seconds to compile."""
    for template in templates.values():
        if len(template) > MAX_TEMPLATE_BYTES:
            raise ModelLoadError(f"{path}: a chat template has more than {MAX_TEMPLATE_BYTES} characters")
    return templates


def _named_templates(path: Path, value: Any) -> dict[str, str]:
    """Return the list of templates in tokenizer_config.json by name."""
    items = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, dict) for item in items) or not all(
        isinstance(item.get(key), str) for item in items for key in ("name", "template")
    ):
        raise ModelLoadError(
            f"{path / 'tokenizer_config.json'}: 'chat_template' must be a text or a list of named ones"
        )
    return {item["name"]: item["template"] for item in items}


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Encode a text. A long one goes through the library's batch call.

    That releases the GIL, which `encode` keeps for 1 us a character, and skips the offsets (half the time).
    """
    if len(text) <= LONG_TEXT:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
