from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos.run import Instead
from benchmarks.chaos.scenario import FaultPlan, Scenario, load_scenario, mesh_config
from benchmarks.chaos.schedule import make_schedule
from shared.errors import ConfigError

KILL = {"kind": "kill", "target": "embedding:0"}
STOP = {"kind": "stop", "target": "store"}


def scenario(**fields: object) -> Scenario:
    document = {"name": "trial", "faults": [KILL, STOP, {"kind": "kill", "target": "controller"}], **fields}
    return Scenario.model_validate(document)


def written(folder: Path, text: str) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_shipped_scenario_is_valid_and_its_deployment_has_every_victim() -> None:
    paths = sorted(Path("configs/chaos").glob("*.yaml"))
    assert paths
    for path in paths:
        found = load_scenario(path)
        assert found.name == path.stem
        mesh_config(found)


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ("name: a\nfaults: []\n", "faults", "at least 1"),
        ("name: a\nfaults: [{kind: melt, target: store}]\n", "faults.0.kind", "melt"),
        ("name: a\nfaults: [{kind: full, target: sequence}]\n", "faults.0", "must be store, is sequence"),
        ("name: a\nfaults: [{kind: kill, target: weights}]\n", "faults.0", "must be a process, is weights"),
        ("name: a\nfaults: [{kind: stop, target: node}]\n", "faults.0", "cut off or made lossy, not: stop"),
        ("name: a\nspeed: 3\nfaults: [{kind: kill, target: store}]\n", "speed", "is not a field"),
        ("name: a\njitter_s: 15.0\nfaults: [{kind: kill, target: store}]\n", "", "jitter_s must be under spacing_s 15"),
        ("name: a\nnum_pairs: 2\nfaults: [{kind: kill, target: store}]\n", "", "num_pairs needs two faults"),
    ],
)
def test_what_breaks_a_rule_is_named_with_limit_and_value(tmp_path: Path, text: str, field: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_scenario(written(tmp_path, text))
    assert caught.value.context["field"] == field


def test_a_victim_that_the_deployment_lacks_is_named_with_those_there_are() -> None:
    lacking = scenario(faults=[KILL, {"kind": "kill", "target": "embedding:7"}])
    with pytest.raises(ConfigError, match=r"faults\.1\.target must be one of ingress, .*door.* is embedding:7"):
        mesh_config(lacking)


def test_a_store_that_is_not_the_meshs_own_is_no_victim() -> None:
    with pytest.raises(ConfigError, match=r"is store"):
        mesh_config(scenario(overrides={"store.kind": "redis"}))


def test_overrides_reach_the_deployment() -> None:
    assert mesh_config(scenario(overrides={"ingress.replicas.replicas": 3})).ingress.replicas.replicas == 3


def test_the_same_seed_gives_the_same_schedule() -> None:
    one = make_schedule(scenario(), 5)
    assert one == make_schedule(scenario(), 5)
    assert one != make_schedule(scenario(), 6)


def test_faults_keep_their_distance_and_all_come() -> None:
    for seed in range(20):
        schedule = make_schedule(scenario(calm_s=4, spacing_s=6, jitter_s=1), seed)
        assert sorted(each.label for each in schedule.faults) == ["kill controller", "kill embedding:0", "stop store"]
        for number, each in enumerate(schedule.faults):
            assert 4 + 6 * number <= each.at_s <= 5 + 6 * number
        assert schedule.duration_s == 22
        assert schedule.left_out == ()


def test_without_shuffling_the_order_is_that_of_the_file() -> None:
    for seed in range(10):
        labels = [each.label for each in make_schedule(scenario(shuffle=False), seed).faults]
        assert labels == ["kill embedding:0", "stop store", "kill controller"]


def test_the_swarm_leaves_out_some_and_never_all() -> None:
    counts = set()
    for seed in range(60):
        schedule = make_schedule(scenario(swarm_off=0.7), seed)
        assert len(schedule.faults) + len(schedule.left_out) == 3
        counts.add(len(schedule.faults))
    assert counts == {1, 2, 3}


def test_pairs_are_two_different_faults_close_together() -> None:
    schedule = make_schedule(scenario(num_pairs=20, pair_gap_s=1.5, jitter_s=0), 0)
    assert len(schedule.faults) == 40
    labels = [each.label for each in schedule.faults]
    assert len(set(labels)) == 40, "each is told from the others"
    for first, second in zip(schedule.faults[::2], schedule.faults[1::2], strict=True):
        assert first.plan != second.plan
        assert 0 <= second.at_s - first.at_s <= 1.5


def test_a_fault_is_named_by_kind_and_target() -> None:
    assert FaultPlan(kind="kill", target="embedding:0").label == "kill embedding:0"


def test_for_a_given_time_every_fault_comes_once_a_round_in_an_order_of_its_own() -> None:
    rounds = make_schedule(scenario(calm_s=10, spacing_s=20, duration_s=200), 3)
    plain = [each.label.partition(" #")[0] for each in rounds.faults]
    assert len(plain) == 9
    for number in range(0, 9, 3):
        assert sorted(plain[number : number + 3]) == ["kill controller", "kill embedding:0", "stop store"]
    assert len({tuple(plain[number : number + 3]) for number in range(0, 9, 3)}) > 1
    assert len({each.label for each in rounds.faults}) == 9
    assert rounds.duration_s == 200
    assert max(each.at_s for each in rounds.faults) <= 10 + 8 * 20 + 1


def test_a_shorter_time_begins_with_the_same_faults() -> None:
    long, short = (make_schedule(scenario(calm_s=10, spacing_s=20, duration_s=time_s), 3) for time_s in (200, 60))
    assert [each.plan for each in short.faults] == [each.plan for each in long.faults][:2]


def test_a_time_without_room_for_a_fault_is_refused(tmp_path: Path) -> None:
    text = "name: a\nfaults: [{kind: kill, target: store}]\n"
    with pytest.raises(ConfigError, match="calm_s and spacing_s at least, 25, is 20"):
        load_scenario(written(tmp_path, text), {"duration_s": 20.0})
    assert load_scenario(written(tmp_path, text), {"duration_s": 25.0}).duration_s == 25


def test_what_is_otherwise_than_the_file_says_is_in_the_command_that_repeats_it(tmp_path: Path) -> None:
    instead = Instead(duration_s=480, requests_per_s=12.5)
    assert instead.options() == " --seconds 480 --per-s 12.5"
    text = "name: a\nfaults: [{kind: kill, target: store}]\n"
    other = load_scenario(written(tmp_path, text), instead.fields())
    assert (other.duration_s, other.load.requests_per_s) == (480, 12.5)
    assert Instead().options() == ""
    assert Instead().fields() == {}
