"""The settings of a job: one frozen ``Config`` that ``ps.run(...)``, the command and the engines share.

A setting may come from four places. A later place wins over an earlier one:

1. the default below;
2. a TOML file: the one named, else ``./penstock.toml`` when it is there;
3. an environment variable, ``PENSTOCK_`` and the name in capitals;
4. what the caller says: keyword arguments of ``ps.run``, flags of the command.

All four pass the same checks, and the error for a wrong value says where the value came from. A misspelt setting that
nobody notices is worse than a job that does not start, so an unknown name is an error. Only in the environment does a
name pass that resembles no setting, because other programs may use the prefix.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import ConfigError
from penstock.ids import INSTANCES_MAX

if TYPE_CHECKING:
    from penstock.control.policies import Policy

DEFAULT_FILE = "penstock.toml"
ENV_PREFIX = "PENSTOCK_"
ENV_RESERVED = frozenset({"PENSTOCK_DATA"})
"""Variables with the prefix that are no settings. The tests find their data by them."""

SLICES_MAX = 65_536
NODES_MAX = 4_096
ROWS_MAX = 1_000_000_000

_MASTER = re.compile(
    r"local(\[(\*|[1-9]\d*)(,\s*[1-9]\d*)?\])?"
    r"|local-cluster\[\s*[1-9]\d*\s*,\s*[1-9]\d*\s*,\s*[1-9]\d*\s*\]"
    r"|spark://\S+|k8s://\S+|yarn"
)


class _Wrong(Exception):
    """A value that a rule refuses; the caller adds where the value came from."""


@dataclass(frozen=True)
class Rule:
    """The values that a setting may have. ``check`` takes a Python value; ``parse`` makes one of a flag or variable."""

    allowed: str
    check: Callable[[Any], Any]
    parse: Callable[[str], Any]


def _whole(low: int, high: int, *, optional: bool = False) -> Rule:
    def check(value: Any) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _Wrong
        return value

    def parse(text: str) -> int | None:
        return None if optional and _is_none(text) else int(text.replace("_", ""))

    return Rule(f"a whole number from {low:,} to {high:,}" + (", or none" if optional else ""), check, parse)


def _number(low: float, high: float) -> Rule:
    def check(value: Any) -> float:
        # The comparison refuses NaN too.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise _Wrong
        return float(value)

    return Rule(f"a number from {low:g} to {high:g}", check, float)


def _text(allowed: str, pattern: re.Pattern[str] | None = None, *, optional: bool = False) -> Rule:
    def check(value: Any) -> str | None:
        if value is None and optional:
            return None
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str) or not value.strip() or (pattern is not None and not pattern.fullmatch(value)):
            raise _Wrong
        return value

    def parse(text: str) -> str | None:
        return None if optional and _is_none(text) else text

    return Rule(allowed, check, parse)


def _one_of(*choices: str) -> Rule:
    def check(value: Any) -> str | None:
        if value is not None and value not in choices:
            raise _Wrong
        return None if value is None else str(value)

    def parse(text: str) -> str | None:
        return None if _is_none(text) else text

    return Rule("one of " + ", ".join(f'"{choice}"' for choice in choices) + ", or none", check, parse)


def _policy(*names: str) -> Rule:
    by_name = _one_of(*names)

    def check(value: Any) -> Any:
        own = isinstance(getattr(value, "name", None), str) and callable(getattr(value, "decide", None))
        return value if own and not isinstance(value, type) else by_name.check(value)

    return Rule(f"{by_name.allowed}; in Python also an object with a name and a method decide", check, by_name.parse)


def _flag() -> Rule:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise _Wrong
        return value

    def parse(text: str) -> bool | None:
        return words.get(text.strip().lower())  # other words give None, which the check refuses

    return Rule("true or false", check, parse)


def _spark_conf() -> Rule:
    def check(value: Any) -> dict[str, str]:
        if not isinstance(value, Mapping):
            raise _Wrong
        conf = {}
        for key, entry in value.items():
            if not isinstance(key, str) or not key.startswith("spark.") or not isinstance(entry, str | int | float):
                raise _Wrong
            # Spark spells its booleans in small letters.
            conf[key] = str(entry).lower() if isinstance(entry, bool) else str(entry)
        return conf

    def parse(text: str) -> dict[str, str]:
        return {key.strip(): value.strip() for key, value in _split_pairs(text)}

    return Rule('Spark properties, each name starting with "spark." (as text: spark.a=1;spark.b=2)', check, parse)


def _pairs(allowed: str) -> Rule:
    def check(value: Any) -> dict[str, str]:
        if not isinstance(value, Mapping) or not all(isinstance(x, str) and x for x in [*value, *value.values()]):
            raise _Wrong
        return dict(value)

    def parse(text: str) -> dict[str, str]:
        return {key.strip(): value.strip() for key, value in _split_pairs(text)}

    return Rule(allowed, check, parse)


def _split_pairs(text: str) -> list[tuple[str, str]]:
    pairs = [part.partition("=") for part in text.split(";") if part.strip()]
    if any(not equals for _, equals, _ in pairs):
        raise ValueError(text)
    return [(key, value) for key, _, value in pairs]


def _is_none(text: str) -> bool:
    return text.strip().lower() in ("", "none")


def _setting(default: Any, rule: Rule) -> Any:
    metadata = {"rule": rule}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The checked settings of one job. ``Config(...)`` takes these values; ``load`` looks in all four places."""

    master: str = _setting(
        "local[*]",
        _text("local, local[N], local[*], local-cluster[N,CORES,MB], spark://HOST:PORT, k8s://... or yarn", _MASTER),
    )
    """Where Spark runs."""

    checkpoint: str | None = _setting(None, _text("a directory or a URL that fsspec knows, or none", optional=True))
    """Where state goes. Without a checkpoint a job recovers from failures of executors, but not from its own end."""

    slices: int = _setting(64, _whole(1, SLICES_MAX))
    """Shares of a stage's keys, where the flow does not say ``key_by(..., slices=...)``. Set once for a checkpoint;
    instances can grow up to it."""

    instances: int | None = _setting(None, _whole(1, INSTANCES_MAX, optional=True))
    """Containers of a stage when it starts. None means all cores."""

    epoch_rows: int | None = _setting(None, _whole(1, ROWS_MAX, optional=True))
    """Rows of an epoch. None lets the engine follow ``target_latency_ms`` between the two bounds below."""

    epoch_rows_max: int = _setting(1_000_000, _whole(1, ROWS_MAX))
    epoch_rows_min: int = _setting(1_000, _whole(1, ROWS_MAX))

    target_latency_ms: int = _setting(500, _whole(1, 3_600_000))
    """The time an epoch should take."""

    epochs_in_flight: int = _setting(2, _whole(1, 64))
    """Epochs that may run at once. With two or more, stages of neighbouring epochs overlap."""

    checkpoint_interval_s: float = _setting(2.0, _number(0.0, 86_400.0))
    """Seconds between the starts of two checkpoints. With 0 a checkpoint begins whenever none is under way."""

    idle_epoch_s: float = _setting(20.0, _number(0.1, 3_600.0))
    """Seconds between empty epochs without input. Spark ends Python workers that have been idle for a minute."""

    poll_ms: int = _setting(20, _whole(1, 60_000))
    """Milliseconds until sources that had nothing new are asked again."""

    backups: int = _setting(1, _whole(0, 16))
    """Copies of each slice on other nodes, as far as there are nodes. Slices of a lost node come up from the copies."""

    backup_memory_mb: int = _setting(512, _whole(1, 1_000_000))
    """MB for backups in each container's process. Backups that do not fit go to the node's local disk."""

    placement: Literal["chained", "ring"] = _setting("chained", _one_of("chained", "ring"))
    """Where backups go: ``chained`` spreads them over all peers, ``ring`` gives them to the clockwise neighbours."""

    schedule: Literal["load", "round_robin"] = _setting("load", _one_of("load", "round_robin"))
    """How slices are dealt out to the containers of a node, and of all nodes: by measured load, or equally many."""

    zones: Mapping[str, str] = _setting({}, _pairs("fault zones of hosts (as text: host-a=rack-1;host-b=rack-2)"))
    """Host -> the zone that fails together. A slice and its backups are kept in different zones. By default a host is a
    zone."""

    move_mb_s: float = _setting(0.0, _number(0.0, 1_000_000.0))
    """MB a second at which a container reads the copies that it makes in the background. 0 means no limit."""

    move_timeout_s: float = _setting(600.0, _number(0.1, 86_400.0))
    """Seconds after which a slice that has not moved stays where it is."""

    hang_s: float = _setting(60.0, _number(0.0, 86_400.0))
    """Seconds at one task after which a container counts as lost. 0 means never."""

    manifests_kept: int = _setting(3, _whole(1, 1_000))
    """Complete checkpoints that stay on disk."""

    deltas_max: int = _setting(8, _whole(2, 1_000))
    """Deltas that a slice may have before they are merged into one."""

    store_retries: int = _setting(5, _whole(0, 100))
    """Quick tries after a failed operation of the checkpoint's store, before the store counts as away."""

    store_timeout_s: float = _setting(30.0, _number(0.0, 3_600.0))
    """Seconds that one try of an operation of the store may take. 0 means for ever."""

    store_away_s: float = _setting(120.0, _number(0.0, 86_400.0))
    """Seconds that the job goes on while the store is away: epochs run, and their output waits. Then the job stops."""

    store_away_epochs: int = _setting(32, _whole(0, 10_000))
    """Epochs that may run ahead of the log while the store is away. Their output is held in memory."""

    epochs_max: int | None = _setting(None, _whole(1, ROWS_MAX, optional=True))
    """Epochs of this run after which the job stops. None means that it stops when the sources end."""

    journal_mb: int = _setting(64, _whole(0, 1_000_000))
    """MiB for the journal in the checkpoint directory. Its oldest part goes first. 0 means no journal."""

    on_error: Literal["dead_letter", "fail"] | None = _setting(None, _one_of("dead_letter", "fail"))
    """What a malformed record does: it is set aside, or it ends the job. None means what the flow says."""

    control: bool = _setting(True, _flag())
    """Whether other processes of the same user may ask and steer the job: ``penstock status``, ``scale``, ``stop``."""

    class_archive: bool = _setting(True, _flag())
    """The first driver in local mode leaves an archive of Spark's classes, and later ones start faster with it."""

    policy: Literal["safe-rate", "target-latency", "ring"] | Policy | None = _setting(  # noqa: RUF009
        None, _policy("safe-rate", "target-latency", "ring")
    )
    """The policy that scales the job: a name, or an object of your own. None leaves the size alone."""

    policy_dry_run: bool = _setting(False, _flag())
    """Whether the policy only says what it would do, and why."""

    policy_cool_down_s: float = _setting(15.0, _number(0.0, 86_400.0))
    """Least seconds between two decisions of the policy."""

    instances_min: int = _setting(1, _whole(1, INSTANCES_MAX))
    """Fewest containers of a stage that the policy may choose."""

    instances_max: int | None = _setting(None, _whole(1, INSTANCES_MAX, optional=True))
    """Most containers of a stage that the policy may choose. None means all cores."""

    nodes_min: int = _setting(1, _whole(1, NODES_MAX))
    """Fewest nodes that the policy may leave."""

    nodes_max: int | None = _setting(None, _whole(1, NODES_MAX, optional=True))
    """Most nodes that the policy may ask for. None means that it asks for no nodes and gives none back."""

    spark: Mapping[str, str] = _setting({}, _spark_conf())
    """Properties for Spark, which win over those that Penstock sets."""

    name: str | None = _setting(None, _text("a text that is not empty, or none", optional=True))
    """Name of the job. None means the flow's name."""

    def __post_init__(self) -> None:
        for name, rule in _rules().items():
            value = _checked(name, rule, getattr(self, name), "")
            object.__setattr__(self, name, value)
        if self.epoch_rows_min > self.epoch_rows_max:
            raise ConfigError(
                f"epoch_rows_min is {self.epoch_rows_min:,}, more than epoch_rows_max, {self.epoch_rows_max:,}.",
                remedy="Lower epoch_rows_min or raise epoch_rows_max; or fix the size with epoch_rows.",
                key="epoch_rows_min",
            )
        for what in ("instances", "nodes"):
            low, high = getattr(self, f"{what}_min"), getattr(self, f"{what}_max")
            if high is not None and low > high:
                raise ConfigError(
                    f"{what}_min is {low:,}, more than {what}_max, {high:,}.",
                    remedy=f"Lower {what}_min or raise {what}_max.",
                    key=f"{what}_min",
                )

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        overrides: Mapping[str, Any] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> Config:
        """The settings from the file, the environment and ``overrides``, in this order.

        ``overrides`` holds Python values. Its ``spark`` is merged with the file's, key by key. Any other setting
        replaces the earlier one.
        """
        merged: dict[str, Any] = {}
        for layer in (
            _from_file(path),
            _from_environ(os.environ if environ is None else environ),
            _from_caller(overrides or {}),
        ):
            spark = {**merged.get("spark", {}), **layer.get("spark", {})}
            merged = {**merged, **layer, "spark": spark}
        return cls(**merged)

    def replace(self, **changes: Any) -> Config:
        """The settings with ``changes``, checked again."""
        return dataclasses.replace(self, **_from_caller(changes))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Turn the command's ``--set key=value`` into overrides. ``spark.x=y`` is a property of Spark."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(
                f'--set {assignment}: not of the form "key=value".',
                remedy="For example: --set target_latency_ms=200",
                key=key,
            )
        if key.startswith("spark."):
            values.setdefault("spark", {})[key] = text.strip()
            continue
        name = _known(key, "--set")
        values[name] = _parsed(name, text, f"--set {key}")
    return values


def _rules() -> dict[str, Rule]:
    return {entry.name: entry.metadata["rule"] for entry in dataclasses.fields(Config)}


def _known(key: str, where: str) -> str:
    """The setting that ``key`` names, with dashes or underscores. An unknown key is an error with the nearest name."""
    name = key.replace("-", "_")
    names = list(_rules())
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    hint = f'Did you mean "{near[0]}"?' if near else "Settings are: " + ", ".join(sorted(names)) + "."
    raise ConfigError(f'{_prefix(where)}there is no setting "{key}".', remedy=hint, key=key, where=where)


def _checked(name: str, rule: Rule, value: Any, where: str) -> Any:
    try:
        return rule.check(value)
    except _Wrong:
        raise _refusal(name, rule, value, where) from None


def _parsed(name: str, text: str, where: str) -> Any:
    rule = _rules()[name]
    try:
        return rule.check(rule.parse(text))
    except (_Wrong, ValueError):
        raise _refusal(name, rule, text, where) from None


def _refusal(name: str, rule: Rule, value: Any, where: str) -> ConfigError:
    return ConfigError(
        f"{_prefix(where)}{name} cannot be {value!r}.",
        remedy=f"Allowed: {rule.allowed}.",
        key=name,
        value=repr(value),
        where=where,
    )


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""


def _from_caller(settings: Mapping[str, Any]) -> dict[str, Any]:
    rules = _rules()
    layer = {}
    for key, value in settings.items():
        name = _known(key, "")
        layer[name] = _checked(name, rules[name], value, "")
    return layer


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    layer = {}
    names = list(_rules())
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or variable in ENV_RESERVED:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
            if near:
                raise ConfigError(
                    f'The environment variable {variable} names no setting "{name}".',
                    remedy=f"Did you mean {ENV_PREFIX}{near[0].upper()}?",
                    key=name,
                    where=variable,
                )
            continue
        layer[name] = _parsed(name, environ[variable], f"environment variable {variable}")
    return layer


def _from_file(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    if path is None:
        if not Path(DEFAULT_FILE).is_file():
            return {}
        path = DEFAULT_FILE
    where = os.fspath(path)
    document = _read_toml(where)
    for key, value in document.items():
        if key != "penstock":
            what = "table" if isinstance(value, dict) else "key"
            raise ConfigError(
                f'{where}: the {what} "{key}" stands outside of [penstock].',
                remedy="Put settings under [penstock] and Spark's own properties under [penstock.spark].",
                key=key,
                where=where,
            )
    table = document.get("penstock", {})
    if not isinstance(table, dict):
        raise ConfigError(
            f"{where}: penstock is no table.", remedy="Start the file with the line [penstock].", where=where
        )
    rules = _rules()
    layer = {}
    for key, value in table.items():
        name = _known(key, f"{where}, [penstock]")
        if name == "spark" and isinstance(value, dict):
            value = _flat(value)
        layer[name] = _checked(name, rules[name], value, f"{where}, [penstock]")
    return layer


def _read_toml(where: str) -> dict[str, Any]:
    try:
        with open(where, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(
            f"{where}: there is no such file.", remedy="Check the path given with --config.", where=where
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{where}: not a TOML file: {error}.", remedy="Correct the file at that place.", where=where
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot be read: {error.strerror}.", remedy="Check the path and its permissions.", where=where
        ) from None


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Turn tables back into dotted names: TOML reads ``spark.driver.memory = "2g"`` as tables within tables.

    Under [penstock.spark] the first ``spark.`` may be left out.
    """
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, entry in value.items():
                walk(f"{prefix}.{key}" if prefix else key, entry)
        else:
            flat[prefix if prefix.startswith("spark.") else f"spark.{prefix}"] = value

    walk("", table)
    return flat
