"""Every error is answered in OpenAI's form, also one of our own."""

import json

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from girih.errors import ConfigError, EngineDiedError, ExecutorError, RequestError
from girih.server.errors import add_handlers, error_body


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x"), 400, "invalid_request_error"),
        (ConfigError("x"), 400, "invalid_request_error"),
        (EngineDiedError("x"), 503, "server_error"),
        (ExecutorError("x"), 500, "server_error"),
        (ZeroDivisionError("secret"), 500, "server_error"),
    ],
)
def test_errors_have_a_status_and_a_body(error, status, kind):
    app = FastAPI()
    add_handlers(app)

    @app.get("/")
    async def fail():
        raise error

    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.get("/")
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == kind
    assert "secret" not in answer.text


def test_half_a_surrogate_pair_can_be_answered():
    body = error_body(400, "bad \ud800", "\udfff")
    assert json.dumps(body, ensure_ascii=False).encode()
