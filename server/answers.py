"""What answers with texts have in common."""

from errors import UserError
from server.engine_thread import EngineDead
from server.protocol import APIError


def api_error(error: Exception) -> APIError:
    """What a client is told of an exception."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, UserError):
        return APIError(400, str(error))
    return APIError(503 if isinstance(error, EngineDead) else 500, str(error))
