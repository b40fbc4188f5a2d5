"""The command line: what it prints, how it exits, how fast it answers."""

import os
import pty
import re
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from quickstart import __main__ as program
from quickstart import config, crash, helptext, outputs, run
from quickstart.arguments import SECTIONS, field_names
from quickstart.errors import Fault, RunError, UserError

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "tiny").mkdir()
    (tmp_path / "c.yaml").write_text("model: {model_name_or_path: tiny}\ndata: {train_file: train.jsonl}\n")
    claimed: list[Path] = []
    for module in (outputs, crash):
        monkeypatch.setattr(module, "CLAIMED", claimed)
    return tmp_path


@pytest.fixture
def trainer(monkeypatch):
    """Stands in for quickstart.trainers.api; `behave` is what train does."""
    calls = []
    module = types.ModuleType("quickstart.trainers.api")

    def train(cfg, choices, argv):
        calls.append((cfg, choices, argv))
        return module.behave()

    module.train, module.behave, module.calls = train, lambda: 0, calls
    monkeypatch.setitem(sys.modules, "quickstart.trainers.api", module)
    return module


def command(*arguments, encoding="utf-8"):
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": encoding}
    line = [sys.executable, "-m", "quickstart.run", *arguments]
    return subprocess.run(line, capture_output=True, encoding=encoding, env=env, check=False)


class TestExitCodes:
    def test_done(self, here, trainer):
        assert run.main(["--config", "c.yaml", "rl.rl_type=grpo"]) == 0
        cfg, choices, argv = trainer.calls[0]
        assert cfg.rl.rl_type == "grpo"
        assert cfg.rl.num_generations == 4
        assert choices
        assert argv == ["python", "-m", "quickstart.run", "--config", "c.yaml", "rl.rl_type=grpo"]

    def test_a_result_that_is_no_number_is_done(self, here, trainer):
        trainer.behave = lambda: {"steps": 3}
        assert run.main(["--config=c.yaml"]) == 0

    def test_the_users_mistake(self, here, trainer, capsys):
        assert run.main(["--config", "c.yaml", "rl.learning_rate=-1"]) == 2
        err = capsys.readouterr().err
        assert "rl.learning_rate" in err
        assert "Traceback" not in err
        assert trainer.calls == []
        assert not (here / "outputs").exists()

    def test_a_mistake_that_shows_while_training(self, here, trainer, capsys):
        def behave():
            raise RunError(Fault(field="train.jsonl:7", found="nan", rule="a reward is a number", fix="repair it"))

        trainer.behave = behave
        assert run.main(["--config", "c.yaml"]) == 2
        assert "train.jsonl:7" in capsys.readouterr().err

    def test_interrupted(self, here, trainer, capsys):
        def behave():
            raise KeyboardInterrupt

        trainer.behave = behave
        assert run.main(["--config", "c.yaml"]) == 130
        assert "interrupted" in capsys.readouterr().err

    def test_the_exit_code_of_the_trainer_is_passed_on(self, here, trainer):
        trainer.behave = lambda: 130
        assert run.main(["--config", "c.yaml"]) == 130


class TestBugs:
    @pytest.fixture
    def broken(self, trainer):
        def behave():
            raise RuntimeError("shapes differ\nsecond line")

        trainer.behave = behave

    def test_one_line_a_path_and_no_traceback(self, here, broken, capsys):
        assert run.main(["--config", "c.yaml"]) == 1
        err = capsys.readouterr().err
        assert "this is a bug in quickstart: RuntimeError: shapes differ\n" in err
        assert "Traceback" not in err
        path = Path(re.search(r"the whole story is in (\S+);", err)[1])
        assert "in behave" in path.read_text()
        path.unlink()

    def test_debug_shows_the_traceback(self, here, broken, capsys):
        assert run.main(["--config", "c.yaml", "--debug"]) == 1
        assert "Traceback" in capsys.readouterr().err

    def test_once_there_is_a_log_the_traceback_goes_there(self, here, trainer, capsys):
        def behave():
            with outputs.OutputFolder.claim("outputs") as folder:
                folder.log.write_text("verl said this\n")
                raise RuntimeError("late")

        trainer.behave = behave
        assert run.main(["--config", "c.yaml"]) == 1
        log = here / "outputs" / "logs" / "run.log"
        assert str(log) in capsys.readouterr().err
        assert log.read_text().startswith("verl said this\n")
        assert "RuntimeError: late" in log.read_text()

    def test_an_error_without_a_message(self, here, trainer, capsys):
        def behave():
            raise AssertionError

        trainer.behave = behave
        assert run.main(["--config", "c.yaml"]) == 1
        assert "no message" in capsys.readouterr().err


class TestFlags:
    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            (["--confg", "c.yaml"], "did you mean --config?"),
            (["--help-me"], "--help"),
            (["--config"], "no file"),
            (["--config", "--debug"], "no file"),
            (["--learning-rate", "3"], "rl.learning_rate"),
            (["--rl.lr=3"], "dashes"),
            (["c.yaml"], "--config c.yaml"),
            (["--config", "nothere.yaml"], "no such file"),
        ],
    )
    def test_what_does_not_exist_is_explained(self, here, capsys, arguments, part):
        assert run.main(arguments) == 2
        assert part in capsys.readouterr().err

    @pytest.mark.parametrize("flag", ["--help", "-h"])
    def test_help_lists_every_setting(self, capsys, flag):
        assert run.main([flag]) == 0
        out = capsys.readouterr().out
        for section in SECTIONS:
            for name in field_names(section):
                assert f"{section}.{name}=" in out

    def test_help_names_every_flag(self):
        assert [flag for flag in run.FLAGS if flag != "-h" and flag not in helptext.USAGE] == []

    def test_examples_in_the_help_are_legal(self, here):
        (here / "my.jsonl").write_text("{}\n")
        (here / "mine.yaml").write_text((here / "c.yaml").read_text())
        for line in helptext.USAGE.splitlines():
            if line.startswith("  python -m quickstart.run"):
                parsed = run.parse(line.split()[3:])
                config.load(parsed.config or "c.yaml", list(parsed.overrides))

    def test_version(self, capsys):
        assert run.main(["--version"]) == 0
        assert re.fullmatch(r"quickstart \d+\.\d+\.\d+\n", capsys.readouterr().out)

    def test_print_config_is_a_config(self, here, capsys):
        assert run.main(["--config", "c.yaml", "--print-config", "rl.learning_rate=3e-6"]) == 0
        text = capsys.readouterr().out
        assert yaml.safe_load(text)["rl"]["learning_rate"] == 3e-6
        (here / "again.yaml").write_text(text)
        assert config.load("again.yaml", []).rl.learning_rate == 3e-6

    def test_dry_run_shows_choices_rows_and_batches_and_starts_nothing(self, here, capsys):
        assert run.main(["profile=cpu", "training.device=cpu", "--dry-run", "rl.rl_type=grpo"]) == 0
        out = capsys.readouterr().out
        assert "training.num_devices" in out
        assert "# note: Read 100 rows" in out
        assert "20 prompts x 4 answers = 80 samples, used in 4 updates of 20" in out
        assert yaml.safe_load(out)["rl"]["rl_type"] == "grpo"
        assert not (here / "outputs").exists()

    def test_dry_run_of_a_preference_method(self, here, capsys):
        assert run.main(["profile=cpu", "training.device=cpu", "--dry-run", "rl.rl_type=kto"]) == 0
        out = capsys.readouterr().out
        assert "# note: Read 200 answers" in out
        assert "one update takes 20 rows" in out

    def test_what_a_reward_prints_in_a_dry_run_is_not_in_the_plan(self, here, capsys):
        (here / "loud.py").write_text("print('hello')\ndef score(*a, **k):\n    print('scored')\n    return 1.0\n")
        settings = ["profile=cpu", "training.device=cpu", "rl.reward=function:loud.py:score"]
        assert run.main([*settings, "--dry-run"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["rl"]["reward"] == "function:loud.py:score"

    def test_a_dry_run_downloads_nothing(self, here, capsys, monkeypatch):
        """A model that is on the hub only: rows, folder and reward are looked at, and what is not is named."""
        monkeypatch.setattr("quickstart.doctor.hub.hub_reachable", lambda address: True)
        monkeypatch.setattr("quickstart.doctor.hub._download", None)
        settings = ["profile=cpu", "training.device=cpu", "model.model_name_or_path=nobody/has-this", "--dry-run"]
        assert run.main(settings) == 0
        out = capsys.readouterr().out
        assert "# note: nobody/has-this: not on this machine yet" in out
        assert yaml.safe_load(out)["model"]["model_name_or_path"] == "nobody/has-this"
        (here / "bad.jsonl").write_text('{"prompt": null, "chosen": "a", "rejected": "b"}\n')
        for wrong in ("data.train_file=bad.jsonl", "training.output_dir=/", "data.eval_file=bad.jsonl"):
            assert run.main([*settings, wrong]) == 2
        assert run.main([*settings, "rl.rollout_batch_size=120"]) == 2
        assert "100 rows of data" in capsys.readouterr().err


class TestProgram:
    def test_commands_that_exist(self, capsys):
        assert program.main([]) == 0
        out = capsys.readouterr().out
        for name, (module, _) in program.COMMANDS.items():
            assert name in out
            assert __import__("importlib").import_module(module).main

    def test_run_is_handed_over(self, capsys):
        assert program.main(["run", "--version"]) == 0

    @pytest.mark.parametrize(("typed", "fix"), [("rnu", "run"), ("rl.lr=3", "quickstart run"), ("xyz", "commands are")])
    def test_unknown_commands_name_the_nearest(self, capsys, typed, fix):
        assert program.main([typed]) == 2
        assert fix in capsys.readouterr().err


class TestPackage:
    def test_names_are_lazy_and_right(self):
        import quickstart

        assert quickstart.UserError is UserError
        assert set(quickstart.__all__) <= set(dir(quickstart))
        with pytest.raises(AttributeError):
            _ = quickstart.nothing

    def test_version_is_the_packages(self):
        import quickstart

        assert f'version = "{quickstart.__version__}"' in (REPOSITORY / "pyproject.toml").read_text()


HEAVY = ["torch", "ray", "verl", "transformers", "datasets", "numpy", "tensorboard", "rich"]


class TestSpeed:
    """Half a second of CPU time, so that a busy machine does not count against us."""

    @pytest.mark.parametrize(
        ("arguments", "code"), [(["--help"], 0), (["rl.learning_rate=-1"], 2), (["--version"], 0), (["-m", "x"], 2)]
    )
    def test_answers_at_once(self, arguments, code):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert command(*arguments).returncode == code
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5

    @pytest.mark.parametrize("arguments", [["--help"], ["rl.learning_rate=-1"], ["--version"]])
    def test_imports_nothing_heavy(self, arguments):
        script = (
            "import sys\nfrom quickstart.run import main\n"
            f"main({arguments!r})\nheavy = set({HEAVY!r}) & set(sys.modules)\nassert not heavy, heavy\n"
        )
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr


class TestConsoles:
    @pytest.mark.parametrize("encoding", ["ascii", "gbk", "utf-8"])
    def test_chinese_in_a_fault_does_not_break_a_console(self, encoding):
        done = command("data.train_file=数据/没有.jsonl", encoding=encoding)
        assert done.returncode == 2
        assert "no such file" in done.stderr

    def test_help_on_a_terminal(self):
        leader, follower = pty.openpty()
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "60"}
        arguments = [sys.executable, "-m", "quickstart.run", "--version"]
        assert subprocess.run(arguments, stdout=follower, stderr=follower, env=env, check=False).returncode == 0
        os.close(follower)
        assert b"quickstart" in os.read(leader, 1000)
        os.close(leader)


class TestVerlSection:
    def test_an_error_in_a_run_with_keys_of_verl_names_them_and_is_no_bug_of_ours(self, monkeypatch, capsys, tmp_path):
        def train(*_):
            raise ZeroDivisionError("integer modulo by zero")

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("quickstart.trainers.api.train", train)
        assert run.main(["training.device=cpu", "verl.trainer.project_name=mine"]) == 2
        shown = capsys.readouterr().err
        assert "verl.trainer.project_name" in shown
        assert "ZeroDivisionError: integer modulo by zero" in shown
        assert "bug in quickstart" not in shown

    def test_control_without_such_keys_it_is_ours(self, monkeypatch, capsys, tmp_path):
        def train(*_):
            raise ZeroDivisionError("integer modulo by zero")

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("quickstart.trainers.api.train", train)
        assert run.main(["training.device=cpu"]) == 1
        assert "bug in quickstart" in capsys.readouterr().err


BIG_COMMAND = """
import sys, types
from quickstart import __main__ as program
sys.modules["big"] = types.SimpleNamespace(main=lambda arguments: print("x" * 10**6) or 0)
program.COMMANDS["big"] = ("big", "")
sys.exit(program.main(["big"]))
"""


def test_a_reader_that_has_seen_enough_is_no_fault():
    """`quickstart doctor | head -1`"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", BIG_COMMAND], **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
