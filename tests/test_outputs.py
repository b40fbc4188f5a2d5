"""The output folder: nothing is overwritten, nothing foreign is touched, one run at a time."""

import collections
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quickstart import outputs
from quickstart.errors import UserError
from quickstart.outputs import OutputFolder

REPOSITORY = Path(__file__).resolve().parents[1]


def finished_run(root, **facts):
    with OutputFolder.claim(root) as folder:
        folder.update_run(**{"started": "2026-01-31T14:05:09+08:00", "rl_type": "ppo", **facts})
        folder.config.write_text("rl: {}\n")
        folder.rollout_file(1).write_text("{}\n")
    return folder


def refusal(root):
    with pytest.raises(UserError) as caught:
        OutputFolder.claim(root)
    assert len(caught.value.faults) == 1
    return caught.value.render()


def snapshot(root):
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def test_a_new_folder_is_made_with_the_names_of_the_contract(tmp_path):
    with OutputFolder.claim(tmp_path / "deep" / "out") as folder:
        assert folder.moved_to is None
        names = {
            folder.config.name,
            folder.run.name,
            folder.doctor.name,
            folder.trainer_state.name,
            folder.verify.name,
            folder.report.name,
        }
        assert names == {"config.yaml", "run.json", "doctor.json", "trainer_state.json", "verify.json", "report.html"}
        assert folder.rollout_file(1).relative_to(folder.root) == Path("rollouts/rollout_000000.jsonl")
        assert folder.rollout_file(12).name == "rollout_000011.jsonl"
        assert folder.checkpoint(7).relative_to(folder.root) == Path("checkpoints/global_step_7")
        assert folder.log.relative_to(folder.root) == Path("logs/run.log")
        assert folder.tensorboard.relative_to(folder.root) == Path("runs")
        for path in (folder.rollouts, folder.tensorboard, folder.checkpoints, folder.log.parent):
            assert path.is_dir()
        assert json.loads(folder.run.read_text())["exit_reason"] == "running"


def test_the_run_before_moves_to_history_whole(tmp_path):
    finished_run(tmp_path, exit_reason="completed")
    with OutputFolder.claim(tmp_path) as folder:
        assert folder.moved_to == tmp_path / "history" / "2026-01-31_14-05-09_ppo"
        assert (folder.moved_to / "config.yaml").read_text() == "rl: {}\n"
        assert (folder.moved_to / "rollouts" / "rollout_000000.jsonl").exists()
        assert json.loads((folder.moved_to / "run.json").read_text())["exit_reason"] == "completed"
        assert list(folder.rollouts.iterdir()) == []


def test_runs_of_the_same_second_get_numbers(tmp_path):
    moved = []
    for _ in range(4):
        finished_run(tmp_path)
    moved = sorted(p.name for p in (tmp_path / "history").iterdir())
    assert moved == ["2026-01-31_14-05-09_ppo", "2026-01-31_14-05-09_ppo-2", "2026-01-31_14-05-09_ppo-3"]


def test_a_run_that_died_before_it_wrote_anything_moves_too(tmp_path):
    OutputFolder.claim(tmp_path).release()
    with OutputFolder.claim(tmp_path) as folder:
        assert folder.moved_to is not None


def test_files_that_are_not_of_a_run_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".gitkeep").write_text("")
    finished_run(tmp_path)
    with OutputFolder.claim(tmp_path):
        assert (tmp_path / "notes.txt").read_text() == "mine"
        assert (tmp_path / ".gitkeep").exists()


@pytest.mark.parametrize("name", ["config.yaml", "run.json", "trainer_state.json", "report.html"])
def test_a_foreign_file_with_our_name_is_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text('{"somebody": "else"}')
    before = snapshot(tmp_path)
    assert name in refusal(tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["runs", "checkpoints", "logs"])
def test_a_foreign_folder_with_our_name_is_not_used(tmp_path, name):
    (tmp_path / name).mkdir()
    assert name in refusal(tmp_path)


def test_resuming_keeps_what_is_there(tmp_path):
    finished_run(tmp_path, seed=7)
    with OutputFolder.claim(tmp_path, keep=True) as folder:
        assert folder.moved_to is None
        assert folder.rollout_file(1).exists()
        assert json.loads(folder.run.read_text())["seed"] == 7


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "out").write_text("")
    assert "is a file" in refusal(tmp_path / "out")
    assert "is a file" in refusal(tmp_path / "out" / "deeper")


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs.os, "access", lambda path, mode: False)  # root may write everywhere
    assert "may not be written" in refusal(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk(tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1 << 20))
    assert "1 MB free" in refusal(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_check_changes_nothing(tmp_path):
    finished_run(tmp_path)
    before = snapshot(tmp_path)
    outputs.check(tmp_path)
    outputs.check(tmp_path / "new")
    assert snapshot(tmp_path) == before


def test_a_second_run_of_this_process_is_refused_until_the_first_is_over(tmp_path):
    with OutputFolder.claim(tmp_path):
        assert "a run of this process" in refusal(tmp_path)
    with OutputFolder.claim(tmp_path):
        pass


def test_the_folder_is_free_after_an_exception(tmp_path):
    with pytest.raises(ZeroDivisionError), OutputFolder.claim(tmp_path):
        _ = 1 / 0
    OutputFolder.claim(tmp_path).release()
    assert not (tmp_path / ".lock").exists()


HOLD = """
import sys
from quickstart.outputs import OutputFolder
OutputFolder.claim(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def holder(root):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(root)], env=environment, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_run_of_another_process_is_refused_and_named(tmp_path):
    process = holder(tmp_path)
    try:
        before = snapshot(tmp_path)
        assert f"process {process.pid}" in refusal(tmp_path)
        assert snapshot(tmp_path) == before
    finally:
        process.communicate("")


def test_a_killed_run_does_not_block_the_folder(tmp_path):
    process = holder(tmp_path)
    process.kill()
    process.communicate()
    assert (tmp_path / ".lock").exists()
    with OutputFolder.claim(tmp_path) as folder:
        assert folder.moved_to is not None


def test_a_later_process_with_the_same_number_does_not_block(tmp_path):
    finished_run(tmp_path)
    lock = {"pid": os.getppid(), "host": outputs.socket.gethostname(), "born": "1"}
    (tmp_path / ".lock").write_text(json.dumps(lock))
    OutputFolder.claim(tmp_path).release()


def test_a_run_on_another_machine_is_named_with_the_way_out(tmp_path):
    (tmp_path / ".lock").write_text(json.dumps({"pid": 1, "host": "elsewhere", "born": "1"}))
    message = refusal(tmp_path)
    assert "elsewhere" in message
    assert "delete" in message


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"pid": 1}'])
def test_half_a_lock_does_not_block(tmp_path, content):
    (tmp_path / ".lock").write_text(content)
    OutputFolder.claim(tmp_path).release()


def test_of_many_runs_at_once_exactly_one_gets_the_folder(tmp_path):
    """The stale lock of a dead run makes it a race."""
    (tmp_path / ".lock").write_text(json.dumps({"pid": 2**22 + 1, "host": outputs.socket.gethostname(), "born": "1"}))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], env=environment, **pipes) for _ in range(6)]
    losers = [r for r in racers if r.stdout.readline() == ""]
    assert len(losers) == 5
    for racer in racers:
        racer.communicate("")


def test_update_run_adds_and_keeps(tmp_path):
    with OutputFolder.claim(tmp_path) as folder:
        folder.update_run(seed=1)
        folder.update_run(data_sha256="ab")
        facts = json.loads(folder.run.read_text())
    assert (facts["seed"], facts["data_sha256"]) == (1, "ab")
