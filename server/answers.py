"""Responses to generation requests."""

from errors import UserError
from server.backend import EngineDead
from server.protocol import APIError


def api_error(error: Exception) -> APIError:
    """Convert an exception to the error that a client gets."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, UserError):
        return APIError(400, str(error))
    return APIError(503 if isinstance(error, EngineDead) else 500, str(error))
