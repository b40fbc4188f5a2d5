"""The shell scripts with a pip and a Python that only note what they are asked."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>calls
"""


@pytest.fixture
def checkout(tmp_path):
    """A clone whose .venv has stand-ins for pip and python."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("pip", "python", "ruff", "mypy"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)
    return tmp_path


@pytest.fixture
def call(checkout, monkeypatch):
    """Runs a script; gives what its stand-ins were asked for by it."""
    monkeypatch.setenv("QUICKSTART_DEVICE", "cpu")

    def call(script, *arguments):
        log = checkout / "calls"
        log.unlink(missing_ok=True)
        subprocess.run(["bash", f"scripts/{script}", *arguments], cwd=checkout, check=True, capture_output=True)
        return log.read_text().splitlines()

    return call


@pytest.fixture
def bench(monkeypatch):
    """scripts/bench_gpu.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("bench_gpu")


RECORD = {"reward": 0.5, "timing_s/step": 2.0, "actor_loss": -0.5, "response_length/mean": 4.0, "timing_s/gen": 1.0}


def write_records(output, *seconds):
    records = [RECORD | {"timing_s/step": s} for s in seconds]
    return (
        f"import json, pathlib\npathlib.Path({str(output)!r}).mkdir()\n"
        f"pathlib.Path({str(output)!r}, 'trainer_state.json').write_text(json.dumps({{'log_history': {records}}}))"
    )


def test_the_benchmark_starts_without_the_records_of_an_earlier_call(bench, tmp_path, monkeypatch):
    (tmp_path / "out_ppo").mkdir()
    (tmp_path / "out_ppo" / "trainer_state.json").write_text('{"log_history": [{"timing_s/step": 1}]}')
    monkeypatch.setattr(bench.work_of, "our_command", lambda *_: [sys.executable, "-c", ""])
    assert bench.ours(tmp_path, "ppo", bench.Work(steps=1), tmp_path, []).first_update is None


def test_the_benchmark_reads_a_run_of_ours(bench, tmp_path, monkeypatch):
    code = write_records(tmp_path / "out_big", 9.0, 2.0, 4.0)
    monkeypatch.setattr(bench.work_of, "our_command", lambda *_: [sys.executable, "-c", code])
    work = bench.Work(prompts=10, new_tokens=4, steps=3)
    found = bench.ours(tmp_path, "ppo", work, tmp_path, [], "big")
    assert (found.steps, found.phases, found.losses) == ([9.0, 2.0, 4.0], {"gen": 1.0}, {"actor_loss": -0.5})
    assert found.first_update is not None
    # the median of the later steps is 3 s, for 10 answers of 4 tokens
    assert bench.cost_table([(work, found)])[2].startswith("| 10 x 4 | 3.00 | 75000 |")


def test_the_benchmark_reads_a_run_of_trl(bench, tmp_path, monkeypatch):
    code = "print('STEP 1'); print('noise'); print('STEP 2 0.250'); print('STEP 3 0.750')"
    monkeypatch.setattr(bench.work_of, "trl_command", lambda *_: [sys.executable, "-c", code])
    found = bench.trl(tmp_path, "dpo", 3, tmp_path, "")
    assert found.steps == [found.first_update, 0.25, 0.75]


def test_runs_of_the_benchmark_keep_bytecode(bench, tmp_path, monkeypatch):
    """What a container sets to stay small makes every start compile its imports: no time of one with warm caches."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    log = tmp_path / "log"
    command = [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"]
    bench.measure("x", command, log, lambda: 0, {}, 60)
    assert log.read_text().strip() == "False"


def test_the_benchmark_repeats_its_rows_with_prompts_of_their_own(bench, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "x"}\n{"prompt": "b", "chosen": "y"}\n')
    rows = bench.work_of.rows_file(tmp_path, 5).read_text().splitlines()
    assert [json.loads(row)["chosen"] for row in rows] == ["x", "y", "x", "y", "x"]
    assert len({json.loads(row)["prompt"] for row in rows}) == 5
    assert bench.size_of("400x128") == (400, 128)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--cost", "400"], "is not PROMPTSxTOKENS"), (["--only", "ppo"], "nvidia-smi is not here")],
)
def test_the_benchmark_refuses_what_it_cannot_measure(bench, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--out", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as caught:
        bench.main()
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def with_smi(bench, tmp_path, monkeypatch):
    """A card that always has 7 MiB in use, and no inputs made."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 7\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bench, "make_inputs", lambda _: None)


@pytest.mark.usefixtures("with_smi")
def test_the_benchmark_says_what_was_learned_where(bench, tmp_path, monkeypatch, capsys):
    def command(output, device, steps):
        assert steps == 6
        rewards = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6) if device == "cuda" else (0.3,) * 6
        records = [RECORD | {"reward": reward} for reward in rewards]
        text = json.dumps({"log_history": records})
        code = f"import pathlib; p = pathlib.Path({str(output)!r}); p.mkdir()"
        return [sys.executable, "-c", f"{code}; (p / 'trainer_state.json').write_text({text!r})"]

    monkeypatch.setattr(bench.work_of, "learn_command", command)
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--out", str(tmp_path), "--only=", "--learn", "6"])
    assert bench.main() == 0
    shown = capsys.readouterr().out
    assert "ours learn_cuda: reward 0.200 -> 0.500" in shown
    assert "ours learn_cpu: reward 0.300 -> 0.300" in shown
    assert "step 1:" not in shown


@pytest.mark.usefixtures("with_smi")
def test_the_benchmark_says_which_run_failed(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.work_of, "our_command", lambda *_: [sys.executable, "-c", "raise SystemExit(2)"])
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--out", str(tmp_path), "--only", "ppo"])
    assert bench.main() == 1
    assert "failed: ours ppo" in capsys.readouterr().err


ARGUMENTS = ("--config", "configs/ppo_min.yaml", "rl.rl_type=grpo", "training.max_steps=3")


def test_run_passes_its_arguments_to_the_run_and_none_to_the_installation(call):
    *installation, run = call("run.sh", *ARGUMENTS)
    assert run == f"python -m quickstart.run {' '.join(ARGUMENTS)}"
    assert installation, "a fresh clone is installed"
    assert all("rl_type" not in line and "--config" not in line for line in installation)
    assert any(".[cpu]" in line for line in installation)


def test_a_second_call_installs_nothing(call):
    call("run.sh", *ARGUMENTS)
    assert call("run.sh", "rl.rl_type=dpo") == ["python -m quickstart.run rl.rl_type=dpo"]


def test_the_installation_says_what_comes_and_how_long_it_takes(checkout, monkeypatch):
    monkeypatch.setenv("QUICKSTART_DEVICE", "cpu")
    first, second = (
        subprocess.run(["bash", "scripts/run.sh"], cwd=checkout, check=True, capture_output=True, text=True).stderr
        for _ in range(2)
    )
    wanted = ("2 GB", "minutes", "torch==", "verl", "installed in")
    assert [word for word in wanted if word not in first] == []
    assert second == ""


def test_tests_bring_their_extra_and_a_run_after_them_installs_nothing(call):
    calls = call("test.sh", "-x")
    assert any(".[cpu,test]" in line for line in calls)
    assert calls[-1] == "python -m pytest -x"
    assert call("run.sh") == ["python -m quickstart.run"]


def test_compare_installs_without_its_arguments(call):
    assert any(".[cpu]" in line for line in call("compare_algorithms.sh", "training.max_steps=3"))
