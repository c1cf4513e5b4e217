"""Build the OpenAPI document, and the page of GET /docs that shows it and works without a network.

FastAPI cannot infer the models, because http/body.py parses bodies and responses are plain dicts. Routes declare both
with `documented`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse

from jaxserve.api import answers

_REF = "#/components/schemas/{model}"


def documented(
    answer: type[BaseModel] | None = answers.ServerInfo,
    *,
    body: type[BaseModel] | None = None,
    events: type[BaseModel] | None = None,
    many: bool = False,
    error: type[BaseModel] = answers.Error,
) -> dict[str, Any]:
    """Return keyword arguments for a route decorator.

    answer: model of a response of status 200; None: it is text. With `many` the response may also be a list of it
    events: model of the data of a stream's events
    error: model of the body of a 4xx or 5xx
    """
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if answer is not None:
        shape = _schema(answer)
        whole = {"anyOf": [shape, {"type": "array", "items": shape}]} if many else shape
        content = {"application/json": {"schema": whole}}
    if events is not None:
        content["text/event-stream"] = {"schema": _schema(events)}
    extra: dict[str, Any] = {"responses": {"200": {"content": content}}}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema(body)}}}
    return {"openapi_extra": extra, "responses": _errors(error)}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF.format(model=model.__name__)}


def _errors(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    content = {"application/json": {"schema": _schema(model)}}
    return {
        "4XX": {"description": "An error in the request; the error names the field.", "content": content},
        "5XX": {"description": "A server error, or it is not ready (503, Retry-After).", "content": content},
    }


def install_openapi(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Build /openapi.json. models: the bodies and answers that the routes declare"""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app, models)
        return app.openapi_schema

    app.openapi = build


def _build(app: FastAPI, models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
    pairs = [(model, "validation") for model in models]
    _, schemas = models_json_schema(pairs, ref_template=_REF)  # type: ignore[arg-type]
    components = document.setdefault("components", {})
    components["schemas"] = schemas["$defs"]
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    return document


Json = dict[str, Any]
Text = Callable[[str], str]

# the keywords of JSON Schema, and the names that pydantic writes for a number inside a union
_SIGNS = {
    ("minimum", "ge"): "≥",
    ("exclusiveMinimum", "gt"): ">",
    ("maximum", "le"): "≤",
    ("exclusiveMaximum", "lt"): "<",
}
_SIZES = {
    "minItems": ("at least", "entries"),
    "minLength": ("at least", "characters"),
    "maxItems": ("at most", "entries"),
    "maxLength": ("at most", "characters"),
    "maxProperties": ("at most", "entries"),
}
_POWERS = {2**power - 1: f"2^{power} - 1" for power in (31, 63)}
_POWERS |= {sign * 2**power: f"{'-' if sign < 0 else ''}2^{power}" for power in (31, 63) for sign in (1, -1)}


def type_text(field: Json, *, named: Text = str, text: Text = str) -> str:
    """Return the type and the limits of a field, without null.

    named: formats the name of a model that the field refers to
    text: formats everything else, such as `html.escape`
    """
    branches = [branch for branch in field.get("anyOf", field.get("oneOf", [field])) if branch.get("type") != "null"]
    return " or ".join(dict.fromkeys(_branch(branch, named, text) for branch in branches))


def _branch(branch: Json, named: Text, text: Text) -> str:
    if "anyOf" in branch or "oneOf" in branch:
        return type_text(branch, named=named, text=text)
    if "$ref" in branch:
        return named(branch["$ref"].rpartition("/")[2])
    if "enum" in branch or "const" in branch:
        return text(", ".join(map(str, branch.get("enum", [branch.get("const")]))))
    kind = str(branch.get("type", "any"))
    limits = [text(limit) for limit in _limits(branch)]
    if kind == "array":
        inner = type_text(branch.get("items", {}), named=named, text=text)
        return ", ".join([f"list of {inner}", *limits])
    if kind == "object" and "properties" in branch:
        properties = branch["properties"].items()
        kind += " of " + ", ".join(
            f"{text(name)}: {type_text(value, named=named, text=text)}" for name, value in properties
        )
    return " ".join([kind, *limits])


def _limits(branch: Json) -> Iterator[str]:
    for names, sign in _SIGNS.items():
        for name in names:
            if name in branch:
                yield f"{sign} {_number(branch[name])}"
    for name, (bound, unit) in _SIZES.items():
        if name in branch:
            yield f"{bound} {branch[name]} {'entries' if branch.get('type') == 'array' else unit}"


def _number(value: float) -> str:
    return _POWERS.get(int(value)) or f"{int(value) if value == int(value) else value}"


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
code { background: #f3f3f3; padding: 0 .2em }
td { vertical-align: top; padding: .2em .8em .2em 0 }
summary { cursor: pointer; padding: .2em 0 } table { border-spacing: 0; font-size: 14px }
"""


def install_docs(app: FastAPI) -> None:
    """Add the route. The page is rendered at the first request."""
    pages: list[str] = []

    async def docs(request: Request) -> HTMLResponse:
        if not pages:
            pages.append(render(app.openapi()))
        return HTMLResponse(pages[0])

    app.add_api_route("/docs", docs, methods=["GET"], include_in_schema=False)


def render(document: Json) -> str:
    """Render the page of an OpenAPI document."""
    title = f"{document['info']['title']} {document['info']['version']}"
    operations = [
        _operation(path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    shapes = [_schema_text(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    body = [f"<h1>{escape(title)}</h1>", '<p>The same as JSON: <a href="openapi.json">openapi.json</a>.</p>']
    body += ["<h2>Routes</h2>", *operations, "<h2>Requests and responses</h2>", *shapes]
    return f"{head}<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"


def _operation(path: str, method: str, operation: Json) -> str:
    lines = [escape(operation.get("description", ""))]
    for parameter in operation.get("parameters", ()):
        lines.append(f"{parameter['in']} <code>{escape(parameter['name'])}</code>: {_type(parameter['schema'])}")
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        lines.append(f"takes <code>{kind}</code>: {_type(content['schema'])}")
    for status, answer in operation["responses"].items():
        for kind, content in answer.get("content", {}).items():
            lines.append(f"{status}: <code>{kind}</code> {_type(content.get('schema', {}))}")
    name = f"<b>{method.upper()}</b> <code>{escape(path)}</code> {escape(operation.get('summary', ''))}"
    return f"<details><summary>{name}</summary><p>{'<br>'.join(lines)}</p></details>"


def _schema_text(name: str, schema: Json) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(field)}</code>{' *' if field in required else ''}</td>"
        f"<td>{_type(value)}</td><td>{escape(value.get('description', ''))}</td></tr>"
        for field, value in schema.get("properties", {}).items()
    ]
    about = escape(schema.get("description", ""))
    return f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{about}</p><table>{"".join(rows)}</table>'


def _type(schema: Json) -> str:
    return type_text(schema, named=_link, text=escape)


def _link(name: str) -> str:
    return f'<a href="#{escape(name)}">{escape(name)}</a>'
