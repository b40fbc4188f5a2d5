"""What a reward may return and what not; its exceptions; and the same guard inside verl's reward manager."""

import asyncio
import contextlib
import json

import numpy as np
import pytest
import torch

from quickstart import config, rewards
from quickstart.errors import RunError
from quickstart.rewards.guard import Guard, to_number

INFO = {"file": "a.jsonl", "line": 7}


def guard(score, **settings):
    return Guard(score=score, name="my_reward", **settings)


def call(reward, answer="an answer", **extra):
    return reward("x", answer, "truth", INFO | extra)


PYTHON_ONES = (1.0, 1, True)
NUMPY_ONES = (np.float32(1), np.float64(1), np.int64(1), np.bool_(True), np.array(1.0), np.array([1.0]))
TORCH_ONES = (
    torch.tensor(1.0),
    torch.tensor([1.0]),
    torch.tensor(1),
    torch.tensor(True),
    torch.ones((), requires_grad=True),
)
NO_NUMBERS = (
    None,
    "1",
    "",
    b"1",
    (1.0, "ok"),
    [1.0],
    {1.0},
    1j,
    object(),
    np.array([1.0, 2.0]),
    torch.tensor([1.0, 2.0]),
)
NOT_FINITE = (float("nan"), float("inf"), -float("inf"), np.float32("nan"), torch.tensor(float("nan")))
NO_SCORES = ({"reward": 1}, {}, {"score": None}, {"score": "1"}, {"score": float("nan")})


@pytest.mark.parametrize("value", [*PYTHON_ONES, *NUMPY_ONES, *TORCH_ONES], ids=lambda value: type(value).__name__)
def test_numbers_of_all_kinds_become_a_float(value):
    result = call(guard(lambda **_: value))
    assert (result, type(result)) == (1.0, float)
    assert call(guard(lambda **_: {"score": value, "note": "x"})) == {"score": 1.0, "note": "x"}


@pytest.mark.parametrize("value", [*NO_NUMBERS, *NOT_FINITE, *NO_SCORES], ids=lambda value: type(value).__name__)
def test_everything_else_stops_the_run_and_names_the_row(value):
    with pytest.raises(rewards.RewardError) as error:
        call(guard(lambda **_: value))
    (fault,) = error.value.faults
    assert fault.field == "a.jsonl:7"
    assert repr(value)[:40] in fault.found
    assert "'an answer'" in fault.found
    assert "finite number" in fault.rule
    assert "my_reward" in fault.fix
    assert isinstance(error.value, RunError)


def test_the_fix_fits_the_mistake():
    with pytest.raises(rewards.RewardError, match="add the key score to what my_reward returns \\(it has reward\\)"):
        call(guard(lambda **_: {"reward": 1}))
    with pytest.raises(rewards.RewardError, match="to give more than a number"):
        call(guard(lambda **_: (1.0, "ok")))


def test_an_exception_shows_the_users_frames_only(tmp_path):
    (tmp_path / "r.py").write_text(
        "def f(solution_str, **kw):\n    return helper(solution_str)\n\ndef helper(text):\n    return text.nope\n"
    )
    reward = rewards.build(settings(f"function:{tmp_path / 'r.py'}:f"))
    with pytest.raises(rewards.RewardError) as error:
        call(reward)
    (fault,) = error.value.faults
    assert fault.field == "a.jsonl:7"
    assert fault.found.startswith("AttributeError: 'str' object has no attribute 'nope'")
    assert 'r.py", line 2, in f' in fault.fix
    assert 'r.py", line 5, in helper' in fault.fix
    assert "guard.py" not in fault.fix
    assert isinstance(error.value.__cause__, AttributeError)


def test_exit_inside_a_reward_is_a_fault_and_ctrl_c_is_not():
    def leave(**_):
        raise SystemExit(0)

    def interrupt(**_):
        raise KeyboardInterrupt

    with pytest.raises(rewards.RewardError, match="SystemExit"):
        call(guard(leave))
    with pytest.raises(KeyboardInterrupt):
        call(guard(interrupt))


def test_quitting_the_debugger_is_an_interrupt():
    import bdb

    def quit_debugger(**_):
        raise bdb.BdbQuit

    with pytest.raises(KeyboardInterrupt):
        call(guard(quit_debugger))


def test_a_missing_package_inside_a_reward():
    def needs(**_):
        import no_such_package_at_all  # noqa: F401

    with pytest.raises(rewards.RewardError, match="pip install no_such_package_at_all"):
        call(guard(needs))


def test_a_users_call_happens_inside_the_terminal():
    log = []

    @contextlib.contextmanager
    def terminal():
        log.append("open")
        yield
        log.append("close")

    def score(**_):
        log.append("call")
        return 1.0

    async def score_async(**_):
        return score()

    call(guard(score, terminal=terminal))
    asyncio.run(guard(score_async, terminal=terminal).call_async("x", "a", "t", INFO))
    assert log == ["open", "call", "close"] * 2


def test_the_reward_gets_the_row_as_it_was_written():
    seen = {}

    def score(**arguments):
        seen.update(arguments)
        return 1.0

    others = {"id": 4, "ratio": 4.5, "index": "their own", "chosen": 3, "nested": {"a": [1]}, "label": "theirs"}
    info = {"index": 0, "prompt": [{"role": "user", "content": "q"}], "chosen": "good", "rejected": None, "label": None}
    guard(score)("x", "answer", "truth", INFO | info | {"row": json.dumps(others), "num_turns": 2}, router="r")
    assert seen["extra_info"] == INFO | others | {
        "prompt": info["prompt"],
        "chosen": "good",
        "rejected": None,
        "num_turns": 2,
    }
    assert (seen["data_source"], seen["solution_str"], seen["ground_truth"], seen["router"]) == (
        "x",
        "answer",
        "truth",
        "r",
    )


def test_a_ground_truth_that_is_no_text_arrives_with_its_type():
    row = json.dumps({"ground_truth": {"target": ["a"]}})
    reward = guard(lambda ground_truth, **_: float(ground_truth["target"] == ["a"]))
    assert reward("x", "a", '{"target": ["a"]}', INFO | {"row": row}) == 1.0


def test_many_answers_outside_a_run():
    async def score(solution_str, **_):
        await asyncio.sleep(0.01)
        return len(solution_str)

    calls = [{"data_source": "x", "solution_str": "a" * n, "ground_truth": "", "extra_info": {}} for n in range(5)]
    assert guard(score).score_all(calls) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert guard(lambda solution_str, **_: len(solution_str)).score_all(calls) == [0.0, 1.0, 2.0, 3.0, 4.0]

    async def inside_a_notebook():
        return guard(score).score_all(calls)

    assert asyncio.run(inside_a_notebook())[4] == 4.0


def test_numbers_are_told_from_what_looks_like_them():
    assert to_number("1") is None
    assert to_number(True) == 1.0


# ---- built from settings, and called by verl ----


def settings(reward, **model):
    return config.from_arguments(model, {}, {"reward": reward}, {"device": "cpu"})


def verl_call(reward, cfg, tokenizer, response, extra_info, truth="good"):
    """The reward as verl's naive reward manager calls it, loaded by path from verl's own config."""
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.protocol import DataProto
    from verl.trainer.ppo.reward import get_custom_reward_fn

    file, name, kwargs = rewards.for_verl(cfg, reward)
    custom = {"path": str(file), "name": name, "reward_kwargs": kwargs}
    verl_config = OmegaConf.create({"reward": {"custom_reward_function": custom}})
    ids = torch.tensor([tokenizer(response, add_special_tokens=False)["input_ids"]])

    def non_tensor(value):
        cell = np.empty(1, dtype=object)
        cell[0] = value
        return cell

    data = DataProto(
        batch=TensorDict({"responses": ids, "attention_mask": torch.ones_like(ids)}, batch_size=1),
        non_tensor_batch={
            "data_source": non_tensor("quickstart"),
            "reward_model": non_tensor({"ground_truth": truth}),
            "extra_info": non_tensor(extra_info),
        },
    )

    async def run():
        manager = NaiveRewardManager(verl_config, tokenizer, get_custom_reward_fn(verl_config))
        manager.loop = asyncio.get_running_loop()
        return await manager.run_single(data)

    return asyncio.run(run())


def test_verl_calls_the_default_reward(byte_tokenizer):
    cfg = settings("preference")
    result = verl_call(rewards.build(cfg), cfg, byte_tokenizer, "good", INFO | {"chosen": "good", "rejected": "xyz"})
    assert result["reward_score"] == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_verl_calls_the_users_function_once_with_its_keywords(byte_tokenizer, tmp_path, kind):
    (tmp_path / "r.py").write_text(
        f"calls = []\n{kind} f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    calls.append(solution_str)\n    return {'score': len(calls), 'id': extra_info['id']}\n"
    )
    cfg = settings(f"function:{tmp_path / 'r.py'}:f")
    result = verl_call(rewards.build(cfg), cfg, byte_tokenizer, "hi", INFO | {"row": '{"id": 9}'})
    assert result == {"reward_score": 1.0, "reward_extra_info": {"score": 1.0, "id": 9}}


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_through_verl_the_row_is_still_named(byte_tokenizer, tmp_path, kind):
    (tmp_path / "r.py").write_text(f"{kind} f(**kw):\n    return 1 / 0\n")
    cfg = settings(f"function:{tmp_path / 'r.py'}:f")
    with pytest.raises(rewards.RewardError) as error:
        verl_call(rewards.build(cfg), cfg, byte_tokenizer, "hi", dict(INFO))
    assert error.value.faults[0].field == "a.jsonl:7"
    assert 'r.py", line 2' in error.value.faults[0].fix


def test_another_process_builds_the_same_reward(byte_tokenizer, tmp_path, monkeypatch):
    from quickstart.rewards import registry

    (tmp_path / "r.py").write_text("def f(**kw):\n    return 0.25\n")
    monkeypatch.chdir(tmp_path)
    cfg = settings("function:r.py:f")
    file, name, kwargs = rewards.for_verl(cfg, rewards.build(cfg))
    monkeypatch.setattr(registry, "_made", {})  # as a new process has it
    monkeypatch.chdir("/")
    from verl.utils.import_utils import load_extern_object

    entry = load_extern_object(str(file), name)
    assert entry(data_source="x", solution_str="a", ground_truth="", extra_info=INFO, **kwargs) == 0.25


def test_this_process_uses_the_very_object(tmp_path):
    from quickstart.rewards import registry

    cfg = settings("preference")
    reward = rewards.build(cfg)
    _, _, kwargs = rewards.for_verl(cfg, reward)
    assert registry.recall(kwargs[registry.KEYWORD]) is reward
