"""Which checkpoint a run goes on from. That it then goes on with the same numbers is test_e2e_control's."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from quickstart import config
from quickstart.errors import RunError, UserError
from quickstart.trainers import resume


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Whole checkpoints of steps 2 and 10, a save of step 12 that was cut off, and records of 12 steps."""
    for step in (2, 10, 12):
        (tmp_path / "checkpoints" / f"global_step_{step}" / "actor").mkdir(parents=True)
    for step in (2, 10):
        folder = tmp_path / "checkpoints" / f"global_step_{step}"
        (folder / "actor" / "model.pt").write_bytes(bytes(100))
        (folder / "data.pt").write_bytes(bytes(10))
        resume.write_manifest(folder, "ppo")
    records = [{"step": step, "reward": step / 100} for step in range(1, 13)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": records}))
    return tmp_path


def found(outputs: Path, wanted: str | None, rl_type: str = "ppo", steps: int = 20) -> resume.Point | None:
    training = {"output_dir": str(outputs), "resume_from_checkpoint": wanted}
    cfg = config.from_arguments({"model_name_or_path": "x/y"}, None, {"rl_type": rl_type}, training)
    return resume.find(cfg, steps)


def test_another_method_is_refused(outputs):
    with pytest.raises(UserError, match=r"was written by ppo, and this run is dpo(.|\n)*rl\.rl_type=ppo"):
        found(outputs, "latest", rl_type="dpo")


def test_nothing_left_to_do_is_refused(outputs):
    with pytest.raises(UserError, match=r"at step 10 of 10(.|\n)*training\.max_steps"):
        found(outputs, "latest", steps=10)


@pytest.mark.parametrize("name", ["actor/model.pt", "data.pt"])
def test_a_file_that_is_cut_off_or_missing_is_named(outputs, name):
    path = outputs / "checkpoints" / "global_step_10" / name
    path.write_bytes(b"123")
    with pytest.raises(UserError, match=f"damaged: {name} has 3 bytes of 10"):
        found(outputs, "latest")
    path.unlink()
    with pytest.raises(UserError, match=f"damaged: {name} is missing"):
        found(outputs, "latest")


def test_files_that_cannot_be_read_end_the_run_with_the_reason(tmp_path):
    with pytest.raises(RunError, match="cannot be read: UnpicklingError: junk"), resume.reading(tmp_path):
        raise pickle.UnpicklingError("junk")


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
    with pytest.raises(UserError, match="global_step_2, global_step_10"):
        found(outputs, str(outputs / wanted))


def test_nothing_to_go_on_from(tmp_path):
    with pytest.raises(UserError, match="leave it out: no run in"):
        found(tmp_path, "latest")


def test_another_runs_checkpoint_is_refused_with_its_folder(outputs, tmp_path_factory):
    with pytest.raises(UserError, match=f"training.output_dir={outputs}"):
        found(tmp_path_factory.mktemp("other"), str(outputs / "checkpoints" / "global_step_2"))
