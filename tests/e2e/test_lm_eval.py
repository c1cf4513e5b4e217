"""lm-eval's local-completions protocol on the demo model: what it sends and reads, and that the numbers are right."""

from typing import Any

import httpx2
import openai
import pytest

from jaxserve.library.serving import RunningServer

CASES = [
    ("The capital of France is", " Paris."),
    ("What is the capital of Japan?", " The capital of Japan is Tokyo."),
    ("Once upon a time", " there was a cat."),
]


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Any:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def encode(http: Any, text: str) -> list[int]:
    return http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]


def loglikelihood(choice: dict[str, Any], context: int, dropped: int) -> tuple[float, bool]:
    """As lm-eval's parse_logprobs reads a choice; `dropped` new tokens are at the end."""
    logprobs = choice["logprobs"]
    end = len(logprobs["token_logprobs"]) - dropped
    values, tops = logprobs["token_logprobs"][context:end], logprobs["top_logprobs"][context:end]
    greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
    return sum(values), greedy


def test_the_remote_tokenizer(http: Any) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] and info["chat_template"]
    ids = encode(http, CASES[0][0])
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == CASES[0][0]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_loglikelihood(http: Any, max_tokens: int) -> None:
    contexts = [encode(http, context) for context, _ in CASES]
    prompts = [ids + encode(http, answer) for ids, (_, answer) in zip(contexts, CASES, strict=True)]
    body = {"model": "demo", "prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1}
    answer = http.post("/v1/completions", json=body | {"seed": 1234, "echo": True}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, prompt, context in zip(answer["choices"], prompts, contexts, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(prompt) + max_tokens
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        pairs = list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[1:]
        assert all(top[token] == value for token, value, top in pairs), "bit for bit"
        total, greedy = loglikelihood(choice, len(context), max_tokens)
        own = engines_own(http, prompt)
        assert logprobs["token_logprobs"][1 : len(prompt)] == pytest.approx(own[1:], abs=1e-5)  # it had neighbours
        assert total == pytest.approx(sum(own[len(context) :]), abs=1e-4)
        assert greedy == is_greedy(http, context, prompt[len(context) :])


def test_the_numbers_are_the_engines_own(http: Any) -> None:
    prompt = encode(http, "".join(CASES[0]))
    body = {"model": "demo", "prompt": [prompt], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    logprobs = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][1 : len(prompt)] == engines_own(http, prompt)[1:], "bit for bit"


def engines_own(http: Any, prompt: list[int]) -> list[float]:
    """The prompt's log-probabilities by SGLang's native route."""
    body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 0}
    meta = http.post("/generate", json=body | {"sampling_params": {"max_new_tokens": 1}}).json()["meta_info"]
    return [value for value, *_ in meta["input_token_logprobs"]]


def is_greedy(http: Any, context: list[int], answer: list[int]) -> bool:
    """Whether greedy decoding writes exactly this answer."""
    body = {"model": "demo", "prompt": context, "temperature": 0, "max_tokens": len(answer)}
    made = http.post("/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True}).json()
    return made["choices"][0]["token_ids"] == answer


def test_generate_until(client: openai.OpenAI, http: Any) -> None:
    prompts = [encode(http, context) for context, _ in CASES]
    stops = [".", "\n\n"]
    answer = client.completions.create(
        model="demo", prompt=prompts, max_tokens=24, temperature=0, stop=stops, seed=1234
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all("." not in choice.text and "\n\n" not in choice.text for choice in answer.choices)
    assert answer.choices[0].finish_reason in ("stop", "length")
