"""Every error Octavo raises on purpose.

OctavoError
├── RequestError                 the caller's request cannot be honoured (HTTP 4xx)
│   ├── InvalidRequest           400  a field is missing, unknown, of the wrong type or out of range
│   ├── ContextLengthExceeded    400  prompt and answer do not fit into the model's context
│   ├── Unauthorized             401  no API key, or none that is known here
│   ├── Forbidden                403  the API key has not the right to this
│   ├── UnknownModel             404  the model named is not the one served here
│   ├── UnknownRoute             404  no such path
│   ├── MethodNotAllowed         405  the path is there, but not with this method
│   ├── UnknownRequest           404  no request of this id is known any more
│   ├── PayloadTooLarge          413  the body is larger than the server reads
│   ├── RateLimited              429  the API key's quota is used up; try later
│   ├── Overloaded               429  a queue limit is reached; try later
│   └── TooManyConnections       503  as many as the server takes are open; try later
├── SetupError                   the server cannot be set up as asked (CLI exit code 2)
│   ├── ConfigError              a setting is out of range, or settings contradict each other
│   ├── ModelFileError           a checkpoint is truncated, foreign, or not what its header says
│   ├── JournalError             a journal cannot be opened, is damaged or of another format
│   ├── ModelNotFound            a model reference names nothing that exists
│   └── DownloadError            a model could not be fetched, or its hash is wrong
├── Expired                      the time of a request is over
│   ├── QueueTimeout             503  it waited too long to be started; try later
│   └── DeadlineExceeded         504  its own timeout has passed
└── EngineError                  500  Octavo failed; the message says in which request or step
    ├── EngineLoading            503  the model is not loaded yet; try later
    └── EngineStopped            503  the engine is draining or has ended
"""


class OctavoError(Exception):
    """Base of all errors raised on purpose. `str(error)` is one line a user can act on."""

    status = 500
    kind = "server_error"
    code: str | None = None
    retry_after_s: float | None = None
    """When the caller may try again; None: not as things are."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(OctavoError):
    status = 400
    kind = "invalid_request_error"


class InvalidRequest(RequestError):
    code = "invalid_value"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class Unauthorized(RequestError):
    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    status = 403
    kind = "permission_error"
    code = "permission_denied"


class UnknownModel(RequestError):
    status = 404
    code = "model_not_found"


class UnknownRoute(RequestError):
    status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class UnknownRequest(RequestError):
    status = 404
    code = "request_not_found"


class ReceiveTimeout(RequestError):
    status = 408
    code = "request_timeout"


class PayloadTooLarge(RequestError):
    status = 413
    code = "payload_too_large"


class RateLimited(RequestError):
    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after_s = 1.0


class Overloaded(RequestError):
    status = 429
    kind = "overloaded_error"
    code = "queue_full"
    retry_after_s = 1.0
    queue_position: int | None = None
    """Where in the queue the request would have been, from 1."""
    predicted_queue_s: float | None = None
    """How long it would have waited there, if that can be said."""


class TooManyConnections(RequestError):
    status = 503
    kind = "overloaded_error"
    code = "too_many_connections"
    retry_after_s = 1.0


class Expired(OctavoError):
    pass


class QueueTimeout(Expired):
    status = 503
    kind = "overloaded_error"
    code = "queue_timeout"
    retry_after_s = 1.0


class DeadlineExceeded(Expired):
    status = 504
    kind = "timeout_error"
    code = "deadline_exceeded"


class SetupError(OctavoError):
    pass


class ConfigError(SetupError):
    pass


class ModelFileError(SetupError):
    pass


class JournalError(SetupError):
    pass


class ModelNotFound(SetupError):
    pass


class DownloadError(SetupError):
    pass


class EngineError(OctavoError):
    pass


class EngineLoading(EngineError):
    status = 503
    code = "model_loading"
    retry_after_s = 1.0


class EngineStopped(EngineError):
    status = 503
    code = "engine_stopped"
    retry_after_s = 1.0
