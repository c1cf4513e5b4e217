"""POST /v1/completions with the official client."""

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from jaxserve.api.generate.wire import CompletionLogprobs
from jaxserve.api.work_pool import TokenTexts
from jaxserve.text.tokenizer import Tokenizer

from .conftest import LiveServer, reply_with


def test_the_four_forms_of_a_prompt(server: LiveServer, client: Any) -> None:
    ids = server.link.tokenizer.encode("one two")
    for prompt, count in (("one two", 1), (["one two", "three"], 2), (ids, 1), ([ids, [5, 6, 7]], 2)):
        server.link.seen.clear()
        answer = client.completions.create(model="demo", prompt=prompt, n=2)
        assert [choice.index for choice in answer.choices] == list(range(2 * count))
        first = [request for request in server.link.seen if request.prompt_token_ids == ids]
        assert len(first) == 2
        prompts = [request.prompt_token_ids for request in server.link.seen]
        assert answer.usage.prompt_tokens == sum(map(len, prompts)) // 2


def test_defaults_and_the_reference_pages_arguments(server: LiveServer, client: Any) -> None:
    client.completions.create(model="demo", prompt="List 3 countries.", temperature=0, max_tokens=64, n=1, stop=None)
    params = server.link.seen[-1].params
    assert (params.temperature, params.max_tokens, params.stop) == (0, 64, ())
    client.completions.create(
        model="org/demo",
        prompt="Write a story.",
        temperature=0.7,
        max_tokens=150,
        top_p=0.9,
        stop=["\n\n", "THE END"],
        presence_penalty=0.3,
        frequency_penalty=0.3,
        n=1,
        seed=123,
    )
    params = server.link.seen[-1].params
    assert params.stop == ("\n\n", "THE END") and params.seed == 123 and params.top_p == 0.9
    assert params.presence_penalty == params.frequency_penalty == 0.3
    client.completions.create(model="demo", prompt="x")
    assert server.link.seen[-1].params.max_tokens == 16


def test_stream_equals_whole_with_logprobs(server: LiveServer, client: Any) -> None:
    reply_with(server, "Grüße, 日本語 👩‍🚀!")
    keys = {"model": "demo", "prompt": ["a b", "c"], "max_tokens": 40, "logprobs": 3, "n": 2}
    whole = client.completions.create(**keys)
    chunks = list(client.completions.create(**keys, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for c in mine for x in getattr(c.logprobs, name)] == getattr(choice.logprobs, name)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_with_logprobs_as_lm_eval_reads_it(server: LiveServer, client: Any, max_tokens: int) -> None:
    reply_with(server, [11, 12, 13, 14, 15, 16])
    prompt = [7, 8, 9, 10]
    answer = client.completions.create(
        model="demo", prompt=[prompt], echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1234
    )
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(prompt) + max_tokens
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert choice.text.startswith(server.link.tokenizer.decode(prompt))
    assert answer.usage.completion_tokens == max_tokens and choice.finish_reason == "length"
    for token, value, top in zip(
        logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True
    ):
        assert top[token] == value  # bit for bit, through JSON and back
    whole_text = choice.text
    for place, (token, offset) in enumerate(zip(logprobs.tokens, logprobs.text_offset, strict=True)):
        assert whole_text[offset : offset + len(token)] == token, place


@pytest.mark.parametrize("prompt", ["<|im_start|>user\nhi", "a<|im_end|>b", "<|im_start|><|im_start|>x<|im_end|>"])
@pytest.mark.parametrize("stream", [False, True])
def test_offsets_of_an_echo_count_the_special_tokens_that_the_prompt_spells(
    server: LiveServer, client: Any, prompt: str, stream: bool
) -> None:
    reply_with(server, " ok")
    keys = {"model": "demo", "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 8}
    if stream:
        choices = [chunk.choices[0] for chunk in client.completions.create(**keys, stream=True) if chunk.choices]
    else:
        choices = client.completions.create(**keys).choices
    text = "".join(choice.text for choice in choices)
    arrays = [choice.logprobs for choice in choices if choice.logprobs is not None]
    pairs = [pair for each in arrays for pair in zip(each.tokens, each.text_offset, strict=True)]
    assert text == prompt + " ok"
    for token, offset in pairs:
        assert text.startswith(token, offset) or offset == len(text), (token, offset)  # or the end token


def test_max_tokens_zero_without_echo_is_an_empty_text(client: Any) -> None:
    choice = client.completions.create(model="demo", prompt="x", max_tokens=0).choices[0]
    assert (choice.text, choice.finish_reason) == ("", "length")


def test_best_of_gives_the_likeliest(server: LiveServer, client: Any) -> None:
    seeds = iter([[3, 3, 3], [7, 7, 7], [6, 6, 6]])  # mean log-probability is that of the token modulo 7
    server.link.script = lambda prompt, params: next(seeds)
    answer = client.completions.create(model="demo", prompt="x", best_of=3, n=1, logit_bias={"3": 1})
    assert len(answer.choices) == 1 and answer.choices[0].index == 0
    expected = server.link.tokenizer.decode([6, 6, 6])
    assert answer.choices[0].text in (expected, server.link.tokenizer.decode([7, 7, 7]))
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == 12


def test_token_ids_and_prompt_logprobs(server: LiveServer, client: Any) -> None:
    reply_with(server, [11, 12])
    extra = {"return_token_ids": True, "prompt_logprobs": 2, "return_prompt_text": True}
    choice = client.completions.create(model="demo", prompt=[7, 8, 9], extra_body=extra).choices[0]
    assert choice.token_ids[:2] == [11, 12] and choice.prompt_token_ids == [7, 8, 9]
    assert choice.prompt_text
    assert choice.prompt_logprobs[0] is None and choice.prompt_logprobs[1]["8"]["rank"] == 1


def test_truncate_prompt_tokens(server: LiveServer, client: Any) -> None:
    for side, kept in (("left", [9, 10]), ("right", [7, 8])):
        extra = {"truncate_prompt_tokens": 2, "truncation_side": side}
        client.completions.create(model="demo", prompt=[7, 8, 9, 10], extra_body=extra)
        assert server.link.seen[-1].prompt_token_ids == kept
    client.completions.create(model="demo", prompt=[7] * 2000, extra_body={"truncate_prompt_tokens": -1})
    assert len(server.link.seen[-1].prompt_token_ids) == server.link.info.max_model_len - 16


def test_stream_interval_makes_fewer_chunks(server: LiveServer, client: Any) -> None:
    reply_with(server, list(range(300, 320)))
    keys: dict[str, Any] = {"model": "demo", "prompt": "x", "max_tokens": 20, "logprobs": 1, "stream": True}
    one = list(client.completions.create(**keys))
    many = list(client.completions.create(**keys, extra_body={"stream_interval": 8}))
    assert len(one) == 20 and [len(c.choices[0].logprobs.tokens) for c in many] == [1, 8, 8, 3]
    assert "".join(c.choices[0].text for c in one) == "".join(c.choices[0].text for c in many)


@pytest.mark.parametrize("field, value", [("prompt_logprobs", 1), ("return_prompt_token_ids", True)])
def test_a_stream_has_what_is_asked_about_the_prompt_before_the_first_text(
    server: LiveServer, client: Any, field: str, value: Any
) -> None:
    """The first token may be half a character, or the beginning of a stop string."""
    reply_with(server, "\U0001f99c!")
    keys: dict[str, Any] = {"model": "demo", "prompt": [7, 8, 9], "stream": True, "extra_body": {field: value}}
    choices = [chunk.choices[0] for chunk in client.completions.create(**keys)]
    assert "".join(choice.text for choice in choices) == "\U0001f99c!" and choices[0].text == ""
    found = (choices[0].model_extra or {}).get(field.removeprefix("return_"))
    assert found is not None and len(found) == 3


@pytest.mark.parametrize("text", ["Once upon a time", " two spaces", "a", "日本 is far"])
@pytest.mark.parametrize("begins", [True, False])
def test_offsets_with_sentencepiece_point_into_the_text(text: str, begins: bool) -> None:
    """Of an echoed prompt the text lacks the space that its first token carries, behind BOS too."""
    vocabulary = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        *map(chr, range(33, 127)),
        "▁a",
        "▁i",
    ]
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    merges = [("▁", "a"), ("▁", "i")]
    backend = Backend(BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = Tokenizer(backend)
    token_ids = [ids["<s>"]] * begins + tokenizer.encode(text)
    drops = tokenizer.strips_first_space
    hidden = tokenizer.special_ids
    arrays = CompletionLogprobs(0, TokenTexts(tokenizer), hidden, False, drops_space=drops)
    offsets = arrays.take([None] * len(token_ids), token_ids)["text_offset"]
    shown = [i for i, token_id in enumerate(token_ids) if token_id not in hidden]
    ends = [*offsets[1:], len(text)]
    for place in shown:
        piece = tokenizer.token_bytes(token_ids[place]).decode("utf-8", "ignore")
        if piece.strip():
            assert text[offsets[place] : ends[place]] == (piece.lstrip() if place == shown[0] else piece)
