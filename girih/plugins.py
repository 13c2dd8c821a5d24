"""Find a model, device, executor, backend or policy by its file name.

Adding one is adding a file: `girih/device/cpu.py` is the device "cpu". Nothing is registered anywhere.
"""

import importlib
import importlib.util
import pkgutil
from types import ModuleType

from girih.errors import ConfigError


def available(package: str) -> list[str]:
    """List the plug-in names in a package such as "girih.device", sorted; names with a leading _ are not plug-ins."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, package
    assert spec.submodule_search_locations is not None, package
    names = (module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))
    return sorted(name for name in names if not name.startswith("_"))


def check(package: str, name: str, *, what: str) -> None:
    """Refuse the name of a plug-in that is not there; nothing is imported.

    Args:
        package: dotted package, e.g. "girih.arch".
        name: file name without .py, e.g. "llama".
        what: what the user asked for, e.g. "model architecture", for the message.

    Raises:
        ConfigError: no such file; the message lists what there is.
    """
    names = available(package)
    if name not in names:
        raise ConfigError(f"unknown {what} {name!r}; available: {', '.join(names)}")


def load(package: str, name: str, *, what: str) -> ModuleType:
    """Import plug-in `name` from `package`; an error while it is imported is shown as it is, never hidden.

    Arguments and errors are those of `check`.
    """
    check(package, name, what=what)
    return importlib.import_module(f"{package}.{name}")
