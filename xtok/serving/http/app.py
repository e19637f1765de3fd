"""The server's routes: OpenAI's API over an engine, and the page."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from xtok.models.cache import context_window
from xtok.results.page import TINTS, VIEW
from xtok.serving.http.answers import answered
from xtok.serving.http.completions import Choices
from xtok.serving.http.middleware import body_of, check_key, context_of, error_response, log_refusal, logged
from xtok.serving.http.protocol import Chat, Completion, RequestError, fields_of, read
from xtok.serving.http.responses import Responses, respond
from xtok.serving.http.service import Service

_POLICY = "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_FRESH = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
_PAGE = Path(__file__).parent / "page"
_CLIENT_CLOSED_REQUEST = 499
"""The status that nginx logs for a client that disconnected. Only the log shows it."""


def app_of(service: Service, *, key: str | None = None, origins: Sequence[str] = ()) -> FastAPI:
    """An ASGI application. `key`: the API key of `/v1`. `origins`: other sites whose pages may send requests (CORS)."""

    async def authenticate(request: Request) -> None:
        if key is not None:
            check_key(request, key)

    app = FastAPI(title="xtok", docs_url=None, redoc_url=None, openapi_url=None)
    api = APIRouter(prefix="/v1", dependencies=[Depends(authenticate)])
    _add_errors(app, service)
    _add_models(api, service)
    _add(api, service, "/completions", partial(read, Completion), partial(answered, Choices))
    _add(api, service, "/chat/completions", partial(read, Chat), partial(answered, Choices))
    _add(api, service, "/responses", partial(fields_of, Responses), respond)
    app.include_router(api)
    _add_operations(app, service)
    _add_page(app)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(logged)
    return app


def _add_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> Response:
        log_refusal(context_of(request), error, texts=service.logs_texts)
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def answer_http_error(request: Request, error: HTTPException) -> Response:
        unknown = f"{request.method} {request.url.path} is not a route of this server."
        message = unknown if error.status_code in (404, 405) else str(error.detail)
        return error_response(RequestError(message, status=error.status_code, headers=error.headers))

    @app.exception_handler(ClientDisconnect)
    async def leave(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        state = service.state()
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _add_models(api: APIRouter, service: Service) -> None:
    served = {"id": service.name, "object": "model", "created": service.created, "owned_by": "xtok"}

    @api.get("/models")
    async def models() -> Response:
        service.ready()
        return JSONResponse({"object": "list", "data": [served]})

    @api.get("/models/{name:path}")
    async def model(name: str) -> Response:
        service.ready()
        _check_model(service, name)
        return JSONResponse(served)

    @api.get("/page")
    async def about() -> Response:
        """What the page needs to know. `tokens`: how many new ones a text may have."""
        xt, _ = service.ready()
        window, chats = context_window(xt.model), bool(xt.tokenizer.chat_template)
        tokens = service.limits.tokens if window is None else min(service.limits.tokens, window)
        known = {"model": service.name, "drafts": list(xt.names), "tokens": tokens, "chats": chats}
        return JSONResponse({**known, "prompts": list(service.prompts)})


def _check_model(service: Service, name: str | None) -> None:
    """Raises `RequestError` unless `name` is the served model, or None."""
    if name not in (None, service.name):
        message = f"The model {name!r} isn't served here; {service.name!r} is."
        raise RequestError(message, "model", status=404, code="model_not_found")


def _add(api: APIRouter, service: Service, path: str, parse: Callable[[bytes], Any], answer: Callable[..., Any]) -> None:
    """Adds a route. A body is parsed and checked, and then `answer` makes the response."""

    @api.post(path)
    async def answered(request: Request) -> Any:
        service.ready()
        body = parse(await body_of(request, service.limits.body))
        _check_model(service, body.model)
        return await answer(service, request, body)


def _add_page(app: FastAPI) -> None:
    @app.get("/")
    async def index() -> Response:
        return FileResponse(_PAGE / "index.html", headers={"Content-Security-Policy": _POLICY, **_FRESH})

    @app.get("/page/tints")
    async def tints() -> Response:
        return JSONResponse(TINTS)

    app.mount("/page", _PageFiles(directory=_PAGE))
    app.mount("/view", _PageFiles(directory=VIEW))


class _PageFiles(StaticFiles):
    """The page's files. Browsers revalidate them, so that all of them are of the same release."""

    def file_response(self, *given: Any, **more: Any) -> Response:
        answer = super().file_response(*given, **more)
        answer.headers.update(_FRESH)
        return answer
