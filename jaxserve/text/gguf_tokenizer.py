"""Reads the tokenizer inside a GGUF file, with its chat templates, into a tokenizer of the tokenizers library.

Two kinds are read. `llama` is sentencepiece's BPE: pairs of pieces are joined in the order of the joined piece's score,
and text that no piece covers becomes bytes. `gpt2` is BPE of bytes with a list of merges. `tokenizer.ggml.pre` names
how a text is cut into words before; the cuts are the same as in the published tokenizers of models of that name.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from jaxserve.model_files import Omitted, open_header
from jaxserve.text.tokenizer_limits import MAX_ADDED

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_ARRAYS = frozenset(_PREFIX + name for name in ("tokens", "token_type", "scores", "merges"))
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # types of tokens; 6 is a byte
_SPACE = "▁"
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ROLES = ("bos", *_ENDS, "unknown", "padding")
# A file names one id where generation_config.json lists several, and converters type them as they find them. These are
# the texts that llama.cpp takes for ends, and for control tokens whatever their type.
_END_TEXTS = frozenset(
    """
    <|endoftext|> <|im_end|> <|end_of_text|> <|eot_id|> <|eom_id|> <|end|> <|return|> <|call|> <|calls|> <|flush|>
    <end_of_turn> <turn|> <|tool_response> <eos> <end_of_utterance> <EOT> _<EOT> [EOT] [EOS]
    <｜end▁of▁sentence｜>
    """.split()
)
# Ends that keep the type of the file: ends of models that fill in a middle, and </s>, which is plain text to Qwen.
_FILLED = frozenset(
    """
    </s> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>
    <|file_sep|>
    """.split()
)
# If a vocabulary also has all texts of a row, <|end|> ends only a part of an answer (gpt-oss and Solar Open).
_GOES_ON = (("<|return|>", "<|call|>"), ("<|call|>", "<|flush|>"), ("<|calls|>", "<|flush|>"))
_CONFIG_NAMES = MappingProxyType({"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"})
_ADVICE = "put the model's tokenizer.json beside it, or set model.tokenizer"
_MAX_CHARACTERS = 2**22  # characters of all pieces together; 260,000 pieces have 2 million
_MAX_JOINS = 2**20  # pairs; 260,000 pieces have 580,000
_LONGEST_PIECE = 256  # characters; sentencepiece's own limit is 16, and runs of spaces have 64

_ENDING = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDING
_QWEN35 = (  # marks belong to the letters before them
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
) + _ENDING
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
) + _ENDING


@dataclass(frozen=True)
class _Cut:
    """How a text becomes words.

    pattern: matches a word; None: GPT-2's pattern. digits: each digit is a word of its own before that
    whole_words: a word of the vocabulary is one token, whatever the merges say. nfc: the text is composed first
    adds_bos: a prompt begins with BOS unless the file says otherwise
    """

    pattern: str | None = None
    digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    adds_bos: bool = False

    def steps(self) -> pre_tokenizers.PreTokenizer:
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), "isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return pre_tokenizers.Sequence(steps)  # type: ignore[return-value]


_LLAMA3_CUT = _Cut(_LLAMA3 % r"\p{N}{1,3}", whole_words=True, adds_bos=True)
_QWEN2_CUT = _Cut(_LLAMA3 % r"\p{N}", nfc=True)
_CUTS = MappingProxyType(
    {
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "lfm2"), _LLAMA3_CUT),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2_CUT),
        "qwen35": _Cut(_QWEN35, nfc=True),
        "dbrx": _Cut(_LLAMA3 % r"\p{N}{1,3}"),
        "tekken": _Cut(_TEKKEN, whole_words=True, adds_bos=True),
        "smollm": _Cut(digits=True),
        "gpt-2": _Cut(),
    }
)


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer, and the file's facts about its tokens.

    config: special tokens as tokenizer_config.json names them. end_ids: token ids that end an output
    """

    backend: tokenizers.Tokenizer
    config: dict[str, Any]
    chat_templates: dict[str, str]
    end_ids: tuple[int, ...]


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a file.

    values: the metadata below `tokenizer.ggml`. tokens, types: by token id. ids: by text. roles: ids by role
    """

    values: Mapping[str, Any]
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    roles: dict[str, int]

    def text(self, role: str) -> str | None:
        return self.tokens[self.roles[role]] if role in self.roles else None

    def of_types(self, *types: int) -> list[str]:
        return [text for text, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def end_ids(self) -> tuple[int, ...]:
        """Return the ids that end an output: first by their roles, then by their known texts."""
        ends = _ends_among(self.ids) | _FILLED
        named = [self.ids[text] for text in self.of_types(_CONTROL, _USER_DEFINED) if text in ends]
        return tuple(dict.fromkeys([self.roles[role] for role in _ENDS if role in self.roles] + named))


def _ends_among(texts: Container[str]) -> frozenset[str]:
    """Return the texts that end an output in a vocabulary of these texts."""
    goes_on = any(all(text in texts for text in row) for row in _GOES_ON)
    return _END_TEXTS - {"<|end|>"} if goes_on else _END_TEXTS


def read_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """Read a file's tokenizer. Raises ModelLoadError if it is missing, damaged or of another kind."""
    with open_header(path) as header:
        _, num_values = header.counts()
        values = header.values(num_values, _ARRAYS)
        vocabulary = _vocabulary({key.removeprefix(_PREFIX): value for key, value in values.items()})
        try:
            backend = _of_bytes(vocabulary) if values[f"{_PREFIX}model"] == "gpt2" else _of_pieces(vocabulary)
        except ValueError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"its tokenizer cannot be made: {error}") from error
        templates = _templates(values)
    for special, types in ((True, (_UNKNOWN, _CONTROL)), (False, (_USER_DEFINED,))):
        texts = vocabulary.of_types(*types)
        backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
    config = {f"{name}_token": vocabulary.text(role) for name, role in _CONFIG_NAMES.items()}
    return GgufTokenizer(backend, config, templates, vocabulary.end_ids())


def _vocabulary(values: Mapping[str, Any]) -> _Vocabulary:
    """Check the tokens, their types and their roles. Raises ValueError if there are none of a known kind."""
    kind, tokens = values.get("model"), values.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"it has no tokenizer: {_ADVICE}")
    if kind not in ("llama", "gpt2"):
        raise ValueError(f"its tokenizer {str(kind)[:40]!r} is not read: {_ADVICE}")
    types = values.get("token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ValueError("its tokenizer has other types than tokens")
    ends = _ends_among(set(tokens))
    types = [_CONTROL if text in ends else kind for text, kind in zip(tokens, types, strict=True)]
    # unused tokens at the end only fill the model's table; published tokenizers do not have them
    count = max((i for i, each in enumerate(types, 1) if each != _UNUSED), default=0)
    tokens, types = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens[:count])], types[:count]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < count:
        raise ValueError("its tokenizer has a token twice")
    roles = {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {}  # if the file does not say
    said = {role: values.get(f"{role}_token_id") for role in _ROLES}
    roles |= {role: i for role, i in said.items() if type(i) is int and 0 <= i < len(tokens)}
    roles = {role: i for role, i in roles.items() if i < len(tokens)}
    if sum(each in (_UNKNOWN, _CONTROL, _USER_DEFINED) for each in types) > MAX_ADDED:
        raise ValueError(f"its tokenizer has more than {MAX_ADDED} special and user-defined tokens")
    return _Vocabulary(values, tokens, types, ids, roles)


def _of_bytes(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    name, merges = str(vocabulary.values.get("pre")), vocabulary.values.get("merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise ValueError("its tokenizer has no merges")
    if name not in _CUTS:
        raise ValueError(f"its tokenizer cuts words as {name[:40]!r} (read: {', '.join(_CUTS)}): {_ADVICE}")
    cut = _CUTS[name]
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(BPE(vocabulary.ids, pairs, ignore_merges=cut.whole_words))
    if cut.nfc:
        backend.normalizer = normalizers.NFC()  # type: ignore[assignment]
    backend.pre_tokenizer = cut.steps()  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    _add_frame(backend, vocabulary, bos=cut.adds_bos)
    return backend


def _of_pieces(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    unknown = vocabulary.text("unknown")
    model = BPE(vocabulary.ids, _joins(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    spaced = vocabulary.values.get("add_space_prefix", True) is True
    before: list[Any] = [normalizers.Prepend(_SPACE)] if spaced else []
    after: list[Any] = [decoders.Strip(" ", 1, 0)] if spaced else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])  # type: ignore[assignment]
    backend.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    _add_frame(backend, vocabulary, bos=True)
    return backend


def _joins(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the pairs of pieces that are joined, in the order of the joined piece's score. Raises ValueError."""
    ids, scores = vocabulary.ids, vocabulary.values.get("scores")
    if not isinstance(scores, list) or len(scores) < len(ids):
        raise ValueError("its tokenizer has no scores")
    pieces = vocabulary.of_types(_NORMAL, _UNUSED)
    if max(map(len, pieces), default=0) > _LONGEST_PIECE or sum(map(len, pieces)) > _MAX_CHARACTERS:
        raise ValueError("its tokenizer has pieces that are too long")
    found = []
    for piece in pieces:
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        # a converter that had no scores writes equal ones; sentencepiece numbers its pieces in the order of scores
        found += [(-scores[ids[piece]], ids[piece], ids[a], a, b) for a, b in halves if a in ids and b in ids]
        if len(found) > _MAX_JOINS:
            raise ValueError(f"its tokenizer joins more than {_MAX_JOINS} pairs of pieces")
    return [(left, right) for *_, left, right in sorted(found)]


def _add_frame(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, *, bos: bool) -> None:
    """Let the tokenizer put BOS before a text and EOS behind it as the file says. bos: used if it does not say"""
    wanted = {"bos": vocabulary.values.get("add_bos_token", bos), "eos": vocabulary.values.get("add_eos_token", False)}
    roles = [role for role, is_wanted in wanted.items() if is_wanted is True and role in vocabulary.roles]
    if roles:
        parts = [part for part in ("bos", "$A", "eos") if part in roles or part == "$A"]
        names = [{"id": role, "ids": [vocabulary.roles[role]], "tokens": [vocabulary.text(role)]} for role in roles]
        frame = processors.TemplateProcessing(single=parts, pair=[*parts, "$B:1"], special_tokens=names)
        backend.post_processor = frame  # type: ignore[assignment]


def _templates(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name. Raises ValueError for one that is too long or not a text."""
    keys = [key for key in values if key.startswith(f"{_TEMPLATE}.")]
    found = {key.removeprefix(f"{_TEMPLATE}."): values[key] for key in keys} | {"default": values.get(_TEMPLATE)}
    for template in found.values():
        if isinstance(template, Omitted):
            raise ValueError(f"its chat template is {template}")
    return {name: template for name, template in found.items() if isinstance(template, str)}
