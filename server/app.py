"""FastAPI application with its routes, middleware and error handlers."""

import base64
import hashlib
import ipaddress
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from errors import UserError
from server import chat_completions, completions, responses
from server.answers import api_error
from server.backend import EngineDead, RequestFailed
from server.live import FrameStream
from server.protocol import IGNORED_HEADER, APIError
from server.served import ServedModel
from server.structured_output import QueueFull

HERE = Path(__file__).parent
MAX_BODY_BYTES = 2**20  # of a request
MAX_DISCARDED_BYTES = 2**23  # read of a longer body before the 413


class BodyLimit:
    """Middleware that answers 413 to requests whose body is too long.

    Many clients write the whole body before they read, and never see a response if the connection
    closes earlier. So part of the excess is read and discarded.
    """

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        size = 0

        async def limited() -> dict:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size <= MAX_BODY_BYTES:
                return message
            while message.get("more_body") and size < MAX_DISCARDED_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
            error = f"the body is too long: at most {MAX_BODY_BYTES} bytes are allowed"
            raise HTTPException(413, error, {"Connection": "close"})

        await self.app(scope, limited, send)


class KeyMiddleware:
    """Middleware that answers 401 for /live and /v1/ without the key, before reading the body."""

    def __init__(self, app, key: str):
        self.app = app
        self.key = key.encode()

    async def __call__(self, scope, receive, send) -> None:
        guarded = scope["type"] == "http" and scope["path"].startswith(("/v1/", "/live"))
        if guarded and scope["method"] != "OPTIONS":
            scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            # Not ==, whose timing reveals how many characters match.
            if scheme.lower() != b"bearer" or not secrets.compare_digest(key.strip(), self.key):
                error = APIError(401, "the API key is missing or wrong", code="invalid_api_key")
                headers = {"WWW-Authenticate": "Bearer"}
                await JSONResponse(error.body, error.status, headers)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class HostMiddleware:
    """Middleware that answers 403 to requests whose Host header names another server.

    A web page can point its own name at 127.0.0.1 (DNS rebinding). The browser then lets it read
    this server's responses, but still sends that name. IP addresses are always allowed, because no
    page can redirect one.
    """

    def __init__(self, app, names: Iterable[str]):
        self.app = app
        self.names = {name.lower() for name in names}

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # Only HTTP/1.0 clients omit the header, and browsers are not among them.
        host = dict(scope["headers"]).get(b"host", b"localhost").decode("latin-1")
        name = host.rpartition("]")[0].removeprefix("[") or host.partition(":")[0]
        if name.lower().removesuffix(".") in self.names or is_address(name):
            await self.app(scope, receive, send)
            return
        message = f"the host name {name[:100]!r} is not allowed; --allowed-host adds it"
        error = APIError(403, message)
        await JSONResponse(error.body, error.status)(scope, receive, send)


def is_address(name: str) -> bool:
    """Return whether a name is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def allowed_hosts(host: str, others: Sequence[str]) -> list[str] | None:
    """Return the names allowed in a Host header; None for all.

    host: the address that the server listens at. If that is all interfaces, the server cannot know
    its names, and the network can reach it anyway, so all are allowed unless `others` are given.
    """
    everywhere = is_address(host) and ipaddress.ip_address(host).is_unspecified
    if "*" in others or (everywhere and not others):
        return None
    return ["localhost", host, *others]


def make_app(
    served: ServedModel,
    api_key: str | None = None,
    origins: Sequence[str] = (),
    hosts: Sequence[str] | None = None,
) -> FastAPI:
    """Return the FastAPI app for a model, which its routes find in `request.app.state.served`.

    api_key: key that clients must send; None for no check. origins: allowed origins of web pages;
    "*": all. hosts: what `allowed_hosts` returns.
    """
    # No documentation pages: they load scripts from other servers.
    app = FastAPI(title="serve.py", docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit)
    app.state.served = served
    app.state.item_store = responses.ItemStore()
    app.include_router(completions.router)
    app.include_router(chat_completions.router)
    app.include_router(responses.router)

    def get(path: str, **options):
        """Register a function for GET, and for HEAD, which monitors use."""

        def register(function):
            app.get(path, **options)(function)
            return app.head(path, include_in_schema=False)(function)

        return register

    @get("/health")
    async def health() -> Response:
        """Return an empty 200, or 503 if the engine is not running or is stalled."""
        reason = served.backend.error or served.backend.stall_reason
        return Response(status_code=503 if reason else 200)

    @get("/metrics")
    async def read_metrics() -> Response:
        """Return metrics for Prometheus, with vLLM's names, counted since the start."""
        served.backend.admit(0)
        return Response(await require_local(served.metrics).read(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/live")
    async def watch() -> Response:
        """Stream the engine's state as server-sent events; see server/live.py for their content."""
        served.backend.admit(0)
        return FrameStream(require_local(served.monitor).subscribe())

    @get("/", include_in_schema=False)
    async def page() -> Response:
        answer = file_response("page.html", "text/html")
        answer.headers["Content-Security-Policy"] = page_policy(answer.body.decode())
        return answer

    @get("/player.js", include_in_schema=False)
    async def player() -> Response:
        return file_response("player.js", "text/javascript")

    @get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [served.model(name) for name in served.roots]}

    @get("/v1/models/{name:path}")
    async def model(name: str) -> dict:
        served.find_adapter(name)
        return served.model(name)

    for error_type in (APIError, UserError, QueueFull, EngineDead, RequestFailed, Exception):
        app.add_exception_handler(error_type, handle_error)
    app.add_exception_handler(RequestValidationError, handle_validation_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    if api_key is not None:
        app.add_middleware(KeyMiddleware, key=api_key)
    if hosts is not None:
        app.add_middleware(HostMiddleware, names=hosts)
    if origins:  # outermost, because browsers send preflight requests without a key
        # Browsers send a preflight request for a public page that calls a private network.
        allowed = {"allow_methods": ["*"], "allow_headers": ["*"], "allow_private_network": True}
        shown = {"expose_headers": ["Retry-After", IGNORED_HEADER]}
        app.add_middleware(CORSMiddleware, allow_origins=origins, **allowed, **shown)
    return app


def file_response(name: str, media_type: str) -> Response:
    """Return a file of this directory; FileResponse would hold a descriptor for each client."""
    return Response((HERE / name).read_bytes(), media_type=media_type)


def page_policy(page: str) -> str:
    """Return the Content-Security-Policy of a page, which limits what it loads, runs and fetches.

    Allowed scripts are this server's files, and the page's inline scripts by hash, so output of a
    model can never run as one. No other site may show the page in a frame.
    """
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in scripts]
    allowed = "".join(f" 'sha256-{digest.decode()}'" for digest in digests)
    rules = ["default-src 'none'", f"script-src 'self'{allowed}", "style-src 'unsafe-inline'"]
    rules += ["connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    return "; ".join([*rules, "frame-ancestors 'none'"])


def require_local(view):
    """Return the metrics or monitor. Raises APIError if the engine is not in this process."""
    if view is None:
        raise APIError(404, "not available here: the engines run in other processes")
    return view


async def handle_error(request: Request, error: Exception) -> JSONResponse:
    response_error = api_error(error)
    headers = {"Retry-After": "1"} if response_error.status == 429 else None  # seconds
    return JSONResponse(response_error.body, response_error.status, headers)


async def handle_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
    """Answer 400 with the first error of a body, without the invalid value."""
    first = error.errors()[0]
    fields = [str(part) for part in first["loc"][1:]]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        message = f"the body is not JSON: {first['ctx']['error']}"
        fields = []
    elif first["type"] == "field":  # whose message begins with the last part of the path
        message = ".".join([*fields, message])
        fields.append(first["ctx"]["field"])
    elif not fields:
        message = "the body must be a JSON object, with Content-Type: application/json"
    elif not message.startswith(f"{fields[-1]} "):  # `check_limits` names the field itself
        message = f"{'.'.join(fields)}: {message}"
    response_error = APIError(400, message, fields[0] if fields else None)
    return JSONResponse(response_error.body, response_error.status)


async def handle_http_exception(request: Request, error: HTTPException) -> JSONResponse:
    """Answer an error of the framework, such as an unknown path."""
    message = error.detail
    if isinstance(error.__cause__, UnicodeDecodeError):
        message = f"the body is not UTF-8: byte {error.__cause__.start} cannot be decoded"
    response_error = APIError(error.status_code, message)
    return JSONResponse(response_error.body, response_error.status, error.headers)
