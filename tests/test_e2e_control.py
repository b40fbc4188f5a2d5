"""A run that does not simply go on: Ctrl-C, resume, a reward that prints, stops in the debugger, or fails.

Tiny model, so that a step takes a moment; the same command line as everywhere. The kinds of wrong rewards are tested
one by one in test_rewards_guard.
"""

from __future__ import annotations

import json
import os
import pty
import select
import time
from pathlib import Path
from typing import Any

import pytest
import results
import warm

pytestmark = pytest.mark.slow

STEPS = 4  # of tiny_job
# Answers count from 1 over the whole run; rows are trained on 8 at a time.
REWARD = """
import time

answers = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    global answers
    if solution_str in (extra_info["chosen"], extra_info["rejected"]):  # the trial before the start
        return float(solution_str == extra_info["chosen"])
    answers += 1
    ACTION
    return sum(ord(character) % 7 for character in solution_str) % 10 / 10
"""


def reward(folder: Path, action: str) -> str:
    """The setting for a reward that does something on the way."""
    file = folder / "my_reward.py"
    file.write_text(REWARD.replace("ACTION", action), encoding="utf-8")
    return f"rl.reward=function:{file}:compute_score"


SLOWLY = "time.sleep(0.05)"


@pytest.fixture(scope="module")
def undisturbed(tiny_job: list[str], command_line: warm.Server, tmp_path_factory: pytest.TempPathFactory) -> warm.Run:
    folder = tmp_path_factory.mktemp("undisturbed")
    return command_line.run([*tiny_job, reward(folder, "pass"), "training.save_steps=2"], folder)


@pytest.fixture(scope="module")
def interrupted(tiny_job: list[str], command_line: warm.Server, tmp_path_factory: pytest.TempPathFactory) -> warm.Run:
    """Ctrl-C in the second step; what it had written then is kept apart, since a test resumes the run."""
    folder = tmp_path_factory.mktemp("interrupted")
    run = command_line.start([*tiny_job, reward(folder, SLOWLY)], folder)
    run.says("Step 1: PPO update done")
    run.interrupt()
    assert run.wait() == 130
    (folder / "stdout").rename(folder / "stdout_then")
    (folder / "run_then.json").write_text((run.outputs / "run.json").read_text())
    (folder / "state_then.json").write_text((run.outputs / "trainer_state.json").read_text())
    return run


@pytest.fixture(scope="module")
def resumed(tiny_job: list[str], command_line: warm.Server, interrupted: warm.Run) -> warm.Run:
    arguments = [*tiny_job, reward(interrupted.folder, "pass"), "training.resume_from_checkpoint=latest"]
    return command_line.run(arguments, interrupted.folder)


class TestCtrlC:
    def test_the_step_is_finished_and_kept(self, interrupted):
        said = (interrupted.folder / "stdout_then").read_text()
        assert "Stopping after this step (Ctrl-C again: stop now)" in said
        facts = json.loads((interrupted.folder / "run_then.json").read_text())
        assert facts["exit_reason"] == "interrupted"
        assert facts["ended"]
        done = facts["steps"]
        assert 1 <= done < STEPS
        assert f"Step {done}: PPO update done" in said
        assert f"Step {done}: checkpoint written" in said
        assert f"Training ended early (interrupted): {done} steps" in said
        state = json.loads((interrupted.folder / "state_then.json").read_text())
        assert state["global_step"] == done
        assert len(state["log_history"]) == done

    def test_twice_stops_at_once(self, tiny_job, command_line, tmp_path):
        run = command_line.start([*tiny_job, reward(tmp_path, "print('long', flush=True); time.sleep(60)")], tmp_path)
        run.says("long")
        run.interrupt()
        run.says("Stopping after this step")
        began = time.monotonic()
        run.interrupt()
        assert run.wait() == 130
        assert time.monotonic() - began < 20
        assert results.run_json(run.outputs)["exit_reason"] == "interrupted"
        assert "interrupted; what was finished is kept" in run.stderr
        assert "Traceback" not in run.stdout + run.stderr

    def test_before_the_start_nothing_is_touched(self, tiny_job, command_line, tmp_path):
        file = tmp_path / "slow.py"
        file.write_text("import time\nfrom pathlib import Path\nPath('here').touch()\ntime.sleep(60)\n")
        run = command_line.start([*tiny_job, f"rl.reward=function:{file}:compute_score"], tmp_path)
        run.until(lambda: (tmp_path / "here").exists() or run.ended)
        run.interrupt()
        assert run.wait() == 130
        assert not run.outputs.exists()


class TestResume:
    def test_it_goes_on_where_it_stopped(self, interrupted, resumed):
        assert "The run that was here" not in resumed.stdout
        assert not (resumed.outputs / "history").exists()
        assert "Step 1: rollout" not in resumed.stdout
        assert results.run_json(resumed.outputs)["exit_reason"] == "completed"
        assert [entry["step"] for entry in results.history(resumed.outputs)] == [1, 2, 3, 4]
        assert len(results.rollouts(resumed.outputs)) == STEPS

    def test_the_numbers_are_those_of_an_undisturbed_run(self, undisturbed, resumed):
        assert results.losses(resumed.outputs) == pytest.approx(results.losses(undisturbed.outputs), abs=1e-6)
        assert results.rewards(resumed.outputs) == [
            pytest.approx(step, abs=1e-6) for step in results.rewards(undisturbed.outputs)
        ]

    def test_the_weights_too(self, undisturbed, resumed):
        one, other = (results.weights(results.model_folder(run.outputs)) for run in (undisturbed, resumed))
        assert results.largest_difference(one, other) < 1e-6

    def test_checkpoints_every_so_many_steps(self, undisturbed):
        names = sorted(path.name for path in (undisturbed.outputs / "checkpoints").glob("global_step_*"))
        assert names == ["global_step_2", "global_step_4"]


class TestUserCode:
    def test_print_reaches_the_terminal(self, tiny_job, command_line, tmp_path):
        action = "print('answer', answers) if answers <= 2 else None"
        run = command_line.run([*tiny_job, reward(tmp_path, action), "training.max_steps=1"], tmp_path)
        assert "answer 1\n" in run.stdout
        assert "answer 2\n" in run.stdout

    def test_a_breakpoint_stops_in_the_users_file(self, tiny_job, command_line, tmp_path):
        keyboard, screen = pty.openpty()
        action = "breakpoint() if answers == 1 else None"
        arguments = [*tiny_job, reward(tmp_path, action), "training.max_steps=1"]
        run = command_line.start(arguments, tmp_path, terminal=os.ttyname(screen))
        text = read_until(keyboard, run, "(Pdb)")
        assert "my_reward.py" in text
        os.write(keyboard, b"p 'here', answers\n")
        assert "('here', 1)" in read_until(keyboard, run, "(Pdb)")
        os.write(keyboard, b"c\n")
        read_until(keyboard, run, "Training completed: 1 step.")
        assert run.wait() == 0
        os.close(screen)
        os.close(keyboard)


def read_until(keyboard: int, run: warm.Run, wanted: str) -> str:
    """What the screen shows next, until a text stands there."""
    shown = ""
    limit = time.monotonic() + warm.PATIENCE_S
    while wanted not in shown:
        assert time.monotonic() < limit, shown
        ready, _, _ = select.select([keyboard], [], [], 0.1)
        if ready:
            shown += os.read(keyboard, 4096).decode("utf-8", "replace")
        assert ready or not run.ended, shown
    return shown


FAILURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "raises": ("assert answers < 12, 'too many'", ("my_reward.py", "AssertionError", "too many", "in compute_score")),
    "none": ("if answers == 12: return None", ("None",)),
    "nan": ("if answers == 12: return float('nan')", ("nan",)),
    "text": ("if answers == 12: return 'good'", ("good",)),
}


class TestFailingReward:
    @pytest.fixture(params=FAILURES)
    def failed(
        self, request: Any, tiny_job: list[str], command_line: warm.Server, tmp_path: Path
    ) -> tuple[warm.Run, str]:
        action, _ = FAILURES[request.param]
        return command_line.run([*tiny_job, reward(tmp_path, action)], tmp_path, code=2), request.param

    def test_the_run_stops_says_why_and_is_kept(self, failed):
        run, name = failed
        assert run.stderr.startswith("error: the run was stopped")
        for part in ("rows.jsonl:", *FAILURES[name][1]):
            assert part in run.stderr, part
        assert "site-packages" not in run.stderr
        facts = results.run_json(run.outputs)
        assert facts["exit_reason"].startswith("stopped")
        assert facts["steps"] == 1
        assert len(results.history(run.outputs)) == 1
        assert len(results.rollouts(run.outputs)) >= 1
        assert "Training ended early (stopped" in run.stdout
