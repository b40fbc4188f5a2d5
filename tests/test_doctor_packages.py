"""Versions against ranges: verl's own metadata, and invented ones."""

from __future__ import annotations

import os
import py_compile
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

from quickstart.doctor import packages as p

NOW = {name: "1" for name in p.SHOWN} | {"verl": "0.9.1", "transformers": "5.9.0", "torch": "2.13.0+cpu"}


def wanted(line: str, *, must: bool = True, whose: str = "verl") -> p.Wanted:
    return p.Wanted(requirement=Requirement(line), whose=whose, must=must)


def test_this_environment_is_inside_the_ranges_that_verl_states() -> None:
    found = p.judge_packages(p.wanted_versions(), p.installed, on_gpu=False)
    assert [f.state for f in found if f.check == "packages"] == ["ok"]
    assert "verl 0.9.1" in found[0].found


def test_what_verl_states_is_read_and_not_remembered() -> None:
    lines = {w.requirement.name: w for w in p.wanted_versions() if w.must and w.whose.startswith("verl")}
    assert str(lines["transformers"].requirement.specifier) == "!=5.6.0,<5.11,>=5.5.3"
    assert lines["TransferQueue"].whose == "verl[verl-core]"
    assert "pytest" not in lines
    extras = [w for w in p.wanted_versions() if not w.must]
    assert any(w.requirement.name == "vllm" and "0.24.0" in str(w.requirement.specifier) for w in extras)


@pytest.mark.parametrize(("version", "state"), [("5.6.0", "error"), ("5.11.0", "error"), ("5.10.2", "ok")])
def test_transformers_outside_of_the_range(version: str, state: str) -> None:
    line = wanted("transformers!=5.6.0,<5.11,>=5.5.3")
    found = p.judge_packages([line], (NOW | {"transformers": version}).get, on_gpu=False)
    assert found[0].state == state
    if state == "error":
        assert (found[0].check, found[0].found) == ("package transformers", version)
        assert "verl needs !=5.6.0,<5.11,>=5.5.3" in found[0].rule
        assert found[0].fix == "pip install 'transformers!=5.6.0,<5.11,>=5.5.3'"


def test_a_missing_package_is_named_with_its_pip_line() -> None:
    (found,) = p.judge_needed(wanted("TransferQueue>=0.1.10", whose="verl[verl-core]"), {}.get)
    assert (found.state, found.found, found.fix) == ("error", "not installed", "pip install 'TransferQueue>=0.1.10'")


def test_all_that_is_wrong_is_said_at_once() -> None:
    found = p.judge_packages([wanted("a>=2"), wanted("b"), wanted("c<2")], {"a": "1", "c": "1"}.get, on_gpu=False)
    assert [f.check for f in found] == ["package a", "package b"]


@pytest.mark.parametrize(("on_gpu", "state"), [(False, "note"), (True, "warning")])
def test_another_torch_than_tested_matters_on_a_gpu(on_gpu: bool, state: str) -> None:
    line = wanted("torch==2.11.0", must=False, whose="verl[vllm]")
    found = p.judge_packages([line], NOW.get, on_gpu=on_gpu)[-1]
    assert (found.check, found.state) == ("packages for GPUs", state)
    assert "torch 2.13.0+cpu (verl[vllm]: ==2.11.0)" in found.found


def test_a_local_part_of_a_version_does_not_count() -> None:
    assert p.fits(Requirement("torch==2.11.0"), "2.11.0+cu130")


def test_trl_one_breaks_the_import_of_verl() -> None:
    assert p.judge_trl({"trl": "0.27.0"}.get) == []
    (found,) = p.judge_trl({"trl": "1.16.0"}.get)
    assert (found.state, found.found) == ("error", "1.16.0")
    assert "pip uninstall trl" in found.fix


class TestBytecode:
    @pytest.fixture
    def missing(self, tmp_path: Path) -> dict[Path, Path]:
        """A package without bytecode, in a folder that takes some."""
        source = tmp_path / "site packages" / "torch" / "__init__.py"
        source.parent.mkdir(parents=True)
        return {source: source.parent / "__pycache__" / "__init__.cpython-311.pyc"}

    def test_what_pip_has_installed_is_compiled(self) -> None:
        assert p.judge_bytecode(p.uncompiled(), kept=False) == []

    def test_a_source_without_bytecode_is_seen_and_not_imported(self, tmp_path: Path, monkeypatch: Any) -> None:
        source = tmp_path / "quickstart_uncompiled" / "__init__.py"
        source.parent.mkdir()
        source.write_text("raise AssertionError('imported')")
        monkeypatch.syspath_prepend(str(tmp_path))
        names = ["quickstart_uncompiled", "quickstart_not_there"]
        ((found, place),) = p.uncompiled(names).items()
        assert found == source
        py_compile.compile(str(source))
        assert place.exists()
        assert p.uncompiled(names) == {}

    def test_python_that_keeps_none_is_told_with_both_ways_out(self, missing: dict[Path, Path]) -> None:
        (found,) = p.judge_bytecode(missing, kept=False)
        assert found.state == "warning"
        assert "torch have none, and PYTHONDONTWRITEBYTECODE" in found.found
        site = next(iter(missing)).parent.parent
        assert found.fix.startswith("unset PYTHONDONTWRITEBYTECODE, or once")
        command = shlex.split(found.fix.partition("write: ")[2])
        assert command[0] == sys.executable
        assert command[-6:] == ["-m", "compileall", "-qq", "-j", "0", str(site)]

    def test_the_first_start_after_an_installation_is_no_fault(self, missing: dict[Path, Path]) -> None:
        assert p.judge_bytecode(missing, kept=True) == []

    def test_a_folder_that_takes_none_is_named(self, missing: dict[Path, Path], monkeypatch: Any) -> None:
        monkeypatch.setattr(p, "writable", lambda place: False)  # root may write anywhere
        (found,) = p.judge_bytecode(missing, kept=True)
        assert f"Python may not write {next(iter(missing.values())).parent}" in found.found
        assert "unset" not in found.fix

    def test_what_is_no_source_file_is_no_such_package(self, monkeypatch: Any) -> None:
        odd = ModuleType("quickstart_odd")  # __spec__ is None, for which find_spec raises
        monkeypatch.setitem(sys.modules, "quickstart_odd", odd)
        assert p.uncompiled(["quickstart_odd", "sys", "quickstart_not_there"]) == {}

    def test_writable_asks_the_nearest_folder(self, tmp_path: Path, monkeypatch: Any) -> None:
        assert p.writable(tmp_path / "a" / "b" / "c.pyc")
        monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path)
        assert not p.writable(tmp_path / "a" / "b" / "c.pyc")
