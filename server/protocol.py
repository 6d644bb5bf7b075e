"""How a client is told what is wrong, in the form of OpenAI's API."""


class APIError(Exception):
    """An answer that is not the one asked for.

    param: the field of the request that is wrong. code: a name for what is wrong, for programs.
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
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}
