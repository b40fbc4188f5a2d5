"""The default reward: the formula by hand, its range, Chinese and English, its cost."""

import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quickstart.errors import UserError
from quickstart.rewards.preference import chrf, compute_score


def test_chrf_worked_by_hand():
    """answer "abc", reference "abd", n = 1..6 characters, beta = 2.

    n=1: answer {a,b,c}, reference {a,b,d}: 2 match, precision 2/3, recall 2/3.
    n=2: {ab,bc} and {ab,bd}: 1 match, 1/2 and 1/2.
    n=3: {abc} and {abd}: none, 0 and 0. Longer ones do not exist and do not count.
    Means: P = R = (2/3 + 1/2 + 0) / 3 = 7/18, so F = P = 7/18.
    """
    assert chrf("abc", "abd") == pytest.approx(7 / 18)


def test_recall_counts_more_than_precision():
    """answer "ab", reference "abab": P = 1, 1; R = 2/4, 1/3: mean P 1, mean R 5/12; F2 = 5PR / (4P + R)."""
    precision, recall = 1.0, (1 / 2 + 1 / 3) / 2
    assert chrf("ab", "abab") == pytest.approx(5 * precision * recall / (4 * precision + recall))


def test_the_reward_compares_the_two():
    near, far = chrf("abc", "abd"), chrf("abc", "xbz")
    score = compute_score("x", "abc", "abd", {"chosen": "abd", "rejected": "xbz"})
    assert score == pytest.approx(0.5 + 0.5 * (near - far))


@pytest.mark.parametrize(("chosen", "rejected"), [("hello there", "qqq xyz"), ("你好，世界", "哈哈哈")])
def test_its_ends_and_its_middle(chosen, rejected):
    info = {"chosen": chosen, "rejected": rejected}
    assert compute_score("x", chosen, chosen, info) == pytest.approx(1.0)
    assert compute_score("x", rejected, chosen, info) == pytest.approx(0.0)
    assert compute_score("x", "", chosen, info) == 0.5
    assert compute_score("x", "§§§§", chosen, info) == 0.5


def test_with_one_answer_it_is_the_likeness():
    for info in ({"chosen": None, "rejected": None}, {}, None):
        assert compute_score("x", "abc", "abd", info) == pytest.approx(7 / 18)


def test_a_nearer_answer_scores_higher():
    info = {"chosen": "春天的风轻轻吹过湖面", "rejected": "不知道"}
    scores = [compute_score("x", text, "", info) for text in ("不知道", "秋天", "春天的风", "春天的风轻轻吹过湖面")]
    assert scores == sorted(scores)
    assert len(set(scores)) == 4


def test_without_anything_to_compare_with_it_says_which_row():
    with pytest.raises(UserError) as error:
        compute_score("x", "abc", "", {"file": "a.jsonl", "line": 7})
    (fault,) = error.value.faults
    assert fault.field == "a.jsonl:7"
    assert "`chosen`" in fault.rule
    assert "data.columns.chosen" in fault.fix


@given(answer=st.text(max_size=30), chosen=st.text(min_size=1, max_size=30), rejected=st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_it_stays_in_its_range(answer, chosen, rejected):
    assert 0.0 <= compute_score("x", answer, "", {"chosen": chosen, "rejected": rejected}) <= 1.0


def test_two_hundred_comparisons_take_less_than_a_tenth_of_a_second():
    answer = "The wind of spring blows over the lake, and willow trees grow."
    info = {"chosen": answer[5:] + " Yes.", "rejected": answer[:30]}
    compute_score("x", answer, "", info)
    start = time.process_time()
    for _ in range(100):
        compute_score("x", answer, "", info)
    assert time.process_time() - start < 0.1


def test_importing_the_rewards_costs_nothing():
    code = (
        "import sys, quickstart.rewards;"
        "heavy = {'torch', 'ray', 'verl', 'transformers', 'datasets', 'pyarrow', 'numpy', 'sacrebleu'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
