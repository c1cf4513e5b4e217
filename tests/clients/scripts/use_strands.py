import asyncio
from typing import Any, Literal

from common import FRANCE, PARIS, PERSON, RESULT, URL, WEATHER, check_person, check_told, report
from pydantic import BaseModel
from strands import Agent, tool
from strands.models.openai import OpenAIModel


class Person(BaseModel):
    """A person"""

    name: Literal["Ann", "Bob"]
    age: Literal[7, 8]


@tool
def get_weather(city: str) -> dict:
    """The weather in a city"""
    return RESULT


def agent(**fields: Any) -> Agent:
    client = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
    model = OpenAIModel(client_args=client, model_id="demo", params={"temperature": 0})
    return Agent(model=model, callback_handler=None, **fields)


def text() -> None:
    assert str(agent()(FRANCE)).strip() == PARIS


def stream() -> None:
    async def run() -> list[str]:
        return [event["data"] async for event in agent().stream_async(FRANCE) if "data" in event]

    pieces = asyncio.run(run())
    assert len(pieces) > 3 and "".join(pieces) == PARIS, pieces


def tools() -> None:
    asked = agent(tools=[get_weather])
    asked(WEATHER)
    (call,) = [part["toolUse"] for message in asked.messages for part in message["content"] if "toolUse" in part]
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Paris"}), call


def tool_loop() -> None:
    check_told(str(agent(tools=[get_weather])(WEATHER)))


def schema() -> None:
    check_person(agent().structured_output(Person, PERSON).model_dump())


report(
    "strands-agents", {"text": text, "stream": stream, "tools": tools, "tool loop": tool_loop, "JSON schema": schema}
)
