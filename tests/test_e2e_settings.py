"""Settings that change how a run goes, each through the command line; the same run from Python; other models.

Tiny model unless the test is about a model. Not here: what a setting may be (test_config).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import results
import tiny_models

pytestmark = pytest.mark.slow


def setting(job: list[str], key: str) -> str:
    """The value of one of a job's settings."""
    return next(text.partition("=")[2] for text in job if text.startswith(f"{key}="))


def policy(job: list[str]) -> dict[str, Any]:
    """Weights that a job starts from."""
    return results.weights(Path(setting(job, "model.model_name_or_path")))


class TestEvaluation:
    def test_rows_of_their_own(self, tiny_job, command_line, tmp_path):
        rows = tmp_path / "eval.jsonl"
        lines = [{"prompt": f"Tell me {n}", "chosen": str(n), "rejected": "no"} for n in range(5)]
        rows.write_text("\n".join(map(json.dumps, lines)))
        more = [f"data.eval_file={rows}", "training.eval_steps=2", "training.eval_before_train=true"]
        run = command_line.run([*tiny_job, *more], tmp_path)
        files = sorted(path.name for path in (run.outputs / "rollouts").glob("evaluation_*"))
        assert files == ["evaluation_000000.jsonl", "evaluation_000002.jsonl", "evaluation_000004.jsonl"]
        answers = [json.loads(line) for line in (run.outputs / "rollouts" / files[0]).read_text().splitlines()]
        assert sorted(row["prompt"] for row in answers) == [f"Tell me {n}" for n in range(5)]
        assert list(answers[0])[:3] == ["prompt", "response", "reward"]
        evaluations = [entry for entry in results.history(run.outputs) if "eval_reward" in entry]
        assert [entry["step"] for entry in evaluations] == [0, 2, 4]
        assert "Step 2: evaluation done on 5 rows: reward 0." in run.stdout
        assert len(results.losses(run.outputs, ("actor_loss",))) == 4

    def test_it_changes_no_training(self, tiny_job, command_line, tmp_path):
        """Draws for an evaluation are not taken from those of the rollouts."""
        rows = f"data.eval_file={setting(tiny_job, 'data.train_file')}"
        plain = command_line.run([*tiny_job, "training.max_steps=2"], tmp_path / "plain")
        other = [*tiny_job, "training.max_steps=2", rows, "training.eval_steps=1", "training.eval_before_train=true"]
        watched = command_line.run(other, tmp_path / "watched")
        assert results.rewards(watched.outputs) == results.rewards(plain.outputs)


class TestTraining:
    def test_lora_is_merged_into_the_export(self, tiny_job, command_line, tmp_path):
        more = ["model.lora_rank=4", "rl.learning_rate=1e-2", "training.max_steps=2"]
        run = command_line.run([*tiny_job, *more], tmp_path)
        before, after = policy(tiny_job), results.weights(results.model_folder(run.outputs))
        changed = {name for name in before if (before[name] - after[name]).abs().max() > 1e-6}
        assert changed
        assert all("_proj" in name for name in changed), changed

    def test_adaptive_kl(self, tiny_job, command_line, tmp_path):
        """The coefficient leaves its start: the KL of a hardly trained model is far below the target."""
        more = ["rl.kl_controller=adaptive", "rl.kl_target=5", "rl.kl_horizon=100", "rl.kl_coef=0.1"]
        run = command_line.run([*tiny_job, *more], tmp_path)
        coefficients = [entry["actor/reward_kl_penalty_coeff"] for entry in results.history(run.outputs)]
        assert coefficients == sorted(coefficients, reverse=True)
        assert coefficients[-1] < 0.1

    def test_kl_in_the_loss_and_filtered_sampling(self, tiny_job, command_line, tmp_path):
        more = ["rl.kl_placement=loss", "rl.kl_coef=0.01", "rl.entropy_coef=0.001", "rl.ppo_epochs=2"]
        more += ["rl.top_p=90%", "rl.top_k=20", "rl.temperature=0.7", "rl.gradient_accumulation_steps=1"]
        run = command_line.run([*tiny_job, *more, "training.max_steps=2"], tmp_path)
        first = results.history(run.outputs)[0]
        assert "actor/kl_loss" in first
        assert "actor/reward_kl_penalty" not in first
        assert first["actor/kl_coef"] == pytest.approx(0.01)

    @pytest.mark.parametrize("rl_type", ["rloo", "reinforce_plus_plus"])
    def test_other_estimators_by_name(self, tiny_job, command_line, tmp_path, rl_type):
        run = command_line.run([*tiny_job, f"rl.rl_type={rl_type}", "training.max_steps=2"], tmp_path)
        assert results.run_json(run.outputs)["rl_type"] == rl_type
        assert len(results.losses(run.outputs, ("actor_loss",))) == 2

    def test_old_checkpoints_go(self, tiny_job, command_line, tmp_path):
        run = command_line.run([*tiny_job, "training.save_steps=1", "training.save_total_limit=2"], tmp_path)
        assert sorted(p.name for p in (run.outputs / "checkpoints").glob("*_*[0-9]")) == [
            "global_step_3",
            "global_step_4",
        ]

    def test_no_checkpoint(self, tiny_job, command_line, tmp_path):
        run = command_line.run([*tiny_job, "training.save_steps=never", "training.max_steps=1"], tmp_path)
        assert list((run.outputs / "checkpoints").iterdir()) == []


class TestVerlKeys:
    def test_a_key_of_verl_takes_effect(self, tiny_job, command_line, tmp_path):
        key = "verl.actor_rollout_ref.actor.optim.lr_warmup_steps=10"
        settings = ["rl.learning_rate=1e-2", "rl.warmup_ratio=0", "training.max_steps=3"]
        run = command_line.run([*tiny_job, key, *settings], tmp_path)
        rates = [record["actor/lr"] for record in results.history(run.outputs)]
        assert rates == pytest.approx([1e-3, 2e-3, 3e-3])
        assert "actor_rollout_ref.actor.optim.lr_warmup_steps: 10" in (run.outputs / "config.yaml").read_text()

    def test_an_unknown_one_is_found_before_the_start(self, tiny_job, command_line, tmp_path):
        run = command_line.run([*tiny_job, "verl.actor_rollout_ref.actor.clip_ratio_d=5"], tmp_path, code=2)
        assert "did you mean verl.actor_rollout_ref.actor.clip_ratio_c?" in run.stderr
        assert run.stdout == ""
        assert not run.outputs.exists()


class TestPython:
    def test_the_same_numbers_as_on_the_command_line(self, tiny_job, command_line, tmp_path, monkeypatch, capsys):
        from quickstart import DataArguments, ModelArguments, RLArguments, Trainer

        defaults = tmp_path / "defaults.yaml"  # Python has no file and no profile
        defaults.write_text("data: {}\n")
        run = command_line.run(
            [*tiny_job, "data.max_prompt_length=64", "training.max_steps=2", "--config", str(defaults)], tmp_path
        )
        monkeypatch.chdir(tmp_path)
        trainer = Trainer(
            model_args=ModelArguments(model_name_or_path=setting(tiny_job, "model.model_name_or_path")),
            data_args=DataArguments(
                train_file=setting(tiny_job, "data.train_file"), max_prompt_length=64, max_response_length=8
            ),
            rl_args=RLArguments(rollout_batch_size=8, per_device_train_batch_size=8),
            training_args={"output_dir": "python", "max_steps": 2, "device": "cpu", "num_threads": 1},
        )
        result = trainer.train()
        assert (result.steps, result.output_dir) == (2, tmp_path / "python")
        assert results.losses(result.output_dir) == pytest.approx(results.losses(run.outputs), abs=1e-6)
        assert result.metrics["reward"] == results.history(run.outputs)[-1]["reward"]
        assert "Training completed: 2 steps" in capsys.readouterr().out
        again = trainer.train()
        assert results.rewards(again.output_dir) == results.rewards(run.outputs)
        assert len(list((tmp_path / "python" / "history").iterdir())) == 1


QWEN2 = {"hidden_size": 112, "intermediate_size": 304, "num_hidden_layers": 24, "vocab_size": 151_936}
QWEN2 |= {"num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32_768}
QWEN2 |= {"rope_theta": 1_000_000.0, "max_window_layers": 24, "use_sliding_window": False, "rms_norm_eps": 1e-6}


class TestQwen2:
    def test_its_architecture_at_an_eighth_of_the_width(self, tiny_job, command_line, tmp_path):
        """Layers, heads, vocabulary and tying of Qwen/Qwen2-0.5B; the true width (896) is a run by hand."""
        folder = tiny_models.save_policy(tmp_path / "qwen2", "qwen2_tied", **QWEN2)
        more = [f"model.model_name_or_path={folder}", "rl.rollout_batch_size=4", "rl.per_device_train_batch_size=4"]
        run = command_line.run([*tiny_job, *more, "training.max_steps=1", "training.num_threads=2"], tmp_path)
        trained = results.weights(results.model_folder(run.outputs))
        assert "lm_head.weight" not in trained
        assert tuple(trained["model.embed_tokens.weight"].shape) == (151_936, 112)
        assert results.largest_difference(trained, results.weights(folder)) > 1e-5
