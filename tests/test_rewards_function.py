"""The user's own reward: loaded from its file, refused before the start when it cannot work."""

import pytest

from quickstart.errors import UserError
from quickstart.rewards import function

GOOD = "def f(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


@pytest.fixture
def reward(tmp_path):
    def reward(text, name="f", file="my_reward.py"):
        (tmp_path / file).write_text(text)
        return f"function:{tmp_path / file}:{name}"

    return reward


def refused(reward):
    with pytest.raises(UserError) as error:
        function.load(reward)
    (fault,) = error.value.faults
    assert fault.field == "rl.reward"
    return fault


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "def f(data_source, solution_str, ground_truth, extra_info=None, **kwargs): return 1.0",
        "def f(*, ground_truth, solution_str, **rest): return 1.0",
        "def f(**everything): return 1.0",
        "f = lambda data_source, solution_str, ground_truth, extra_info: 1.0",
        "import functools\ndef g(scale, **kw): return scale\nf = functools.partial(g, 1.0)",
        "class C:\n    def __call__(self, **kw): return 1.0\nf = C()",
    ],
)
def test_whatever_takes_verls_call_is_taken(reward, text):
    loaded, _ = function.load(reward(text))
    assert loaded(data_source="x", solution_str="y", ground_truth="z", extra_info={}) == 1.0


@pytest.mark.parametrize(
    "signature",
    ["(solution_str, ground_truth)", "(a, b, c)", "()", "(data_source, solution_str, ground_truth, extra_info, k)"],
)
def test_another_signature_is_refused(reward, signature):
    fault = refused(reward(f"def f{signature}: return 1.0"))
    assert f"f{signature}" in fault.found
    assert "data_source, solution_str, ground_truth, extra_info" in fault.rule
    assert "def f(data_source" in fault.fix


def test_a_missing_file(tmp_path):
    fault = refused(f"function:{tmp_path / 'none.py'}:f")
    assert "none.py" in fault.found
    assert fault.rule == "no such file"


def test_a_missing_name_lists_the_functions_that_are_there(reward):
    fault = refused(reward(f"from json import dumps\n{GOOD}\ndef helper(): pass\nX = 1\n", name="g"))
    assert "without g" in fault.found
    assert fault.fix == "use one of its functions: f, helper"


@pytest.mark.parametrize(("text", "what"), [("f = 3", "int"), ("class f: pass", "class")])
def test_what_is_no_function(reward, text, what):
    fault = refused(reward(text))
    assert what in fault.found
    assert "must be a function" in fault.rule


def test_a_syntax_error_names_its_line(reward, tmp_path):
    fault = refused(reward("x = 1\ndef f(:\n"))
    assert f"{tmp_path / 'my_reward.py'}:2" in fault.found
    assert "def f(:" in fault.found


def test_an_error_while_loading_shows_the_users_own_traceback(reward):
    fault = refused(reward("def helper():\n    return 1 / 0\n\nhelper()\n" + GOOD))
    assert "ZeroDivisionError" in fault.found
    assert 'my_reward.py", line 4' in fault.fix
    assert 'my_reward.py", line 2' in fault.fix
    assert "importlib" not in fault.fix
    assert "function.py" not in fault.fix


def test_a_missing_package_says_how_to_install_it(reward):
    fault = refused(reward("import no_such_package_at_all.part\n" + GOOD))
    assert "pip install no_such_package_at_all" in fault.fix


def test_a_script_that_exits_is_refused(reward):
    assert "SystemExit" in refused(reward("import sys\nsys.exit(3)\n" + GOOD)).found


def test_files_beside_it_can_be_imported(reward, tmp_path):
    (tmp_path / "sibling_of_my_reward.py").write_text("VALUE = 0.25\n")
    text = "def f(**kw):\n    from sibling_of_my_reward import VALUE\n    return VALUE\n"
    loaded, _ = function.load(reward(text))
    assert loaded() == 0.25


def test_a_file_beside_it_does_not_shadow_a_package(reward, tmp_path):
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')\n")
    (tmp_path / "sacrebleu.py").write_text("raise RuntimeError('shadowed')\n")
    function.load(reward("import json, sacrebleu\n" + GOOD))


def test_dataclasses_with_text_annotations_work(reward):
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\nclass D:\n    x: int\n"
    function.load(reward(text + GOOD))


def test_two_files_of_one_name_stay_apart(tmp_path):
    for folder, value in (("one", 1.0), ("two", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "r.py").write_text(f"def f(**kw): return {value}\n")
    loaded = [function.load(f"function:{tmp_path / folder / 'r.py'}:f")[0] for folder in ("one", "two")]
    assert [one() for one in loaded] == [1.0, 2.0]


def test_a_windows_path_keeps_its_colon():
    assert function.split("function:C:/rewards/r.py:f") == (function.Path("C:/rewards/r.py"), "f")
