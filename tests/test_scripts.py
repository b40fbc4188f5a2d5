"""The shell scripts with a pip and a Python that only note what they are asked."""

import importlib.util
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


def test_the_benchmark_starts_without_the_records_of_an_earlier_call(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("bench_gpu", ROOT / "scripts" / "bench_gpu.py")
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_gpu", bench)
    spec.loader.exec_module(bench)
    (tmp_path / "out_ppo").mkdir()
    (tmp_path / "out_ppo" / "trainer_state.json").write_text('{"log_history": [{"timing_s/step": 1}]}')
    monkeypatch.setattr(bench, "our_command", lambda *_: [sys.executable, "-c", ""])
    assert bench.ours(tmp_path, "ppo", 1, tmp_path, []).first_update is None


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
