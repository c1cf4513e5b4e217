"""suffix: fill in the middle where the tokenizer has tokens for it."""

import asyncio

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from jaxserve.api.generate.planner import infill_prompt
from jaxserve.api.work_pool import TextEncoder, TextWork
from jaxserve.errors import UnsupportedParameterError
from jaxserve.text.tokenizer import Tokenizer

from .conftest import LiveServer


def test_prefix_suffix_middle(server: LiveServer) -> None:
    tokenizer = server.link.tokenizer
    body = {"model": "demo", "prompt": "def f(", "suffix": "):<|fim_middle|>"}
    assert server.post("/v1/completions", body).status_code == 200
    ids = server.link.seen[-1].prompt_token_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|><|fim_middle|>"
    )
    middle = tokenizer.token_to_id("<|fim_middle|>")
    assert middle is not None and ids.count(middle) == 1  # the user's own stays text
    assert server.post("/v1/completions", body | {"echo": True}).json()["error"]["param"] == "suffix"


def test_a_tokenizer_without_such_tokens() -> None:
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate("abc")}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer = Tokenizer(backend)
    with pytest.raises(UnsupportedParameterError, match="fill-in-the-middle"):
        asyncio.run(infill_prompt(TextEncoder(tokenizer, TextWork()), tokenizer, "a", "b", None))
