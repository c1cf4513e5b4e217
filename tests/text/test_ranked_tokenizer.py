"""Tokenizers by rank against an independent tiktoken: its loop over the pieces that the `regex` module cuts."""

import base64
import importlib.util
import itertools
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import regex

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import MAX_BYTES
from jaxserve.text.ranked_tokenizer import KIMI_PATTERN
from jaxserve.text.tokenizer import Tokenizer

SAMPLE = """The DON'T-care year 12345: it's HeLLo, wORLD's end.\r\n\r\n  def f(x):\n\treturn x  # naïve Größe
你好世界,今天是2026年11月28日。 日本語のテキスト и немного русского; ξένος. 👩‍👩‍👧 e\u0301   \n\n   aaaaaaaa
ababab they'll WE'VE I'm"""
MISTRAL_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pieces(pattern: str, text: str) -> list[bytes]:
    return [match[0].encode() for match in regex.finditer(f"(?V1){pattern}", text)]


def joined(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The ids of one piece: the leftmost pair of the lowest rank is joined until none is left."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not found:
            return [ranks[part] for part in parts]
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def oracle(pattern: str, text: str, ranks: dict[bytes, int]) -> list[int]:
    return [i for piece in pieces(pattern, text) for i in joined(piece, ranks)]


def trained(pattern: str, count: int) -> list[bytes]:
    """The byte strings that BPE learns from the sample, by rank: 256 bytes, then `count` joins."""
    words = Counter(pieces(pattern, SAMPLE * 2))
    ranks = {bytes([byte]): byte for byte in range(256)}
    for _ in range(count):
        pairs: Counter[bytes] = Counter()
        for word, number in words.items():
            parts = split(word, ranks)
            for a, b in itertools.pairwise(parts):
                pairs[a + b] += number
        best = min((pair for pair in pairs if pair not in ranks), key=lambda pair: (-pairs[pair], pair), default=None)
        if best is None:
            break
        ranks[best] = len(ranks)
    return list(ranks)


def split(word: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    names = {rank: token for token, rank in ranks.items()}
    return [word] if word in ranks else [names[i] for i in joined(word, ranks)]


def kimi(directory: Path, tokens: list[bytes]) -> Path:
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    names = {len(tokens): "[BOS]", len(tokens) + 1: "[EOS]", len(tokens) + 4: "<|im_end|>", len(tokens) + 255: "[PAD]"}
    special = {i: {"content": name, "special": name != "<|im_end|>", "normalized": False} for i, name in names.items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": special, "bos_token": "[BOS]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "[EOS]"}))
    return directory


def tekken(directory: Path, tokens: list[bytes], **changes: Any) -> Path:
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    (directory / "tekken.json").write_text(json.dumps({
        "config": {"pattern": MISTRAL_PATTERN, "default_vocab_size": 20 + len(tokens) - 3,
                   "default_num_special_tokens": 20, "version": "v7"},
        "vocab": [{"rank": i, "token_bytes": base64.b64encode(t).decode()} for i, t in enumerate(tokens)],
        "special_tokens": [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)],
    } | changes))  # fmt: skip
    return directory


def texts() -> list[str]:
    rng = random.Random(1)
    alphabet = [*SAMPLE, *"aab'S \n\t9Üß世'll", " the", "\r\n", "'VE", "ǅ", "ʰ", "\u0301", "٣"]
    return [SAMPLE, "", *("".join(rng.choices(alphabet, k=rng.randrange(1, 40))) for _ in range(400))]


def test_kimis_ids_are_tiktokens(tmp_path: Path) -> None:
    tokens = trained(KIMI_PATTERN, 150)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    tokenizer = Tokenizer.from_directory(kimi(tmp_path, tokens))
    for text in texts():
        ids = tokenizer.encode(text)
        assert ids == oracle(KIMI_PATTERN, text, ranks), text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    size = len(tokens)
    assert tokenizer.vocab_size == size + 256 and tokenizer.decoder_kind == "byte_level"
    assert tokenizer.encode("[BOS]a<|im_end|>[PAD]") == [size, ranks[b"a"], size + 4, size + 255]
    assert tokenizer.id_to_token(size + 2) == f"<|reserved_token_{size + 2}|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (size, (size + 1,))
    assert size + 4 not in tokenizer.special_ids and {size, size + 2} <= tokenizer.special_ids


def test_tekkens_ids_are_tiktokens(tmp_path: Path) -> None:
    tokens = trained(MISTRAL_PATTERN, 150)
    ranks = {token: 20 + rank for rank, token in enumerate(tokens[:-3])}  # the last three are beyond the vocabulary
    tokenizer = Tokenizer.from_directory(tekken(tmp_path, tokens))
    for text in texts():
        assert tokenizer.encode(text, add_special_tokens=False) == oracle(MISTRAL_PATTERN, text, ranks), text
    assert tokenizer.encode("a[INST]") == [1, ranks[b"a"], 3]
    assert tokenizer.encode("[INST]", plain=True)[1:] == oracle(MISTRAL_PATTERN, "[INST]", ranks)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.unk_token) == (1, (2,), "<unk>")
    assert tokenizer.id_to_token(19) == "<SPECIAL_19>" and tokenizer.vocab_size == 20 + len(ranks)


def test_what_cannot_be_read_says_what_to_convert(tmp_path: Path) -> None:
    tokens = trained(MISTRAL_PATTERN, 5)
    for name, write, message, fix in (
        ("class", lambda d: (kimi(d, tokens) / "tokenizer_config.json").write_text('{"tokenizer_class": "QWen"}'),
         r"'QWen', which is never run", "convert_tiktoken_to_fast"),
        ("special", lambda d: (kimi(d, tokens) / "tokenizer_config.json").write_text(json.dumps(
            {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {"7": {"content": "[X]"}}}
        )), "no special token has id 7", ""),
        ("size", lambda d: os.truncate(kimi(d, tokens) / "tiktoken.model", MAX_BYTES + 1), "has more than", ""),
        ("line", lambda d: (kimi(d, tokens) / "tiktoken.model").write_text("AA== 0\nx\n"), "line 2", "tokenizer.json"),
        ("bytes", lambda d: kimi(d, tokens[1:]), "a byte is missing", "tokenizer.json"),
        ("old", lambda d: tekken(d, tokens, special_tokens=None), "version 7 and later", "tokenizer.json"),
        ("count", lambda d: (d / "tekken.json").write_text(
            (tekken(d, tokens) / "tekken.json").read_text().replace('special_tokens": 20', 'special_tokens": 1e999')
        ), "cannot be read: OverflowError", "tokenizer.json"),
        ("pattern", lambda d: tekken(d, tokens, config={"pattern": "(", "default_vocab_size": 270,
                                                        "default_num_special_tokens": 9}), "cannot be read", ""),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        write(tmp_path / name)
        with pytest.raises(ModelLoadError, match=message) as caught:
            Tokenizer.from_directory(tmp_path / name)
        assert fix in (caught.value.fix or ""), name


def test_a_published_tekken_has_tiktokens_ids(tmp_path: Path) -> None:
    package = importlib.util.find_spec("mistral_common")
    if package is None or importlib.util.find_spec("tiktoken") is None:
        pytest.skip("needs mistral_common, which brings a tekken.json, and tiktoken")
    found = json.loads((Path(str(package.origin)).parent / "data/tekken_240911.json").read_text())
    count, size = (found["config"][f"default_{key}"] for key in ("num_special_tokens", "vocab_size"))
    names = found.get("special_tokens") or [{"rank": i, "token_str": f"<{i}>"} for i in range(count)]
    (tmp_path / "tekken.json").write_text(json.dumps(found | {"special_tokens": names}))
    ours = Tokenizer.from_directory(tmp_path)
    ranks = {base64.b64decode(each["token_bytes"]): each["rank"] for each in found["vocab"][: size - count]}
    tiktoken = importlib.import_module("tiktoken")  # is not installed in CI
    theirs = tiktoken.Encoding("tekken", pat_str=found["config"]["pattern"], mergeable_ranks=ranks, special_tokens={})
    for text in texts():
        wanted = [count + rank for rank in theirs.encode_ordinary(text)]
        assert ours.encode(text, add_special_tokens=False) == wanted, text
