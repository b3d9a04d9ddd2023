"""Find the flow in a user's file: ``FLOW.py`` or ``FLOW.py:name``.

The file is imported as it is. An error in the file shows the user's lines and hides Penstock's. What the file defines
travels to Spark's workers by value, because they do not have the file.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import ConfigError, FlowError, PenstockError


def load_flow(target: str, flow_type: type | None = None) -> Any:
    """Import the file of ``FLOW.py[:name]`` and return the flow in it."""
    if flow_type is None:
        from penstock.flow import Flow

        flow_type = Flow
    path, name = _split_target(target)
    module = _import_file(path)
    flows = {key: value for key, value in vars(module).items() if isinstance(value, flow_type)}
    distinct = {id(value): value for value in flows.values()}
    listed = ", ".join(sorted(flows))
    if name is not None:
        if name in flows:
            return flows[name]
        what = f"is no ps.Flow but {type(vars(module)[name]).__name__}" if name in vars(module) else "does not exist"
        raise ConfigError(
            f'{path}: "{name}" {what}.', remedy=f"Flows there: {listed}." if flows else "The file builds no flow."
        )
    if len(distinct) == 1:
        return next(iter(distinct.values()))
    if not flows:
        raise ConfigError(
            f"{path}: there is no flow in this file.", remedy='Build one at its top level: flow = ps.Flow("name").'
        )
    if "flow" in flows:
        return flows["flow"]
    raise ConfigError(
        f"{path}: there are several flows in this file: {listed}.",
        remedy=f"Say which: penstock run {path}:{sorted(flows)[0]}",
    )


def _split_target(target: str) -> tuple[Path, str | None]:
    head, colon, name = target.rpartition(":")
    path, chosen = (Path(head), name) if colon and name.isidentifier() else (Path(target), None)
    if not path.exists():
        raise ConfigError(
            f"{path}: there is no such file.", remedy="Give the path of the Python file that builds the flow."
        )
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(
            f"{path}: not a Python file.", remedy="Give the path of the Python file that builds the flow."
        )
    return path, chosen


def _import_file(path: Path) -> ModuleType:
    """Import a file by its path. Modules in its directory are found, in this process and in Python workers."""
    path = path.resolve()
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # Workers that Spark starts on this machine inherit PYTHONPATH.
    inherited = os.environ.get("PYTHONPATH")
    if folder not in (inherited or "").split(os.pathsep):
        os.environ["PYTHONPATH"] = folder + (os.pathsep + inherited if inherited else "")
    # A file named like an installed package must not hide the package: json.py would replace the standard library's.
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names or not path.stem.isidentifier()
    name = f"penstock_flow_{path.stem}" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _import_failure(path, error) from error
    _pickle_by_value(module)
    return module


def _pickle_by_value(module: ModuleType) -> None:
    """Let the functions of the flow's file travel with the job. Other machines lack the file, and must not run it
    again.
    """
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)


def _import_failure(path: Path, error: BaseException) -> PenstockError:
    if isinstance(error, SyntaxError):
        place = f"{_shown(error.filename or str(path))}:{error.lineno}"
        line = (error.text or "").rstrip("\n")
        pointer = " " * max(0, (error.offset or 1) - 1) + "^"
        return FlowError(
            f"{place}: {error.msg}\n    {line}\n    {pointer}", remedy="Correct this line.", path=str(path)
        )
    frames = _users_frames(error)
    if isinstance(error, PenstockError):
        where = f"{_shown(frames[-1].filename)}:{frames[-1].lineno}: " if frames else ""
        return type(error)(where + error.message, remedy=error.remedy, **error.evidence)
    text = "".join(traceback.format_list(frames)).rstrip()
    name = "sys.exit" if isinstance(error, SystemExit) else type(error).__name__
    return FlowError(
        f"{_shown(str(path))}: {name} while the file was imported: {error}\n{text}",
        remedy="The command imports the file to find the flow; correct the line above.",
        path=str(path),
    )


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the user's own files, without those of Penstock, installed packages and Python."""
    ours = str(Path(__file__).resolve().parent) + os.sep
    library = str(Path(os.__file__).resolve().parent) + os.sep

    def foreign(name: str) -> bool:
        resolved = name if name.startswith("<") else str(Path(name).resolve())
        installed = f"{os.sep}site-packages{os.sep}" in resolved
        return resolved.startswith(("<", ours, library)) or installed

    return [
        traceback.FrameSummary(_shown(frame.filename), frame.lineno, frame.name, line=frame.line)
        for frame in traceback.extract_tb(error.__traceback__)
        if not foreign(frame.filename)
    ]


def _shown(name: str) -> str:
    """A path relative to the current directory, if the path is below it."""
    with contextlib.suppress(ValueError):
        return str(Path(name).resolve().relative_to(Path.cwd()))
    return name
