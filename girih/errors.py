"""Every error a user can cause: one line that says what was asked, what there is, and which knob to turn.

`assert` is for our own bugs. Front ends catch `GirihError`, print its message and exit with code 2.
"""


class GirihError(Exception):
    """Base of all errors whose message is written for the user, not for a stack trace."""


class ConfigError(GirihError):
    """An option, a name or a combination of options that cannot be used."""


class CheckpointError(GirihError):
    """A model file that is missing, damaged, foreign, or does not match its config."""


class PlanError(GirihError):
    """Cache specs that no plan can serve (a wrong alignment, two layers with one name)."""


class CapacityError(PlanError):
    """A plan that is sound but does not fit in the memory there is.

    Args:
        message: need, have, what would fit, and the options to change.
        need_bytes: bytes that were asked for.
        have_bytes: bytes there are.
        fitting_tokens: the longest context that would fit; None when not even one block fits.
    """

    def __init__(self, message: str, *, need_bytes: int, have_bytes: int, fitting_tokens: int | None):
        super().__init__(message)
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes
        self.fitting_tokens = fitting_tokens


class RequestError(GirihError):
    """One request that cannot be served; every other request goes on."""


class BindingError(GirihError):
    """Caches and layers that do not match by name, shape or dtype."""


class ExecutorError(GirihError):
    """A worker failed; the message carries its rank and the original text."""


class EngineDiedError(GirihError):
    """The engine's process has ended; the message says how."""
