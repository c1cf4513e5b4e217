"""Write docs/errors.md: every error that a client can get, read from the code that raises it.

python -m docgen.errors > docs/errors.md
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxserve.api.app import create_app
from jaxserve.errors import ContextLengthError, HTTPError

_HEAD = """\
# Errors

Made by `python -m docgen.errors`; tests compare it with the code and with every error that they cause.

An error is `{"error": {"message", "type", "param", "code"}}`; `param` names the field. Anthropic's and Ollama's routes
have [others](routes.md). In a stream an error is an event. A word in braces varies.
"""


class Entry(NamedTuple):
    """The status, type and code of an error."""

    status: int
    type: str
    code: str | None


# What to do about each error. A test fails if an error has no entry here.
FIXES: dict[tuple[int, str | None], str] = {
    (400, "context_length_exceeded"): "Shorten the conversation or the prompt; `truncate_prompt_tokens` cuts it.",
    (400, "conversation_locked"): "Wait until the response that works on the conversation has ended.",
    (400, "previous_response_not_found"): "Send the whole conversation: the response expired or was deleted.",
    (400, "invalid_image_url"): "Send the image as a data: URL, or from a host of `media.allowed_hosts`.",
    (400, "invalid_json"): "Send a JSON body.",
    (400, "invalid_json_schema"): "Simplify the schema, the pattern or the grammar that `param` names.",
    (400, "invalid_type"): "Send the type that docs/routes.md names for the field.",
    (400, "invalid_value"): "Send a value that docs/routes.md allows for the field.",
    (400, "missing_required_parameter"): "Send the field that `param` names.",
    (400, "request_aborted"): "`/abort_request` ended the request: send it again if it is still needed.",
    (400, "thread_already_continued"): "Continue the latest reply, or send the whole conversation.",
    (400, "thread_continue_in_flight"): "Wait until the other request has ended, or send the whole conversation.",
    (400, "thread_fingerprint_mismatch"): "Leave the fields out, or send the whole conversation to change them.",
    (400, "thread_unsupported_request"): "Send the whole conversation without `thread`; SDKs do so by themselves.",
    (400, "unsupported_parameter"): "Leave the field out: this server does not support it.",
    (401, "invalid_api_key"): "Send the server's key as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
    (403, "host_not_allowed"): "Use an address of the server; the operator lists its names in `server.allowed_hosts`.",
    (403, "origin_not_allowed"): "Ask the operator: `server.cors_origins` lists the pages' origins.",
    (403, None): "Ask the operator: the route is disabled.",
    (404, None): "Check the id; it may have expired or been deleted.",
    (404, "model_not_found"): "Use a name of `GET /v1/models`.",
    (404, "thread_not_found"): "Send the whole conversation: the thread has expired. SDKs do so by themselves.",
    (404, "not_found"): "Check the path; docs/routes.md lists them.",
    (503, "weights_lost"): "Update the weights again, all of them.",
    (405, "method_not_allowed"): "Use a method of the `Allow` header.",
    (408, "request_timeout"): "Send the body faster.",
    (
        408,
        "stream_not_read",
    ): "Read the stream as it arrives; the operator sets `server.max_unread_bytes`.",
    (409, None): "Read the state of the object first.",
    (413, None): "Send less at once; the operator sets the limit of bytes, `server.max_body_bytes`.",
    (415, "unsupported_content_encoding"): "Send the body without compression.",
    (429, "rate_limit_exceeded"): "Wait as long as `Retry-After` says, then send it again.",
    (500, None): "Send it again; if the error remains, ask the operator for the server's log.",
    (500, "internal_error"): "A defect of the server: ask the operator for its log.",
    (501, "not_implemented"): "The operator chooses the model when the server starts.",
    (503, "engine_dead"): "Wait as long as `Retry-After` says: the engine is restarted. The request is not replayed.",
    (502, "model_ended"): "Send it again: the model's process is started again, and other models are not affected.",
    (503, "media_memory_full"): "Wait as long as `Retry-After` says: requests hold many images (`media.memory`).",
    (503, "not_ready"): "Wait as long as `Retry-After` says: the server is loading or draining.",
    (503, "rate_limit_exceeded"): "Wait as long as `Retry-After` says, then send it again.",
    (503, "store_damaged"): "Ask the operator: files, batches and stored responses are disabled, generation works.",
    (503, "store_lease_lost"): "Send it to the server that has the store, or ask the operator.",
    (503, "store_unavailable"): "Ask the operator for a store; generation works without one.",
    (504, "request_timeout"): "Request fewer tokens, or send it when the server is less busy.",
    (507, "insufficient_storage"): "Delete files, or ask the operator for disk space.",
}

# raised by calls whose message or code is not a literal
_COMPUTED: list[tuple[Entry, str]] = [
    (Entry(400, "invalid_request_error", "invalid_type"), "{param}: {what is wrong with its type}"),
    (Entry(400, "invalid_request_error", "invalid_value"), "{param}: {what is wrong with its value}"),
    (Entry(400, "invalid_request_error", "missing_required_parameter"), "{param}: Field required"),
    (Entry(503, "requests", "rate_limit_exceeded"), "the queue is full ({waiting} requests wait); on /v1/responses"),
    *(
        (Entry(400, "invalid_request_error", "context_length_exceeded"), example.message)
        for example in (
            ContextLengthError.too_long(6013, 2047, context=2048, param="messages"),
            ContextLengthError.no_room(1000, 2000, 2048),
        )
    ),
]


def entries() -> dict[Entry, list[str]]:
    """List each error with the messages that it can have."""
    classes = {each.__name__: each for each in _subclasses(HTTPError)}
    found: dict[Entry, set[str]] = {Entry(each.status, each.type, each.code): set() for each in classes.values()}
    for entry, words in _COMPUTED:
        found.setdefault(entry, set()).add(words)
    makes_one = re.compile(rf"\b(?:{'|'.join(classes)})\(")
    for path in sorted((Path(__file__).parents[1] / "jaxserve").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not makes_one.search(text):
            continue  # parsing and walking all files takes ten times as long
        for name, code, words in _calls(ast.parse(text), classes):
            known = classes[name]
            found.setdefault(Entry(known.status, known.type, code or known.code), set()).update(words)
    ordered = sorted(found, key=lambda entry: (entry.status, entry.code or ""))
    return {entry: sorted(found[entry]) for entry in ordered if found[entry]}


def _subclasses(kind: type[HTTPError]) -> Iterator[type[HTTPError]]:
    assert create_app  # imported so that the classes of its modules are defined
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _calls(tree: ast.Module, classes: dict[str, type[HTTPError]]) -> Iterator[tuple[str, str | None, list[str]]]:
    """List (class, code, messages) for each call that makes an error."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes):
                continue
            codes = [word.value for word in node.keywords if word.arg == "code"]
            if codes and not isinstance(codes[0], ast.Constant):
                continue  # in _COMPUTED
            first = node.args[0] if node.args else None
            words = _text_before(node, first.id, function) if isinstance(first, ast.Name) else _template(first)
            code = codes[0].value if codes and isinstance(codes[0], ast.Constant) else None
            yield node.func.id, code, [words or "{message}"]  # type: ignore[misc]


def _text_before(call: ast.Call, name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the text of variable `name` at `call`: its last assignment, and what is added to it."""
    nodes = (node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.AugAssign))
    text = ""
    for node in sorted(nodes, key=lambda node: node.lineno):
        target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
        if isinstance(target, ast.Name) and target.id == name and node.lineno < call.lineno:
            added = _template(node.value) or ""
            text = text + added if isinstance(node, ast.AugAssign) else added
    return text


def _template(node: ast.expr | None) -> str | None:
    """Return the text with each expression replaced by its last name."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else "{" + _placeholder(part.value) + "}"
        for part in node.values
        if isinstance(part, ast.Constant | ast.FormattedValue)
    )


def _placeholder(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else "..."


def index() -> str:
    """Return the whole page."""
    sections = [_HEAD]
    for entry, words in entries().items():
        fix = FIXES[entry.status, entry.code]
        lines = [f"- `{text}`" for text in words]
        kind = f"type `{entry.type}`, code `{entry.code or 'null'}`. {fix}"
        sections.append("\n".join([f"## {entry.status} {entry.code or entry.type}", "", kind, "", *lines, ""]))
    return "\n".join(sections)


if __name__ == "__main__":
    sys.stdout.write(index())
