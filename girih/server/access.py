"""What happens to every request before a path sees it: its id, its API key, its body's type and size; its log line."""

from __future__ import annotations

import asyncio
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

MAX_LOGGED_CHARACTERS = 128
"""Of what a client chooses."""

MAX_BODIES = 128
"""Bodies of the largest size that are held at once, or any number of smaller ones."""

BODY_TIMEOUT_S = 60.0
"""How long the next piece of a body may take."""


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


def note_user(request: Request, user: str | None) -> None:
    """Write to the request's log line whom a client says that it is for; escaped, as it may hold anything."""
    if user is not None:
        request.scope["girih.user"] = ascii(user[:MAX_LOGGED_CHARACTERS])


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
        self._bodies = _Bodies(config.max_body_bytes)

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

        body = _Body(receive, self._bodies)
        try:
            key_digest = self._check_key(scope["path"], headers)
            _check_is_json(scope["method"], headers)
            body.check_length(headers)
            scope["girih.caller"] = Caller(request_id, key_digest)
            await self._app(scope, body.receive, send_with_id)
        except ApiError as error:
            if not status:
                await error_response(error)(scope, receive, send_with_id)
        finally:
            body.release()
            extra = {"request_id": request_id, "status": status, "seconds": time.perf_counter() - start_s}
            if (user := scope.get("girih.user")) is not None:
                extra["user"] = user
            # the path as it was sent: decoded, it may hold what looks like other lines
            level = logging.DEBUG if _is_watching(scope["path"]) and status < 400 else logging.INFO
            logger.log(level, "%s %s", scope["method"], scope["raw_path"].decode("latin-1"), extra=extra)

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


def _is_watching(path: str) -> bool:
    """Tell whether a path is asked for again and again by whoever only looks, which would bury requests in the log."""
    return path == "/health" or path in DASHBOARD_PATHS or path.startswith(DASHBOARD_PREFIX)


def _request_id(headers: Mapping[str, str]) -> str:
    given = headers.get("x-request-id", "")
    is_fit = given.isascii() and given.isprintable() and 0 < len(given) <= MAX_LOGGED_CHARACTERS
    return given if is_fit else uuid.uuid4().hex


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


def _check_is_json(method: str, headers: Mapping[str, str]) -> None:
    """Refuse a body that a foreign web page can send with a browser's password: JSON it cannot, without being asked.

    Raises:
        ApiError: 415.
    """
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method == "POST" and media_type != "application/json":
        raise ApiError(415, f"the body's type is {media_type!r}; send JSON, with Content-Type: application/json")


class _Bodies:
    """What is held of the bodies of all requests.

    Args:
        max_bytes: of one.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.max_total_bytes = MAX_BODIES * max_bytes
        self.total_bytes = 0


class _Body:
    """The body of a request, as far as it is allowed. An error ends the connection: what is not read cannot be skipped.

    Args:
        receive: gives it.
        bodies: what is held of this one and of others.
    """

    def __init__(self, receive: Receive, bodies: _Bodies):
        self._receive = receive
        self._bodies = bodies
        self._num_bytes = 0
        self._is_complete = False

    def check_length(self, headers: Mapping[str, str]) -> None:
        """Refuse a body that says it is too large, before it is read.

        Raises:
            ApiError: 413.
        """
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._bodies.max_bytes:
            raise self._too_large()

    async def receive(self) -> Message:
        """Return the next message; refuse a body when more comes than is allowed, or nothing for too long."""
        try:
            async with asyncio.timeout(None if self._is_complete else BODY_TIMEOUT_S):
                message = await self._receive()
        except TimeoutError:
            raise _last_words(408, f"nothing of the body has come for {BODY_TIMEOUT_S:.0f} s") from None
        num_bytes = len(message.get("body", b""))
        self._num_bytes += num_bytes
        self._bodies.total_bytes += num_bytes
        self._is_complete = not message.get("more_body", False)
        if self._num_bytes > self._bodies.max_bytes:
            raise self._too_large()
        if self._bodies.total_bytes > self._bodies.max_total_bytes:
            raise _last_words(429, "too many large bodies at once; come back later", {"Retry-After": "1"})
        return message

    def release(self) -> None:
        """Note that nobody holds it any more."""
        self._bodies.total_bytes -= self._num_bytes
        self._num_bytes = 0

    def _too_large(self) -> ApiError:
        return _last_words(413, f"the body is larger than {self._bodies.max_bytes} bytes (--max-body-bytes)")


def _last_words(status: int, message: str, headers: Mapping[str, str] | None = None) -> ApiError:
    return ApiError(status, message, headers={**(headers or {}), "Connection": "close"})
