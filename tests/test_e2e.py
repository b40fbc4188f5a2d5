"""Whole runs through the command line on the bundled model: what the README promises of the main job and its kin.

Each run is made once; the tests look at what it left. Not here: Ctrl-C, resume and rewards that fail
(test_e2e_control), settings that change how a run goes (test_e2e_settings).
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import results
import warm

REPOSITORY = warm.REPOSITORY
BUNDLED = REPOSITORY / "data" / "bundled_model"
SHORT = ["training.device=cpu", "rl.rollout_batch_size=8", "rl.per_device_train_batch_size=8", "training.max_steps=2"]
CLOCK = r"\d\d:\d\d:\d\d  "
NUMBER = r"-?\d\S*"
EPOCHS = 3  # of the cpu profile
STEPS = 5 * EPOCHS  # 100 rows, 20 prompts a step

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def main_job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The README's first command, cold, as it stands but for the device."""
    folder = tmp_path_factory.mktemp("main")
    done = warm.cold(["training.device=cpu"], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return SimpleNamespace(folder=folder, outputs=folder / "outputs", stdout=done.stdout, stderr=done.stderr)


@pytest.fixture(scope="module")
def second_job(main_job: Any, command_line: warm.Server) -> warm.Run:
    """A shorter run with the same seed in the same folder."""
    return command_line.run(["training.device=cpu", "training.max_steps=2"], main_job.folder)


@pytest.fixture(scope="module")
def first_outputs(main_job: Any, second_job: warm.Run) -> Path:
    """Where the second run has moved the first."""
    (folder,) = (main_job.outputs / "history").iterdir()
    return folder


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory, command_line: warm.Server) -> warm.Run:
    return command_line.run([*SHORT, "rl.rl_type=grpo", "data.max_response_length=32"], tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="module", params=["dpo", "kto"])
def preference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, command_line: warm.Server
) -> warm.Run:
    return command_line.run([*SHORT, f"rl.rl_type={request.param}"], tmp_path_factory.mktemp(request.param))


class TestMainJob:
    def test_lines_of_the_console_in_their_order(self, main_job):
        lines = [
            r"chosen automatically:",
            r"  training.device +cpu|  profile +cpu",
            CLOCK + r"Read 100 rows from \S*data/sample_100.jsonl",
            CLOCK + r"Loading verl for PPO on cpu",
            CLOCK + r"Loading reward: preference",
            CLOCK + r"Loading model \S*data/bundled_model",
            CLOCK + r"Initialising critic",
            CLOCK + r"Initialising actor, reference and rollout engine",
            CLOCK
            + rf"Starting the training loop after \S+ s: {STEPS} steps, each of 20 prompts, 20 responses, 1 update",
            CLOCK + r"Step 1: rollout completed \(20 prompts -> 20 responses\)",
            CLOCK + r"Step 1: reward computed \(avg 0\.\d\d, std 0\.\d\d\)",
            r"Answers of the first step: best, middle and worst",
            CLOCK + rf"Step 1: PPO update done. Loss: actor {NUMBER}, critic {NUMBER}, kl {NUMBER}",
            CLOCK + rf"Step {STEPS}: rollout completed \(20 prompts -> 20 responses\)",
            CLOCK + rf"Step {STEPS}: PPO update done",
            r"Answers of the last step: best, middle and worst",
            CLOCK + rf"Training completed: {STEPS} steps, reward 0\.\d+ -> 0\.\d+. Results are in \S+outputs",
        ]
        rest = iter(main_job.stdout.splitlines())
        missing = [wanted for wanted in lines if not any(re.match(wanted, line) for line in rest)]
        assert missing[:1] == []

    def test_the_noise_of_libraries_is_in_the_log(self, main_job, first_outputs):
        log = (first_outputs / "logs" / "run.log").read_text(encoding="utf-8")
        assert "site-packages/verl" in log
        assert "site-packages" not in main_job.stdout
        assert main_job.stderr == ""
        assert len(log) > len(main_job.stdout) / 2
        assert f"Step {STEPS}: PPO update done" in log

    def test_every_file_of_the_contract(self, first_outputs):
        for name in ("config.yaml", "run.json", "doctor.json", "trainer_state.json", "logs/run.log"):
            assert (first_outputs / name).is_file(), name
        assert [path.name for path in sorted((first_outputs / "rollouts").iterdir())] == [
            f"rollout_{step:06d}.jsonl" for step in range(STEPS)
        ]
        assert len(list((first_outputs / "runs").glob("*/events.out.tfevents.*"))) == 1
        assert (first_outputs / "checkpoints" / f"global_step_{STEPS}" / "model" / "model.safetensors").is_file()
        assert not [path for path in first_outputs.rglob("*") if path.suffix in (".part", ".tmp")]

    def test_a_hundred_rollouts_with_the_promised_keys(self, first_outputs):
        rows = [row for step in results.rollouts(first_outputs) for row in step]
        assert len(rows) == 100 * EPOCHS
        assert len({row["prompt"] for row in rows}) == 100
        for row in rows:
            assert list(row)[:3] == ["prompt", "response", "reward"]
            assert {"step", "uid", "ground_truth", "prompt_length", "response_length", "finish_reason"} <= row.keys()
            assert 0 <= row["reward"] <= 1
            assert 1 <= row["response_length"] <= 96
            assert row["finish_reason"] in ("stop", "length")
        assert len({row["reward"] for row in rows}) > 50
        assert sum(bool(re.search("[a-z\u4e00-\u9fff]{2}", row["response"])) for row in rows) > 90 * EPOCHS

    def test_the_state_loads_in_transformers(self, first_outputs):
        from transformers import TrainerState

        state = TrainerState.load_from_json(str(first_outputs / "trainer_state.json"))
        assert (state.global_step, state.max_steps, state.epoch) == (STEPS, STEPS, EPOCHS)
        assert [entry["step"] for entry in state.log_history] == list(range(1, STEPS + 1))
        for name in ("reward", "kl", "actor_loss", "critic_loss"):
            assert len({entry[name] for entry in state.log_history}) > 1, name

    def test_rewards_of_the_records_agree(self, first_outputs):
        means = [sum(step) / len(step) for step in results.rewards(first_outputs)]
        assert means == pytest.approx([entry["reward"] for entry in results.history(first_outputs)], abs=1e-6)

    def test_tensorboard_reads_the_events(self, first_outputs):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (folder,) = (first_outputs / "runs").iterdir()
        events = EventAccumulator(str(folder))
        events.Reload()
        shown = {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
        recorded = [entry["reward"] for entry in results.history(first_outputs)]
        assert shown["reward"] == pytest.approx(recorded, abs=1e-6)
        assert "actor/grad_norm" in shown

    def test_facts_of_the_run(self, first_outputs):
        facts = results.run_json(first_outputs)
        assert facts["exit_reason"] == "completed"
        assert facts["steps"] == facts["steps_planned"] == STEPS
        assert facts["command"] == ["python", "-m", "quickstart.run", "training.device=cpu"]
        assert facts["num_train"] == 100
        assert facts["seed"] == 42
        assert facts["device"]["kind"] == "cpu"
        assert facts["versions"]["verl"] == "0.9.1"
        assert re.fullmatch("[0-9a-f]{64}", facts["data_sha256"])
        assert facts["started"] < facts["ended"]
        assert facts["nonfinite_values"] == {}

    def test_the_written_config_gives_the_same_settings(self, main_job, first_outputs, monkeypatch):
        import dataclasses

        from quickstart import config

        monkeypatch.chdir(main_job.folder)
        again = config.resolve(config.load(str(first_outputs / "config.yaml"), []))
        assert again.choices == ()
        first = config.resolve(config.load(None, ["training.device=cpu"])).cfg
        for section in ("data", "rl", "training", "verl"):
            assert vars(again.cfg)[section] == vars(first)[section]
        assert Path(again.cfg.model.model_name_or_path).samefile(first.model.model_name_or_path)
        assert dataclasses.replace(again.cfg.model, model_name_or_path="") == dataclasses.replace(
            first.model, model_name_or_path=""
        )

    def test_the_export_is_the_trained_model(self, first_outputs):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = results.model_folder(first_outputs)
        model = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert AutoTokenizer.from_pretrained(folder).chat_template
        checkpoint = folder.parent / "actor" / "model_world_size_1_rank_0.pt"
        saved = torch.load(checkpoint, weights_only=False, map_location="cpu")
        assert model.keys() == saved.keys()
        for name, value in saved.items():
            whole = value.full_tensor() if type(value).__name__ == "DTensor" else value
            assert torch.equal(model[name], whole), name

    def test_training_has_changed_the_model(self, first_outputs):
        trained = results.weights(results.model_folder(first_outputs))
        assert 1e-5 < results.largest_difference(trained, results.weights(BUNDLED)) < 0.1


class TestSecondRun:
    def test_it_says_where_the_first_one_went(self, first_outputs, second_job):
        assert f"The run that was here is now in {first_outputs}" in second_job.stdout
        assert results.run_json(second_job.outputs)["steps"] == 2
        assert len(results.rollouts(second_job.outputs)) == 2

    def test_one_seed_gives_the_same_numbers(self, first_outputs, second_job):
        assert results.rewards(second_job.outputs) == [
            pytest.approx(step, abs=1e-6) for step in results.rewards(first_outputs)[:2]
        ]
        first = results.losses(first_outputs)
        again = results.losses(second_job.outputs)
        assert again == pytest.approx(first[: len(again)], abs=1e-6)

    def test_another_seed_gives_others(self, second_job, command_line, tmp_path):
        run = command_line.run([*SHORT, "training.max_steps=1", "training.seed=7"], tmp_path)
        prompts = {row["prompt"] for row in results.rollouts(run.outputs)[0]}
        assert prompts != {row["prompt"] for row in results.rollouts(second_job.outputs)[0]}


class TestGRPO:
    def test_groups_of_four(self, grpo):
        for rows in results.rollouts(grpo.outputs):
            assert len(rows) == 32
            groups: dict[str, list[dict[str, Any]]] = {}
            for row in rows:
                groups.setdefault(row["uid"], []).append(row)
            assert [len(group) for group in groups.values()] == [4] * 8
            assert all(len({row["prompt"] for row in group}) == 1 for group in groups.values())
            assert any(len({row["response"] for row in group}) > 1 for group in groups.values())

    def test_no_critic(self, grpo):
        assert "Initialising critic" not in grpo.stdout
        assert not (grpo.outputs / "checkpoints" / "global_step_2" / "critic").exists()
        assert "critic_loss" not in results.history(grpo.outputs)[0]
        assert re.search(rf"Step 2: GRPO update done. Loss: actor {NUMBER}, kl {NUMBER}", grpo.stdout)

    def test_what_a_group_method_looks_at(self, grpo):
        assert 0 <= results.history(grpo.outputs)[-1]["training/dead_group_share"] < 1

    def test_training_has_changed_the_model(self, grpo):
        trained = results.weights(results.model_folder(grpo.outputs))
        assert results.largest_difference(trained, results.weights(BUNDLED)) > 1e-5


class TestPreference:
    def test_two_updates(self, preference):
        history = [entry for entry in results.history(preference.outputs) if "loss" in entry]
        assert [entry["step"] for entry in history] == [1, 2]
        assert history[0]["loss"] != history[1]["loss"]
        assert "update done" in preference.stdout

    def test_the_same_files(self, preference):
        for name in ("config.yaml", "run.json", "doctor.json", "trainer_state.json", "logs/run.log"):
            assert (preference.outputs / name).is_file(), name
        assert results.run_json(preference.outputs)["exit_reason"] == "completed"

    def test_training_has_changed_the_model(self, preference):
        trained = results.weights(results.model_folder(preference.outputs))
        assert results.largest_difference(trained, results.weights(BUNDLED)) > 1e-5
