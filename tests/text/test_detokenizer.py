"""Detokenizing token by token: the joined deltas are the text, no half character, linear time."""

import random
import time
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import WordPiece

from jaxserve.text.detokenizer import StreamDetokenizer, make_detokenizer
from jaxserve.text.tokenizer import Tokenizer

TEXT = "Zoë 👩‍👩‍👧 🦜🦜 日本語のテキスト नमस्ते e\u0301à ด้วย\n\ttabs  end"
VOCABULARIES = ["tokenizers/qwen3", "tokenizers/gpt2", "models/stories260K-hf"]


@pytest.mark.parametrize("directory", VOCABULARIES)
def test_deltas_join_to_the_text(shared_data: Any, directory: str) -> None:
    tokenizer = Tokenizer.from_directory(shared_data / directory)
    ids = tokenizer.encode(TEXT)
    detokenizer = make_detokenizer(tokenizer)
    deltas = [detokenizer.push([i]) for i in ids]
    assert "".join(deltas) + detokenizer.flush() == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(deltas)
    whole = make_detokenizer(tokenizer)
    assert whole.push(ids) == "".join(deltas)


def test_a_character_begun_in_the_prompt_is_finished(shared_data: Any) -> None:
    tokenizer = Tokenizer.from_directory(shared_data / "tokenizers/gpt2")
    ids = tokenizer.encode("a 🦜b")
    split = next(n for n in range(len(ids)) if tokenizer.decode(ids[:n]).endswith("\ufffd"))
    detokenizer = make_detokenizer(tokenizer, ids[:split])
    assert "".join(detokenizer.push([i]) for i in ids[split:]) == "🦜b"


@pytest.mark.parametrize("output, text", [("b", "b"), ("\ufffd", "\ufffd"), ("🦜", "🦜")])
def test_a_character_that_only_the_prompt_begins_is_not_in_the_text(shared_data: Any, output: str, text: str) -> None:
    tokenizer = Tokenizer.from_directory(shared_data / "tokenizers/gpt2")
    prompt = tokenizer.encode("a 🦜")[:-1]
    assert tokenizer.decode(prompt).endswith("\ufffd")
    detokenizer = make_detokenizer(tokenizer, prompt)
    deltas = [detokenizer.push([i]) for i in tokenizer.encode(output)]
    assert "".join(deltas) == text


def test_a_replacement_character_that_the_output_finishes_is_its_own(shared_data: Any) -> None:
    tokenizer = Tokenizer.from_directory(shared_data / "tokenizers/gpt2")
    first, *rest = [tokenizer.backend.token_to_id(char) or 0 for char in "ï¿½"]  # the three bytes of U+FFFD
    assert make_detokenizer(tokenizer, [first]).push(rest) == "\ufffd"


def test_a_character_cut_at_the_end_is_dropped(shared_data: Any) -> None:
    tokenizer = Tokenizer.from_directory(shared_data / "tokenizers/gpt2")
    ids = tokenizer.encode("ok 🦜")[:-1]
    detokenizer = make_detokenizer(tokenizer)
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == "ok "


def test_sentencepiece_space_depends_on_the_prompt(shared_data: Any) -> None:
    tokenizer = Tokenizer.from_directory(shared_data / "models/stories260K-hf")
    once = tokenizer.encode("Once", add_special_tokens=False)
    assert make_detokenizer(tokenizer).push(once) == "Once"
    assert make_detokenizer(tokenizer, [1]).push(once) == "Once"
    assert make_detokenizer(tokenizer, tokenizer.encode("a")).push(once) == " Once"


def test_special_tokens_are_shown_on_demand(shared_data: Any) -> None:
    tokenizer = Tokenizer.from_directory(shared_data / "tokenizers/qwen3")
    ids = tokenizer.encode("<think>a<|im_end|>")
    assert make_detokenizer(tokenizer).push(ids) == "<think>a"  # an added token, but no special one
    assert make_detokenizer(tokenizer, skip_special_tokens=False).push(ids) == "<think>a<|im_end|>"


@pytest.mark.parametrize("directory", VOCABULARIES)
def test_random_tokens_at_two_microseconds_each(shared_data: Any, directory: str) -> None:
    tokenizer = Tokenizer.from_directory(shared_data / directory)
    ids = random.Random(0).choices(range(tokenizer.vocab_size), k=20_000)
    make_detokenizer(tokenizer).push(ids)  # fills the table of bytes
    detokenizer = make_detokenizer(tokenizer)
    start = time.thread_time()
    out = [detokenizer.push((i,)) for i in ids]
    assert (time.thread_time() - start) / len(ids) < 20e-6  # measured 0.7-1.5 us
    if tokenizer.decoder_kind == "byte_level":
        assert tokenizer.decode(ids).startswith("".join(out))


def test_endless_invalid_bytes_stay_linear(shared_data: Any) -> None:
    tokenizer = Tokenizer.from_directory(shared_data / "models/stories260K-hf")
    byte = next(i for i in range(512) if tokenizer.token_bytes(i) == b"\xe3")
    detokenizer = make_detokenizer(tokenizer)
    out = "".join(detokenizer.push([byte]) for _ in range(20_000))
    assert out == "\ufffd" * 19_999  # the last may still become a character


def test_other_decoders_go_through_the_library() -> None:
    backend = Backend(WordPiece({"[UNK]": 0, "un": 1, "##known": 2, "word": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    detokenizer = make_detokenizer(tokenizer)
    assert isinstance(detokenizer, StreamDetokenizer)
    assert "".join(detokenizer.push([i]) for i in (1, 2, 3)) + detokenizer.flush() == "unknown word"
