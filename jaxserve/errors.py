"""The exception tree. Each request error knows its HTTP status and its OpenAI `type` and `code`.

JaxserveError
├── ConfigError                 the operator's mistake: one line, a cause and a fix, exit code 2
│   └── ModelLoadError          a checkpoint that cannot be served as it is
├── RequestError                a client's mistake (4xx); `param` names the field
│   ├── InvalidValueError           400 invalid_value
│   ├── UnsupportedParameterError   400 unsupported_parameter
│   ├── InvalidSchemaError          400 invalid_json_schema
│   ├── ContextLengthError          400 context_length_exceeded
│   ├── AuthenticationError         401 invalid_api_key
│   ├── PermissionDeniedError       403
│   ├── NotFoundError               404
│   │   └── ModelNotFoundError          404 model_not_found
│   ├── SlowRequestError            408 a body that does not arrive
│   ├── ConflictError               409
│   ├── PayloadTooLargeError        413
│   └── QueueFullError              429 rate_limit_exceeded, Retry-After
└── ServerError                 ours (5xx)
    ├── NotReadyError               503 while loading or draining, Retry-After
    ├── RequestTimeoutError         504 a deadline passed
    ├── EngineDeadError             503 the engine ended and the request cannot be replayed
    └── StorageError                507 the store cannot be written
"""

from typing import ClassVar


class JaxserveError(Exception):
    """Root of every error that jaxserve raises on purpose."""


class ConfigError(JaxserveError):
    """A configuration that cannot be used. `str()` is one line with the cause; `fix` says what to do."""

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.fix = fix


class ModelLoadError(ConfigError):
    """A checkpoint that is missing, incomplete, damaged or of an unsupported architecture."""


class HTTPError(JaxserveError):
    """An error that has an HTTP answer. `retry_after` is in seconds."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    retry_after: float | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def body(self) -> dict[str, dict[str, str | None]]:
        """The OpenAI error envelope: always the four keys."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class RequestError(HTTPError):
    """The client can fix this one."""

    status = 400
    type = "invalid_request_error"


class InvalidValueError(RequestError):
    code = "invalid_value"


class UnsupportedParameterError(RequestError):
    code = "unsupported_parameter"


class InvalidSchemaError(RequestError):
    code = "invalid_json_schema"


class ContextLengthError(RequestError):
    code = "context_length_exceeded"


class AuthenticationError(RequestError):
    status = 401
    code = "invalid_api_key"


class PermissionDeniedError(RequestError):
    status = 403


class NotFoundError(RequestError):
    status = 404


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class SlowRequestError(RequestError):
    status = 408
    code = "request_timeout"


class ConflictError(RequestError):
    status = 409


class PayloadTooLargeError(RequestError):
    status = 413


class QueueFullError(RequestError):
    status = 429
    type = "requests"
    code = "rate_limit_exceeded"
    retry_after = 1.0


class ServerError(HTTPError):
    """The server's own fault; the client may try again."""


class NotReadyError(ServerError):
    status = 503
    code = "not_ready"
    retry_after = 1.0


class RequestTimeoutError(ServerError):
    status = 504
    code = "request_timeout"


class EngineDeadError(ServerError):
    status = 503
    code = "engine_dead"
    retry_after = 5.0


class StorageError(ServerError):
    status = 507
    code = "insufficient_storage"
