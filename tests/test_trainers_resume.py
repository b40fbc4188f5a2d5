"""Which checkpoint a run goes on from. That it then goes on with the same numbers is test_e2e_control's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quickstart import config
from quickstart.errors import UserError
from quickstart.trainers import resume


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Whole checkpoints of steps 2 and 10, a save of step 12 that was cut off, and records of 12 steps."""
    for step in (2, 10, 12):
        (tmp_path / "checkpoints" / f"global_step_{step}" / "actor").mkdir(parents=True)
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"global_step_{step}" / "model").mkdir()
    records = [{"step": step, "reward": step / 100} for step in range(1, 13)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": records}))
    return tmp_path


def found(outputs: Path, wanted: str | None) -> resume.Point | None:
    training = {"output_dir": str(outputs), "resume_from_checkpoint": wanted}
    return resume.find(config.from_arguments({"model_name_or_path": "x/y"}, None, None, training))


def test_a_new_run_has_no_point(outputs):
    assert found(outputs, None) is None


def test_the_latest_is_the_largest_step_that_was_saved_whole(outputs):
    point = found(outputs, "latest")
    assert point is not None
    assert (point.folder.name, point.step) == ("global_step_10", 10)
    assert [record["step"] for record in point.history] == list(range(1, 11))


def test_an_earlier_one_by_its_folder(outputs):
    point = found(outputs, str(outputs / "checkpoints" / "global_step_2"))
    assert point is not None
    assert point.step == 2
    assert len(point.history) == 2


def test_without_records_the_history_is_empty(outputs):
    (outputs / "trainer_state.json").unlink()
    point = found(outputs, "latest")
    assert point is not None
    assert point.history == []


@pytest.mark.parametrize("wanted", ["checkpoints/global_step_12", "checkpoints/global_step_3", "checkpoints"])
def test_what_is_no_whole_checkpoint_is_refused_and_those_are_named(outputs, wanted):
    with pytest.raises(UserError, match="there are: global_step_2, global_step_10"):
        found(outputs, str(outputs / wanted))


def test_nothing_to_go_on_from(tmp_path):
    with pytest.raises(UserError, match="there are: none"):
        found(tmp_path, "latest")


def test_another_runs_checkpoint_is_refused_with_its_folder(outputs, tmp_path_factory):
    with pytest.raises(UserError, match=f"training.output_dir={outputs}"):
        found(tmp_path_factory.mktemp("other"), str(outputs / "checkpoints" / "global_step_2"))
