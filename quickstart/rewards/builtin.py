"""verl's own scorers (verl/utils/reward_score): gsm8k, MATH, code and search tasks, chosen by a row's data_source.

Not here: the scorers. They compare text with a ground truth in a form of their own: gsm8k's is "4", not "#### 4".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from quickstart.errors import Fault, RunError, UserError
from quickstart.imports import light

# The names that default_compute_score of verl 0.9.1 knows; a test reads them from its source.
DATA_SOURCES = (
    "openai/gsm8k",
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "math_dapo",
    "math",
    "math_dapo_reasoning",
    "numina_aops_forum",
    "numina_synthetic_math",
    "numina_amc_aime",
    "numina_synthetic_amc",
    "numina_cn_k12",
    "numina_olympiads",
    "codecontests",
    "apps",
    "codeforces",
    "taco",
    "hiyouga/geometry3k",
    "searchR1_nq",
    "searchR1_triviaqa",
    "searchR1_popqa",
    "searchR1_hotpotqa",
    "searchR1_2wikimultihopqa",
    "searchR1_musique",
    "searchR1_bamboogle",
)
PREFIXES = ("aime",)  # any name that begins so


def is_known(data_source: str) -> bool:
    """Whether verl has a scorer for rows of this source."""
    return data_source in DATA_SOURCES or data_source.startswith(PREFIXES)


def unknown_source(data_source: str, field: str) -> Fault:
    """The fault of a row that verl has no scorer for."""
    close = get_close_matches(data_source, DATA_SOURCES, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return Fault(
        field=field,
        found=f"data_source {data_source!r}",
        rule=f"the reward `verl` goes by data_source and knows: {', '.join((*DATA_SOURCES, 'aime*'))}",
        fix=f"{hint}Write one of these into the column data_source, or choose another rl.reward",
    )


def check_sources(data_sources: Iterable[str], field: str = "rl.reward") -> None:
    """Before the start: every data_source of the data must be known. Raises UserError, all unknown ones at once."""
    unknown = [source for source in data_sources if not is_known(source)]
    if unknown:
        raise UserError(unknown_source(source, field) for source in unknown)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """verl's score of one answer: most scorers give 1.0 or 0.0. Raises RunError for an unknown data_source."""
    if not is_known(data_source):
        info = extra_info or {}
        raise RunError(unknown_source(data_source, f"{info.get('file', '?')}:{info.get('line', '?')}"))
    return scorer()(data_source, solution_str, ground_truth, extra_info, **kwargs)


@functools.cache
def scorer() -> Callable[..., Any]:
    """verl's, imported with the first answer: what is hidden meanwhile must not be hidden again for each one."""
    with light():
        from verl.utils.reward_score import default_compute_score

    return default_compute_score
