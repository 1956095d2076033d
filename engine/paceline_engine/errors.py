"""Every error that Paceline raises, in one tree.

PacelineError
├── InvalidValueError            a value the caller passed (also a ValueError)
│   ├── PromptTooLongError       prompt and cap exceed the context or the KV cache
│   └── UnknownOptionError       an option or name that does not exist
├── MissingExtraError            an optional part is not installed (also an ImportError)
├── ModelError
│   ├── ModelNotFoundError       nothing at that path, name or hub id
│   ├── ModelLoadError           a file that is damaged or does not fit its own table
│   └── UnsupportedModelError    an architecture or tensor type that is not read
├── InfeasibleError              no mode fits the SLO, and the SLO says reject
├── GenerationError              a generation that began and did not end well; has the text so far
│   ├── StallError               no token for longer than the stall limit
│   ├── EngineDiedError          the worker or the step loop died
│   └── BackendError             the backend reported an error for this one request
├── DeadlineExpiredError         the deadline had passed before the work was sent
└── ClosedError                  the client or backend is closed, or was forked

Each message gives the limit, the value seen and the remedy; the fields carry the same.
"""

from __future__ import annotations

from typing import Any


class PacelineError(Exception):
    """Root of the tree."""


class InvalidValueError(PacelineError, ValueError):
    """A value that the caller passed is outside what is allowed.

    Attributes:
        field: the name of the parameter.
        observed: the value seen.
        limit: what is allowed, in words or as a number.
        remedy: what to do instead.
    """

    def __init__(self, field: str, *, observed: Any, limit: Any, remedy: str) -> None:
        super().__init__(f"{field} must be {limit}, got {_short(observed)}: {remedy}")
        self.field = field
        self.observed = observed
        self.limit = limit
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (
            type(self),
            self.args,
            self.__dict__ | {"observed": _plain(self.observed), "limit": _plain(self.limit)},
        )


class PromptTooLongError(InvalidValueError):
    """The prompt, or the prompt with its token cap, does not fit the context or the KV cache."""


class UnknownOptionError(InvalidValueError):
    """An option, model name, variant or similar that does not exist."""


class MissingExtraError(PacelineError, ImportError):
    """An optional part of Paceline is not installed.

    Attributes:
        extra: the extra to install.
    """

    def __init__(self, extra: str, *, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the extra '{extra}', which is not installed: pip install 'paceline[{extra}]'"
        )
        self.extra = extra
        self.needed_for = needed_for

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class ModelError(PacelineError):
    """A model could not be found, read or run.

    Attributes:
        model: the path, name or hub id as the caller gave it.
        reason: what is wrong.
        remedy: what to do.
        tensor: the tensor's name, where one is to blame.
    """

    def __init__(self, model: str, *, reason: str, remedy: str, tensor: str | None = None) -> None:
        where = f"tensor '{tensor}': " if tensor else ""
        shown = str(model).encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
        super().__init__(f"{shown}: {where}{reason}: {remedy}")
        self.model = model
        self.reason = reason
        self.remedy = remedy
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class ModelNotFoundError(ModelError):
    """Nothing was found at the path, name or hub id."""


class ModelLoadError(ModelError):
    """A model file is damaged, truncated or does not fit its own table."""


class UnsupportedModelError(ModelError):
    """An architecture, tensor type or RoPE scaling that is not supported."""


class InfeasibleError(PacelineError):
    """No mode is predicted to meet the SLO and the SLO says ``reject``.

    Attributes:
        decision: the decision with every mode's prediction
            (``paceline_policies.decide.Decision``).
    """

    def __init__(self, message: str, *, decision: Any) -> None:
        super().__init__(message)
        self.decision = decision

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class GenerationError(PacelineError):
    """A generation that began and did not end well. Nothing produced is lost.

    Attributes:
        partial_text: the text produced before the error.
        phase: the phase in which it happened (``queue``, ``prefill`` or ``decode``).
    """

    def __init__(self, message: str, *, partial_text: str = "", phase: str | None = None) -> None:
        super().__init__(message)
        self.partial_text = partial_text
        self.phase = phase

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class StallError(GenerationError):
    """No token came for longer than the stall limit."""


class EngineDiedError(GenerationError):
    """The worker process or the step loop died; every request in flight gets this error."""


class BackendError(GenerationError):
    """The backend reported an error for this one request."""


class DeadlineExpiredError(PacelineError):
    """The deadline had passed before the work was sent, so it was not sent.

    Attributes:
        late_ms: by how much the deadline had passed.
    """

    def __init__(self, *, late_ms: float) -> None:
        super().__init__(
            f"the deadline passed {late_ms:.0f} ms before the work could be sent: "
            "open a new turn, or give this one a larger e2e_ms"
        )
        self.late_ms = late_ms

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class ClosedError(PacelineError):
    """The client or the backend is closed, was never opened, or belongs to the parent process."""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _plain(value: Any) -> Any:
    """A copy that any process can unpickle."""
    return value if isinstance(value, (str, int, float, bool, type(None))) else _short(value)


def _rebuild(kind: type[Exception], args: tuple[Any, ...], fields: dict[str, Any]) -> Exception:
    """Unpickle an error whose constructor takes keywords."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error
