"""Errors of a simulated node, in vLLM's shape."""

from http import HTTPStatus
from typing import Any

_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
}


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        kind: the `type` member; by default what vLLM uses with that status.
        param: the request member to blame, or None.
    """

    def __init__(
        self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST, *, param: str | None = None, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or _TYPES.get(status, status.phrase)
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON object, members in vLLM's order."""
        return {
            "error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status.value},
        }


class GenerationError(ApiError):
    """This request failed inside the engine (a KV load with policy `fail`); the engine lives on."""

    def __init__(self) -> None:
        super().__init__("Internal server error", HTTPStatus.INTERNAL_SERVER_ERROR)


class EngineDeadError(ApiError):
    """The engine process is gone; this and every later request fails."""

    def __init__(self) -> None:
        super().__init__(
            "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            HTTPStatus.INTERNAL_SERVER_ERROR,
        )
