"""The app: what clients find at which path."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from server.protocol import APIError
from server.served import Served


def make_app(served: Served) -> FastAPI:
    """An app of FastAPI. served: what `request.app.state.served` is."""
    # Without its pages of documentation, which load scripts from elsewhere.
    app = FastAPI(title="serve.py", docs_url=None, redoc_url=None)
    app.state.served = served

    @app.get("/health")
    async def health() -> Response:
        """200 with an empty body; 503 if there is no engine any more."""
        return Response(status_code=503 if served.thread.error else 200)

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [served.model()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict:
        served.check_model(name)
        return served.model()

    app.add_exception_handler(APIError, tell_error)
    app.add_exception_handler(HTTPException, tell_refused)
    return app


async def tell_error(request: Request, error: APIError) -> JSONResponse:
    return JSONResponse(error.body, error.status)


async def tell_refused(request: Request, error: HTTPException) -> JSONResponse:
    """What the framework refuses, such as an unknown path."""
    found = APIError(error.status_code, error.detail)
    return JSONResponse(found.body, found.status, error.headers)
