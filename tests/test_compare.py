"""compare on mixed, dead and odd runs: what stands on the page, what is refused, and that nothing is trusted.

The runs here are written by hand, as a run's files look; test_preference.py has one that a trainer wrote.
"""

from __future__ import annotations

import errno
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from quickstart.compare import main
from quickstart.compare.chart import draw, ticks
from quickstart.compare.command import compare
from quickstart.compare.picture import title
from quickstart.compare.reading import CURVES, names_of, read_run
from quickstart.errors import EXIT_DONE, EXIT_USER, UserError

PPO = {"reward": 0.5, "actor_loss": -0.01, "critic_loss": 0.2, "kl": 0.001, "timing_s/step": 2.0}
DPO = {
    "loss": 0.69,
    "rewards/margins": 0.1,
    "rewards/accuracies": 0.5,
    "timing_s/step": 0.4,
}


def write_run(
    folder: Path,
    kind: str,
    entries: list[dict[str, Any]],
    *,
    answers: list[list[float]] = (),
    **facts: Any,  # type: ignore[assignment]
) -> Path:
    """A run's files. answers: rewards of each rollout."""
    (folder / "rollouts").mkdir(parents=True)
    history = [{"step": step, "epoch": step / 10, **entry} for step, entry in enumerate(entries, start=1)]
    state = {"global_step": len(history), "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    run = {"quickstart": "0.1.0", "rl_type": kind, "exit_reason": "completed", "steps_planned": len(history), **facts}
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    settings = f"model:\n  model_name_or_path: /models/tiny\nrl:\n  rl_type: {kind}\n"
    (folder / "config.yaml").write_text(settings, encoding="utf-8")
    for number, rewards in enumerate(answers):
        rows = [{"prompt": f"question {i}", "response": f"{kind} {i}", "reward": r} for i, r in enumerate(rewards)]
        path = folder / "rollouts" / f"rollout_{number:06d}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture
def mixed(tmp_path: Path) -> list[Path]:
    ppo = write_run(tmp_path / "ppo", "ppo", [PPO, {**PPO, "reward": 0.7}], answers=[[0.4, 0.6], [0.6, 0.8]])
    dpo = write_run(tmp_path / "dpo", "dpo", [DPO, {**DPO, "loss": 0.5}], answers=[[0.25, 0.5], [0.5, 1.0]])
    kto = write_run(tmp_path / "kto", "kto", [{"loss": 0.5, "kl": 0.0, "rewards/margins": 0.0}])
    return [ppo, dpo, kto]


def test_mixed_methods_on_one_page(mixed: list[Path]) -> None:
    page, png = compare(mixed)
    text = page.read_text(encoding="utf-8")
    assert page == mixed[0].parent / "compare.html"
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "0.5 → 0.7" in text  # ppo's reward
    assert "0.375 → 0.75 (2 greedy samples)" in text  # dpo's reward, from its rollouts
    assert "0.5 → 0.7 (" not in text
    assert "0.69 → 0.5" in text  # dpo's loss
    assert "dpo 1" in text  # its last answer
    assert "http" not in text.replace("http-equiv", "")  # no network
    assert "<script" not in text
    assert text.count("<figure>") == 6


def test_a_picture_has_one_colour_a_run(mixed: list[Path]) -> None:
    text = compare(mixed)[0].read_text(encoding="utf-8")
    reward = text[text.index("Reward of the answers") : text.index("<figcaption>Loss")]
    assert re.findall(r'stroke="(#\w+)"', reward) == ["#0072B2", "#D55E00", "#D55E00"]  # a line; two rings


def test_the_kl_of_kto_is_said_to_be_cut_off(mixed: list[Path]) -> None:
    text = compare(mixed)[0].read_text(encoding="utf-8")
    assert re.search(r"<figcaption>KL <span class='note'>[^<]*kto[^<]*cut off at 0", text)


def test_samples_are_rings_before_and_after_and_no_line(tmp_path: Path) -> None:
    """A run of 15 steps: its samples stand at 0 and 15, and nothing is drawn in between."""
    dpo = write_run(tmp_path / "dpo", "dpo", [DPO] * 15, answers=[[0.25]])
    row = {"prompt": "p", "response": "r", "reward": 0.75}
    (dpo / "rollouts" / "rollout_000015.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    run = read_run(dpo, "dpo")
    assert run.curves["reward"] == [(0, 0.25), (15, 0.75)]
    drawing = draw({"dpo": run.curves["reward"]}, ["dpo"], ["dpo"])
    assert "polyline" not in drawing
    assert drawing.count("<circle") == 2
    assert title(CURVES[0], [run]).endswith("greedy samples, before and after")
    assert "\n" not in title(CURVES[1], [run])
    assert "do not compare with the others" in compare([dpo])[0].read_text(encoding="utf-8")


def test_dead_run(tmp_path: Path) -> None:
    """Killed in its third step, with a skipped update in the second: no end, a null, fewer steps than planned."""
    entries = [PPO, {**PPO, "reward": None, "nonfinite": ["reward"]}]
    dead = write_run(tmp_path / "dead", "ppo", entries, exit_reason="running", steps_planned=10, started="x")
    run = read_run(dead, "dead")
    assert run.curves["reward"] == [(1, 0.5)]
    text = compare([dead])[0].read_text(encoding="utf-8")
    assert "2 of 10" in text
    assert "running" in text


def test_run_that_wrote_rollouts_only(tmp_path: Path) -> None:
    dead = write_run(tmp_path / "early", "ppo", [], answers=[[0.5, 0.7]])
    for name in ("trainer_state.json", "run.json", "config.yaml"):
        (dead / name).unlink()
    run = read_run(dead, "early")
    assert run.curves == {"reward": [(1, pytest.approx(0.6))]}
    assert run.algorithm == "?"
    compare([dead])


def test_what_a_model_wrote_is_shown_and_not_run(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\x1b[2J<img src=x onerror=alert(1)>"
    run = write_run(tmp_path / "a<b>", "<i>ppo</i>", [PPO], answers=[[0.5]])
    row = {"prompt": [{"role": "user", "content": evil}], "response": evil, "reward": 0.5}
    (run / "rollouts" / "rollout_000000.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    text = compare([run])[0].read_text(encoding="utf-8")
    assert "<script" not in text
    assert "<img" not in text
    assert "<i>" not in text
    assert "<b>" not in text
    assert "\x1b" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("trainer_state.json", '{"log_history": [', "trainer_state.json"),
        ("trainer_state.json", "[1, 2]", "a list where an object belongs"),
        ("trainer_state.json", '{"log_history": 3}', "log_history is no list"),
        ("run.json", "\ud800".encode("utf-16-le", "surrogatepass"), "run.json"),
        ("config.yaml", "a: [", "config.yaml"),
        ("rollouts/rollout_000000.jsonl", '{"prompt": "a"}\n', "rollout_000000.jsonl:1"),
        ("rollouts/rollout_000000.jsonl", '{"prompt": "a", "resp', "rollout_000000.jsonl:1"),
    ],
)
def test_odd_files_are_named(tmp_path: Path, name: str, content: str | bytes, wanted: str) -> None:
    run = write_run(tmp_path / "odd", "ppo", [PPO])
    (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        compare([run])
    assert wanted in error.value.render()


def test_a_folder_that_may_not_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refusing)
    with pytest.raises(UserError, match="Permission denied"):
        compare([tmp_path / "locked"])


def test_all_bad_folders_in_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    code = main([str(tmp_path / "empty"), str(tmp_path / "nowhere")])
    told = capsys.readouterr().err
    assert code == EXIT_USER
    assert "no records" in told
    assert "no such folder" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("arguments", [["--fast", "x"], ["--out"], ["--out", "x"], ["--out="]])
def test_command_line_faults(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == EXIT_USER
    assert "fix:" in capsys.readouterr().err


def test_help_and_out(mixed: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == EXIT_DONE
    assert "usage" in capsys.readouterr().out
    assert main([*map(str, mixed), "--out", str(tmp_path / "new" / "place")]) == EXIT_DONE
    assert (tmp_path / "new" / "place" / "compare.html").is_file()
    told = capsys.readouterr().out
    assert told.startswith("3 runs compared: ")
    assert all(str(tmp_path / "new" / "place" / f"compare.{suffix}") in told for suffix in ("html", "png"))


def test_numbers_nowhere(tmp_path: Path) -> None:
    run = write_run(tmp_path / "blank", "ppo", [{"note": "x", "reward": None}])
    with pytest.raises(UserError, match="a finite number"):
        compare([run])


def test_names_differ(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "outputs", tmp_path / "b" / "outputs", tmp_path / "a" / "outputs"]
    assert names_of(paths) == ["a/outputs", "b/outputs", "a/outputs (3)"]
    assert names_of([tmp_path / "ppo", tmp_path / "dpo"]) == ["ppo", "dpo"]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3.2, 7.7), (5, 5), (0, 0), (1e-9, 2e-9), (-1e8, 1e8)])
def test_ticks_cover(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low <= high <= found[-1]
    assert 2 <= len(found) <= 12


def test_drawing_is_well_formed() -> None:
    """Every point inside the frame, for one point, for equal values and for many."""
    for points in ([(3, 0.5)], [(1, 2.0), (2, 2.0)], [(i, (-1.0) ** i * i) for i in range(200)]):
        tree = ET.fromstring(draw({"a & b": points}, ["a & b"]))
        polyline = next(element for element in tree.iter() if element.tag.endswith("polyline"))
        places = [tuple(map(float, pair.split(","))) for pair in polyline.attrib["points"].split()]
        assert len(places) == len(points)
        assert all(0 <= x <= 560 and 0 <= y <= 260 for x, y in places)
