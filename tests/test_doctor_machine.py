"""Judges of the host, with invented machines; cgroup files of both versions."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from quickstart import config
from quickstart.arguments import RunConfig
from quickstart.doctor import machine as m

GB = m.GB
GOOD = m.Machine(host_cpus=8, affinity_cpus=8, ram_bytes=16 * GB, available_bytes=12 * GB, shared_bytes=8 * GB)


def other(**changes: Any) -> m.Machine:
    return dataclasses.replace(GOOD, **changes)


def settings(**training: Any) -> RunConfig:
    return config.from_arguments(training_args={"device": "cpu", **training})


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_this_machine_can_be_looked_at() -> None:
    there = m.look_at_machine()
    assert there.ram_bytes > 100 * 10**6
    assert 1 <= there.cpus <= there.host_cpus
    assert 0 < there.usable_bytes <= there.ram_bytes


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (None, 0)),
        ({"memory.max": "max\n", "memory.current": "5", "memory.stat": ""}, (None, 0)),
        (
            {"memory.max": "4000\n", "memory.current": "3000", "memory.stat": "anon 10\ninactive_file 1200\n"},
            (4000, 1800),
        ),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, (None, 0)),
        (
            {
                "memory/memory.limit_in_bytes": "8000",
                "memory/memory.usage_in_bytes": "7000",
                "memory/memory.stat": "total_inactive_file 1000\n",
            },
            (8000, 6000),
        ),
    ],
    ids=["none", "v2 no limit", "v2", "v1 no limit", "v1"],
)
def test_memory_limit_of_both_cgroup_versions(
    tmp_path: Path, files: dict[str, str], expected: tuple[int | None, int]
) -> None:
    assert m.cgroup_memory(write(tmp_path, files)) == expected


def test_the_container_counts_and_not_the_host() -> None:
    there = other(limit_bytes=4 * GB, used_bytes=GB, quota_cpus=1.5, affinity_cpus=4)
    assert there.usable_bytes == 3 * GB
    assert there.cpus == 1
    found = m.judge_cpus(there, None)
    assert found.found == "1 usable of 8 (affinity allows 4, the container's quota is 1.5)"
    assert "the container may use 4.0 GB" in m.judge_memory(there).found


def test_more_threads_than_cpus() -> None:
    found = m.judge_cpus(other(affinity_cpus=2), settings(num_threads=16))
    assert (found.state, found.field, found.fix) == ("warning", "training.num_threads", "write 2 or auto")
    assert "16 threads on 2 CPUs" in found.rule


@pytest.mark.parametrize(
    ("platform", "state", "word"), [("linux", "ok", ""), ("darwin", "note", "CUDA"), ("win32", "error", "WSL2")]
)
def test_platforms(platform: str, state: str, word: str) -> None:
    found = m.judge_platform(other(platform=platform))
    assert found.state == state
    assert word in found.found + found.fix


@pytest.mark.parametrize(("version", "state"), [((3, 9, 1), "error"), ((3, 10, 0), "ok"), ((3, 12, 9), "ok")])
def test_python_versions(version: tuple[int, int, int], state: str) -> None:
    assert m.judge_python(other(python=version)).state == state


def test_too_new_a_python_names_the_range_and_the_way() -> None:
    found = m.judge_python(other(python=(3, 13, 1)))
    assert (found.state, found.found) == ("error", "3.13.1")
    assert "3.10, 3.11 or 3.12" in found.rule
    assert "3.11" in found.fix


@pytest.mark.parametrize(("encoding", "state"), [("UTF-8", "ok"), ("utf8", "ok"), ("cp936", "note")])
def test_console_encoding(encoding: str, state: str) -> None:
    assert m.judge_encoding(other(encoding=encoding)).state == state


def test_small_shared_memory_matters_to_ray_only() -> None:
    small = other(shared_bytes=64 * 2**20)
    assert m.judge_shared_memory(GOOD, uses_ray=True).state == "ok"
    assert m.judge_shared_memory(small, uses_ray=False).state == "note"
    found = m.judge_shared_memory(small, uses_ray=True)
    assert found.state == "warning"
    assert "67 MB" in found.found
    assert "--shm-size" in found.fix
    assert m.judge_shared_memory(other(shared_bytes=None), uses_ray=True).state == "ok"


@pytest.mark.parametrize(("free", "state"), [(1, "error"), (3, "warning"), (9, "ok")])
def test_disk_against_what_is_written(free: int, state: str) -> None:
    disk = m.Disk(folder="/out", free_bytes=free * GB, total_bytes=100 * GB)
    found = m.judge_disk(disk, "outputs", 2 * GB, "free some space", "training.output_dir")
    assert found.state == state
    assert f"{free}.0 GB free under /out" in found.found
    if state != "ok":
        assert "2.0 GB" in found.rule
        assert found.field == "training.output_dir"


def test_a_full_disk_under_ray() -> None:
    full = m.Disk(folder="/tmp", free_bytes=3 * GB, total_bytes=100 * GB)
    assert m.judge_ray_disk(full, uses_ray=False).state == "note"
    found = m.judge_ray_disk(full, uses_ray=True)
    assert (found.state, "97% full" in found.found, "RAY_TMPDIR" in found.fix) == ("warning", True, True)


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert m.disk_of(tmp_path / "a" / "b").free_bytes == pytest.approx(m.disk_of(tmp_path).free_bytes, rel=0.1)
