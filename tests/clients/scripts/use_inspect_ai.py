import asyncio
import json

from common import FRANCE, PARIS, PERSON, RESULT, SCHEMA, URL, WEATHER, check_person, check_told, report
from inspect_ai.model import (
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.tool import tool
from inspect_ai.util import JSONSchema


@tool
def get_weather():
    async def execute(city: str) -> str:
        """The weather in a city

        Args:
            city: The city
        """
        return json.dumps(RESULT)

    return execute


def ask(messages, tools=(), **config):
    async def run():
        model = get_model("openai-api/jaxserve/demo", base_url=f"{URL}/v1", api_key="none", memoize=False)
        return await model.generate(messages, tools=list(tools), config=GenerateConfig(temperature=0, **config))

    return asyncio.run(run())


def text() -> None:
    assert ask(FRANCE).completion == PARIS


def tools() -> None:
    [call] = ask(WEATHER, [get_weather()]).choices[0].message.tool_calls
    assert (call.function, call.arguments) == ("get_weather", {"city": "Paris"})


def tool_loop() -> None:
    message = ask(WEATHER, [get_weather()]).choices[0].message
    result = ChatMessageTool(content=json.dumps(RESULT), tool_call_id=message.tool_calls[0].id, function="get_weather")
    check_told(ask([ChatMessageUser(content=WEATHER), message, result], [get_weather()]).completion)


def schema() -> None:
    wanted = ResponseSchema(name="person", json_schema=JSONSchema.model_validate(SCHEMA))
    check_person(json.loads(ask(PERSON, response_schema=wanted).completion))


def logprobs() -> None:
    found = ask(FRANCE, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert found.content[0].token == "The"


report(
    "inspect-ai",
    {"text": text, "tools": tools, "tool loop": tool_loop, "JSON schema": schema, "logprobs": logprobs},
)
