"""What happens to every request before a path sees it: its id, its API key, the size of its body; and its log line."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from girih.server.config import ServerConfig
from girih.server.errors import ApiError, error_response

logger = logging.getLogger("girih.access")

OPEN_PATHS = frozenset({"/health", "/version", "/docs", "/openapi.json"})
DASHBOARD_PATHS = frozenset({"/", "/metrics"})
DASHBOARD_PREFIX = "/dashboard/"

MAX_ID_CHARACTERS = 128


@dataclass(frozen=True)
class Caller:
    """Who sent a request.

    Args:
        request_id: of the HTTP request, the client's own if it sent one.
        key_digest: of the API key; None where no key was given.
    """

    request_id: str
    key_digest: str | None


def caller_of(request: Request) -> Caller:
    """Return who sent a request."""
    caller: Caller = request.scope["girih.caller"]
    return caller


class Keys:
    """The API keys.

    Args:
        keys: any number; without one everybody is let in.
    """

    def __init__(self, keys: Sequence[str]):
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        """Tell whether a key is needed."""
        return bool(self._digests)

    def find(self, given: str | None) -> str | None:
        """Return the digest of a key if it is one of these; takes as long for any other key."""
        digest = _digest(given or "")
        matches = [known for known in self._digests if hmac.compare_digest(known, digest)]
        return matches[0] if matches and given is not None else None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


class Gate:
    """Lets requests in, one after the other step of the module's first line.

    Args:
        app: what is behind it.
        config: keys and limits.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app = app
        self._config = config
        self._keys = Keys(config.api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s = time.perf_counter()
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = _request_id(headers)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode("latin-1"))]
            await send(message)

        body = _Body(receive, self._config.max_body_bytes)
        try:
            key_digest = self._check_key(scope["path"], headers)
            body.check_length(headers)
            scope["girih.caller"] = Caller(request_id, key_digest)
            await self._app(scope, body.receive, send_with_id)
        except ApiError as error:
            if not status:
                await error_response(error)(scope, receive, send_with_id)
        finally:
            logger.info(
                "%s %s %d", scope["method"], scope["path"], status,
                extra={"request_id": request_id, "status": status, "seconds": time.perf_counter() - start_s},
            )  # fmt: skip

    def _check_key(self, path: str, headers: Mapping[str, str]) -> str | None:
        """Return the digest of the request's key, None if it has none and needs none.

        Raises:
            ApiError: 401.
        """
        if not self._keys:
            return None
        digest = self._keys.find(_given_key(headers.get("authorization", "")))
        is_dashboard = path in DASHBOARD_PATHS or path.startswith(DASHBOARD_PREFIX)
        if digest is not None or path in OPEN_PATHS or (is_dashboard and self._config.public_dashboard):
            return digest
        message = "give one of the server's API keys: Authorization: Bearer KEY"
        # a browser then asks for a password, and sends it with everything that the page asks for
        challenge = 'Basic realm="Girih: any name, and an API key as password"' if is_dashboard else "Bearer"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": challenge})


def _request_id(headers: Mapping[str, str]) -> str:
    given = headers.get("x-request-id", "")
    return (
        given if given.isascii() and given.isprintable() and 0 < len(given) <= MAX_ID_CHARACTERS else uuid.uuid4().hex
    )


def _given_key(authorization: str) -> str | None:
    """Return the key that a header gives, as Bearer, or as the password of Basic."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return None
    return None


class _Body:
    """The body of a request, as far as it is allowed.

    Args:
        receive: gives it.
        max_bytes: limit.
    """

    def __init__(self, receive: Receive, max_bytes: int):
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def check_length(self, headers: Mapping[str, str]) -> None:
        """Refuse a body that says it is too large, before it is read.

        Raises:
            ApiError: 413.
        """
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large()

    async def receive(self) -> Message:
        """Return the next message; refuse a body when more comes than is allowed."""
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            raise self._too_large()
        return message

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes (--max-body-bytes)")
