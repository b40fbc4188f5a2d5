"""The doctor as users meet it: its command, and what every training run checks first."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quickstart import config
from quickstart.doctor import before, command
from quickstart.doctor.children import Answer
from quickstart.doctor.facts import Facts
from quickstart.doctor.rows import row_facts
from quickstart.errors import UserError

GOOD = Answer(facts={"torch": "2", "gloo": True, "nccl": False, "verl": "0.9.1", "plugin": "registered"})
ROWS = [{"prompt": f"Say {i}", "chosen": f"{i} it is, gladly" + "!" * i, "rejected": f"no, not {i}"} for i in range(12)]
Doctor = Callable[..., tuple[int, dict[str, list[dict[str, str]]]]]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    return path


@pytest.fixture
def arguments(tiny_tied: Path, rows: Path, tmp_path: Path) -> list[str]:
    """A config that is good from end to end."""
    return [
        "profile=cpu",
        f"model.model_name_or_path={tiny_tied}",
        f"data.train_file={rows}",
        f"training.output_dir={tmp_path / 'outputs'}",
        "rl.rollout_batch_size=4",
        "rl.num_train_epochs=1",
        "rl.gradient_accumulation_steps=1",
        "rl.per_device_train_batch_size=4",
    ]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs the command in this process, without its children; gives the exit code and the findings by check."""
    monkeypatch.setattr(Facts, "start_children", lambda self, names: None)
    monkeypatch.setattr(Facts, "child", lambda self, name: GOOD if name == "stack" else None)

    def run(*argv: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
        code = command.main([*argv, "--json"])
        found: dict[str, list[dict[str, str]]] = {}
        for finding in json.loads(capsys.readouterr().out)["findings"]:
            found.setdefault(finding["check"], []).append(finding)
        return code, found

    return run


def states(found: dict[str, list[dict[str, str]]], state: str) -> set[str]:
    return {check for check, findings in found.items() for finding in findings if finding["state"] == state}


CHECKS = {
    "config", "platform", "python", "console", "cpus", "host memory", "shared memory", "packages", "torch", "gpu",
    "vllm", "disk: outputs", "disk: converted data", "disk: hub cache", "disk: Ray", "hub", "model folder",
    "architecture", "parameters", "longest sequence", "chat template", "tokenizer", "pad and eos", "end of answers",
    "data", "prompt length", "answer length", "batch plan", "host memory plan", "settings", "reward self-test",
    "collectives", "plugin in verl", "cuda kernel", "flash-attn",
}  # fmt: skip


def test_a_good_config_passes_every_check(doctor: Doctor, arguments: list[str]) -> None:
    code, found = doctor(*arguments)
    assert (code, states(found, "error")) == (0, set())
    assert found.keys() >= CHECKS


def test_it_writes_no_outputs(doctor: Doctor, arguments: list[str], tmp_path: Path) -> None:
    doctor(*arguments)
    assert not (tmp_path / "outputs").exists()


def test_faults_of_every_room_come_in_one_table(
    doctor: Doctor, arguments: list[str], tiny_tied: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(tiny_tied, tmp_path / "broken"))
    (broken / "chat_template.jinja").unlink()
    reward = tmp_path / "reward.py"
    reward.write_text("def f(data_source, solution_str, ground_truth, extra_info=None):\n    return None\n")
    changes = [f"model.model_name_or_path={broken}", "data.max_response_length=5000", f"rl.reward=function:{reward}:f"]
    code, found = doctor(*arguments, *changes)
    assert code == 2
    assert states(found, "error") == {"chat template", "longest sequence", "data"}
    assert "it needs the training rows" in found["reward self-test"][0]["found"]
    assert found["host memory plan"][0]["state"] == "ok"


def test_the_users_reward_is_called_and_its_traceback_shown(
    doctor: Doctor, arguments: list[str], tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def f(data_source, solution_str, ground_truth, extra_info=None):\n    return {}['score']\n")
    code, found = doctor(*arguments, f"rl.reward=function:{reward}:f")
    (finding,) = found["reward self-test"]
    assert (code, finding["state"]) == (2, "error")
    assert "rows.jsonl:1" in finding["field"]
    assert "return {}['score']" in finding["fix"]


@pytest.mark.parametrize(
    ("change", "check", "field", "words"),
    [
        ("data.max_response_length=3", "settings", "data.max_response_length", "could finish"),
        ("rl.rollout_batch_size=16", "batch plan", "rl.rollout_batch_size", "12 rows of data"),
        ("rl.warmup_ratio=0.9", "settings", "rl.warmup_ratio", "little or nothing would change"),
        ("data.columns.chosen=good", "data", "data.columns", "good"),
    ],
)
def test_one_fault_one_error(
    doctor: Doctor, arguments: list[str], change: str, check: str, field: str, words: str
) -> None:
    extra = ["rl.per_device_train_batch_size=4", "training.num_threads=1"]
    if "warmup" in change:
        extra += ["rl.rollout_batch_size=6", "rl.per_device_train_batch_size=6"]  # two steps
    code, found = doctor(*arguments, *extra, change)
    errors = [f for f in found[check] if f["state"] == "error"]
    assert code == 2
    assert len(errors) == 1
    assert field in errors[0]["field"]
    assert words in " ".join(map(str, errors[0].values()))
    assert errors[0]["fix"]


def test_a_config_that_cannot_be_read_hides_nothing_else(doctor: Doctor) -> None:
    code, found = doctor("rl.lerning_rate=1", "rl.temperature=0", "profile=cpu")
    assert code == 2
    assert {f["field"].split(" ")[0] for f in found["config"]} == {"rl.lerning_rate", "rl.temperature"}
    assert {"platform", "packages", "torch", "collectives", "plugin in verl"} <= states(found, "ok")
    assert "it needs the config" in found["model folder"][0]["found"]


def test_an_output_folder_that_may_not_be_used(doctor: Doctor, arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file")
    code, found = doctor(*arguments)
    (finding,) = found["disk: outputs"]
    assert (code, finding["state"]) == (2, "error")
    assert "is a file" in finding["found"]


def test_an_unknown_flag_ends_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--jsn"])
    assert ended.value.code == 2
    assert "--json" in capsys.readouterr().err


def test_the_table_for_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], doctor: Doctor, arguments: list[str]
) -> None:
    assert command.main(arguments) == 0
    text = capsys.readouterr().out
    for words in ("state", "what to do", "reward self-test", "no errors", "host memory plan, MB", "critic, Adam"):
        assert words in text


# ---- the real command line ----


def call(*argv: str, code: int = 0) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "quickstart", "doctor", *argv], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_real_command_line(arguments: list[str]) -> None:
    found = {f["check"]: f for f in json.loads(call(*arguments, "--json"))["findings"]}
    assert found["plugin in verl"]["state"] == "ok"
    assert found["collectives"]["state"] == "ok"


@pytest.mark.slow
def test_real_command_line_with_an_error(arguments: list[str]) -> None:
    out = call(*arguments, "data.max_response_length=3", code=2)
    assert "1 error" in out
    assert "set data.max_response_length=" in out.replace("\n", " ")


CHEAP = """
import json, sys, time
from quickstart import config
from quickstart.doctor import before
cfg = config.resolve(config.load(None, sys.argv[1:])).cfg
began = time.process_time()
findings = before.environment(cfg)
print(json.dumps([time.process_time() - began, "torch" in sys.modules, "transformers" in sys.modules, len(findings)]))
"""


def test_the_cheap_checks_are_cheap_and_import_no_torch(arguments: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CHEAP, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    seconds, torch, transformers, number = json.loads(ended.stdout)
    assert seconds < 2
    assert (torch, transformers) == (False, False)
    assert number >= 12


# ---- before training ----


def resolved(arguments: list[str], *changes: str) -> Any:
    return config.resolve(config.load(None, [*arguments, *changes])).cfg


def look(cfg: Any, tokenizer: Any) -> list[Any]:
    return before.training(cfg, tokenizer=tokenizer, rows=row_facts(cfg, tokenizer), reward=None)


def test_before_training_all_errors_come_at_once(arguments: list[str], byte_tokenizer: Any) -> None:
    two_steps = ["rl.rollout_batch_size=6", "rl.per_device_train_batch_size=6"]
    cfg = resolved(arguments, "data.max_response_length=5000", "rl.warmup_ratio=0.9", *two_steps)
    with pytest.raises(UserError) as caught:
        look(cfg, byte_tokenizer)
    assert {fault.field for fault in caught.value.faults} == {"data.max_response_length", "rl.warmup_ratio"}


def test_before_training_a_good_run_is_recorded(arguments: list[str], byte_tokenizer: Any, tmp_path: Path) -> None:
    findings = before.environment(resolved(arguments))
    findings += look(resolved(arguments), byte_tokenizer)
    before.write(tmp_path / "doctor.json", findings)
    content = json.loads((tmp_path / "doctor.json").read_text())
    assert content["states"]["error"] == 0
    assert len(content["findings"]) == len(findings)
    data = {finding["check"]: finding["data"] for finding in content["findings"] if finding["data"]}
    assert data["batch plan"]["steps"] == 3
    assert data["host memory plan"]["actor, weights"]["rollout"] == 4 * 91_200
    assert before.notices(findings) == []


def test_before_training_warnings_are_told(arguments: list[str], byte_tokenizer: Any) -> None:
    cfg = resolved(arguments, "data.max_response_length=20")
    (line,) = before.notices(look(cfg, byte_tokenizer))
    assert line.startswith("Warning: data.max_response_length: 20 tokens")
    assert "To do: set data.max_response_length=" in line
