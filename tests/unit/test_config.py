"""Settings: four places, one set of checks, and messages that name file, key and what is allowed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from penstock.config import Config, parse_assignments
from penstock.errors import ConfigError


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(path: str | Path | None = None, overrides: dict[str, object] | None = None, **environ: str) -> Config:
    return Config.load(path, overrides or {}, environ=environ)


def refused(path: str | Path | None = None, overrides: dict[str, object] | None = None, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides, **environ)
    return caught.value


def test_defaults() -> None:
    config = load()
    assert config == Config()
    assert (config.master, config.slices, config.instances, config.checkpoint) == ("local[*]", 64, None, None)
    assert (config.epoch_rows, config.epoch_rows_min, config.epoch_rows_max) == (None, 1_000, 1_000_000)
    assert config.spark == {}


def test_later_places_win(empty_directory: Path) -> None:
    Path("penstock.toml").write_text('[penstock]\nslices = 8\npoll-ms = 5\nmaster = "local[2]"\n')
    config = load(None, {"master": "local[4]"}, PENSTOCK_MASTER="local[3]", PENSTOCK_POLL_MS="7")
    assert (config.slices, config.poll_ms, config.master) == (8, 7, "local[4]")


def test_a_policy_by_name_with_its_limits_from_every_place() -> None:
    Path("penstock.toml").write_text('[penstock]\npolicy = "ring"\npolicy_dry_run = true\nnodes_max = 4\n')
    config = load(None, parse_assignments(["nodes_max=none"]), PENSTOCK_NODES_MIN="2")
    assert (config.policy, config.policy_dry_run, config.nodes_min, config.nodes_max) == ("ring", True, 2, None)
    assert load(None, {}, PENSTOCK_POLICY_DRY_RUN="no").policy_dry_run is False
    assert "in Python also an object" in refused(None, {}, PENSTOCK_POLICY="mine").remedy


def test_a_named_file_replaces_the_default_one() -> None:
    Path("penstock.toml").write_text("[penstock]\nslices = 8\n")
    Path("other.toml").write_text("[penstock]\npoll_ms = 5\n")
    config = load("other.toml")
    assert (config.slices, config.poll_ms) == (64, 5)


def test_spark_properties_merge_by_key_and_keep_dotted_names() -> None:
    Path("penstock.toml").write_text(
        '[penstock.spark]\n"spark.a" = "file"\nspark.driver.memory = "2g"\nui.enabled = false\nspark.n = 3\n'
    )
    config = load(None, {"spark": {"spark.a": "caller"}}, PENSTOCK_SPARK="spark.a=env; spark.b=env")
    assert config.spark == {
        "spark.a": "caller",
        "spark.b": "env",
        "spark.driver.memory": "2g",
        "spark.ui.enabled": "false",
        "spark.n": "3",
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("slices", 0),
        ("slices", True),
        ("slices", 1.5),
        ("slices", "64"),
        ("instances", -1),
        ("checkpoint", ""),
        ("checkpoint_interval_s", -0.1),
        ("checkpoint_interval_s", float("nan")),
        ("on_error", "ignore"),
        ("policy_dry_run", "true"),
        ("nodes_min", 0),
        ("nodes_max", 0),
        ("master", "lokal[2]"),
        ("master", "local[0]"),
        ("spark", {"driver.memory": "2g"}),
        ("spark", ["spark.a"]),
        ("target_latency_ms", None),
    ],
)
def test_values_out_of_range_or_of_the_wrong_type(key: str, value: object) -> None:
    error = refused(None, {key: value})
    assert error.message == f"{key} cannot be {value!r}."
    assert error.remedy.startswith("Allowed: ")
    assert error.evidence["key"] == key
    with pytest.raises(ConfigError):
        Config(**{key: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "master", ["local", "local[2]", "local[*]", "local[2,4]", "local-cluster[3,1,1024]", "spark://host:7077", "yarn"]
)
def test_masters(master: str) -> None:
    assert Config(master=master).master == master


def test_whole_numbers_serve_where_fractions_are_allowed() -> None:
    config = load(None, {"checkpoint_interval_s": 3})
    assert config.checkpoint_interval_s == 3.0
    assert isinstance(config.checkpoint_interval_s, float)


def test_paths_become_text(tmp_path: Path) -> None:
    assert load(None, {"checkpoint": tmp_path}).checkpoint == str(tmp_path)


def test_unknown_names_get_the_nearest_one() -> None:
    error = refused(None, {"slicess": 3})
    assert error.message == 'there is no setting "slicess".'
    assert error.remedy == 'Did you mean "slices"?'
    assert "Settings are: backup_memory_mb," in refused(None, {"zzzzzz": 3}).remedy


def test_errors_name_the_file_and_the_key() -> None:
    Path("penstock.toml").write_text("[penstock]\nslices = 0\n")
    error = refused()
    assert error.message == "penstock.toml, [penstock]: slices cannot be 0."
    assert error.remedy == "Allowed: a whole number from 1 to 65,536."
    Path("penstock.toml").write_text("[penstock]\nchekpoint = 'x'\n")
    error = refused()
    assert error.message == 'penstock.toml, [penstock]: there is no setting "chekpoint".'
    assert error.remedy == 'Did you mean "checkpoint"?'


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("slices = 8\n", 'the key "slices" stands outside of [penstock]'),
        ("[spark]\na = 1\n", 'the table "spark" stands outside of [penstock]'),
        ("penstock = 3\n", "penstock is no table"),
        ("[penstock\n", "not a TOML file"),
    ],
)
def test_files_that_are_wrong_as_a_whole(text: str, part: str) -> None:
    Path("penstock.toml").write_text(text)
    assert part in refused().message


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    assert "no such file" in refused("gone.toml").message
    assert "cannot be read" in refused(tmp_path).message


def test_environment_is_typed_and_checked() -> None:
    config = load(PENSTOCK_SLICES="1_024", PENSTOCK_INSTANCES="none", PENSTOCK_CHECKPOINT_INTERVAL_S="0.5")
    assert (config.slices, config.instances, config.checkpoint_interval_s) == (1024, None, 0.5)
    error = refused(PENSTOCK_SLICES="many")
    assert error.message == "environment variable PENSTOCK_SLICES: slices cannot be 'many'."


def test_how_benchmarks_compare_is_no_setting() -> None:
    for name in ("moves", "checkpoints", "baseline"):
        assert refused(None, {name: "stop"}).message == f'there is no setting "{name}".'


def test_environment_names_that_look_like_ours_are_errors_and_others_pass() -> None:
    assert refused(PENSTOCK_SLICE="3").remedy == "Did you mean PENSTOCK_SLICES?"
    assert load(PENSTOCK_DATA="/data", PENSTOCK_WORKER_SLOT="3", PATH="/bin") == Config()


def test_bounds_of_an_epoch_must_agree() -> None:
    error = refused(None, {"epoch_rows_min": 10, "epoch_rows_max": 9})
    assert "epoch_rows_min is 10, more than epoch_rows_max, 9" in error.message


def test_assignments_of_the_command() -> None:
    values = parse_assignments(["slices=8", "on-error=fail", "spark.driver.memory=2g", "epochs_max=none", "name=a=b"])
    assert values == {
        "slices": 8,
        "on_error": "fail",
        "spark": {"spark.driver.memory": "2g"},
        "epochs_max": None,
        "name": "a=b",
    }
    assert Config.load(None, values, environ={}).slices == 8


@pytest.mark.parametrize(
    ("assignment", "part"),
    [
        ("slices", 'not of the form "key=value"'),
        ("=3", "not of the form"),
        ("slices=x", "--set slices: slices cannot be 'x'"),
    ],
)
def test_assignments_that_are_wrong(assignment: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parse_assignments([assignment])


def test_frozen_replaceable_and_picklable() -> None:
    config = Config(slices=8, spark={"spark.a": "1"})
    assert config.replace(instances=2) == Config(slices=8, instances=2, spark={"spark.a": "1"})
    with pytest.raises(ConfigError):
        config.replace(instances=0)
    with pytest.raises(AttributeError):
        config.slices = 9  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.to_dict()["spark"] == {"spark.a": "1"}
