import json

from common import FRANCE, PARIS, PERSON, RESULT, SCHEMA, TOOL, URL, WEATHER, check_person, check_told, report
from huggingface_hub import InferenceClient

client = InferenceClient(base_url=f"{URL}/v1", api_key="none")


def ask(text: str, **fields):
    return client.chat_completion([{"role": "user", "content": text}], model="demo", temperature=0, **fields)


def text() -> None:
    assert ask(FRANCE).choices[0].message.content == PARIS


def stream() -> None:
    chunks = [chunk.choices[0].delta.content or "" for chunk in ask(FRANCE, stream=True)]
    assert len(chunks) > 3 and "".join(chunks) == PARIS


def tools() -> None:
    [call] = ask(WEATHER, tools=[TOOL]).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def tool_loop() -> None:
    [call] = ask(WEATHER, tools=[TOOL]).choices[0].message.tool_calls
    function = {"name": call.function.name, "arguments": call.function.arguments}
    messages = [
        {"role": "user", "content": WEATHER},
        {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps(RESULT)},
    ]
    answer = client.chat_completion(messages, model="demo", temperature=0, tools=[TOOL])
    check_told(answer.choices[0].message.content)


def schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    check_person(json.loads(ask(PERSON, response_format=wanted).choices[0].message.content))


def logprobs() -> None:
    assert ask(FRANCE, logprobs=True, top_logprobs=2).choices[0].logprobs.content[0].token == "The"


report(
    "huggingface_hub",
    {
        "text": text,
        "stream": stream,
        "tools": tools,
        "tool loop": tool_loop,
        "JSON schema": schema,
        "logprobs": logprobs,
    },
)
