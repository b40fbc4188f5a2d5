"""verl's own scorers by data_source: known ones score, unknown ones are named with the list."""

import ast
import inspect

import pytest

from quickstart import config, rewards
from quickstart.errors import RunError, UserError
from quickstart.rewards import builtin


def test_gsm8k_compares_with_the_bare_number():
    assert builtin.compute_score("openai/gsm8k", "so it is #### 4", "4") == 1.0
    assert builtin.compute_score("openai/gsm8k", "so it is #### 4", "#### 4") == 0.0
    assert builtin.compute_score("openai/gsm8k", "the answer is 4", "4") == 0.0


def test_scorers_that_return_more_than_a_number_pass_the_guard():
    reward = rewards.build(config.from_arguments({}, {}, {"reward": "verl"}, {}))
    result = reward("math_dapo", "Answer: 4", "4", {"file": "a.jsonl", "line": 1})
    assert isinstance(result, dict)
    assert result["score"] == 1.0
    assert result["acc"] is True


def test_an_unknown_source_stops_with_the_known_ones():
    with pytest.raises(RunError) as error:
        builtin.compute_score("openai/gsm8", "4", "4", {"file": "a.jsonl", "line": 3})
    (fault,) = error.value.faults
    assert fault.field == "a.jsonl:3"
    assert fault.found == "data_source 'openai/gsm8'"
    assert "searchR1_nq" in fault.rule
    assert fault.fix.startswith("did you mean openai/gsm8k?")


def test_before_the_start_all_unknown_sources_are_named():
    builtin.check_sources(["openai/gsm8k", "aime2024", "math"])
    with pytest.raises(UserError) as error:
        builtin.check_sources(["quickstart", "math", "my_source"])
    assert [fault.found for fault in error.value.faults] == ["data_source 'quickstart'", "data_source 'my_source'"]
    assert {fault.field for fault in error.value.faults} == {"rl.reward"}


def test_contract_the_list_is_verls():
    """Read from the source of default_compute_score: every text that data_source is compared with."""
    from verl.utils.reward_score import default_compute_score

    tree = ast.parse(inspect.getsource(default_compute_score))
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    names = {
        constant.value
        for node in compared
        if isinstance(node.left, ast.Name) and node.left.id == "data_source"
        for part in node.comparators
        for constant in ast.walk(part)
        if isinstance(constant, ast.Constant)
    }
    assert names == set(builtin.DATA_SOURCES)
    prefixes = [
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and "startswith" in ast.dump(node.func)
    ]
    assert tuple(prefixes) == builtin.PREFIXES
