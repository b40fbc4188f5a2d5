"""Bad input through the real entry point: exit code 2, one message with field, value, rule and fix, nothing written."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quickstart import run

REPOSITORY = Path(__file__).resolve().parents[1]
BUNDLED = REPOSITORY / "data" / "bundled_model"
ROW = {"prompt": "Why is the sky blue?", "chosen": "Because of scattering.", "rejected": "No idea at all."}


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run with settings that must be refused; gives the message."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(lines(*({**ROW, "prompt": f"Question {i}?"} for i in range(8))))
    base = ["profile=cpu", "training.device=cpu", f"model.model_name_or_path={BUNDLED}", "data.train_file=rows.jsonl"]
    base += ["rl.rollout_batch_size=8", "rl.per_device_train_batch_size=8"]

    def refused(*settings: str) -> str:
        keys = {setting.partition("=")[0] for setting in settings}
        command = [*(s for s in base if s.partition("=")[0] not in keys), *settings]
        assert run.main([*command, "--dry-run"]) == 2
        foreseen = capfd.readouterr()
        code = run.main(command)
        shown = capfd.readouterr()
        assert code == 2, shown
        assert shown.err == foreseen.err, "a dry run says what the run says"
        assert "Traceback" not in shown.out + shown.err
        assert shown.err.count("error:") == 1
        assert "fix:" in shown.err
        assert not (tmp_path / "outputs").exists()
        return shown.err

    return refused


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["rows.jsonl", "no records"]),
        (lines({"question": "a", "good": "b", "bad": "c"}), ["rows.jsonl", "question"]),
        (lines(ROW) + '{"prompt": "cut", "chosen"\n', ["rows.jsonl:2", "JSON"]),
        (lines({**ROW, "prompt": None}), ["rows.jsonl:1", "prompt"]),
        (lines({**ROW, "rejected": ROW["chosen"]}), ["identical"]),
    ],
    ids=["empty", "columns", "json", "null", "identical"],
)
def test_data_that_cannot_be_used(refuse, content, words):
    Path("rows.jsonl").write_text(content, encoding="utf-8")
    message = refuse()
    assert [word for word in words if word not in message] == []


def test_no_place_is_named_twice(refuse):
    Path("rows.jsonl").write_text(lines(*([{**ROW, "chosen": 3}] * 12)))
    message = refuse()
    assert message.count("rows.jsonl") == 1
    assert "rows.jsonl:1: found chosen 3" in message
    assert "in 12 rows, also: 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more" in message
    Path("rows.jsonl").write_text("[1, 2, 3]\n")
    assert refuse().count("1") == refuse().count("rows.jsonl:1: found 1") + refuse().count("error: 1 problem") + 1


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
@pytest.mark.parametrize("batch", [(8, 1), (2, 4)])
@pytest.mark.parametrize("method", ["ppo", "grpo", "dpo", "kto"])
def test_the_sizes_that_are_named_for_few_rows_are_legal(refuse, capfd, rows, batch, method):
    """One message is enough: who does what it says has a run."""
    Path("rows.jsonl").write_text(lines(*({**ROW, "prompt": f"Question {i}?"} for i in range(rows))))
    sizes = ["rl.rollout_batch_size=8", f"rl.per_device_train_batch_size={batch[0]}"]
    sizes += [f"rl.gradient_accumulation_steps={batch[1]}", "rl.num_train_epochs=1", f"rl.rl_type={method}"]
    if method == "kto" and rows * 2 >= 8:
        return
    message = refuse(*sizes)
    if method == "dpo" or method == "kto" or "set " in message:
        fixed = re.findall(r"rl\.\w+=\d+", message.partition("fix:")[2])
    else:
        fixed = [f"rl.rollout_batch_size={number}" for number in re.findall(r"write (\d+)", message)]
    assert fixed, message
    base = ["profile=cpu", "training.device=cpu", f"model.model_name_or_path={BUNDLED}", "data.train_file=rows.jsonl"]
    code = run.main([*base, *sizes, *fixed, "--dry-run"])
    assert code == 0, capfd.readouterr().err


def test_a_file_that_is_not_there(refuse):
    message = refuse("data.train_file=row.jsonl")
    assert "row.jsonl" in message
    assert "rows.jsonl" in message  # the nearest one that is


def test_a_batch_larger_than_the_data(refuse):
    message = refuse("rl.rollout_batch_size=16")
    assert "rl.rollout_batch_size" in message
    assert "8 rows" in message


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("rl.learning_rat=1e-6", ["rl.learning_rate"]),
        ("rl.learning_rate=-1e-6", ["rl.learning_rate", "above 0"]),
        ("rl.learning_rate=fast", ["rl.learning_rate", "fast"]),
        ("rl.temperature=0", ["rl.temperature", "nothing is learned"]),
        ("rl.rl_type=pppo", ["ppo"]),
        ("verl.actor_rollout_ref.actor.clip_ratoi=0.1", ["clip_ratio"]),
        ("training.output_dir=rows.jsonl", ["rows.jsonl", "folder"]),
        ("training.backend=ray", ["training.backend", "local"]),
        ("rl.rollout_engine=vllm", ["rl.rollout_engine", "hf"]),
        ("training.memory_budget_gb=0.1", ["training.memory_budget_gb", "found 0.1", "the least", "GiB", "or more"]),
        ("training.memory_budget_gb=0", ["training.memory_budget_gb", "above 0"]),
        ("rl.reward=function:none.py:score", ["'function:none.py:score'", "no such file", "function:FILE.py:NAME"]),
        ("rl.top_p=1.5", ["rl.top_p", "1.5", "fix: write a value above 0 and at most 1"]),
        ("rl.top_p=95", ["fix: write 0.95 (a share of one) or 95%"]),
        ("rl.learning_rate=0,001", ["fix: write 0.001\n"]),
        ("rl.learning_rate=1,500", ["fix: write 1.500 or 1500\n"]),
        ("training.max_steps=1,500", ["fix: write 1500\n"]),
        ("training.device=gpu", ["fix: write cuda\n"]),
        ("training.save_steps=5.5", ["fix: write end, never or a whole number"]),
        ("training.resume_from_checkpoint=latest", ["leave it out", "no run in"]),
        ("train", ["train: found a word without ="]),
        ("profile=tpu", ["'tpu'", "leave it out", "auto, gpu or cpu"]),
        ("training.output_dir=/", ["output_dir=/:", "folder of their own", "name another folder"]),
        ("training.output_dir=/dev/null/x", ["/dev/null is a file"]),
        ("model.model_name_or_path=rows.jsonl", ["'rows.jsonl'", "a model is a folder", "config.json"]),
        (f"model.model_name_or_path={BUNDLED}/model.safetensors", ["a model is a folder", f"fix: write {BUNDLED}\n"]),
        ("model.critic_model_name_or_path=rows.jsonl", ["model.critic_model_name_or_path", "a model is a folder"]),
        ("data.train_file=/nowhere/rows.jsonl", ["found '/nowhere/rows.jsonl'; no such file\n"]),
    ],
)
def test_settings_that_cannot_be_used(refuse, setting, words):
    message = refuse(setting)
    assert [word for word in words if word not in message] == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a file system that holds no files of ours")
def test_a_folder_that_is_on_no_disk(refuse):
    message = refuse("training.output_dir=/proc/x")
    assert "on no disk" in message
    assert "free some space" not in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(refuse, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "may not be written" in refuse("training.output_dir=locked/x")


NAMED = {
    "training.output_dir": "{}/x",
    "data.train_file": "{}/rows.jsonl",
    "data.cache_dir": "{}/x",
    "model.model_name_or_path": "{}/model",
    "rl.reward": "function:{}/reward.py:score",
}


@pytest.mark.parametrize("setting", NAMED)
def test_what_may_not_be_looked_at_is_no_bug_of_ours(refuse, tmp_path, monkeypatch, setting):
    """As os.stat answers anybody but root below a folder without x."""
    locked = str(tmp_path / "locked")
    stat = os.stat

    def refusing(path, *arguments, **options):
        if str(path).startswith(locked):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refusing)
    message = refuse(f"{setting}={NAMED[setting].format(locked)}")
    assert "locked" in message
    assert "bug" not in message


def test_all_faults_are_told_at_once(refuse):
    message = refuse("rl.learning_rate=-1", "rl.temperature=0", "rl.top_q=1")
    assert "3 problems" in message


def test_a_reward_function_that_is_not_in_its_file(refuse):
    Path("reward.py").write_text("def score(): ...\n")
    assert "scores" in refuse("rl.reward=function:reward.py:scores")


def test_a_model_folder_without_weights(refuse, tmp_path):
    shutil.copytree(BUNDLED, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    message = refuse("model.model_name_or_path=model")
    assert "model.model_name_or_path" in message
    assert "no weight file" in message


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size"])
def test_a_config_of_another_model(refuse, tmp_path, field):
    shutil.copytree(BUNDLED, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, field: 2 * content[field]}))
    message = refuse("model.model_name_or_path=model")
    assert "an embedding of 3328 x 256 in model.safetensors" in message
    assert "config.json must be that of the weights" in message


def test_a_model_file_that_is_a_pointer(refuse, tmp_path):
    shutil.copytree(BUNDLED, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git lfs pull" in refuse("model.model_name_or_path=model")


def test_a_hub_that_cannot_be_reached_gives_the_three_ways_out(refuse, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    message = refuse("model.model_name_or_path=Qwen/Qwen2-0.5B")
    for way in ("HF_ENDPOINT", "local folder", "bundled model"):
        assert way in message


def test_a_dry_run_takes_what_the_run_takes(refuse, capfd):
    """Packed rows under a name without .gz are known by their content; `refuse` has made the folder."""
    Path("packed.jsonl").write_bytes(gzip.compress(Path("rows.jsonl").read_bytes()))
    settings = ["profile=cpu", "training.device=cpu", "data.train_file=packed.jsonl", "rl.rollout_batch_size=4"]
    assert run.main([*settings, "rl.per_device_train_batch_size=4", "--dry-run"]) == 0
    assert "# note: Read 8 rows from packed.jsonl" in capfd.readouterr().out
    assert not Path("outputs").exists()
