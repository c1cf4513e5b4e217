"""Read a task from the body of /v1/decisions: the whole input as one text, and the options of each question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import orjson

from jaxserve.api.decisions.protocol import (
    MAX_BYTES_OF_JSON,
    MAX_LEVELS_OF_JSON,
    MAX_VALUES_OF_JSON,
    DecisionItem,
    DecisionPart,
    DecisionQuestion,
    DecisionRequest,
)
from jaxserve.errors import InvalidValueError, UnsupportedParameterError

T = TypeVar("T")

_TRUTH = ("The statement is true.", "The statement is false.")
# who wrote a content -> the types of its parts
_QUESTION = ("input_text", "input_image", "input_json")
_PARTS = {
    "user": _QUESTION,
    "developer": ("input_text",),
    "system": ("input_text",),
    "assistant": ("output_text", "refusal"),
    "output": ("input_text", "input_image"),
    "question": _QUESTION,
}
_FIELDS = {"input_text": "text", "output_text": "text", "refusal": "refusal", "input_json": "data"}
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}  # type -> the field of its input


@dataclass(frozen=True)
class Question:
    """A question with the texts of its options."""

    asked: DecisionQuestion
    text: str
    options: Sequence[str]


@dataclass(frozen=True)
class DecisionTask:
    """The input as one text, and the questions about it."""

    text: str
    questions: Sequence[Question]


def decision_task(body: DecisionRequest) -> DecisionTask:
    """Read and check a body. Raises a RequestError that names the field."""
    text = body.input if isinstance(body.input, str) else _transcript(body.input)
    return DecisionTask(text, [_question(each, f"questions.{i}") for i, each in enumerate(body.questions)])


def _transcript(items: Sequence[DecisionItem]) -> str:
    """Write the items as one text, each below a line that says what it is."""
    calls: set[str] = set()
    written = []
    for number, item in enumerate(items):
        head, text = _item(item, f"input.{number}", calls)
        written.append(f"[{head}]\n{text}")
    return "\n\n".join(written)


def _item(item: DecisionItem, param: str, calls: set[str]) -> tuple[str, str]:
    """Return (what an item is, its text). calls: ids of the calls so far"""
    if item.type == "message":
        role = _given(item.role, f"{param}.role")
        return role, _content(_given(item.content, f"{param}.content"), role, f"{param}.content")
    call_id = _given(item.call_id, f"{param}.call_id")
    if item.type in _CALLS:
        calls.add(call_id)
        name, field = _given(item.name, f"{param}.name"), _CALLS[item.type]
        given = _given(getattr(item, field), f"{param}.{field}")
        return f"call {call_id} of {item.namespace or ''}{'.' if item.namespace else ''}{name}", given
    if call_id not in calls:
        message = f"No tool call found for function call output with call_id {call_id[:100]}."
        raise InvalidValueError(message, param=f"{param}.call_id")
    output = _given(item.output, f"{param}.output")
    return f"output of call {call_id}", _content(output, "output", f"{param}.output")


def _given(value: T | None, param: str) -> T:
    if value is None:
        raise InvalidValueError(f"{param} is missing.", param=param, code="missing_required_parameter")
    return value


def _content(content: str | Sequence[DecisionPart], kind: str, param: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, kind, f"{param}.{number}") for number, part in enumerate(content))


def _part(part: DecisionPart, kind: str, param: str) -> str:
    if part.type not in _PARTS[kind]:
        message = f"{param}: a part of the type {part.type} is not allowed here."
        raise InvalidValueError(message, param=f"{param}.type")
    if part.type == "input_image":
        raise UnsupportedParameterError(f"{param}: the model reads text, no images.", param=param)
    field = _FIELDS[part.type]
    value = _given(getattr(part, field), f"{param}.{field}")
    return value if isinstance(value, str) else _json(value, f"{param}.data")


def _json(value: object, param: str) -> str:
    """Return a value as compact JSON text. Raises InvalidValueError if it exceeds the API's limits."""
    raw = orjson.dumps(value)
    count, level, depth = 0, [value], 0
    while level and count <= MAX_VALUES_OF_JSON:
        count += len(level)
        inner = [each for each in level if isinstance(each, dict | list)]
        depth += bool(inner)
        level = [each for box in inner for each in (box.values() if isinstance(box, dict) else box)]
    if len(raw) > MAX_BYTES_OF_JSON or count > MAX_VALUES_OF_JSON or depth > MAX_LEVELS_OF_JSON:
        message = (
            f"{param} has more than {MAX_LEVELS_OF_JSON} levels, {MAX_VALUES_OF_JSON} values or "
            f"{MAX_BYTES_OF_JSON} bytes."
        )
        raise InvalidValueError(message, param=param)
    return raw.decode()


def _question(asked: DecisionQuestion, param: str) -> Question:
    text = _content(asked.instructions, "question", f"{param}.instructions")
    match asked.type:
        case "predicate":
            return Question(asked, text, _TRUTH)
        case "choice":
            choices = _given(asked.choices, f"{param}.choices")
            _check_unique([(type(each.value), each.value) for each in choices], f"{param}.choices")
            names = [(str(each.value).lower() if isinstance(each.value, bool) else each.value) for each in choices]
            return Question(asked, text, _described(names, [each.description for each in choices]))
        case "score":
            levels = _given(asked.levels, f"{param}.levels")
            _check_unique([each.label for each in levels], f"{param}.levels")
            return Question(
                asked, text, _described([each.label for each in levels], [each.description for each in levels])
            )


def _described(names: Sequence[str], descriptions: Sequence[str | None]) -> list[str]:
    return [f"{name}: {more}" if more else name for name, more in zip(names, descriptions, strict=True)]


def _check_unique(values: Sequence[object], param: str) -> None:
    if len(set(values)) != len(values):
        raise InvalidValueError(f"{param} has the same entry twice.", param=param)
