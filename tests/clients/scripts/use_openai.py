import json

from common import FRANCE, PARIS, PERSON, RESULT, SCHEMA, TOOL, URL, WEATHER, check_person, check_told, report
from openai import OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
asked = {"model": "demo", "temperature": 0}


def ask(text: str, **fields):
    return client.chat.completions.create(messages=[{"role": "user", "content": text}], **asked, **fields)


def text() -> None:
    assert ask(FRANCE).choices[0].message.content == PARIS


def stream() -> None:
    chunks = [chunk.choices[0].delta.content or "" for chunk in ask(FRANCE, stream=True)]
    assert len(chunks) > 3 and "".join(chunks) == PARIS


def tools() -> None:
    call = ask(WEATHER, tools=[TOOL]).choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}


def tool_loop() -> None:
    message = ask(WEATHER, tools=[TOOL]).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": json.dumps(RESULT)}
    messages = [{"role": "user", "content": WEATHER}, message, result]
    check_told(client.chat.completions.create(messages=messages, tools=[TOOL], **asked).choices[0].message.content)


def schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    check_person(json.loads(ask(PERSON, response_format=wanted).choices[0].message.content))


def logprobs() -> None:
    entries = ask(FRANCE, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert entries[0].token == "The" and len(entries[0].top_logprobs) == 2


def embeddings() -> None:
    first, second = client.embeddings.create(model="demo", input=["a cat", "a dog"]).data
    assert len(first.embedding) == len(second.embedding) > 1 and first.embedding != second.embedding


report(
    "openai",
    {
        "text": text,
        "stream": stream,
        "tools": tools,
        "tool loop": tool_loop,
        "JSON schema": schema,
        "logprobs": logprobs,
        "embeddings": embeddings,
    },
)
