"""The Starlette application: which path does what, and what surrounds every request."""

import asyncio
import hmac
import importlib.metadata
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import starlette.exceptions
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import chat, completions, openapi
from server.answers import Job, to_json
from server.errors import ApiError, bad_request, internal_error, not_found, unauthorized
from server.metrics import Metrics
from server.models import Models, ServedModel
from server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
)
from server.responses import EventStream, first_event, read_body, unless_gone

logger = logging.getLogger(__name__)

_LARGE_BODY = 1 << 20  # bytes; parsed beside the event loop


@dataclass
class HttpOptions:
    """What surrounds the models.

    Attributes:
        api_keys: Of which each request must bring one; empty: none.
        guards_metrics: Whether /metrics needs a key too.
        max_body_bytes: Of a request.
        stall_s: Seconds without a step after which an engine counts as stuck.
        patience_s: Seconds that a client may read nothing.
        keep_alive_s: Seconds of silence in a stream until a comment is sent; 0: none.
        allowed_origins: For browsers.
        allowed_methods: Likewise.
        allowed_headers: Likewise.
        allow_credentials: Likewise.
        logs_requests: Whether each is a line in the log.
        root_path: Prefix of all paths, which a proxy may cut off.
    """

    api_keys: Sequence[str] = ()
    guards_metrics: bool = True
    max_body_bytes: int = 32 << 20
    stall_s: float = 120.0
    patience_s: float = 600.0
    keep_alive_s: float = 0.0
    allowed_origins: Sequence[str] = ()
    allowed_methods: Sequence[str] = ("*",)
    allowed_headers: Sequence[str] = ("*",)
    allow_credentials: bool = False
    logs_requests: bool = False
    root_path: str = ""


@dataclass
class Server:
    """What handlers work with.

    Attributes:
        models: All models.
        metrics: What is counted.
        options: Of HTTP.
        load: Requests that are being answered.
        is_draining: Whether no new ones are taken.
        ignored: Fields that were logged as ignored.
        entrance: Passed by a few requests at a time, so that a burst of them, each of which takes
            a part of a millisecond to read, never holds up the streams for all of them.
    """

    models: Models
    metrics: Metrics
    options: HttpOptions = field(default_factory=HttpOptions)
    load: int = 0
    is_draining: bool = False
    ignored: set[str] = field(default_factory=set[str])
    entrance: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))

    def problem(self) -> str | None:
        """Why /health is 503."""
        if self.is_draining:
            return "shutting down"
        for state in self.models.client.states:
            problem = state.problem(self.options.stall_s)
            if problem is not None:
                return f"{state.spec.name}: {problem}"
        return None


def create_app(server: Server) -> Starlette:
    """The application."""
    options = server.options

    def handle[Body: BaseModel](
        kind: type[Body], function: Callable[[Server, Request, Body], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Any]]:
        async def endpoint(request: Request) -> Any:
            content = await read_body(request, options.max_body_bytes)
            if issubclass(kind, GenerationRequest):  # until its answer is sent
                request.state.is_load = True
                server.load += 1
            async with server.entrance:
                body = parse(kind, await _read_json(content))
                await asyncio.sleep(0)  # or the four would be no limit
            return await function(server, request, body)

        return endpoint

    def get(function: Callable[[Server, Request], Response]) -> Callable[[Request], Awaitable[Any]]:
        async def endpoint(request: Request) -> Response:
            return function(server, request)

        return endpoint

    routes = [
        Route("/v1/completions", handle(CompletionRequest, _completions), methods=["POST"]),
        Route("/v1/chat/completions", handle(ChatRequest, _chat), methods=["POST"]),
        Route("/v1/models", get(_list_models)),
        Route("/v1/models/", get(_list_models)),
        Route("/v1/models/{id:path}", get(_show_model)),
        Route("/tokenize", handle(TokenizeRequest, _tokenize), methods=["POST"]),
        Route("/detokenize", handle(DetokenizeRequest, _detokenize), methods=["POST"]),
        Route("/health", get(_health)),
        Route("/ping", get(_health), methods=["GET", "POST"]),
        Route("/version", get(_version)),
        Route("/load", get(_load)),
        Route("/metrics", get(_metrics)),
        Route("/openapi.json", get(_openapi)),
    ]
    middleware = [
        Middleware(Surroundings, server=server),
        Middleware(
            CORSMiddleware,
            allow_origins=list(options.allowed_origins),
            allow_methods=list(options.allowed_methods),
            allow_headers=list(options.allowed_headers),
            allow_credentials=options.allow_credentials,
        ),
        Middleware(KeyGuard, options=options),
    ]
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            ApiError: _on_api_error,
            starlette.exceptions.HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
        },
    )


# --- What surrounds every request


class Surroundings:
    """Request ids, the log line, counts, and an envelope for what nobody foresaw."""

    def __init__(self, app: ASGIApp, server: Server):
        """Wraps the application."""
        self._app, self._server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        root = self._server.options.root_path
        if root and scope["path"].startswith(f"{root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(root)}
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _is_id(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"], (b"x-request-id", request_id.encode("latin-1"))
                ]  # fmt: skip
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s: %s %s", request_id, scope["method"], scope["path"])
            if status:
                raise
            error = internal_error(f"something went wrong here; the log has it by {request_id}")
            await error.response()(scope, receive, send_with_id)
        finally:
            self._server.load -= scope["state"].get("is_load", False)
            seconds = time.perf_counter() - started
            route = scope.get("route")
            path = getattr(route, "path", "none")
            self._server.metrics.count_http(scope["method"], path, status, seconds)
            if self._server.options.logs_requests and path not in _QUIET:
                logger.info(
                    "%s %s %d in %.3f s, request %s",
                    scope["method"], scope["path"], status, seconds, request_id,
                )  # fmt: skip


_QUIET = ("/health", "/ping", "/metrics", "/load", "/version")
_OPEN = ("/health", "/ping")


class KeyGuard:
    """Lets nobody in without a key, but to what says whether the server lives."""

    def __init__(self, app: ASGIApp, options: HttpOptions):
        """Wraps the application."""
        self._app = app
        self._keys = [key.encode() for key in options.api_keys]
        self._open = {*_OPEN, *(() if options.guards_metrics else ("/metrics",))}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        is_open = scope["type"] != "http" or not self._keys or scope["path"] in self._open
        if is_open or self._has_key(dict(scope["headers"]).get(b"authorization", b"")):
            await self._app(scope, receive, send)
        else:
            await unauthorized().response()(scope, receive, send)

    def _has_key(self, header: bytes) -> bool:
        scheme, _, token = header.partition(b" ")
        # All are compared, each in a time that does not tell how much of it fits.
        fits = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(fits)


def _is_id(text: str) -> bool:
    return 0 < len(text) <= 128 and text.isascii() and text.isprintable()


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, starlette.exceptions.HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return not_found(f"there is nothing at {request.url.path}").response()
    if error.status_code == 405:
        message = f"{request.method} is not for {request.url.path}: {headers.get('Allow', '')} is"
        return ApiError(405, message, kind="MethodNotAllowedError", headers=headers).response()
    return ApiError(error.status_code, error.detail, kind="HttpError", headers=headers).response()


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _read_json(body: bytes) -> Any:
    try:
        if len(body) > _LARGE_BODY:
            return await asyncio.to_thread(json.loads, body, parse_constant=_no_constant)
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error or 'it is nested too deeply'}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


# --- Generation


async def _completions(server: Server, request: Request, body: CompletionRequest) -> Any:
    return await _generate(
        server, request, body, completions.start, completions.answer, completions.events
    )


async def _chat(server: Server, request: Request, body: ChatRequest) -> Any:
    return await _generate(server, request, body, chat.start, chat.answer, chat.events)


async def _generate(
    server: Server,
    request: Request,
    body: GenerationRequest,
    start: Callable[..., Awaitable[Job]],
    answer: Callable[[Job], Awaitable[dict[str, Any]]],
    events: Callable[[Job], AsyncGenerator[bytes]],
) -> Any:
    if server.is_draining:
        raise ApiError(503, "the server is shutting down", kind="ServiceUnavailableError")
    given = request.headers.get("x-request-id", "")
    request_id = given if _is_id(given) else body.request_id or request.state.request_id
    if not _is_id(request_id):
        raise bad_request("request_id must have 1 to 128 ASCII characters", "request_id")
    headers = _note_ignored(server, body)
    job = await start(server.models, body, request_id)
    if trace := request.headers.get("traceparent"):
        for generation in job.generations:
            generation.trace_headers = {"traceparent": trace}
    if not body.stream:
        try:
            result = await unless_gone(request.receive, answer(job))
        finally:
            job.abort()
        return Response(to_json(result), headers=headers, media_type="application/json")
    stream, keep_alive_s = events(job), server.options.keep_alive_s
    return EventStream(
        await first_event(request.receive, stream, timeout_s=keep_alive_s or None),
        stream,
        headers=headers,
        patience_s=server.options.patience_s,
        keep_alive_s=keep_alive_s,
    )


def _note_ignored(server: Server, body: GenerationRequest) -> dict[str, str]:
    names = body.ignored()
    if not names:
        return {}
    new = [name for name in names if name not in server.ignored]
    if new and len(server.ignored) < 1000:
        server.ignored.update(new)
        logger.warning("request fields that nobody here knows, ignored: %s", ", ".join(new))
    shown = "".join(c if " " <= c <= "~" else "?" for c in ", ".join(names)[:500])
    return {"x-jpaged-ignored": shown}


# --- The rest


def _card(server: Server, model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "jpaged",
        "root": model.path,
        "parent": None,
        "max_model_len": server.models.max_model_len(model),
        "permission": [],
    }


def _list_models(server: Server, request: Request) -> Response:
    cards = [_card(server, model, name) for model in server.models.all for name in model.names]
    return _json({"object": "list", "data": cards})


def _show_model(server: Server, request: Request) -> Response:
    name = request.path_params["id"]
    return _json(_card(server, server.models.find(name), name))


async def _tokenize(server: Server, request: Request, body: TokenizeRequest) -> Response:
    model = server.models.find(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.messages is not None:
        _, token_ids = await server.models.render(model, body)
    else:
        [token_ids] = await server.models.encode(
            model, [body.prompt or ""], add_special_tokens=body.add_special_tokens is not False
        )
    strings = None
    if body.return_token_strs:
        strings = [model.tokenizer.id_to_token(token_id) for token_id in token_ids]
    return _json(
        {
            "count": len(token_ids),
            "max_model_len": server.models.max_model_len(model),
            "tokens": token_ids,
            "token_strs": strings,
        }
    )


async def _detokenize(server: Server, request: Request, body: DetokenizeRequest) -> Response:
    model = server.models.find(body.model)
    for token_id in body.tokens:
        if not 0 <= token_id < model.tokenizer.vocab_size:
            raise bad_request(
                f"tokens holds {token_id}; ids go from 0 to {model.tokenizer.vocab_size - 1}",
                "tokens",
            )
    text = await server.models.beside_if_long(
        len(body.tokens),
        lambda: model.tokenizer.decode(body.tokens, skip_special_tokens=False),
        "tokens",
    )
    return _json({"prompt": text})


def _health(server: Server, request: Request) -> Response:
    problem = server.problem()
    if problem is None:
        return Response(status_code=200)
    return _json({"status": problem}, status=503)


def _version(server: Server, request: Request) -> Response:
    return _json({"version": importlib.metadata.version("jpaged")})


def _load(server: Server, request: Request) -> Response:
    return _json({"server_load": server.load})


def _metrics(server: Server, request: Request) -> Response:
    body, content_type = server.metrics.render(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


def _openapi(server: Server, request: Request) -> Response:
    return _json(openapi.document(server.options.root_path))


def _json(value: Any, *, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")
