"""The few typed errors. Each carries its HTTP status, a stable code and, where one is at fault, the field's name."""

from __future__ import annotations


class DliteError(Exception):
    """Base of every error a user may see.

    Args:
        message: one sentence that says what is wrong and what to do about it.
        param: the field, option or file key at fault, if there is one.
    """

    status: int = 500
    code: str = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(DliteError):
    """A value given by the caller cannot be honoured."""

    status = 400
    code = "invalid_request"


class ContextOverflow(InvalidRequest):
    """Prompt and requested tokens do not fit the target's context."""

    code = "context_length_exceeded"


class ModelError(DliteError):
    """Weights, config or tokenizer of a model cannot be used."""

    status = 500
    code = "model_error"


class UnsupportedArchitecture(ModelError):
    """The target's architecture is not one the executor knows."""

    code = "unsupported_architecture"


class CheckpointError(ModelError):
    """A drafter checkpoint is incomplete, malformed or made for another target; `param` names the field."""

    code = "checkpoint_error"


class KVExhausted(DliteError):
    """No KV memory is left for a reservation. Nothing was changed: free or truncate sequences, then retry."""

    status = 503
    code = "kv_exhausted"


class NotFound(DliteError):
    """The named thing does not exist, or does not belong to the caller."""

    status = 404
    code = "not_found"


class Conflict(DliteError):
    """The named thing is busy or has changed since the caller last saw it."""

    status = 409
    code = "conflict"
