import asyncio
from typing import Any, Literal

from common import FRANCE, PARIS, PERSON, RESULT, URL, WEATHER, check_person, check_told, report
from google.adk.agents import Agent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from pydantic import BaseModel


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[7, 8]


def get_weather(city: str) -> dict:
    """The weather in a city"""
    return RESULT


def events(question: str, *, streams: bool = False, **fields: Any) -> list:
    """All events of one turn of an agent."""

    async def run() -> list:
        model = LiteLlm("hosted_vllm/demo", api_base=f"{URL}/v1", api_key="none", num_retries=0)
        sampling = types.GenerateContentConfig(temperature=0)
        runner = InMemoryRunner(Agent(name="demo", model=model, generate_content_config=sampling, **fields))
        session = await runner.session_service.create_session(app_name=runner.app_name, user_id="a")
        config = RunConfig(streaming_mode=StreamingMode.SSE if streams else StreamingMode.NONE)
        message = types.Content(role="user", parts=[types.Part(text=question)])
        given = {"user_id": "a", "session_id": session.id, "new_message": message, "run_config": config}
        return [event async for event in runner.run_async(**given)]

    return asyncio.run(run())


def said(event: Any) -> str:
    return "".join(part.text or "" for part in event.content.parts)


def text() -> None:
    assert said(events(FRANCE)[-1]) == PARIS


def stream() -> None:
    found = events(FRANCE, streams=True)
    assert sum(bool(event.partial) for event in found) > 3 and said(found[-1]) == PARIS


def tools() -> None:
    (call,) = events(WEATHER, tools=[get_weather])[0].get_function_calls()
    assert (call.name, call.args) == ("get_weather", {"city": "Paris"}), call


def tool_loop() -> None:
    check_told(said(events(WEATHER, tools=[get_weather])[-1]))


def schema() -> None:
    check_person(Person.model_validate_json(said(events(PERSON, output_schema=Person)[-1])).model_dump())


report("google-adk", {"text": text, "stream": stream, "tools": tools, "tool loop": tool_loop, "JSON schema": schema})
