from typing import Literal

import instructor
from common import PERSON, URL, report
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[7, 8]


def ask(mode: instructor.Mode):
    return instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)


FIELDS = {"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": PERSON}], "max_retries": 0}


def stream() -> None:
    *_, last = ask(instructor.Mode.JSON_SCHEMA).create_partial(response_model=Person, **FIELDS)
    assert last.age in (7, 8)


def tools() -> None:
    assert ask(instructor.Mode.TOOLS).create(response_model=Person, **FIELDS).age in (7, 8)


def schema() -> None:
    assert ask(instructor.Mode.JSON_SCHEMA).create(response_model=Person, **FIELDS).age in (7, 8)


report("instructor", {"stream": stream, "tools": tools, "JSON schema": schema})
