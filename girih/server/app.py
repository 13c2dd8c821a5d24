"""The server's application: its paths, and what happens before and around them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp

import girih
from girih import plugins
from girih.server.access import Gate
from girih.server.errors import add_handlers
from girih.server.replies.job import ClientGoneError
from girih.server.serving import Serving

DESCRIPTION = """An OpenAI-compatible server.

Not in this version: CUDA, LoRA, KV offload, multimodal input, embeddings.
"""

CLIENT_CLOSED_REQUEST = 499

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for status, text in (
        (400, "The request cannot be served as it is"),
        (401, "An API key is needed"),
        (404, "There is no such model"),
        (408, "The body took too long"),
        (413, "The body is too large"),
        (415, "The body is not JSON"),
        (429, "Too many requests wait"),
        (503, "There is no engine now"),
    )
}


def make_app(serving: Serving) -> ASGIApp:
    """Build the application.

    Args:
        serving: the server.
    """
    app = FastAPI(
        title="Girih", version=girih.__version__, description=DESCRIPTION, redoc_url=None, redirect_slashes=False
    )
    app.state.serving = serving
    for name in plugins.available("girih.server.routes"):
        router = plugins.load("girih.server.routes", name, what="paths").router
        app.include_router(router, responses=_ERRORS)
    add_handlers(app)
    app.add_exception_handler(ClientGoneError, _nobody_is_there)
    _document_errors(app)
    return Gate(app, serving.config)


async def _nobody_is_there(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _document_errors(app: FastAPI) -> None:
    """Let the OpenAPI document say what errors look like: 400 where FastAPI itself would have answered 422."""
    document = app.openapi()
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    text = {"type": ["string", "null"]}
    error = {"type": "object", "properties": {name: text for name in ("message", "type", "param", "code")}}
    schemas["Error"] = {"type": "object", "required": ["error"], "properties": {"error": error}}
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    app.openapi_schema = document
