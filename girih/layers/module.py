"""`Module`: torch's, without what makes a call of it, or a look at its parts, as slow as a small operation."""

from __future__ import annotations

from typing import Any

from torch import nn


class Module(nn.Module):
    """A module that torch's hooks take no part in: a call is one of `forward`."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return what `forward` returns."""
        return self.forward(*args, **options)


def settle(model: nn.Module) -> None:
    """Let Python find the parts and parameters of all modules as plain attributes: they are exchanged no more.

    torch keeps them in tables that Python looks into last, by a function of torch's that is written in Python.
    """
    for module in model.modules():
        vars(module).update(module._modules)
        vars(module).update(module._parameters)
