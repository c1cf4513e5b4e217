"""The tokenizer against published encode vectors, and what no library promises: exact bytes, escaped text."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import jaxserve
from jaxserve.errors import ModelLoadError
from jaxserve.text.pairs import PairEncoder
from jaxserve.text.tokenizer import Tokenizer
from tests.models.checkpoints import train_tokenizer, write_words

DEMO = Path(jaxserve.__file__).parent / "assets" / "demo"
VOCABULARIES = ["tokenizers/qwen2.5", "tokenizers/qwen3", "tokenizers/gpt2", "tokenizers/minimind",
                "tokenizers/smollm2", "models/stories260K-hf"]  # fmt: skip
HF_VECTORS = [("gpt2", "openai-community/gpt2", "gpt2"), ("gpt2", "Xenova/gpt2", "gpt2"),
              ("qwen2", "Xenova/Qwen1.5-0.5B-Chat", "qwen2.5")]  # fmt: skip


@cache
def loaded(directory: Path) -> Tokenizer:
    """The tokenizer of a directory, read once for all tests that change nothing in it: Qwen's take 0.7 s."""
    return Tokenizer.from_directory(directory)


@pytest.mark.parametrize("file, name, directory", HF_VECTORS)
def test_published_vectors(shared_data: Any, file: str, name: str, directory: str) -> None:
    vectors = json.loads((shared_data / f"golden/tokenizer_hf/{file}.json").read_text())[name]
    tokenizer = loaded(shared_data / f"tokenizers/{directory}")
    assert len(vectors) > 20
    for case in vectors.values():
        ids = tokenizer.encode(case["text"])
        assert ids == case["ids"]
        # gpt2's published texts had spaces before punctuation cleaned away, which would not be what the model wrote
        expected = case["decoded"] if directory == "qwen2.5" else case["text"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize("file, directory", [("gpt-2", "gpt2"), ("qwen2", "qwen2.5")])
def test_published_vectors_of_odd_text(shared_data: Any, file: str, directory: str) -> None:
    folder = shared_data / "golden/tokenizer_llamacpp"
    texts = (folder / f"{file}.inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = (folder / f"{file}.out").read_text().splitlines()
    tokenizer = loaded(shared_data / f"tokenizers/{directory}")
    # the vectors were made without Unicode normalisation, which Qwen's tokenizer applies
    pairs = [(t, [int(i) for i in line.split()]) for t, line in zip(texts, lines, strict=False)]
    assert len(pairs) > 40
    assert [tokenizer.encode(text, add_special_tokens=False) for text, _ in pairs] == [ids for _, ids in pairs]


@pytest.mark.parametrize("directory", VOCABULARIES)
def test_bytes_of_every_token(shared_data: Any, directory: str) -> None:
    tokenizer = loaded(shared_data / directory)
    assert tokenizer.decoder_kind != "other"
    step = max(1, tokenizer.vocab_size // 20_000)
    for token_id in (*range(0, tokenizer.vocab_size, step), *tokenizer.special_ids):
        decoded = tokenizer.decode([token_id], skip_special_tokens=False)
        own = tokenizer.token_bytes(token_id).decode(errors="replace")
        assert own == decoded or own == " " + decoded  # sentencepiece drops a text's first space
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


TEXT = "Zoë 🦜 日本語のテキスト, नमस्ते à\n\ttabs  and <|not special|>"


@pytest.mark.parametrize("directory", VOCABULARIES)
def test_bytes_join_to_the_text(shared_data: Any, directory: str) -> None:
    tokenizer = loaded(shared_data / directory)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
    assert joined.removeprefix(" ") == TEXT


@pytest.mark.parametrize("directory", VOCABULARIES)
def test_shielded_text_never_yields_a_special_token(shared_data: Any, directory: str) -> None:
    tokenizer = loaded(shared_data / directory)
    for special in sorted(tokenizer.special_ids):
        name = tokenizer.id_to_token(special)
        assert name is not None
        assert special in tokenizer.encode(f"a{name}b", add_special_tokens=False)
        escaped = tokenizer.escape(f"a{name}b")
        for ids in (
            tokenizer.encode(escaped, add_special_tokens=False),
            tokenizer.encode(f"a{name}b", add_special_tokens=False, plain=True),
        ):
            assert not tokenizer.special_ids & set(ids) - {tokenizer.token_to_id("<unk>")}
            assert tokenizer.decode(ids) == f"a{name}b"
        mixed = tokenizer.encode(f"{name}{escaped}{name}", add_special_tokens=False)
        assert (mixed[0], mixed[-1], mixed.count(special)) == (special, special, 2)


@pytest.mark.parametrize("special", [True, False])
def test_a_long_text_is_read_as_a_short_one_and_beside_other_threads(special: bool) -> None:
    tokenizer = Tokenizer.from_directory(DEMO)
    text = " ".join(f"word {i}, {'é' * (i % 3)} 日本<|im_end|>" for i in range(10_000))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(tokenizer.encode, text, add_special_tokens=special)
        turns = 0
        while not future.done():
            time.sleep(0.001)
            turns += 1
    assert future.result() == tokenizer.backend.encode(text, add_special_tokens=special).ids
    assert turns > 5, "the interpreter's lock is held while it encodes"


def test_facts_of_a_directory(shared_data: Any) -> None:
    tokenizer = Tokenizer.from_directory(shared_data / "models/stories260K-hf")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.vocab_size) == ("<s>", "</s>", 512)
    assert tokenizer.eos_token_ids[0] == 2
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 1
    for outside in (-1, 512, 2**32 - 1, 2**32, 2**64):
        assert tokenizer.id_to_token(outside) is None and tokenizer.token_bytes(outside) == b""
    assert tokenizer.special_tokens_map()["eos_token"] == "</s>"
    assert "default" in tokenizer.chat_templates


def test_the_special_tokens_of_an_older_directory(tmp_path: Path) -> None:
    """Transformers reads the file unless tokenizer_config.json has the newer form."""
    backend = Backend(BPE())
    backend.add_special_tokens(["<s>", "<|im_end|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>", "lstrip": False}, "additional": ["x"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    assert Tokenizer.from_directory(tmp_path).special_tokens_map() == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {}, "eos_token": "<s>"}))
    assert Tokenizer.from_directory(tmp_path).special_tokens_map() == {"eos_token": "<s>"}


def flagged(content: str, special: bool, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": content, "special": special} | plain | flags


def beside(start: int) -> dict[str, dict[str, Any]]:
    """Files that name tokens which tokenizer.json lacks, or has otherwise. start: the first free id."""
    turn, end, call = "<|turn|>", "<|end|>", "<call>"
    decoder = {str(start + i): flagged(text, i < 2) for i, text in enumerate((turn, end, call))}
    config, special, added = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
    return {
        "added_tokens_decoder": {config: {"added_tokens_decoder": decoder}},
        "in another order, with a gap": {
            config: {"added_tokens_decoder": {str(start + 9): flagged(turn, True), str(start + 4): flagged(end, False)}}
        },
        "flags": {config: {"added_tokens_decoder": {str(start): flagged(call, False, rstrip=True, lstrip=True)}}},
        "normalized": {config: {"added_tokens_decoder": {str(start): flagged(call, False, normalized=True)}}},
        "a token of tokenizer.json with other flags": {
            config: {"added_tokens_decoder": {"1": flagged("<s>", False), str(start): flagged(turn, True)}}
        },
        "a role makes it special": {
            config: {"added_tokens_decoder": {str(start): flagged(end, False)}, "eos_token": end, "pad_token": "<pad>"}
        },
        "additional_special_tokens": {config: {"additional_special_tokens": [turn, end, "</s>", turn]}},
        "extra_special_tokens": {config: {"extra_special_tokens": [end, turn]}},
        "both lists": {config: {"extra_special_tokens": [end], "additional_special_tokens": [turn]}},
        "extra_special_tokens by role": {config: {"extra_special_tokens": {"turn_token": turn, "call_token": call}}},
        "a role of its own": {config: {"image_token": turn, "eos_token": end}},
        "beside added_tokens_decoder": {
            config: {"added_tokens_decoder": decoder, "additional_special_tokens": [call, "<more>"], "bos_token": turn}
        },
        "special_tokens_map": {
            config: {},
            special: {"additional_special_tokens": [turn, end], "eos_token": flagged(end, True), "bos_token": "<s>"},
        },
        "special_tokens_map not read beside added_tokens_decoder": {
            config: {"added_tokens_decoder": decoder},
            special: {"additional_special_tokens": ["<more>"], "eos_token": "<other>"},
        },
        "added_tokens.json": {config: {"eos_token": end}, added: {call: start + 1, end: start, turn: start + 2}},
        "added_tokens.json alone": {added: {call: start, turn: start + 1}},
        "added_tokens.json with special_tokens_map": {
            special: {"additional_special_tokens": [turn]}, added: {call: start, turn: start + 1},
        },
        "added_tokens.json not read beside added_tokens_decoder": {
            config: {"added_tokens_decoder": decoder}, added: {"<more>": start + 7},
        },
    }  # fmt: skip


CHAT = "<|turn|>user\nhello <call>world <call> no<|end|> <|turn|>assistant<s></s><pad><more><other>"


@pytest.mark.parametrize("kind", ["bytes", "pieces", "unigram", "words"])
@pytest.mark.parametrize("form", beside(0))
def test_tokens_that_only_other_files_name_are_added_as_transformers_adds_them(
    form: str, kind: str, tmp_path: Path
) -> None:
    backend = train_tokenizer(kind)
    backend.save(str(tmp_path / "tokenizer.json"))
    start = backend.get_vocab_size()
    for name, value in beside(start)[form].items():
        (tmp_path / name).write_text(json.dumps(value))
    published, read = PreTrainedTokenizerFast.from_pretrained(tmp_path), Tokenizer.from_directory(tmp_path)
    added = published.backend_tokenizer.get_added_tokens_decoder()
    assert max(added) >= start
    found = read.backend.get_added_tokens_decoder()
    assert {i: token.content for i, token in found.items()} == {i: token.content for i, token in added.items()}
    assert read.encode(CHAT, add_special_tokens=False) == published.encode(CHAT, add_special_tokens=False)
    special = {i for i, token in added.items() if token.special}
    # transformers takes a token of special_tokens_map.json for plain text if added_tokens.json has its id
    special |= {read.token_to_id("<|turn|>")} if form == "added_tokens.json with special_tokens_map" else set()
    assert read.special_ids == special


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer_config.json", {"added_tokens_decoder": ["<a>"]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": flagged("<a>", True)}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": {"special": True}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": flagged("<a>", True) | {"lstrip": "no"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {str(i): flagged(f"<{i}>", True) for i in range(40_000)}}),
        ("tokenizer_config.json", {"additional_special_tokens": "<a>"}),
        ("tokenizer_config.json", {"extra_special_tokens": [1]}),
        ("added_tokens.json", {"<a>": [1]}),
        ("added_tokens.json", {"<a>": "many"}),
    ],
)
def test_damaged_lists_of_tokens_are_named(name: str, content: dict[str, Any], tmp_path: Path) -> None:
    train_tokenizer("bytes").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=re.escape(name)):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("lowers", [True, False, None])
def test_texts_in_lower_case_as_sentence_transformers_reads_them(lowers: bool | None, tmp_path: Path) -> None:
    write_words(tmp_path, 8)
    if lowers is not None:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": lowers}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("W4 w5 [SEP]") == [2, 4 if lowers else 1, 5, 3, 3]
    assert tokenizer.encode(tokenizer.escape("W4 [SEP]"), add_special_tokens=False)[0] == (4 if lowers else 1)


def test_pairs_have_the_frame_of_the_tokenizer(tmp_path: Path) -> None:
    pairs = PairEncoder(Tokenizer.from_directory(write_words(tmp_path, 8)))
    query, document = pairs.text("w4 w7"), pairs.text("w5 w6")
    assert pairs.joined(query, document, 2) == ([2, 4, 7, 3, 5, 6, 3], 4) and pairs.num_added == 3
    assert pairs.joined(query, document, 1) == ([2, 4, 7, 3, 5, 3], 4)


def test_damaged_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="tokenizer_config"):
        Tokenizer.from_directory(tmp_path)


def test_templates_by_file_and_name(tmp_path: Path) -> None:
    Backend(BPE()).save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_directory(tmp_path).chat_templates == {}
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": "A", "tool_use": "B"}
    (tmp_path / "chat_template.jinja").write_text("C")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("D")
    templates = Tokenizer.from_directory(tmp_path).chat_templates
    assert templates == {"default": "C", "tool_use": "B", "rag": "D"}


def test_a_sentencepiece_file_alone_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    monkeypatch.setattr("jaxserve.text.tokenizer.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"only as tokenizer\.model, which needs sentencepiece") as caught:
        Tokenizer.from_directory(tmp_path)
    assert "tokenizer.json" in str(caught.value.fix) and "tiktoken" not in str(caught.value)
