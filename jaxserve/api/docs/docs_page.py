"""GET /docs: the OpenAPI document as one static page, which works without a network."""

from __future__ import annotations

from html import escape

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse

from jaxserve.api.docs.type_text import Json, type_text

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
    shapes = [_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
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


def _schema(name: str, schema: Json) -> str:
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
