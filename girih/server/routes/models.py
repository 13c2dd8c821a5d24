"""GET /v1/models, and one of them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from girih.server.serving import Serving

router = APIRouter()


@router.get("/v1/models")
async def list_models(serving: Annotated[Serving, Depends(Serving.of)]) -> dict[str, Any]:
    """List the names of the model that is served."""
    return {"object": "list", "data": [_model(serving, name) for name in serving.model_names]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, serving: Annotated[Serving, Depends(Serving.of)]) -> dict[str, Any]:
    """Describe the model by one of its names."""
    return _model(serving, serving.check_model(name))


def _model(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.started_s,
        "owned_by": "girih",
        "root": serving.model_names[0],
        "parent": None,
        "max_model_len": serving.engine.max_model_len,
    }
