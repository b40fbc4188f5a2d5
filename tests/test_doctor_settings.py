"""Settings that train nothing, lengths of rows, and the reward on trial."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from quickstart import config, rewards
from quickstart.arguments import RunConfig
from quickstart.doctor import rewardtest, rows, settings
from quickstart.doctor.finding import Finding
from quickstart.doctor.parameters import ModelShape
from quickstart.doctor.plan import batch_plan
from quickstart.doctor.rows import Lengths, Sample
from quickstart.errors import UserError
from quickstart.rewards import Guard

BIG = ModelShape(
    parameters=494_032_768,
    head_parameters=0,
    hidden=896,
    layers=24,
    heads=14,
    kv_heads=2,
    head_dim=64,
    intermediate=4864,
    vocabulary=151_936,
    positions=None,
)
SHORT = Lengths(prompts=[10, 20], answers=[10, 20, 30])


def judged(
    *, lengths: Lengths = SHORT, shape: ModelShape | None = BIG, count: int = 100, **sections: Any
) -> dict[str, Finding]:
    """Findings by field, of settings given as rl=..., data=..., training=..., model=..."""
    given = {f"{name}_args": values for name, values in sections.items()}
    cfg: RunConfig = config.from_arguments(**given)
    known = settings.Known(cfg=cfg, plan=batch_plan(cfg, count), lengths=lengths, shape=shape)
    return {finding.field: finding for finding in settings.judge_settings(known)}


def test_good_settings_get_one_line() -> None:
    found = judged(model={"torch_dtype": "float32"})
    assert [(f.check, f.state) for f in found.values()] == [("settings", "ok")]


@pytest.mark.parametrize(
    ("limit", "state"), [(9, "error"), (15, "warning"), (25, "note"), (30, None)], ids=["none", "most", "some", "all"]
)
def test_answers_that_cannot_finish(limit: int, state: str | None) -> None:
    found = judged(data={"max_response_length": limit}).get("data.max_response_length")
    if state is None:
        assert found is None
        return
    assert found is not None
    assert found.state == state
    assert f"{limit} tokens" in found.found
    assert found.fix == "set data.max_response_length=30, which 99% of them fit into"


@pytest.mark.parametrize(("training", "state"), [({"max_steps": 1}, None), ({}, "note"), ({"max_steps": 50}, None)])
def test_warm_up_of_few_steps(training: dict[str, int], state: str | None) -> None:
    found = judged(rl={"warmup_ratio": 0.4, "rollout_batch_size": 20}, training=training)
    warm = found.get("rl.warmup_ratio")
    assert (warm.state if warm else None) == state


def test_a_warm_up_over_all_computed_steps() -> None:
    found = judged(rl={"warmup_ratio": 0.5, "rollout_batch_size": 4}, count=8)["rl.warmup_ratio"]
    assert (found.state, found.fix) == ("error", "write 0 for a short run")
    assert "0.5 of 2 steps" in found.found


@pytest.mark.parametrize(
    ("rl", "model", "warned"),
    [
        ({"learning_rate": 6e-5}, {}, True),
        ({"learning_rate": 6e-5}, {"lora_rank": 16}, False),
        ({"learning_rate": 1e-2}, {"lora_rank": 16}, True),
        ({"learning_rate": 6e-5, "rl_type": "dpo"}, {}, True),
        ({"learning_rate": 1e-6}, {}, False),
    ],
)
def test_learning_rates_that_break_large_models(rl: dict[str, Any], model: dict[str, Any], warned: bool) -> None:
    found = judged(rl=rl, model={"torch_dtype": "float32", **model}).get("rl.learning_rate")
    assert (found is not None and found.state == "warning") == warned
    small = dataclasses.replace(BIG, parameters=3_000_000)
    assert "rl.learning_rate" not in judged(rl=rl, model={"torch_dtype": "float32", **model}, shape=small)


def test_a_tiny_rate_and_an_engine_in_bfloat16() -> None:
    """5 steps of 1 update at 1e-6 move a weight by 5e-6; a bfloat16 near 0.02 has a spacing of 0.02 / 256."""
    found = judged(model={"torch_dtype": "bfloat16"}, rl={"gradient_accumulation_steps": 5})["rl.learning_rate"]
    assert found.state == "note"
    assert "1e-06 x 5 updates moves a weight by 5e-06" in found.found
    assert "4e-05" in found.rule


def test_filters_small_groups_and_nothing_kept_are_said() -> None:
    found = judged(
        model={"torch_dtype": "float32"},
        rl={"rl_type": "grpo", "num_generations": 2, "top_p": 0.9},
        training={"save_steps": "never"},
    )
    assert found["rl.top_p"].state == found["rl.num_generations"].state == "note"
    assert "dead_group_share" in found["rl.num_generations"].fix
    assert "never" in found["training.save_steps"].found


# ---- lengths ----


def test_histogram_and_shares_by_hand() -> None:
    counts = [1, 4, 5, 8, 9, 30]
    assert rows.histogram(counts) == [
        (1, 4, 2),
        (5, 8, 2),
        (9, 12, 1),
        (13, 16, 0),
        (17, 20, 0),
        (21, 24, 0),
        (25, 28, 0),
        (29, 32, 1),
    ]
    assert rows.share(counts, 0.5) == 5
    assert rows.share(counts, 0.99) == 30
    assert rows.words(counts).startswith("1 to 30 tokens, half up to 5, 99% up to 30 (1-4: 2, ")


def test_lengths_are_those_of_template_and_end_token(byte_tokenizer: Any) -> None:
    sample = Sample(prompt=[{"role": "user", "content": "abc"}], chosen="hello", rejected=None, place="a:1")
    lengths = rows.measure([sample], byte_tokenizer)
    shown = byte_tokenizer.apply_chat_template(sample.prompt, add_generation_prompt=True)["input_ids"]
    assert (lengths.prompts, lengths.answers) == ([len(shown)], [6])


@pytest.mark.parametrize("rl_type", ["ppo", "dpo", "kto"])
def test_rows_of_every_kind_of_method(rl_type: str, byte_tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 2 + '{"prompt": "d", "chosen": "e", "rejected": "f"}\n'
    )
    cfg = config.from_arguments(
        {"model_name_or_path": str(tmp_path)},
        {"train_file": str(file)},
        {"rl_type": rl_type},
        {"output_dir": str(tmp_path / "out")},
    )
    facts = rows.row_facts(cfg, byte_tokenizer)
    assert facts.count == (6 if rl_type == "kto" else 3)
    assert {sample.chosen for sample in facts.samples} >= {"b", "e"}
    assert rows.judge_rows(facts)[0].state == "ok"


# ---- reward ----

ROWS = [
    Sample(
        prompt=[{"role": "user", "content": "?"}],
        chosen=f"a good answer {i}",
        rejected=f"rubbish {i}",
        place=f"rows.jsonl:{i + 1}",
        ground_truth=f"a good answer {i}",
        data_source="quickstart",
        extra_info={"file": "rows.jsonl", "line": i + 1, "chosen": f"a good answer {i}", "rejected": f"rubbish {i}"},
    )
    for i in range(40)
]


def own(function: Any) -> Guard:
    return Guard(score=function, name="function:mine.py:f")


def try_it(reward: Guard, samples: list[Sample] = ROWS) -> Finding:
    trials = rewardtest.try_reward(reward, samples, seconds=20)
    (found,) = rewardtest.judge_reward(trials, samples, reward.name)
    return found


def test_the_default_reward_prefers_the_chosen_answer() -> None:
    found = try_it(rewards.build(config.from_arguments()))
    assert found.state == "ok"
    assert "of 32 rows chosen above rejected in 32, below in 0" in found.found


def test_chosen_and_rejected_swapped_is_an_error() -> None:
    swapped = [dataclasses.replace(s, chosen=s.rejected, rejected=s.chosen) for s in ROWS]
    found = try_it(rewards.build(config.from_arguments()), swapped)
    assert (found.state, found.field) == ("error", "rl.reward")
    assert "below in 32" in found.found
    assert "data.columns" in found.fix


def test_a_function_that_wants_something_else_is_only_warned_of() -> None:
    found = try_it(own(lambda solution_str, **_: -float("good" in solution_str)))
    assert (found.state, "sign" in found.fix) == ("warning", True)


def test_case_28_a_constant_reward() -> None:
    found = try_it(own(lambda **_: 0.5))
    assert (found.state, found.rule) == ("warning", "the reward never varies")
    assert "solution_str" in found.fix


def test_a_function_that_raises_shows_its_own_lines(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(data_source, solution_str, ground_truth, extra_info=None):\n    return 1 / len([])\n")
    reward = rewards.build(config.from_arguments(None, None, {"reward": f"function:{file}:f"}))
    with pytest.raises(UserError) as caught:
        rewardtest.try_reward(reward, ROWS, 5)
    (fault,) = caught.value.faults
    assert fault.field == "rows.jsonl:1"
    assert "ZeroDivisionError" in fault.found
    assert "return 1 / len([])" in fault.fix


@pytest.mark.parametrize("value", [None, "1", (1.0, "ok"), float("nan"), {"reward": 1}])
def test_case_24_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match="finite number"):
        rewardtest.try_reward(own(lambda **_: value), ROWS, 5)


def test_a_score_outside_of_the_promised_range() -> None:
    trials = rewardtest.Trials(trials=[rewardtest.Trial(good=1.5, bad=0.1, place="a:1")], stopped=False)
    (found,) = rewardtest.judge_reward(trials, ROWS, "preference")
    assert (found.state, "1.5 among them" in found.found, "from 0 to 1" in found.rule) == ("error", True, True)


def test_a_coroutine_is_called_as_verl_calls_it_even_inside_a_loop() -> None:
    async def slow(solution_str: str, **_: Any) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"score": float("good" in solution_str)}

    async def notebook() -> Finding:
        return try_it(own(slow))

    assert asyncio.run(notebook()).state == "ok"


def test_a_slow_reward_is_tried_on_what_the_time_allows() -> None:
    trials = rewardtest.try_reward(own(lambda **_: 0.0), ROWS, seconds=0)
    assert (len(trials.trials), trials.stopped) == (1, True)


def test_rows_without_a_second_answer_are_compared_with_each_other() -> None:
    single = [dataclasses.replace(sample, rejected=None) for sample in ROWS]
    found = try_it(own(lambda solution_str, ground_truth, **_: float(solution_str == ground_truth)), single)
    assert (found.state, "mean 1 against 0" in found.found) == ("ok", True)


def gsm8k(truth: str, others: str = "7") -> list[Sample]:
    return [
        Sample(prompt=[], chosen=t, rejected=None, place=f"g.jsonl:{i}", ground_truth=t, data_source="openai/gsm8k")
        for i, t in enumerate((truth, others))
    ]


def scorer(solution_str: str, ground_truth: str, **_: Any) -> float:
    """verl's gsm8k in its strict form (verl/utils/reward_score/gsm8k.py), without importing verl."""
    import re

    found = re.findall("#### (\\-?[0-9\\.\\,]+)", solution_str)
    return float(bool(found) and found[-1].replace(",", "") == ground_truth)


def test_case_23_the_bare_number_is_right_and_its_other_forms_are_not() -> None:
    reward = Guard(score=scorer, name="verl")
    assert try_it(reward, gsm8k("4")).state == "ok"
    found = try_it(reward, gsm8k("#### 4", "#### 7"))
    assert (found.state, found.field) == ("error", "rl.reward")
    assert "'#### 4' (g.jsonl:0)" in found.rule
    assert "bare number" in found.fix
    assert try_it(reward, gsm8k("1,000", "2,000")).state == "error"


def test_programs_of_the_rows_are_not_run() -> None:
    code = [dataclasses.replace(ROWS[0], data_source="apps")]
    assert rewardtest.runs_programs(code, Guard(score=scorer, name="verl"))
    assert not rewardtest.runs_programs(ROWS, Guard(score=scorer, name="verl"))
