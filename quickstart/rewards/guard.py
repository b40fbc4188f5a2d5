"""Between verl and a reward: the reward gets whole rows, must return a finite number, and what it raises is shown.

verl takes whatever a reward returns (None, text and NaN pass through), and logs an exception and goes on with the rows
that are left (verl/trainer/ppo/v1/agent_loop_tq.py:138). Here each of these stops the run with the row and the user's
own traceback. Not here: any reward.
"""

from __future__ import annotations

import asyncio
import bdb
import inspect
import json
import math
import numbers
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from quickstart.errors import Fault, RunError, UserError
from quickstart.rewards.waiting import Watch, run_coroutine

Score = float | dict[str, Any]
RewardFunction = Callable[..., Any]  # verl's: (data_source, solution_str, ground_truth, extra_info=None, **kwargs)
Terminal = Callable[[], AbstractContextManager[Any]]

PLACE = ("file", "line")  # of extra_info: where the row stands
OURS = ("prompt", "chosen", "rejected")  # of extra_info: what the data room read goes before a column of that name


class RewardError(RunError):
    """A reward that raised, or returned what is no reward."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a reward, as verl makes it."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]
    kwargs: dict[str, Any]
    place: str  # file:line of the row

    @classmethod
    def unpack(cls, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, kwargs: Any) -> Call:
        """Undo what data/layouts.py packed: the row's other columns back into extra_info, with their types."""
        info = dict(extra_info or {})
        place = ":".join(str(info.get(key, "?")) for key in PLACE)
        others = json.loads(info.pop("row", None) or "{}")
        truth = others.pop("ground_truth", ground_truth)
        return cls(
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=truth,
            extra_info=info | others | {key: info[key] for key in OURS if info.get(key) is not None},
            kwargs=kwargs,
            place=place,
        )

    def arguments(self) -> dict[str, Any]:
        """As keywords, the way verl passes them."""
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
            **self.kwargs,
        }


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A reward with verl's signature whose result can be trusted.

    Args:
        score: the reward itself.
        name: as the user chose it, for messages.
        user_file: the user's own file; tracebacks begin there. None for ours and verl's rewards.
        terminal: opened around each call, so that print and breakpoint() of the user's code reach the terminal.
        load: loads what takes long (a reward model's weights); without it that happens at the first call.
        watch: says which row a call hangs on.
    """

    score: RewardFunction
    name: str
    user_file: Path | None = None
    terminal: Terminal = nullcontext
    load: Callable[[], None] = lambda: None
    watch: Watch = field(default_factory=Watch, repr=False, compare=False)

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
    ) -> Score:
        """The score of one answer. Raises RewardError."""
        call = Call.unpack(data_source, solution_str, ground_truth, extra_info, kwargs)
        with self.terminal(), self.watch.over(call.place):
            try:
                result = self.score(**call.arguments())
            except (Exception, SystemExit) as error:
                self._raised(error, call)
        return self._accept(result, call)

    async def call_async(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
    ) -> Score:
        """The same for a reward that is a coroutine function; many of them wait at the same time."""
        call = Call.unpack(data_source, solution_str, ground_truth, extra_info, kwargs)
        with self.terminal(), self.watch.over(call.place):
            try:
                result = await self.score(**call.arguments())
            except (Exception, SystemExit) as error:
                self._raised(error, call)
        return self._accept(result, call)

    @property
    def is_async(self) -> bool:
        """Whether the reward is a coroutine function, to be called with `call_async`."""
        return inspect.iscoroutinefunction(self.score)

    def score_all(self, calls: list[dict[str, Any]]) -> list[Score]:
        """The scores of several answers, outside a run. calls: the keywords of each. Raises RewardError."""
        if not self.is_async:
            return [self(**call) for call in calls]

        async def gather() -> list[Score]:
            return await asyncio.gather(*(self.call_async(**call) for call in calls))

        scores: list[Score] = run_coroutine(gather())
        return scores

    def _accept(self, result: Any, call: Call) -> Score:
        score = result.get("score") if isinstance(result, dict) else result
        number = to_number(score)
        if number is None or not math.isfinite(number):
            raise RewardError(self._bad_result(result, call))
        return result | {"score": number} if isinstance(result, dict) else number

    def _bad_result(self, result: Any, call: Call) -> Fault:
        fix = f"return a number from {self.name}, for every answer"
        if isinstance(result, dict) and "score" not in result:
            fix = f"add the key score to what {self.name} returns (it has {', '.join(map(str, result))})"
        elif isinstance(result, tuple):
            fix = f'return {{"score": ..., "note": ...}} from {self.name} to give more than a number'
        return Fault(
            field=call.place,
            found=f"{cut(repr(result))} as the reward of {cut(repr(call.solution_str))}",
            rule='a reward must be a finite number, or a dict with one under "score"',
            fix=fix,
        )

    def _raised(self, error: BaseException, call: Call) -> None:
        if isinstance(error, bdb.BdbQuit):
            raise KeyboardInterrupt from None  # `q` in a debugger that the user's breakpoint() opened
        if isinstance(error, UserError):
            raise error  # it says already what to do
        raise RewardError(
            Fault(
                field=call.place,
                found=f"{type(error).__name__}: {error}, for the answer {cut(repr(call.solution_str))}",
                rule=f"the reward {self.name} must not raise",
                fix=fix_for(error) + "\n" + user_traceback(error, self.user_file),
            )
        ) from error


def fix_for(error: BaseException) -> str:
    """What to do about an exception."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install what it needs: pip install {error.name.partition('.')[0]}"
    return "correct it there:"


def cut(text: str, limit: int = 80) -> str:
    """At most `limit` characters of a text."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def to_number(value: Any) -> float | None:
    """A float from int, float, bool, or a numpy or torch scalar; None for anything else. NaN and inf pass."""
    if isinstance(value, numbers.Real):
        return float(value)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")  # a value of theirs means that they are loaded
    if numpy is not None and isinstance(value, (numpy.bool_, numpy.ndarray)) and value.size == 1:
        return to_number(value.item())
    if torch is not None and isinstance(value, torch.Tensor) and value.numel() == 1:
        return to_number(value.item())
    return None


def user_traceback(error: BaseException, user_file: Path | None) -> str:
    """The traceback from the user's own file on, without the frames that led there."""
    start: TracebackType | None = error.__traceback__
    while start is not None and user_file is not None and Path(start.tb_frame.f_code.co_filename) != user_file:
        start = start.tb_next
    text = "".join(traceback.format_exception(type(error), error, start or error.__traceback__))
    return "\n".join(f"      {line}" for line in text.rstrip().splitlines())
