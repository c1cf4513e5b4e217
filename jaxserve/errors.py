"""The exception tree. Each request error knows its HTTP status and its OpenAI `type` and `code`.

JaxserveError
├── ConfigError                 the operator's mistake: one line, a cause and a fix, exit code 2
│   └── ModelLoadError          a checkpoint that cannot be served as it is
├── UnexpectedEndError          the server ends without having been asked to: one line, a cause and a fix, exit code 1
└── HTTPError                   what a client gets as an HTTP response
    ├── RequestError                a client's mistake (4xx); `param` names the field
    │   ├── InvalidValueError           400 invalid_value
    │   ├── UnsupportedParameterError   400 unsupported_parameter
    │   ├── InvalidSchemaError          400 invalid_json_schema
    │   ├── ContextLengthError          400 context_length_exceeded
    │   ├── AuthenticationError         401 invalid_api_key
    │   ├── PermissionDeniedError       403
    │   ├── NotFoundError               404
    │   │   └── ModelNotFoundError          404 model_not_found
    │   ├── ThreadError                 400 a thread of Messages that this request may not continue
    │   │   ├── ThreadsUnsupportedError     400 thread_unsupported_request
    │   │   └── ThreadNotFoundError         404 thread_not_found
    │   ├── SlowRequestError            408 a body that does not arrive
    │   ├── SlowReaderError             408 a stream that is not read
    │   ├── ConflictError               409
    │   ├── PayloadTooLargeError        413
    │   ├── UnsupportedEncodingError    415 a compressed body
    │   └── QueueFullError              429 a full queue, a key's limit, or too many bodies in memory; Retry-After
    └── ServerError                 ours (5xx)
        ├── NotReadyError               503 while loading or draining, Retry-After
        ├── ModelEndedError             502 the process of one of several models ended during the request
        ├── RequestTimeoutError         504 a deadline passed
        ├── EngineDeadError             503 the engine ended and the request cannot be replayed
        ├── WeightsLostError            503 an update failed half way, and the model has no weights
        ├── MediaMemoryError            503 the images of running requests fill the memory for images, Retry-After
        ├── StoreUnavailableError       503 the server runs without a store
        ├── StorageError                507 the store cannot be written
        │   └── DiskFullError               507 its disk is full
        └── StoreDamagedError           503 the store's database is damaged; nothing is written any more
"""

from __future__ import annotations

from typing import Any, ClassVar

MAX_LOAD_MESSAGE = 700  # characters of a message about a checkpoint


class JaxserveError(Exception):
    """Base class of all errors that jaxserve raises on purpose."""


class ConfigError(JaxserveError):
    """An invalid configuration. `str()` is one line with the cause; `fix` says what to do, also below a traceback."""

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.fix = fix
        if fix:
            self.add_note(f"-> {fix}")


class ModelLoadError(ConfigError):
    """A checkpoint that is missing, incomplete, damaged or of an unsupported architecture.

    The message may quote the checkpoint's files, so it is reduced to one line of limited length.
    """

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in message)
        super().__init__(line if len(line) <= MAX_LOAD_MESSAGE else line[: MAX_LOAD_MESSAGE - 3] + "...", fix=fix)


class UnexpectedEndError(JaxserveError):
    """The server stopped without being asked to. `str()` is one line with the cause; `fix` says what to do."""

    def __init__(self, message: str, *, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


class HTTPError(JaxserveError):
    """An error that is returned as an HTTP response. `retry_after` is in seconds."""

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
        """Return the OpenAI error envelope, always with its four keys."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def details(self) -> dict[str, Any]:
        """Return the field `details` of Anthropic's form of the error, on which its SDKs act."""
        return {}


class RequestError(HTTPError):
    """An error that the client can fix (4xx)."""

    status = 400
    type = "invalid_request_error"


class InvalidValueError(RequestError):
    code = "invalid_value"


class UnsupportedParameterError(RequestError):
    code = "unsupported_parameter"


class InvalidSchemaError(RequestError):
    code = "invalid_json_schema"


class ContextLengthError(RequestError):
    """The request has more tokens than the model's context.

    Clients search the message, so it contains the phrases of OpenAI's and Anthropic's messages.
    """

    code = "context_length_exceeded"

    @classmethod
    def too_long(cls, num_tokens: int, maximum: int, *, context: int, param: str) -> ContextLengthError:
        """Return the error for a prompt of `num_tokens`.

        maximum: tokens of the longest prompt that is accepted: the context less one token to generate
        """
        noun = param if param in ("messages", "input") else "prompt"
        return cls(
            f"This model's maximum context length is {context} tokens, and the prompt is too long: "
            f"{num_tokens} tokens > {maximum} maximum. Please reduce the length of the {noun}.",
            param=param,
        )

    @classmethod
    def no_room(cls, num_tokens: int, max_tokens: int, limit: int) -> ContextLengthError:
        """Return the error for a prompt that fits and an output that does not fit after it."""
        return cls(
            f"This model's maximum context length is {limit} tokens, and you requested {num_tokens + max_tokens} "
            f"tokens ({num_tokens} in the prompt, {max_tokens} in the output). "
            "Please reduce the length of the prompt or max_tokens.",
            param="max_tokens",
        )


class AuthenticationError(RequestError):
    status = 401
    code = "invalid_api_key"


class PermissionDeniedError(RequestError):
    status = 403


class NotFoundError(RequestError):
    status = 404


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class ThreadError(RequestError):
    """A thread of Messages cannot be continued like this.

    `code` is Anthropic's `error_code`. For most codes its SDKs send the whole conversation again.
    """

    @property
    def details(self) -> dict[str, Any]:
        return {"error_code": self.code}


class ThreadsUnsupportedError(ThreadError):
    """The server keeps no threads. SDKs go on without them."""

    code = "thread_unsupported_request"

    @property
    def details(self) -> dict[str, Any]:
        return super().details | {"unsupported": ["threads"]}


class ThreadNotFoundError(ThreadError):
    status = 404
    code = "thread_not_found"


class SlowRequestError(RequestError):
    status = 408
    code = "request_timeout"


class SlowReaderError(RequestError):
    status = 408
    code = "stream_not_read"


class ConflictError(RequestError):
    status = 409


class PayloadTooLargeError(RequestError):
    status = 413


class UnsupportedEncodingError(RequestError):
    status = 415
    code = "unsupported_content_encoding"


class QueueFullError(RequestError):
    status = 429
    type = "requests"
    code = "rate_limit_exceeded"
    retry_after = 1.0

    def __init__(self, message: str, *, param: str | None = None, limit: str = "") -> None:
        """limit: the exceeded limit, max_queued_requests or max_queued_tokens; empty for limits of other kinds"""
        super().__init__(message, param=param)
        self.limit = limit


class ServerError(HTTPError):
    """An error of the server (5xx). The client may try again."""


class NotReadyError(ServerError):
    status = 503
    code = "not_ready"
    retry_after = 1.0


class MediaMemoryError(ServerError):
    """The pictures of running requests fill media.memory."""

    status = 503
    code = "media_memory_full"
    retry_after = 1.0


class ModelEndedError(ServerError):
    """The process that serves the model ended before its answer was complete. Other models are not affected."""

    status = 502
    code = "model_ended"


class RequestTimeoutError(ServerError):
    status = 504
    code = "request_timeout"


class EngineDeadError(ServerError):
    status = 503
    code = "engine_dead"
    retry_after = 5.0


class WeightsLostError(ServerError):
    """A device failed after the first old weights were freed. The model has no weights until the next update."""

    status = 503
    code = "weights_lost"


class StoreUnavailableError(ServerError):
    status = 503
    code = "store_unavailable"


class StorageError(ServerError):
    status = 507
    code = "insufficient_storage"


class DiskFullError(StorageError):
    """The disk of the store is full."""


class StoreDamagedError(ServerError):
    """The store's database is damaged: it does not contain what was written to it."""

    status = 503
    code = "store_damaged"
