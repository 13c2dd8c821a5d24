"""What a client is told when a request cannot be served: a status, and a body as OpenAI's."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from girih.errors import ConfigError, EngineDiedError, ExecutorError, GirihError, RequestError

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An answer that is an error; of a kind that FastAPI lets through, also while it reads a body.

    Args:
        status: the HTTP status.
        message: for the user.
        param: the field of the body that is wrong, if one is.
        code: a word for programs, as OpenAI's.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the JSON of an error, as OpenAI's."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    # a message may quote half a surrogate pair of the request, which no answer can hold
    whole = {
        name: text and text.encode(errors="replace").decode() for name, text in (("message", message), ("param", param))
    }
    return {"error": {**whole, "type": kind, "code": code}}


def error_response(error: ApiError) -> Response:
    """Return the answer of an error."""
    body = msgspec.json.encode(error_body(error.status, error.message, error.param, error.code))
    return Response(body, error.status, headers=error.headers, media_type="application/json")


def as_api_error(error: GirihError) -> ApiError:
    """Say of an error for the user whose fault it is."""
    if isinstance(error, EngineDiedError):
        return ApiError(503, str(error), code="engine_unavailable", headers={"Retry-After": "5"})
    if isinstance(error, ExecutorError):
        return ApiError(500, str(error))
    return ApiError(400 if isinstance(error, (RequestError, ConfigError)) else 500, str(error))


def add_handlers(app: FastAPI) -> None:
    """Let every error of an app be answered in the same form."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(GirihError, _on_girih_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_girih_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, GirihError)
    return error_response(as_api_error(error))


async def _on_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {})))


async def _on_bug(_request: Request, _error: Exception) -> Response:
    return error_response(ApiError(500, "an error in Girih; the server's log says where"))


async def _on_invalid_body(_request: Request, error: Exception) -> Response:
    """Name the first field that is wrong; a field that nobody knows is refused, never ignored."""
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    # of a union every alternative complains: the longest path is the one that came furthest
    first = unknown[0] if unknown else max(problems, key=lambda problem: len(problem["loc"]))
    path = [str(part) for part in first["loc"] if part != "body" and not _names_a_type(part)]
    name = ".".join(path)
    if unknown:
        message = f"{name}: Girih does not support this field; leave it out"
    elif first["loc"] == ("body",):
        message = "the body must be a JSON object"
    elif first["type"] == "json_invalid":
        message = f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}"
    else:
        message = f"{name}: {first['msg']}" if name else str(first["msg"])
    return error_response(ApiError(400, message, param=name or None))


def _names_a_type(part: object) -> bool:
    """Tell whether a part of a path is pydantic's word for one alternative of a union, such as list[int]."""
    return isinstance(part, str) and (part in {"str", "int", "float", "bool"} or "[" in part)
