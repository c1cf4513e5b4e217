import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import FRANCE, PARIS, PERSON, RESULT, URL, WEATHER, check_told, report
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[7, 8]


@function_tool
def get_weather(city: str) -> dict:
    """The weather in a city"""
    return RESULT


def agent(**fields) -> Agent:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    settings = fields.pop("model_settings", ModelSettings(temperature=0))
    return Agent(
        "demo", model=OpenAIChatCompletionsModel("demo", openai_client=client), model_settings=settings, **fields
    )


def text() -> None:
    assert Runner.run_sync(agent(), FRANCE).final_output == PARIS


def stream() -> None:
    async def run() -> str:
        result = Runner.run_streamed(agent(), FRANCE)
        kinds = [event.type async for event in result.stream_events()]
        assert kinds.count("raw_response_event") > 3
        return result.final_output

    assert asyncio.run(run()) == PARIS


def tool_loop() -> None:
    check_told(Runner.run_sync(agent(tools=[get_weather]), WEATHER).final_output)


def schema() -> None:
    assert Runner.run_sync(agent(output_type=Person), PERSON).final_output.age in (7, 8)


def forced() -> None:
    """A forced call beside an output type: both in one request."""
    settings = ModelSettings(temperature=0, tool_choice="get_weather")
    both = agent(
        tools=[get_weather], output_type=Person, model_settings=settings, tool_use_behavior="stop_on_first_tool"
    )
    assert "sunny" in str(Runner.run_sync(both, WEATHER).final_output)


report(
    "openai-agents",
    {"text": text, "stream": stream, "tools": forced, "tool loop": tool_loop, "JSON schema": schema},
)
