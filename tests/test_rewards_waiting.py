"""A reward that hangs says on which row, and Ctrl-C ends the wait for it at once."""

import asyncio
import signal
import subprocess
import sys
import threading
import time

import pytest

from quickstart.rewards.guard import Guard
from quickstart.rewards.waiting import Watch, run_coroutine

INFO = {"file": "a.jsonl", "line": 7}
CALL = {"data_source": "x", "solution_str": "a", "ground_truth": "", "extra_info": INFO}


def watched(score):
    told = []
    watch = Watch(patience=0.1, look=0.02, tell=told.append)
    return Guard(score=score, name="mine", watch=watch), told


def slow(seconds):
    def score(**_):
        time.sleep(seconds)
        return 1.0

    return score


def slow_coroutine(seconds):
    async def score(**_):
        await asyncio.sleep(seconds)
        return 1.0

    return score


@pytest.mark.parametrize("kind", [slow, slow_coroutine])
def test_a_slow_call_is_told_with_its_row_and_more_and_more_seldom(kind):
    reward, told = watched(kind(0.55))
    assert reward.score_all([CALL]) == [1.0]
    assert told[0] == "the reward function has been running for 0 s on row a.jsonl:7"
    assert 2 <= len(told) <= 3


def test_many_quick_calls_are_silent_and_the_thread_ends():
    reward, told = watched(slow(0.01))
    others = set(threading.enumerate())  # the watches of other tests among them: they take seconds to end
    assert reward.score_all([CALL] * 20) == [1.0] * 20
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - others and time.monotonic() < deadline:
        time.sleep(0.02)
    assert told == []
    assert not set(threading.enumerate()) - others
    assert reward.score_all([CALL]) == [1.0]  # and starts again


def test_of_many_coroutines_the_oldest_is_told():
    reward, told = watched(slow_coroutine(0.15))
    reward.score_all([CALL | {"extra_info": {"file": "a.jsonl", "line": line}} for line in range(5)])
    assert [line.rpartition(" ")[2] for line in told] == ["a.jsonl:0"]


def test_what_a_coroutine_raises_arrives():
    async def wrong():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_coroutine(wrong())


HANGING = """
import asyncio, time
from quickstart.doctor.rewardtest import score
from quickstart.doctor.rows import Sample
from quickstart.rewards.guard import Guard
{kind}def hang(**_):
    print("hanging", flush=True)
    {wait}(60)
row = Sample(prompt=[], data_source="x", ground_truth="", chosen="a", rejected="b", place="a:1", extra_info={{}})
score(Guard(score=hang, name="mine"), row, "a")
"""


@pytest.mark.parametrize(("kind", "wait"), [("", "time.sleep"), ("async ", "await asyncio.sleep")])
def test_ctrl_c_ends_the_self_test_at_once(kind, wait):
    code = HANGING.format(kind=kind, wait=wait)
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(2, signal.default_int_handler)" + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "hanging\n"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=20)
    assert errors.rstrip().endswith("KeyboardInterrupt")
