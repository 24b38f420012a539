"""The application: addresses and what they answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from deq_zoo.serving.engine import make_engine
from deq_zoo.serving.handler import Handler, json_response
from deq_zoo.serving.limits import Limits
from deq_zoo.serving.metrics import as_prometheus
from deq_zoo.serving.service import Service

_PAGE = Path(__file__).with_name("page.html")
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'; connect-src 'self'; img-src blob: data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def make_app(service: Service[Any], name: str, limits: Limits) -> FastAPI:
    """Return the application that serves a model; `app.state.handler` has its counts.

    Args:
        service: of the model.
        name: of its preset.
        limits: of the server.
    """
    engine = make_engine(service, limits)
    handler = Handler(engine, service.fields, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        app.state.idle = engine.close()

    # FastAPI's own pages load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.handler, app.state.idle = handler, True

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        return await handler.predict(request)

    @app.get("/health")
    async def health() -> Response:
        return json_response(
            200,
            {
                "status": "ok",
                "model": name,
                "fields": [field._asdict() for field in service.fields],
                "limits": vars(limits),
            },
        )

    @app.get("/metrics")
    async def metrics(request: Request, format: str = "") -> Response:
        data = handler.metrics.as_data(
            slots=engine.slots, busy=engine.busy, waiting=handler.waiting
        )
        plain = "text/plain" in request.headers.get("accept", "")
        if format == "prometheus" or (plain and format != "json"):
            return Response(as_prometheus(data), media_type="text/plain; version=0.0.4")
        return json_response(200, data)

    @app.get("/")
    async def page() -> Response:
        return Response(_PAGE.read_text("utf-8"), headers=_PAGE_HEADERS, media_type="text/html")

    return app
