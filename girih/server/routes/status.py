"""GET /health, /version and /metrics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response

import girih
from girih.server.errors import ApiError
from girih.server.serving import Serving

router = APIRouter()


@router.get("/health")
async def health(serving: Annotated[Serving, Depends(Serving.of)]) -> dict[str, Any]:
    """Answer 200 while requests can be served: the engine is up, and steps end while there is work."""
    engine = serving.engine
    if not engine.is_up:
        comes = "; another one is started" if serving.config.restart_engine else ""
        raise ApiError(503, f"there is no engine now{comes}", code="engine_unavailable", headers={"Retry-After": "5"})
    serving.check_moving()
    return {"status": "ok"}


@router.get("/version")
async def version() -> dict[str, str]:
    """Return Girih's version."""
    return {"version": girih.__version__}


@router.get("/metrics", response_class=Response)
async def metrics(serving: Annotated[Serving, Depends(Serving.of)]) -> Response:
    """Return counts and times for Prometheus."""
    text, media_type = await serving.metrics.text()
    return Response(text, media_type=media_type)
