import json
import os
import pathlib
import tempfile

from common import FRANCE, PARIS, PERSON, RESULT, SCHEMA, URL, WEATHER, check_person, check_told, report

folder = pathlib.Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(folder)
(folder / "extra-openai-models.yaml").write_text(f"""\
- model_id: demo
  model_name: demo
  api_base: {URL}/v1
  supports_tools: true
  supports_schema: true
""")
(folder / "keys.json").write_text('{"openai": "none"}')

import llm

model = llm.get_model("demo")


def get_weather(city: str) -> str:
    """The weather in a city"""
    return json.dumps(RESULT)


def text() -> None:
    assert model.prompt(FRANCE, stream=False, temperature=0).text() == PARIS


def stream() -> None:
    pieces = list(model.prompt(FRANCE, temperature=0))
    assert len(pieces) > 3 and "".join(pieces) == PARIS


def tools() -> None:
    [call] = model.prompt(WEATHER, tools=[get_weather], stream=False, temperature=0).tool_calls()
    assert call.arguments == {"city": "Paris"}


def tool_loop() -> None:
    check_told(model.chain(WEATHER, tools=[get_weather], stream=False, options={"temperature": 0}).text().strip())


def schema() -> None:
    check_person(json.loads(model.prompt(PERSON, schema=SCHEMA, stream=False, temperature=0).text()))


report("llm", {"text": text, "stream": stream, "tools": tools, "tool loop": tool_loop, "JSON schema": schema})
