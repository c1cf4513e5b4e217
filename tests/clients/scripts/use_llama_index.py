import asyncio
import json
from typing import Literal

from common import FRANCE, PARIS, PERSON, RESULT, URL, WEATHER, check_told, report
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

FIELDS = {
    "model": "demo",
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "temperature": 0,
    "context_window": 2048,
    "is_chat_model": True,
    "is_function_calling_model": True,
    "max_retries": 0,
}
model = OpenAILike(**FIELDS)


class Person(BaseModel):
    """A person"""

    name: Literal["Ann", "Bob"]
    age: Literal[7, 8]


def get_weather(city: str) -> str:
    """The weather in a city"""
    return json.dumps(RESULT)


def text() -> None:
    assert model.chat([ChatMessage(FRANCE)]).message.content == PARIS


def stream() -> None:
    pieces = [chunk.delta or "" for chunk in model.stream_chat([ChatMessage(FRANCE)])]
    assert len(pieces) > 3 and "".join(pieces) == PARIS


def tools() -> None:
    found = model.chat_with_tools(
        [FunctionTool.from_defaults(get_weather, description="The weather in a city")], user_msg=WEATHER
    )
    [call] = model.get_tool_calls_from_response(found)
    assert call.tool_name == "get_weather" and call.tool_kwargs["city"], call


def tool_loop() -> None:
    async def run() -> str:
        return str(await FunctionAgent(tools=[get_weather], llm=model).run(WEATHER))

    check_told(asyncio.run(run()))


def schema() -> None:
    structured = OpenAILike(**FIELDS, should_use_structured_outputs=True).as_structured_llm(Person)
    assert structured.chat([ChatMessage(PERSON)]).raw.age in (7, 8)


def logprobs() -> None:
    found = OpenAILike(**FIELDS, additional_kwargs={"logprobs": True, "top_logprobs": 2}).chat([ChatMessage(FRANCE)])
    assert found.raw.choices[0].logprobs.content[0].token == "The"


def embeddings() -> None:
    made = OpenAILikeEmbedding(model_name="demo", api_base=f"{URL}/v1", api_key="none")
    assert len(made.get_text_embedding("a cat")) > 1


report(
    "llama-index-llms-openai-like",
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
