"""What clients are told when something is wrong: OpenAI's envelope, vLLM's types."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response


class ApiError(Exception):
    """An answer with a status of 400 or more.

    Attributes:
        status: Of HTTP.
        message: For a person.
        kind: The envelope's "type".
        param: The field at fault.
        headers: Further ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.kind, self.param = status, message, kind, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The envelope."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.status,
            }
        }

    def response(self) -> Response:
        """The whole answer."""
        return Response(
            json.dumps(self.body), self.status, self.headers, media_type="application/json"
        )


def bad_request(message: str, param: str | None = None) -> ApiError:
    """What was sent cannot be done."""
    return ApiError(400, message, kind="BadRequestError", param=param)


def not_found(message: str, param: str | None = None) -> ApiError:
    """There is no such thing."""
    return ApiError(404, message, kind="NotFoundError", param=param)


def unavailable(message: str, retry_after_s: int | None = None) -> ApiError:
    """Not now."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, kind="ServiceUnavailableError", headers=headers)


def internal_error(message: str) -> ApiError:
    """Our fault."""
    return ApiError(500, message, kind="InternalServerError")


def unauthorized() -> ApiError:
    """No key, or a wrong one."""
    return ApiError(
        401,
        "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
        kind="AuthenticationError",
        headers={"WWW-Authenticate": "Bearer"},
    )
