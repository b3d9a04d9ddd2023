"""Packages that only some flows need. Each belongs to an extra of ``pyproject.toml``, and is imported on first use."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Final

from penstock.errors import MachineError

EXTRAS: Final = {"matplotlib": "plots", "datasketches": "sketches", "s3fs": "s3"}
"""Package -> the extra that installs it."""


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def need(package: str, what: str) -> ModuleType:
    """The imported package. Without it the error says what needs the package, and how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise  # the package is there, and something that it needs itself is not
        extra = EXTRAS[package]
        raise MachineError(
            f"{what} needs the package {package}, which is not installed.",
            remedy=f"pip install 'penstock[{extra}]', or in a checkout: pip install -r requirements-extras.txt",
            package=package,
        ) from None


__all__ = ["EXTRAS", "installed", "need"]
