import json

from anthropic import Anthropic, DefaultHttpxClient, beta_tool
from common import FRANCE, PARIS, PERSON, RESULT, SCHEMA, TOOL, URL, WEATHER, check_person, check_told, report

seen: list[tuple[str | None, int]] = []


def note(response) -> None:
    thread = json.loads(response.request.content).get("thread") or {}
    seen.append((thread.get("type"), response.status_code))


http = DefaultHttpxClient(event_hooks={"response": [note]})
client = Anthropic(base_url=URL, api_key="none", max_retries=0, http_client=http)
asked = {"model": "demo", "max_tokens": 200, "extra_body": {"temperature": 0}}
function = TOOL["function"]
tool = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}


def ask(text: str, **fields):
    return client.messages.create(messages=[{"role": "user", "content": text}], **asked, **fields)


def text() -> None:
    assert ask(FRANCE).content[0].text == PARIS


def stream() -> None:
    with client.messages.stream(messages=[{"role": "user", "content": FRANCE}], **asked) as events:
        pieces = list(events.text_stream)
        assert len(pieces) > 3 and "".join(pieces) == PARIS == events.get_final_message().content[0].text


def tools() -> None:
    call = ask(WEATHER, tools=[tool]).content[-1]
    assert call.name == "get_weather" and call.input == {"city": "Paris"}


def get_weather(city: str) -> str:
    """The weather in a city"""
    return json.dumps(RESULT)


def run_tools(*, stream: bool, **fields) -> list:
    """A whole loop of the SDK's tool runner: the thread and status of each of its requests."""
    seen.clear()
    messages = [{"role": "user", "content": WEATHER}]
    runner = client.beta.messages.tool_runner(
        messages=messages, tools=[beta_tool(get_weather)], stream=stream, **asked, **fields
    )
    replies = [reply.get_final_message() if stream else reply for reply in runner]
    check_told(replies[-1].content[-1].text)
    return list(seen)


def tool_loop() -> None:
    for stream in (False, True):
        assert run_tools(stream=stream) == [("create", 200), ("continue", 200)], seen
        assert run_tools(stream=stream, thread=False) == [(None, 200)] * 2, seen
    content = ask(WEATHER, tools=[tool]).content
    result = {"type": "tool_result", "tool_use_id": content[-1].id, "content": json.dumps(RESULT)}
    messages = [
        {"role": "user", "content": WEATHER},
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result]},
    ]
    check_told(client.messages.create(messages=messages, tools=[tool], **asked).content[0].text)


def schema() -> None:
    answer = ask(PERSON, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    check_person(json.loads(answer.content[0].text))


report("anthropic", {"text": text, "stream": stream, "tools": tools, "tool loop": tool_loop, "JSON schema": schema})
