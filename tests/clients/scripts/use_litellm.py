import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched

import litellm
from common import FRANCE, PARIS, PERSON, RESULT, SCHEMA, TOOL, URL, WEATHER, check_person, check_told, report

FIELDS = {"model": "hosted_vllm/demo", "api_base": f"{URL}/v1", "api_key": "none", "temperature": 0, "num_retries": 0}


def ask(text: str, **fields):
    return litellm.completion(messages=[{"role": "user", "content": text}], **FIELDS, **fields)


def text() -> None:
    assert ask(FRANCE).choices[0].message.content == PARIS


def stream() -> None:
    chunks = [chunk.choices[0].delta.content or "" for chunk in ask(FRANCE, stream=True)]
    assert len(chunks) > 3 and "".join(chunks) == PARIS


def tools() -> None:
    call = ask(WEATHER, tools=[TOOL]).choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def tool_loop() -> None:
    message = ask(WEATHER, tools=[TOOL]).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": json.dumps(RESULT)}
    messages = [{"role": "user", "content": WEATHER}, message, result]
    check_told(litellm.completion(messages=messages, tools=[TOOL], **FIELDS).choices[0].message.content)


def schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    check_person(json.loads(ask(PERSON, response_format=wanted).choices[0].message.content))


def logprobs() -> None:
    assert ask(FRANCE, logprobs=True, top_logprobs=2).choices[0].logprobs.content[0].token == "The"


def embeddings() -> None:
    made = litellm.embedding(
        model="hosted_vllm/demo", input=["a cat", "a dog"], api_base=f"{URL}/v1", api_key="none"
    ).data
    assert len(made) == 2 and len(made[0]["embedding"]) > 1


def rerank() -> None:
    found = litellm.rerank(
        model="hosted_vllm/demo",
        query=FRANCE,
        documents=["Bananas are yellow.", "The capital of France is Paris."],
        top_n=1,
        api_base=URL,
        api_key="none",
    )
    assert len(found.results) == 1 and 0 <= found.results[0]["relevance_score"] <= 1, found


def too_long() -> None:
    """The words of the error are those that the client looks for."""
    try:
        ask("word " * 20000)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no ContextWindowExceededError")


report(
    "litellm",
    {
        "text": text,
        "stream": stream,
        "tools": tools,
        "tool loop": tool_loop,
        "JSON schema": schema,
        "logprobs": logprobs,
        "embeddings": embeddings,
        "rerank": rerank,
        "too long": too_long,
    },
)
