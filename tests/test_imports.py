"""Packages that are hidden from the imports of others, and never from the user's own code."""

import gc
import importlib
import os
import subprocess
import sys
import weakref

import pytest
import warm

from quickstart import imports


class Loop:
    """Garbage that only a search finds."""

    def __init__(self):
        self.me = self


class TestHiddenPackages:
    def test_the_rollout_engine_is_not_hidden(self):
        assert "vllm" in imports.unused_packages("hf")
        assert "vllm" not in imports.unused_packages("vllm")

    def test_they_are_not_found_inside_and_found_again_after(self, tmp_path, monkeypatch):
        (tmp_path / "seldom_used.py").write_text("value = 3\n")
        monkeypatch.syspath_prepend(tmp_path)
        with imports.without_packages("seldom_used"), pytest.raises(ImportError):
            importlib.import_module("seldom_used")
        assert importlib.import_module("seldom_used").value == 3
        del sys.modules["seldom_used"]

    def test_what_is_imported_already_stays(self):
        with imports.without_packages("json"):
            assert importlib.import_module("json") is sys.modules["json"]
        assert sys.modules["json"] is not None

    def test_they_come_back_after_an_error(self):
        with pytest.raises(ZeroDivisionError), imports.without_packages("nothing_of_this_name"):
            _ = 1 / 0
        assert "nothing_of_this_name" not in sys.modules


class TestLight:
    def test_garbage_is_searched_for_again_after_it(self):
        with imports.light():
            assert not gc.isenabled()
        assert gc.isenabled()
        with pytest.raises(ZeroDivisionError), imports.light():
            _ = 1 / 0
        assert gc.isenabled()

    def test_who_has_switched_that_off_keeps_it_off(self):
        gc.disable()
        try:
            with imports.light():
                pass
            assert not gc.isenabled()
        finally:
            gc.enable()

    def test_in_a_run_later_searches_leave_out_what_was_imported(self):
        with imports.set_aside():
            with imports.light():
                pass
            assert gc.get_freeze_count() > 0
            new = Loop()
            alive = weakref.ref(new)
            del new
            gc.collect()
            assert alive() is None
        assert gc.get_freeze_count() == 0

    def test_outside_of_a_run_nothing_is_set_aside(self):
        """A notebook that calls a scorer, or the doctor."""
        with imports.light():
            pass
        assert gc.get_freeze_count() == 0

    def test_everything_is_searched_again_after_an_error(self):
        with pytest.raises(ZeroDivisionError), imports.set_aside(), imports.light():
            _ = 1 / 0
        assert gc.get_freeze_count() == 0

    def test_garbage_of_before_is_freed_before_and_not_kept(self):
        old = Loop()
        alive = weakref.ref(old)
        del old
        with imports.set_aside(), imports.light():
            assert alive() is None

    def test_what_a_user_has_set_aside_stays_so(self):
        gc.freeze()
        count = gc.get_freeze_count()
        try:
            with imports.set_aside(), imports.light():
                pass
            assert gc.get_freeze_count() == pytest.approx(count, rel=0.01)
        finally:
            gc.unfreeze()

    def test_only_the_rollout_engine_that_is_used_is_found(self, tmp_path, monkeypatch):
        (tmp_path / "vllm.py").write_text("value = 3\n")
        monkeypatch.syspath_prepend(tmp_path)
        with imports.light(), pytest.raises(ImportError):
            importlib.import_module("vllm")
        with imports.light("vllm"):
            assert importlib.import_module("vllm").value == 3
        del sys.modules["vllm"]


@pytest.mark.slow
def test_a_reward_may_use_what_nothing_else_imports(tiny_job, tmp_path):
    """In the self-test, where it once could not. The packages are empty: a library that imported one would fail."""
    names = ("sklearn", "timm", "wandb")
    for name in names:
        (tmp_path / f"{name}.py").write_text("SHARE = 0.1\n")
    lines = [f"    import {name}; total += {name}.SHARE" for name in names]
    reward = ["def score(data_source, solution_str, ground_truth, extra_info=None, **more):", "    total = 0.0", *lines]
    (tmp_path / "reward.py").write_text("\n".join([*reward, "    return total + len(solution_str) % 5 / 10\n"]))
    more = [f"rl.reward=function:{tmp_path / 'reward.py'}:score", "--dry-run"]
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(warm.REPOSITORY)])}
    command = [sys.executable, "-m", "quickstart.run", *tiny_job, *more]
    run = subprocess.run(command, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "rl_type: ppo" in run.stdout
