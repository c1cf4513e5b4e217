import asyncio
from typing import Literal

from common import FRANCE, PARIS, PERSON, RESULT, URL, WEATHER, check_told, report
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[7, 8]


model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
settings = {"temperature": 0}


def text() -> None:
    assert Agent(model, model_settings=settings).run_sync(FRANCE).output == PARIS


def stream() -> None:
    async def run() -> list[str]:
        async with Agent(model, model_settings=settings).run_stream(FRANCE) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(run())
    assert len(pieces) > 3 and "".join(pieces) == PARIS


def tool_loop() -> None:
    agent = Agent(model, model_settings=settings)
    cities = []

    @agent.tool_plain
    def get_weather(city: str) -> dict:
        """The weather in a city"""
        cities.append(city)
        return RESULT

    check_told(agent.run_sync(WEATHER).output)
    assert cities == ["Paris"]


def tools() -> None:
    assert Agent(model, output_type=Person, model_settings=settings).run_sync(PERSON).output.age in (7, 8)


def schema() -> None:
    agent = Agent(model, output_type=NativeOutput(Person), model_settings=settings)
    assert agent.run_sync(PERSON).output.age in (7, 8)


def logprobs() -> None:
    result = Agent(model, model_settings=settings | {"openai_logprobs": True}).run_sync(FRANCE)
    assert result.all_messages()[-1].provider_details["logprobs"][0]["token"] == "The"


report(
    "pydantic-ai-slim",
    {
        "text": text,
        "stream": stream,
        "tools": tools,
        "tool loop": tool_loop,
        "JSON schema": schema,
        "logprobs": logprobs,
    },
)
