"""GET / and /dashboard/...: the live page, its files, and what it shows."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

import girih
from girih.engine.pool_view import PageHolder
from girih.kv.config import KVCacheConfig, one_per_class
from girih.server.access import caller_of
from girih.server.errors import ApiError
from girih.server.serving import Serving, is_own

router = APIRouter(include_in_schema=False)

_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = {
    file.name: (file.read_bytes(), _MEDIA_TYPES[file.name[file.name.rindex(".") :]])
    for file in files("girih.server").joinpath("page").iterdir()
    if file.is_file()
}

_HEADERS = {
    # only what the server itself sends: whatever a prompt says, nothing of it runs, and nothing goes elsewhere
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/")
async def show_page() -> Response:
    """Return the page."""
    return _file("index.html")


@router.get("/dashboard/plan")
async def show_plan(request: Request, serving: Annotated[Serving, Depends(Serving.of)]) -> dict[str, Any]:
    """Return what stays as it is while an engine runs: the model, the plan of its cache, and what the caller may do."""
    engine = serving.engine
    may_ask = not serving.config.api_key or caller_of(request).key_digest is not None
    return {
        "version": girih.__version__,
        "model": serving.model_names[0],
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.config.max_num_seqs,
        "num_workers": len(engine.ready.kv_cache_configs),
        "has_chat_template": engine.tokenizer.chat_template is not None,
        "needs_key": not may_ask,
        "classes": [_class_facts(config) for config in one_per_class(engine.ready.kv_cache_configs)],
    }


@router.get("/dashboard/state")
async def show_state(serving: Annotated[Serving, Depends(Serving.of)]) -> Response:
    """Return the pool and the requests now, as `girih.server.snapshot` writes them."""
    headers = {"Content-Encoding": "gzip", "Cache-Control": "no-store"}
    return Response(await serving.watch.snapshot(), media_type="application/octet-stream", headers=headers)


@router.get("/dashboard/page")
async def show_one_page(
    group: int, page: int, request: Request, serving: Annotated[Serving, Depends(Serving.of)]
) -> dict[str, Any]:
    """Return who holds a page, and the text of its tokens where the caller may see it."""
    info = await serving.watch.page(group, page)
    return {
        "is_cached": info.is_cached,
        "holders": [_holder_facts(serving, request, holder) for holder in info.holders],
    }


@router.get("/dashboard/{name}")
async def show_file(name: str) -> Response:
    """Return a file of the page."""
    return _file(name)


def _file(name: str) -> Response:
    if name not in _FILES:
        raise ApiError(404, f"the page has no file {name!r}")
    content, media_type = _FILES[name]
    return Response(content, media_type=media_type, headers=_HEADERS)


def _class_facts(config: KVCacheConfig) -> dict[str, Any]:
    groups = [
        {
            "group": config.first_group + index,
            "keeps": group.retention.describe(),
            "num_layers": len(group.layers),
            "block_size": group.block_size,
            "page_bytes": group.page_size_bytes,
            "pages_per_slab": group.pages_per_slab,
        }
        for index, group in enumerate(config.groups)
    ]
    return {"num_slabs": config.num_slabs, "slab_bytes": config.slab_bytes, "groups": groups}


def _holder_facts(serving: Serving, request: Request, holder: PageHolder) -> dict[str, Any]:
    """Return a holder as the caller may see it: without keys everything, else the text and the full id of one's own."""
    live = serving.engine.live_request(holder.request_id)
    has_own_key = live is not None and is_own(caller_of(request), live.cache_salt)
    facts: dict[str, Any] = {
        "request": holder.request_id,
        "first_token": holder.first_token,
        "end_token": holder.end_token,
        "is_hidden": bool(serving.config.api_key) and not has_own_key,
    }
    if not facts["is_hidden"]:
        token_to_text = serving.engine.tokenizer.token_to_text
        facts["request_id"] = None if live is None else live.request_id
        facts["tokens"] = [token_to_text(token_id) for token_id in holder.token_ids.tolist()]
    return facts
