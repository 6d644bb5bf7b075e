"""Error bodies of OpenAI's API."""


class APIError(Exception):
    """An HTTP error response.

    param: the invalid field of the request. code: a machine-readable error code.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict:
        error_type = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": error_type, "param": self.param, "code": self.code}
        return {"error": error}
