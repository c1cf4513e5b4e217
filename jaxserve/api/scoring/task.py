"""Read a task from the bodies of the scoring routes: pairs of texts, or one input and the options of each question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import orjson

from jaxserve.api.generate.task import RequestOptions, new_id
from jaxserve.api.scoring.protocol import (
    MAX_BYTES_OF_JSON,
    MAX_LEVELS_OF_JSON,
    MAX_VALUES_OF_JSON,
    DecisionItem,
    DecisionPart,
    DecisionQuestion,
    DecisionRequest,
    PairFields,
    RerankRequest,
    ScoreRequest,
    ScoringFields,
)
from jaxserve.errors import InvalidValueError, UnsupportedParameterError
from jaxserve.types.page_keys import salt_of

_NAMES = (("queries", "text_1", "data_1"), ("documents", "text_2", "data_2"))


@dataclass(frozen=True, kw_only=True)
class PairTask:
    """Pairs of texts to score: one query for all documents, or one for each.

    keep: tokens that a prompt may have; its document is cut to fit. -1: as many as fit; None: no cut
    document_tokens: cut each document to this many tokens
    activation: whether scores are probabilities instead of the model's own logits
    params: names of the fields of the queries and of the documents, for errors
    """

    queries: Sequence[str]
    documents: Sequence[str]
    keep: int | None = None
    document_tokens: int | None = None
    instruction: str | None = None
    activation: bool = True
    params: tuple[str, str] = ("query", "documents")

    def query_of(self, number: int) -> int:
        """Return the index of a document's query."""
        return number if len(self.queries) > 1 else 0


def rerank_task(body: RerankRequest) -> PairTask:
    """Read and check a body. Raises InvalidValueError that names the field."""
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    return _task(body, [body.query], documents, ("query", "documents"))


def score_task(body: ScoreRequest) -> PairTask:
    """Read and check a body. Raises InvalidValueError that names the field."""
    (first, queries), (second, documents) = (_given(body, names) for names in _NAMES)
    if not (queries and documents):
        param = second if queries else first
        raise InvalidValueError(f"{param}: At least one text element must be given", param=param)
    if len(queries) not in (1, len(documents)):
        raise InvalidValueError(f"{first}: Input lengths must be either 1:1, 1:N or N:N", param=first)
    return _task(body, queries, documents, (first, second))


def scoring_options(body: ScoringFields, prefix: str) -> RequestOptions:
    return RequestOptions(
        request_id=new_id(prefix, body.request_id or body.rid),
        priority=body.priority or 0,
        cache_salt=salt_of(body.cache_salt, None),
    )


def check_keep(keep: int | None) -> None:
    """Raise InvalidValueError if no token of a prompt would be left."""
    if keep == 0:
        message = "truncate_prompt_tokens is 0: no token of the prompt would be left."
        raise InvalidValueError(message, param="truncate_prompt_tokens")


def _task(body: PairFields, queries: list[str], documents: list[str], params: tuple[str, str]) -> PairTask:
    check_keep(body.truncate_prompt_tokens)
    for texts, param in ((queries, params[0]), (documents, params[1])):
        if not all(texts):
            raise InvalidValueError(f"{param} has an empty text.", param=param)
    return PairTask(
        queries=queries,
        documents=documents,
        keep=body.truncate_prompt_tokens,
        document_tokens=body.max_tokens_per_doc,
        instruction=body.instruction,
        activation=body.use_activation is not False,
        params=params,
    )


def _given(body: ScoreRequest, names: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return (name of the field, its texts). Raises InvalidValueError if more than one of the names is given."""
    found = [name for name in names if getattr(body, name) is not None]
    if len(found) > 1:
        message = f"{found[1]} is another name of {found[0]}; give one of them."
        raise InvalidValueError(message, param=found[1])
    value = cast("str | list[str] | None", getattr(body, found[0])) if found else None
    return (found or names)[0], [value] if isinstance(value, str) else value or []


T = TypeVar("T")

_TRUTH = ("The statement is true.", "The statement is false.")
# author of a content -> the types of its parts
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
    """Write the items as one text, each below a line that names its kind."""
    calls: set[str] = set()
    written = []
    for number, item in enumerate(items):
        head, text = _item(item, f"input.{number}", calls)
        written.append(f"[{head}]\n{text}")
    return "\n\n".join(written)


def _item(item: DecisionItem, param: str, calls: set[str]) -> tuple[str, str]:
    """Return (kind of the item, its text). calls: ids of the calls so far"""
    if item.type == "message":
        role = _given_decision(item.role, f"{param}.role")
        return role, _content(_given_decision(item.content, f"{param}.content"), role, f"{param}.content")
    call_id = _given_decision(item.call_id, f"{param}.call_id")
    if item.type in _CALLS:
        calls.add(call_id)
        name = _given_decision(item.name, f"{param}.name")
        field = _CALLS[item.type]
        given = _given_decision(getattr(item, field), f"{param}.{field}")
        return f"call {call_id} of {item.namespace or ''}{'.' if item.namespace else ''}{name}", given
    if call_id not in calls:
        message = f"No tool call found for function call output with call_id {call_id[:100]}."
        raise InvalidValueError(message, param=f"{param}.call_id")
    output = _given_decision(item.output, f"{param}.output")
    return f"output of call {call_id}", _content(output, "output", f"{param}.output")


def _given_decision(value: T | None, param: str) -> T:
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
    value = _given_decision(getattr(part, field), f"{param}.{field}")
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
            choices = _given_decision(asked.choices, f"{param}.choices")
            _check_unique([(type(each.value), each.value) for each in choices], f"{param}.choices")
            names = [(str(each.value).lower() if isinstance(each.value, bool) else each.value) for each in choices]
            return Question(asked, text, _described(names, [each.description for each in choices]))
        case "score":
            levels = _given_decision(asked.levels, f"{param}.levels")
            _check_unique([each.label for each in levels], f"{param}.levels")
            return Question(
                asked, text, _described([each.label for each in levels], [each.description for each in levels])
            )


def _described(names: Sequence[str], descriptions: Sequence[str | None]) -> list[str]:
    return [f"{name}: {more}" if more else name for name, more in zip(names, descriptions, strict=True)]


def _check_unique(values: Sequence[object], param: str) -> None:
    if len(set(values)) != len(values):
        raise InvalidValueError(f"{param} has the same entry twice.", param=param)
