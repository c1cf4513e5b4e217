"""Tokenizers inside GGUF files, beside published ones and beside ids that were worked out by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from jaxserve.engine.factory import ServedModel
from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.pooling import PoolingConfig
from jaxserve.text.tokenizer import Tokenizer
from tests.conftest import SharedData

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SENTENCE = "I'LL pay  12345 for Größe/日本.\n\n  Don't!"
# how models of each name were published to cut the sentence
WORDS = {
    "gpt-2": ["I", "'", "LL", " pay", " ", " 12345", " for", " Größe", "/", "日本", ".", "\n\n ", " Don", "'t", "!"],
    "smollm": [
        *("I", "'", "LL", " pay", " ", " ", "1", "2", "3", "4", "5", " for", " Größe", "/", "日本", "."),
        *("\n\n ", " Don", "'t", "!"),
    ],
    "llama-bpe": [
        *("I", "'LL", " pay", " ", " ", "123", "45", " for", " Größe", "/日本", ".\n\n", " ", " Don", "'t", "!"),
    ],
    "qwen2": [
        *("I", "'LL", " pay", " ", " ", "1", "2", "3", "4", "5", " for", " Größe", "/日本", ".\n\n", " ", " Don"),
        *("'t", "!"),
    ],
    "tekken": [
        *("I", "'LL", " pay", " ", " ", "1", "2", "3", "4", "5", " for", " Größe", "/日本", ".\n\n", " ", " Don"),
        *("'t", "!"),
    ],
}
WORDS |= dict.fromkeys(("lfm2", "dbrx"), WORDS["llama-bpe"]) | {"qwen35": WORDS["qwen2"]}


def write(path: Path, values: dict[str, Any]) -> Path:
    """Write a file of metadata alone. values: below `tokenizer.ggml`, other keys with a point."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values.items():
        key = name if "." in name else f"tokenizer.ggml.{name}"
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def of_bytes(backend: tokenizers.Tokenizer, pre: str, special: tuple[str, ...] = (), **others: Any) -> dict[str, Any]:
    """The metadata of a byte-level tokenizer with the vocabulary and the merges of `backend`."""
    data = json.loads(backend.to_str())
    ids = dict(data["model"]["vocab"]) | {each["content"]: each["id"] for each in data["added_tokens"]}
    tokens = sorted(ids, key=lambda text: ids[text])
    added = {each["content"]: CONTROL if each["special"] else USER_DEFINED for each in data["added_tokens"]}
    tokens += special
    types = [CONTROL if text in special else added.get(text, NORMAL) for text in tokens]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in data["model"]["merges"]]
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges, **others}


@pytest.fixture(scope="module")
def trained() -> tokenizers.Tokenizer:
    """A byte-level tokenizer in which every word of WORDS is one token."""
    backend = tokenizers.Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([word for words in WORDS.values() for word in words] * 3, trainer)
    return backend


@pytest.mark.parametrize("pre", WORDS)
def test_a_text_is_cut_as_models_of_that_name_were_published(
    pre: str, trained: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    file = write(tmp_path / "m.gguf", of_bytes(trained, pre, add_bos_token=False))
    tokenizer = Tokenizer.from_directory(file)
    ids = tokenizer.encode(SENTENCE)
    assert [tokenizer.token_bytes(i).decode() for i in ids] == WORDS[pre]
    assert tokenizer.decode(ids) == SENTENCE


def test_the_names_of_qwen_compose_characters(trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    composed = {pre: write(tmp_path / f"{pre}.gguf", of_bytes(trained, pre)) for pre in ("qwen2", "gpt-2")}
    found = {pre: Tokenizer.from_directory(file).encode("e\u0301") for pre, file in composed.items()}
    assert found["qwen2"] == Tokenizer.from_directory(composed["gpt-2"]).encode("\u00e9") != found["gpt-2"]


def test_marks_are_parts_of_words_in_qwen35(trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    word, found = "a\u0323\u0324b", {}  # two marks that are not composed with each other
    for pre in ("qwen2", "qwen35"):
        backend = Tokenizer.from_directory(write(tmp_path / f"{pre}.gguf", of_bytes(trained, pre))).backend
        cut = backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(word))  # type: ignore[union-attr]
        found[pre] = len(cut)
    assert found == {"qwen2": 2, "qwen35": 1}


@pytest.mark.parametrize(("name", "pre"), [("gpt2", "gpt-2"), ("smollm2", "smollm"), ("qwen3", "qwen2")])
def test_ids_are_those_of_the_published_tokenizer(name: str, pre: str, shared_data: SharedData, tmp_path: Path) -> None:
    published = Tokenizer.from_directory((shared_data / f"tokenizers/{name}/tokenizer.json").parent)
    read = Tokenizer.from_directory(write(tmp_path / "m.gguf", of_bytes(published.backend, pre)))
    assert read.special_ids == published.special_ids and read.vocab_size == published.vocab_size
    parts = [
        *"aZ09 .'-\n\r\té日語ß🙂\u200d\u00a0",
        "  ",
        "'s",
        "n't",
        "e\u0301",
        "1234567",
        "<|im_end|>",
        "<tool_call>",
    ]
    draw = random.Random(7)
    for _ in range(300):
        text = "".join(draw.choices(parts, k=draw.randrange(1, 25)))
        for plain in (False, True):
            expected = published.encode(text, add_special_tokens=False, plain=plain)
            assert read.encode(text, add_special_tokens=False, plain=plain) == expected, text


PIECES = {  # text: score; what comes first has the better score
    "<unk>": 0.0,
    "<s>": 0.0,
    "</s>": 0.0,
    **{f"<0x{byte:02X}>": 0.0 for byte in range(256)},
    "▁h": -1.0,
    "el": -2.0,
    "lo": -3.0,
    "▁hel": -4.0,
    "▁hello": -5.0,
    "▁▁": -6.0,
    "<call>": 0.0,
    **dict.fromkeys("▁helo", -100.0),
}


def of_pieces(**others: Any) -> dict[str, Any]:
    types = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<call>": USER_DEFINED}
    types |= {text: BYTE for text in PIECES if text.startswith("<0x")}
    found = [types.get(text, NORMAL) for text in PIECES]
    return {
        "model": "llama",
        "tokens": list(PIECES),
        "scores": list(PIECES.values()),
        "token_type": found,
        **others,
    }


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hello", ["<s>", "▁hello"]),
        ("hel", ["<s>", "▁hel"]),
        ("helol", ["<s>", "▁hel", "o", "l"]),  # el first, then ▁hel; lo is no pair there
        ("  hello", ["<s>", "▁▁", "▁hello"]),
        ("heé", ["<s>", "▁h", "e", "<0xC3>", "<0xA9>"]),
        ("hel<call>hel", ["<s>", "▁hel", "<call>", "▁hel"]),
        ("</s>", ["<s>", "</s>"]),
        ("", ["<s>"]),
    ],
)
def test_pieces_are_joined_in_the_order_of_their_scores(text: str, pieces: list[str], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path / "m.gguf", of_pieces()))
    ids = tokenizer.encode(text)
    assert [tokenizer.id_to_token(i) for i in ids] == pieces
    if text == "heé":
        assert tokenizer.decode(ids) == text and tokenizer.token_bytes(ids[-1]) == b"\xa9"


def test_pieces_of_a_published_tokenizer(shared_data: SharedData, tmp_path: Path) -> None:
    published = Tokenizer.from_directory((shared_data / "models/stories260K-hf/tokenizer.json").parent)
    data = json.loads(published.to_json())
    ids: dict[str, int] = data["model"]["vocab"]
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in data["model"]["merges"]]
    scores = dict.fromkeys(ids, -1e6)
    for rank, merge in enumerate(merges):
        scores.setdefault("".join(merge), 0.0)
        scores["".join(merge)] = max(scores["".join(merge)], -float(rank))
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL} | {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    tokens = sorted(ids, key=lambda text: ids[text])
    values = of_pieces(
        tokens=tokens,
        scores=[scores[text] for text in tokens],
        token_type=[kinds.get(text, NORMAL) for text in tokens],
        add_bos_token=False,
    )
    read = Tokenizer.from_directory(write(tmp_path / "m.gguf", values))
    draw = random.Random(7)
    parts = ["Once upon a time", " there was", " a", "little", "  ", "\n", "é", "日", "<s>", "!", "▁"]
    for _ in range(300):
        text = "".join(draw.choices(parts, k=draw.randrange(1, 15)))
        assert read.encode(text) == published.encode(text, add_special_tokens=False), text
        assert read.decode(read.encode(text)) == published.decode(read.encode(text))


def test_pieces_of_equal_scores_are_joined_in_the_order_of_their_ids(shared_data: SharedData, tmp_path: Path) -> None:
    published = Tokenizer.from_directory((shared_data / "models/stories260K-hf/tokenizer.json").parent)
    tokens = [published.id_to_token(i) or "" for i in range(published.vocab_size)]
    types = [*(UNKNOWN, CONTROL, CONTROL), *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    values = of_pieces(tokens=tokens, scores=[-1000.0] * len(tokens), token_type=types)
    text = "Once upon a time there was a little girl named Lily. She loved to play outside in the park."
    read = Tokenizer.from_directory(write(tmp_path / "m.gguf", values))
    assert read.encode(text, add_special_tokens=False) == published.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("others", "ids"),
    [
        ({}, [1, 263]),  # <s> and ▁hello
        ({"add_bos_token": False}, [263]),
        ({"add_eos_token": True}, [1, 263, 2]),
        ({"add_eos_token": True, "add_bos_token": False, "eos_token_id": 1}, [263, 1]),
        ({"bos_token_id": 2}, [2, 263]),
        ({"bos_token_id": 2**32 - 1}, [1, 263]),  # as llama.cpp: an id outside the vocabulary says nothing
        ({"add_space_prefix": False}, [1, 267, 260, 261]),  # h, el, lo
    ],
)
def test_what_is_put_around_a_text(others: dict[str, Any], ids: list[int], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path / "m.gguf", of_pieces(**others)))
    assert tokenizer.encode("hello") == ids
    assert tokenizer.decode(ids) == "hello"


def test_special_tokens_ends_and_templates(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": "default one", "tokenizer.chat_template.tool_use": "with tools"}
    named = {"tokenizer.chat_templates": ["tool_use"]}
    file = write(tmp_path / "m.gguf", of_pieces(eot_token_id=5, eom_token_id=6, **templates, **named))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer.eos_token_ids == (2, 5, 6)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.chat_templates == {"default": "default one", "tool_use": "with tools"}
    (tmp_path / "chat_template.jinja").write_text("of the directory")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5, 70000]}')
    assert Tokenizer.from_directory(file).eos_token_ids == (2, 5, 6, 4)
    assert Tokenizer.from_directory(file).chat_templates["default"] == "of the directory"


def test_control_tokens_that_end_a_text_are_ends(trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    values = of_bytes(trained, "qwen2", special, eos_token_id=trained.get_vocab_size() + 2)
    tokenizer = Tokenizer.from_directory(write(tmp_path / "m.gguf", values))
    assert [tokenizer.id_to_token(i) for i in tokenizer.eos_token_ids] == ["<|im_end|>", "<|endoftext|>"]
    loaded: Any = SimpleNamespace(config=SimpleNamespace(eos_token_ids=(70000,), vocab_size=tokenizer.vocab_size))
    served = ServedModel(ModelFiles.open(tmp_path / "m.gguf"), loaded, tokenizer, PoolingConfig("last"))
    assert served.eos_token_ids == tokenizer.eos_token_ids


def test_tokens_that_fill_the_table_add_nothing_to_a_text(tmp_path: Path) -> None:
    plain = of_pieces()
    for name, value in (("tokens", "[PAD]"), ("scores", 0.0), ("token_type", UNUSED)):
        plain[name] = [*plain[name], value]
    tokenizer = Tokenizer.from_directory(write(tmp_path / "m.gguf", plain))
    assert tokenizer.vocab_size == len(PIECES)
    assert tokenizer.decode([*tokenizer.encode("hello"), len(PIECES)]) == "hello"
    assert tokenizer.token_bytes(len(PIECES)) == b""


def test_files_of_a_tokenizer_beside_it_win(trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", of_pieces())
    trained.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_directory(file).vocab_size == trained.get_vocab_size()


BYTES = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({}, "it has no tokenizer: put the model's tokenizer.json beside it, or set model.tokenizer"),
        ({"model": "none"}, "it has no tokenizer"),
        (BYTES | {"model": "bert"}, "its tokenizer 'bert' is not read"),
        (BYTES | {"pre": "falcon"}, "cuts words as 'falcon'"),
        ({key: value for key, value in BYTES.items() if key != "pre"}, "cuts words as 'None'"),
        ({key: value for key, value in BYTES.items() if key != "merges"}, "its tokenizer has no merges"),
        (BYTES | {"merges": ["a c"]}, "its tokenizer cannot be made"),
        (BYTES | {"tokens": ["a", "a", "ab"]}, "a token twice"),
        (BYTES | {"token_type": [1]}, "other types than tokens"),
        (BYTES | {"tokens": [1, 2]}, "it has no tokenizer"),
        (of_pieces(scores=[0.0]), "its tokenizer has no scores"),
        (of_pieces(tokens=["l" * 257, *list(PIECES)[1:]], token_type=[1] * len(PIECES)), "pieces that are too long"),
        (BYTES | {"tokenizer.chat_template": "x" * 300_000}, "a chat template has more than"),
        (BYTES | {"tokenizer.chat_template": "x" * (2**20 + 1)}, "its chat template is a text of 1048577 bytes"),
        (BYTES | {"tokenizer.chat_template": ["x"]}, "its chat template is an array of 1"),
    ],
)
def test_what_is_not_read_is_refused_in_one_line(values: dict[str, Any], cause: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", values)
    with pytest.raises(ModelLoadError) as caught:
        Tokenizer.from_directory(file)
    assert cause in str(caught.value) and str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("limit", "value", "cause"),
    [
        ("jaxserve.model_files._MAX_ITEMS", 3 * len(PIECES) - 1, "its arrays have more than"),
        ("jaxserve.text.gguf_tokenizer._MAX_JOINS", 5, "joins more than 5 pairs"),  # there are 6
        ("jaxserve.text.gguf_tokenizer.MAX_ADDED", 3, "more than 3 special and user-defined"),  # there are 4
    ],
)
def test_what_would_take_long_is_refused_before(
    limit: str, value: int, cause: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write(tmp_path / "m.gguf", of_pieces())
    monkeypatch.setattr(limit, value)
    with pytest.raises(ModelLoadError, match=cause):
        Tokenizer.from_directory(file)
    monkeypatch.setattr(limit, value + 1)
    assert Tokenizer.from_directory(file).vocab_size == len(PIECES)


ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "[EOT]", "<EOT>")


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED, UNUSED])
@pytest.mark.parametrize("text", ENDS)
def test_ends_of_any_type_end_an_answer(text: str, kind: int, trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    values = of_bytes(trained, "qwen2", (text, "<|start|>"), eos_token_id=0)
    values["token_type"][-2:] = [kind, kind]
    tokenizer = Tokenizer.from_directory(write(tmp_path / "m.gguf", values))
    end = len(values["tokens"]) - 2
    assert tokenizer.eos_token_ids == (0, end)
    assert tokenizer.encode(f"pay{text}", add_special_tokens=False)[-1] == end and end in tokenizer.special_ids
    assert (end + 1 in tokenizer.special_ids) == (kind == CONTROL)


@pytest.mark.parametrize(
    "texts, ends",
    [
        (("<|end|>", "<|return|>", "<|call|>"), {"<|return|>", "<|call|>"}),
        (("<|end|>", "<|flush|>", "<|calls|>"), {"<|flush|>", "<|calls|>"}),
        (("<|end|>", "<|return|>"), {"<|end|>", "<|return|>"}),
    ],
)
def test_a_part_of_an_answer_does_not_end_it(
    texts: tuple[str, ...], ends: set[str], trained: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path / "m.gguf", of_bytes(trained, "qwen2", texts, eos_token_id=0)))
    assert {tokenizer.id_to_token(i) for i in tokenizer.eos_token_ids[1:]} == ends
