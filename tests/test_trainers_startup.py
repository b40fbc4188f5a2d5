"""Everything a run needs, looked at before the start."""

from __future__ import annotations

import dataclasses
import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from quickstart import config
from quickstart.data.convert import Conversion
from quickstart.errors import UserError
from quickstart.trainers import checking, startup


@pytest.fixture
def settings(tiny_tied: Path, tmp_path: Path) -> Any:
    """Makes resolved settings for eight sums; sections may be given in part."""
    rows = tmp_path / "rows.jsonl"
    sums = [row for row in tiny_models.arithmetic_rows(20) if row["chosen"] != row["rejected"]][:8]
    rows.write_text("".join(json.dumps(row) + "\n" for row in sums))

    def make(**sections: dict[str, Any]) -> config.RunConfig:
        model = {"model_name_or_path": str(tiny_tied)} | sections.get("model", {})
        data = {"train_file": str(rows), "max_prompt_length": 64, "max_response_length": 16} | sections.get("data", {})
        rl = {"rollout_batch_size": 4} | sections.get("rl", {})
        training = {"output_dir": str(tmp_path / "outputs"), "device": "cpu"} | sections.get("training", {})
        return config.resolve(config.from_arguments(model, data, rl, training)).cfg

    return make


class TestReady:
    def test_rows_steps_and_what_was_read(self, settings):
        ready = startup.prepare_run(settings(rl={"num_train_epochs": 3}))
        assert (ready.rows.num_train, ready.steps) == (8, 6)
        assert ready.notices[0].startswith("Read 8 rows from ")
        assert ready.rows.prepared is not None
        assert ready.rows.preference is None

    @pytest.mark.parametrize("rl_type", ["dpo", "kto"])
    def test_methods_without_rollouts_get_token_ids(self, settings, rl_type):
        ready = startup.prepare_run(settings(rl={"rl_type": rl_type}))
        assert ready.rows.prepared is None
        assert ready.rows.preference is not None

    @pytest.mark.parametrize("rl_type", ["grpo", "dpo", "kto"])
    def test_rows_are_read_once(self, settings, rl_type, monkeypatch):
        """By the run, and by nobody else: the doctor and the memory plan look at what it read."""
        read = Conversion.run
        calls: list[str] = []
        monkeypatch.setattr(Conversion, "run", lambda self, f: calls.append(self.setting) or read(self, f))
        checking.check(settings(rl={"rl_type": rl_type}, training={"memory_budget_gb": 20}), [])
        assert calls == ["data.train_file"]

    def test_nothing_is_written_to_the_output_folder(self, settings, tmp_path):
        startup.prepare_run(settings())
        assert not (tmp_path / "outputs").exists()

    def test_the_reward_runs_in_the_terminal_that_is_given_later(self, settings, tmp_path):
        inside: list[str] = []

        @contextmanager
        def terminal():
            inside.append("open")
            yield

        file = tmp_path / "reward.py"
        file.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.5\n")
        ready = startup.prepare_run(settings(rl={"reward": f"function:{file}:compute_score"}))
        ready.guard_terminal(terminal)
        ready.reward("x", "an answer", "truth", {"chosen": "a", "rejected": "b", "file": "f", "line": 1})
        assert inside == ["open"]


class TestModels:
    def test_faults_of_all_models_at_once(self, settings, tiny_tied, tmp_path):
        for name in ("policy", "critic"):
            shutil.copytree(tiny_tied, tmp_path / name)
            (tmp_path / name / "model.safetensors").unlink()
        names = {
            "model_name_or_path": str(tmp_path / "policy"),
            "critic_model_name_or_path": str(tmp_path / "critic"),
        }
        with pytest.raises(UserError) as caught:
            startup.prepare_run(settings(model=names))
        fields = [fault.field for fault in caught.value.faults]
        assert fields == ["model.model_name_or_path", "model.critic_model_name_or_path"]

    def test_a_critic_that_nobody_trains_is_not_looked_at(self, settings, tmp_path):
        (tmp_path / "empty").mkdir()
        cfg = settings(model={"critic_model_name_or_path": str(tmp_path / "empty")}, rl={"rl_type": "grpo"})
        assert startup.with_local_models(cfg).model.critic_model_name_or_path == str(tmp_path / "empty")


def test_a_named_template_is_for_a_tokenizer_without_one(settings, tiny_tied, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_tied, bare)
    (bare / "chat_template.jinja").unlink()
    cfg = settings(model={"model_name_or_path": str(bare), "chat_template": "chatml"})
    ready = startup.prepare_run(cfg)
    messages = [{"role": "user", "content": "hi"}]
    text = ready.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    without = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, chat_template=None))
    with pytest.raises(UserError, match="chat_template"):
        startup.prepare_run(without)
