"""The page: a table, the curves, and the answers to the same prompts. One file, no script, no network.

Whatever a model, a file or a folder's name brought in is escaped.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import Any

from quickstart.compare.chart import draw, style
from quickstart.compare.reading import CURVES, Points, Run
from quickstart.words import counted

PROMPTS = 5  # whose answers are shown
CELL_CHARACTERS = 600
CSS = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1180px; padding: 0 1em; color: #1b1b1b }
table { border-collapse: collapse; width: 100%; font-size: 14px }
th, td { border-bottom: 1px solid #ddd; padding: .35em .6em; text-align: left; vertical-align: top }
td.n { font-variant-numeric: tabular-nums; white-space: nowrap }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(440px, 1fr)); gap: 1.2em }
figure { margin: 0 } figcaption { font-weight: 600 } .note { color: #666; font-size: 13px; font-weight: 400 }
svg { width: 100% } svg text { font: 11px system-ui, sans-serif; fill: #555 } svg .grid { stroke: #e4e4e4 }
.key { display: inline-block; width: 1.6em; border-top: 3px solid; margin-right: .4em; vertical-align: middle }
.answer { white-space: pre-wrap; overflow-wrap: anywhere }
"""
DASH_STYLES = {"": "solid", "6 3": "dashed", "2 3": "dotted"}
COLUMNS = (
    "run",
    "method",
    "model",
    "ended",
    "steps",
    "reward",
    "loss",
    "KL",
    "margin",
    "accuracy",
    "s a step",
    "whole run",
)


def page(runs: Sequence[Run]) -> str:
    """The HTML text."""
    names = [run.name for run in runs]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>Runs compared</title>',
        f"<style>{CSS}</style></head><body>",
        f"<h1>{counted(len(runs), 'run')} compared</h1>",
        "<p class='note'>An arrow goes from the first value to the last one; a dash stands for what a method does not "
        "have, or a run did not reach. Rewards are sampled in each step of training; those marked as greedy samples "
        "come from the same few prompts, answered once before and once after it, and do not compare with the "
        "others.</p>",
        table(runs),
        "<h2>Curves</h2><div class='charts'>",
        *(figure for curve in CURVES if (figure := chart(curve.key, curve.title, curve.note, runs, names))),
        "</div>",
        answers(runs),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def table(runs: Sequence[Run]) -> str:
    """One line a run."""
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "\n".join(row(run, index) for index, run in enumerate(runs))
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def row(run: Run, index: int) -> str:
    """The line of a run."""
    colour, dash = style(index)
    key = f'<span class="key" style="border-color:{colour};border-top-style:{DASH_STYLES[dash]}"></span>'
    seconds = [value for _, value in run.curves.get("seconds", [])]
    texts = [run.algorithm, run.model, str(run.facts.get("exit_reason") or "?"), steps_text(run)]
    numbers = [reward_text(run)] + [change(run.curves.get(name, [])) for name in ("loss", "kl", "margin", "accuracy")]
    numbers += [f"{statistics.median(seconds):.3g}" if seconds else "–", duration(run.facts)]
    cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
    cells += "".join(f"<td class='n'>{escape(text)}</td>" for text in numbers)
    return f"<tr><td>{key}{escape(run.name)}</td>{cells}</tr>"


def steps_text(run: Run) -> str:
    """30, or 12 of 30 for a run that ended early."""
    planned = run.facts.get("steps_planned")
    return f"{run.steps} of {planned}" if isinstance(planned, int) and planned != run.steps else str(run.steps)


def reward_text(run: Run) -> str:
    """Its change, and what it is the mean of where that is no rollout."""
    text = change(run.curves.get("reward", []))
    return f"{text} ({run.sampled} greedy samples)" if run.sampled else text


def change(points: Points) -> str:
    """First and last value."""
    if not points:
        return "–"
    first, last = points[0][1], points[-1][1]
    return f"{first:.3g}" if len(points) == 1 else f"{first:.3g} → {last:.3g}"


def duration(facts: dict[str, Any]) -> str:
    """From start to end, as the clock says."""
    times = [facts.get("started"), facts.get("ended")]
    if not all(isinstance(time, str) for time in times):
        return "–"
    try:
        began, ended = (datetime.fromisoformat(str(time)) for time in times)
    except ValueError:  # written by something else
        return "–"
    seconds = int((ended - began).total_seconds())
    return f"{seconds // 60}:{seconds % 60:02d}"


def chart(key: str, title: str, note: str, runs: Sequence[Run], names: list[str]) -> str:
    """One drawing with its title; empty where no run has the quantity."""
    curves = {run.name: run.curves[key] for run in runs if run.curves.get(key)}
    if not curves:
        return ""
    rings = [run.name for run in runs if run.sampled and key == "reward"]
    note = f" <span class='note'>{escape(note)}</span>" if note else ""
    return f"<figure><figcaption>{escape(title)}{note}</figcaption>{draw(curves, names, rings)}</figure>"


def answers(runs: Sequence[Run]) -> str:
    """Last answers to the prompts that most runs have."""
    counts: dict[str, int] = {}
    for run in runs:
        for prompt in run.answers:
            counts[prompt] = counts.get(prompt, 0) + 1
    prompts = sorted(counts, key=lambda prompt: -counts[prompt])[:PROMPTS]
    if not prompts:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in ("prompt", *(run.name for run in runs)))
    body = "\n".join(answer_row(runs, prompt) for prompt in prompts)
    return f"<h2>Last answers</h2><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def answer_row(runs: Sequence[Run], prompt: str) -> str:
    """What all runs answer to one prompt."""
    cells = "".join(cell(run, prompt) for run in runs)
    return f"<tr><td class='answer'>{escape(cut(prompt))}</td>{cells}</tr>"


def cell(run: Run, prompt: str) -> str:
    """A run's answer to a prompt, with its reward."""
    answer = run.answers.get(prompt)
    if answer is None:
        return "<td>–</td>"
    reward = "" if answer.reward is None else f"<br><span class='note'>reward {answer.reward:.3f}</span>"
    return f"<td><span class='answer'>{escape(cut(answer.response))}</span>{reward}</td>"


def cut(text: str) -> str:
    """At most CELL_CHARACTERS, and nothing that a browser would not show."""
    text = "".join(c for c in text if c.isprintable() or c in "\n\t")
    return text if len(text) <= CELL_CHARACTERS else text[: CELL_CHARACTERS - 1] + "…"
