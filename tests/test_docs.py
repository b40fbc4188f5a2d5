"""The READMEs: every command in them parses, every path exists, and both languages say the same."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from quickstart import config, run
from quickstart.__main__ import COMMANDS
from quickstart.arguments import SECTIONS, field_names
from quickstart.config import Probe

REPOSITORY = Path(__file__).resolve().parents[1]
READMES = ("README.md", "README_zh.md")
ENGLISH, CHINESE = ((REPOSITORY / name).read_text(encoding="utf-8") for name in READMES)
EXAMPLES = ("my.jsonl", "my_reward.py")  # files of the reader's own
SETTING = re.compile(r"\b(?:model|data|rl|training)\.[a-z0-9_]+\b")
NOT_SETTINGS = {"data.jsonl"}


def blocks(text: str, language: str) -> list[str]:
    """Code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands(text: str) -> list[str]:
    """Shell commands, without their comments."""
    lines = [line for block in blocks(text, "bash") for line in block.splitlines()]
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


def code(text: str) -> list[str]:
    """Python blocks as the interpreter sees them: without comments and layout."""
    return [ast.dump(ast.parse(block)) for block in blocks(text, "python")]


def trees(text: str) -> list[list[str]]:
    """The paths of each list of files, in order."""
    listed = [block for block in blocks(text, "text") if "Loading verl" not in block]
    return [[line.split()[0] for line in block.splitlines()] for block in listed]


def logs(text: str) -> list[str]:
    """What a console shows: the same in every language."""
    return [block for block in blocks(text, "text") if "Loading verl" in block]


def comments(text: str) -> list[str]:
    """What stands behind commands and paths."""
    behind = [line.split("  #")[1] for block in blocks(text, "bash") for line in block.splitlines() if "  #" in line]
    listed = [block for block in blocks(text, "text") if "Loading verl" not in block]
    lines = [line.split(None, 1) for block in listed for line in block.splitlines()]
    return behind + [parts[1] for parts in lines if len(parts) == 2]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the examples name."""
    row = '{"prompt": "p", "chosen": "good", "rejected": "bad"}\n'
    (tmp_path / "my.jsonl").write_text(row * 40, encoding="utf-8")
    block = next(block for block in blocks(ENGLISH, "python") if "my_reward.py" in block)
    (tmp_path / "my_reward.py").write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", commands(ENGLISH))
def test_each_command_is_understood(command, reader, capsys):
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "quickstart.run"]:
        flags = [word for word in words[3:] if word in ("--help", "--dry-run")]
        assert run.main([*words[3:], *([] if flags else ["--dry-run"])]) == 0, capsys.readouterr().err
    elif words[:3] == ["python", "-m", "quickstart"]:
        assert words[3] in COMMANDS
    else:
        assert words[0] == "bash"
        assert subprocess.run(["bash", "-n", str(REPOSITORY / words[1])], check=False).returncode == 0


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=READMES)
def test_each_path_exists(text):
    linked = [path for path in re.findall(r"\]\(([^)#]+)\)", text) if not path.startswith("http")]
    tree = [block for block in blocks(text, "text") if "Loading verl" not in block]
    named = [line.split()[0] for block in tree for line in block.splitlines() if not line.startswith(" ")]
    inside = [f"quickstart/{line.split()[0]}" for block in tree for line in block.splitlines() if line.startswith("  ")]
    told = re.findall(r"`((?:tests|scripts|configs|data|quickstart)/[\w./]+)`", text)
    missing = [path for path in {*linked, *named, *inside, *told} if not (REPOSITORY / path).exists()]
    assert missing == []


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=READMES)
def test_each_setting_exists(text):
    known = {f"{section}.{name}" for section in SECTIONS for name in field_names(section)}
    named = {name for name in SETTING.findall(text) if not name.endswith((".py", ".jsonl", ".json"))}
    assert named - known - NOT_SETTINGS == set()


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=READMES)
def test_each_python_block_compiles(text):
    for block in blocks(text, "python"):
        ast.parse(block)


def test_the_python_example_is_the_main_job_on_a_cpu(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    block = next(block for block in blocks(ENGLISH, "python") if "Trainer(" in block)
    scope: dict[str, Any] = {}
    exec(block.replace("trainer.train()", ""), scope)
    cpu = Probe(gpus=(), cpus=2, why_no_gpu="none", has_vllm=False, has_flash_attention=False)
    main_job = config.resolve(config.load(None, ["training.device=cpu"]), cpu).cfg
    for section in ("data", "rl"):
        assert vars(scope["trainer"].cfg)[section] == vars(main_job)[section]
    assert scope["trainer"].cfg.model.model_name_or_path == main_job.model.model_name_or_path
    assert scope["trainer"].cfg.training.seed == main_job.training.seed


def test_every_room_is_in_the_tree():
    tree = next(block for block in blocks(ENGLISH, "text") if "configs/" in block)
    rooms = [path.name for path in (REPOSITORY / "quickstart").iterdir() if (path / "__init__.py").exists()]
    assert [room for room in rooms if f"  {room}/" not in tree] == []


def test_both_languages_give_the_same_commands_code_and_tables():
    for same in (commands, code, trees, logs):
        assert same(ENGLISH) == same(CHINESE)
    assert len(comments(ENGLISH)) == len(comments(CHINESE))
    assert [line.count("|") for line in ENGLISH.splitlines() if line.startswith("|")] == [
        line.count("|") for line in CHINESE.splitlines() if line.startswith("|")
    ]
    assert ENGLISH.count("\n## ") == CHINESE.count("\n## ")


def test_a_chinese_reader_reads_chinese_comments():
    assert [comment for comment in comments(CHINESE) if not re.search("[\u4e00-\u9fff]", comment)] == []


def test_the_shipped_config_is_the_default():
    assert (REPOSITORY / config.DEFAULT_CONFIG).is_file()
    assert f"({config.DEFAULT_CONFIG})" in ENGLISH
