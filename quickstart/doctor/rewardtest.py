"""The reward, tried on rows of the data before anything is trained: does it prefer the better answer?

The user's own function is called here first, so that what it raises is seen with its traceback and not after minutes
of loading. Not here: the guard around rewards (rewards.guard), which refuses what is no number.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quickstart.doctor.finding import Finding, error, note, ok, warning
from quickstart.doctor.rows import Sample
from quickstart.rewards import Guard

CHECK = "reward self-test"
ROWS = 32
RANGES: dict[str, tuple[float, float]] = {"preference": (0.0, 1.0)}  # what a reward of ours promises
# Ways in which verl's scorers want a right answer to be written: gsm8k, MATH, DAPO, search tasks.
FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "Answer: {}", "<answer>{}</answer>")
CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco")  # their ground truth is a program's test cases
NUMBER_FIX = (
    'write the ground truth as the scorer compares it (openai/gsm8k: the bare number as text, "1000", not '
    '"#### 1000", 1000 or "1,000"), or choose another rl.reward'
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Scores of one row."""

    good: float  # of the chosen or only answer
    bad: float | None  # of the rejected answer, or of another row's; None: there is none
    place: str


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Scores of some rows."""

    trials: list[Trial]
    stopped: bool  # the time was up before all rows were tried

    @property
    def scores(self) -> list[float]:
        """All of them."""
        return [value for t in self.trials for value in (t.good, t.bad) if value is not None]

    @property
    def wins(self) -> int:
        """Rows whose better answer scores higher."""
        return sum(t.bad is not None and t.good > t.bad for t in self.trials)

    @property
    def losses(self) -> int:
        """Rows whose worse answer scores higher."""
        return sum(t.bad is not None and t.good < t.bad for t in self.trials)


def score(reward: Guard, sample: Sample, answer: str) -> float:
    """As verl calls it. Raises RewardError with the user's traceback."""
    call: dict[str, Any] = {
        "data_source": sample.data_source,
        "solution_str": answer,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
    }
    result = reward.score_all([call])[0]
    return float(result["score"] if isinstance(result, dict) else result)


def try_reward(reward: Guard, samples: Sequence[Sample], seconds: float) -> Trials:
    """Score the answers of up to ROWS rows, spread over the samples, for at most `seconds` (one row at least)."""
    step = max(len(samples) // ROWS, 1)
    chosen = list(samples[::step])[:ROWS]
    began = time.monotonic()
    trials: list[Trial] = []
    for number, sample in enumerate(chosen):
        if trials and time.monotonic() - began > seconds:
            break
        other = other_answer(chosen, number)
        worse = sample.rejected if sample.rejected is not None else other
        good = best(reward, sample, sample.chosen or "")
        bad = None if worse is None or sample.chosen is None else best(reward, sample, worse)
        trials.append(Trial(good=good, bad=bad, place=sample.place))
    return Trials(trials=trials, stopped=len(trials) < len(chosen))


def best(reward: Guard, sample: Sample, answer: str) -> float:
    """verl's scorers want an answer in a form of their own: the best of them counts."""
    forms = FORMS if reward.name == "verl" else FORMS[:1]
    return max(score(reward, sample, form.format(answer)) for form in forms)


def other_answer(samples: Sequence[Sample], number: int) -> str | None:
    """Another row's answer, where it differs."""
    own = samples[number].chosen
    others = (s.chosen for s in (*samples[number + 1 :], *samples[:number]))
    return next((answer for answer in others if answer is not None and answer != own), None)


def runs_programs(samples: Sequence[Sample], reward: Guard) -> bool:
    """Whether scoring would run code that the rows bring."""
    return reward.name == "verl" and any(sample.data_source in CODE_SOURCES for sample in samples)


def judge_reward(trials: Trials, samples: Sequence[Sample], name: str) -> list[Finding]:
    """The chosen answer above the rejected one more often than not; finite, varying, in its range."""
    field, found = "rl.reward", words(trials, name)
    if not trials.scores:
        return [note(CHECK, "no rows to try it on")]
    outside = [value for value in trials.scores if not inside(value, name)]
    if outside:
        low, high = RANGES.get(name, (-math.inf, math.inf))
        rule = f"scores must be finite and from {low:g} to {high:g}"
        return [error(CHECK, f"{outside[0]:g} among them; {found}", "correct the reward", field=field, rule=rule)]
    if name == "verl" and all(trial.good <= 0 for trial in trials.trials):
        truth = samples[0].ground_truth
        rule = f"no ground truth scores above 0 in any usual form, the first is {truth!r} ({samples[0].place})"
        return [error(CHECK, found, NUMBER_FIX, field=field, rule=rule)]
    if len(set(trials.scores)) == 1 and len(trials.scores) > 1:
        fix = "let it depend on solution_str; where every answer scores the same, nothing is learned"
        return [warning(CHECK, found, fix, field=field, rule="the reward never varies")]
    return [judge_preference(trials, found, name)]


def judge_preference(trials: Trials, found: str, name: str) -> Finding:
    """Wins against losses. A function of the user's may want something else than the rows do: that is only said."""
    if trials.wins > trials.losses or all(trial.bad is None for trial in trials.trials):
        return ok(CHECK, found)
    field, rule = "rl.reward", "the chosen answer must score above the rejected one more often than not"
    if name.startswith("function:"):
        fix = "check its sign, and that it scores solution_str; if it is meant to want something else, all is well"
        return warning(CHECK, found, fix, field=field, rule=rule)
    fix = "check data.columns (are chosen and rejected swapped?), or choose another rl.reward"
    return error(CHECK, found, fix, field=field, rule=rule)


def inside(value: float, name: str) -> bool:
    """Whether a score is what its reward promises."""
    low, high = RANGES.get(name, (-math.inf, math.inf))
    return math.isfinite(value) and low <= value <= high


def words(trials: Trials, name: str) -> str:
    """30 of 32 rows: chosen above rejected, 2 below; mean 0.81 against 0.33."""
    total = len(trials.trials)
    good = statistics.fmean(t.good for t in trials.trials) if trials.trials else 0.0
    bad = [t.bad for t in trials.trials if t.bad is not None]
    cut = ", then the time was up" if trials.stopped else ""
    if not bad:
        return f"{name}: {total} rows scored, mean {good:.3g}; no second answer to compare with{cut}"
    return (
        f"{name}: of {total} rows chosen above rejected in {trials.wins}, below in {trials.losses}; "
        f"mean {good:.3g} against {statistics.fmean(bad):.3g}{cut}"
    )
