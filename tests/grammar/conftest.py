"""A tokenizer of the tests' own: every byte, some merges, and special tokens like those of chat models."""

import pytest
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from jaxserve.grammar.matcher import MatcherFactory
from jaxserve.text.tokenizer import Tokenizer

SPECIAL = ["<eos>", "<|call|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]"]
PLAIN_ADDED = ["<think>", "</think>"]


def byte_tokenizer() -> Tokenizer:
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for left, right in [
        ("t", "r"),
        ("tr", "u"),
        ("tru", "e"),
        ("a", "b"),
        ("{", '"'),
        ('"', ":"),
        ("Ġ", "Ġ"),
        ("1", "2"),
    ]:
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    backend = Backend(BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False) for text in PLAIN_ADDED])
    return Tokenizer(backend, {"eos_token": "<eos>"})


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def factory(tokenizer: Tokenizer) -> MatcherFactory:
    # a model's vocabulary may be padded above its tokenizer's
    return MatcherFactory(tokenizer.to_json(), vocab_size=320, eos_token_ids=tokenizer.eos_token_ids)
