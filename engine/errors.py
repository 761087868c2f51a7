"""Errors a client sees."""


class ApiError(Exception):
    """A request that can't be answered: HTTP `status` and a message for the client."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.message = message
        self.status = status

    def body(self) -> dict:
        """The JSON body: {"error": {"message", "type", "param", "code"}}."""
        return error_body(self.message, self.status)


class ModelError(Exception):
    """A model folder or name that this engine can't serve; the message says why and what would work."""


def error_body(message: str, status: int) -> dict:
    """The error envelope in SGLang's shape."""
    kind = "invalid_request_error" if 400 <= status < 500 else "internal_server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
