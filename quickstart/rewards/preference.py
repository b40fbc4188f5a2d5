"""The default reward: is the answer nearer to the chosen answer than to the rejected one?

    reward = 0.5 + 0.5 * (c - r),   c = chrF(answer, chosen) / 100,   r = chrF(answer, rejected) / 100

in [0, 1]; 0.5 where it resembles both alike. Where there is only one answer to compare with, reward = c.
chrF is the character n-gram F-score (Popović 2015, https://aclanthology.org/W15-3049) with sacrebleu's defaults:
n = 1..6, no word n-grams, beta = 2, blank space left out. It needs no model, no word segmentation, and works the same
for Chinese and English. What it is not: a judgement of quality. It rewards sounding like the chosen answers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from quickstart.errors import Fault, RunError


@cache
def _chrf() -> Any:
    from sacrebleu.metrics.chrf import CHRF  # 70 ms, so not before it is needed

    return CHRF()


def chrf(answer: str, reference: str) -> float:
    """chrF of a sentence against one reference, in [0, 1]."""
    return _chrf().sentence_score(answer, [reference]).score / 100


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> float:
    """The reward of one answer, in [0, 1]. chosen and rejected come from extra_info, else chosen is the ground truth.

    Raises:
        RunError: the row has neither.
    """
    info = extra_info or {}
    chosen = info.get("chosen") or ground_truth
    if not chosen:
        place = f"{info.get('file', '?')}:{info.get('line', '?')}"
        rule = "the reward `preference` compares answers with `chosen`"
        fix = "name the column (data.columns.chosen=...), or choose another rl.reward"
        raise RunError(Fault(field=place, found="a row without chosen", rule=rule, fix=fix))
    near = chrf(solution_str, chosen)
    rejected = info.get("rejected")
    return near if not rejected else 0.5 + 0.5 * (near - chrf(solution_str, rejected))
