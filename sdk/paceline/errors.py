"""Every error that Paceline raises. The tree is drawn at the top of ``paceline_engine.errors``."""

from paceline_engine.errors import (
    BackendError,
    ClosedError,
    DeadlineExpiredError,
    EngineDiedError,
    GenerationError,
    InfeasibleError,
    InvalidValueError,
    MissingExtraError,
    ModelError,
    ModelLoadError,
    ModelNotFoundError,
    PacelineError,
    PromptTooLongError,
    StallError,
    UnknownOptionError,
    UnsupportedModelError,
)

__all__ = [
    "BackendError",
    "ClosedError",
    "DeadlineExpiredError",
    "EngineDiedError",
    "GenerationError",
    "InfeasibleError",
    "InvalidValueError",
    "MissingExtraError",
    "ModelError",
    "ModelLoadError",
    "ModelNotFoundError",
    "PacelineError",
    "PromptTooLongError",
    "StallError",
    "UnknownOptionError",
    "UnsupportedModelError",
]
