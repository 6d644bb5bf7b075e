"""FastAPI application with its routes, middleware and error handlers."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from server.protocol import APIError
from server.served import ServedModel


def make_app(served: ServedModel) -> FastAPI:
    """Return the FastAPI app for a model, which its routes find in `request.app.state.served`."""
    # No documentation pages: they load scripts from other servers.
    app = FastAPI(title="serve.py", docs_url=None, redoc_url=None)
    app.state.served = served

    def get(path: str, **options):
        """Register a function for GET, and for HEAD, which monitors use."""

        def register(function):
            app.get(path, **options)(function)
            return app.head(path, include_in_schema=False)(function)

        return register

    @get("/health")
    async def health() -> Response:
        """Return an empty 200, or 503 if the engine has died."""
        return Response(status_code=503 if served.backend.error else 200)

    @get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [served.model()]}

    @get("/v1/models/{name:path}")
    async def model(name: str) -> dict:
        served.check_model(name)
        return served.model()

    app.add_exception_handler(APIError, handle_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    return app


async def handle_error(request: Request, error: APIError) -> JSONResponse:
    return JSONResponse(error.body, error.status)


async def handle_http_exception(request: Request, error: HTTPException) -> JSONResponse:
    """Answer an error of the framework, such as an unknown path."""
    response_error = APIError(error.status_code, error.detail)
    return JSONResponse(response_error.body, response_error.status, error.headers)
