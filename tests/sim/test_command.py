"""``penstock simulate``: what is shown, and the exit codes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from penstock import cli
from penstock.engines.sim import simulate as module
from penstock.engines.sim.simulate import Campaign, Outcome

GOOD = Outcome(0, "d", 1.0, 3, 1, 0, 0)
BAD = Outcome(7, "e", 2.0, 3, 1, 0, 0, "progress", "it hangs", tuple(f"line {i}" for i in range(100)))


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["simulate", *args])
    return result.exit_code, result.stdout


def test_a_seed_is_run_and_told() -> None:
    code, said = invoke("--seed", "3", "--verbose")
    assert code == 0
    lines = said.splitlines()
    assert "driver 1 starts" in said and "event   Started (step 1)" in said and "<- step 1" in said
    assert lines[-2].startswith("seed 3: digest ")
    assert lines[-1].startswith("seeds: 1, ") and lines[-1].endswith("violations: none.")


def test_seeds_are_counted_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def fake(seed: int, *, keep_story: bool = False, storm: bool = False) -> Outcome:
        seen.append(seed)
        return GOOD

    monkeypatch.setattr(module, "simulate", fake)
    code, said = invoke("--seeds", "3", "--from", "40")
    assert (code, seen) == (0, [40, 41, 42])
    assert "seeds: 3" in said


def test_a_violation_shows_its_story_and_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "simulate", lambda seed, *, keep_story=False, storm=False: BAD if seed == 7 else GOOD)
    code, said = invoke("--seeds", "10")
    assert code == 1
    assert "... 40 lines before" in said and "line 99" in said and "line 39" not in said
    assert "seed 7 violates progress: it hangs" in said
    assert "Again with: penstock simulate --seed 7 --verbose" in said
    assert said.splitlines()[-1].endswith("violations: 1.")


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "simulate", lambda seed, *, keep_story=False, storm=False: BAD if seed == 7 else GOOD)
    code, said = invoke("--seeds", "8", "--json")
    assert code == 1
    found = json.loads(said)
    assert found["seeds"] == 8 and found["epochs"] == 24
    (violation,) = found["violations"]
    assert violation["seed"] == 7 and violation["checker"] == "progress"
    assert violation["replay"] == "penstock simulate --seed 7 --verbose"


def test_a_storm_is_asked_for_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def fake(seed: int, *, keep_story: bool = False, storm: bool = False) -> Outcome:
        asked.append(storm)
        return Outcome(seed, "d", 1.0, 3, 1, 0, 0, "progress", "no rest", ("a line",), 200, 50, 4, storm)

    monkeypatch.setattr(module, "simulate", fake)
    code, said = invoke("--seeds", "2", "--storm")
    assert (code, asked) == (1, [True, True])
    assert "400 orders (100 refused), 8 nodes killed" in said
    assert "Again with: penstock simulate --seed 1 --storm --verbose" in said


def test_ctrl_c_ends_it_with_what_was_found_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(seed: int, *, keep_story: bool = False, storm: bool = False) -> Outcome:
        if seed == 2:
            raise KeyboardInterrupt
        return GOOD

    monkeypatch.setattr(module, "simulate", fake)
    code, said = invoke("--seeds", "10")
    assert code == 130
    assert "seeds: 2," in said and "violations: none." in said


def test_several_processes_give_the_same_outcomes() -> None:
    one, two = Campaign(), Campaign()
    assert list(one.run(range(6))) == list(two.run(range(6), jobs=2))
    assert one.to_json() | {"elapsed_s": 0, "seeds_per_s": 0} == two.to_json() | {"elapsed_s": 0, "seeds_per_s": 0}
