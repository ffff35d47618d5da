"""Code of the user's own, imported by the name that a recipe gives."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


def import_from_here(module: str, who: str) -> ModuleType:
    """The module of that name; those in the working folder are found too.

    Args:
        who: asks for it, and opens the error.

    Raises:
        ImportError: it cannot be imported, whatever its code raised, an exit included.
    """
    # Last, so that a file in the working folder never hides an installed package.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(module)
    # A script without a main guard may end the process: sys.exit is no Exception.
    except (Exception, SystemExit) as error:
        raise ImportError(
            f"{who}: importing {module!r} failed with {type(error).__name__}: {error}; "
            f"install it or run from the folder that holds it (now {Path.cwd()})"
        ) from error
