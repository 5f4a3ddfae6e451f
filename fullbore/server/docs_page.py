"""GET /docs: the API on one page, made from the OpenAPI document, without scripts or anything from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.3rem; border-top: 1px solid #ddd; padding-top: 1rem; }
code { font-family: ui-monospace, monospace; background: #f4f4f4; padding: 0 0.2em; }
table { border-collapse: collapse; width: 100%; }
td { vertical-align: top; padding: 0.2rem 0.8rem 0.2rem 0; border-bottom: 1px solid #eee; }
td:first-child { white-space: nowrap; }
"""


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """The API as a page for people."""
    document = request.app.openapi()
    title = f"{document['info']['title']} {document['info']['version']}"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1><p>{escape(document['info']['description'])} ",
        "For programs: <a href=openapi.json>openapi.json</a>.</p>",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(_operation(document, method, path, operation))
    return HTMLResponse("\n".join(parts))


def _operation(document: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    rows = [
        (parameter["name"], parameter["schema"], bool(parameter.get("required")))
        for parameter in operation.get("parameters", [])
    ]
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is not None:
        schema = _resolve(document, content["schema"])
        required = schema.get("required", [])
        rows += [(name, field, name in required) for name, field in schema.get("properties", {}).items()]
    table = "".join(_row(*row) for row in rows)
    description = escape(operation.get("description", ""))
    return f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{description}</p><table>{table}</table>"


def _row(name: str, schema: dict[str, Any], is_required: bool) -> str:
    text = escape(schema.get("description", ""))
    kind = escape(_kind(schema)) + (", required" if is_required else "")
    return f"<tr><td><code>{escape(name)}</code><td>{kind}<td>{text}"


def _kind(schema: dict[str, Any]) -> str:
    """A type in words: `text or list of integer`."""
    if "anyOf" in schema:
        kinds = [_kind(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    return {"string": "text"}.get(schema.get("type", ""), str(schema.get("type", schema.get("const", "any"))))


def _resolve(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = document["components"]["schemas"].get(name, schema)
    return found
