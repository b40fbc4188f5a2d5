"""The preference trainer on a tiny model: what it learns, writes and refuses.

One process, one device, verl's engine; rows are sums with a right and a wrong answer. Equality with TRL is in
test_preference_parity.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import preference_runs as runs
import tiny_models
import torch
from local_runs import same
from scarce import Memory

from quickstart.data.prepare import Labelled, Pair
from quickstart.errors import RunError, UserError
from quickstart.trainers.preference_batches import TokenRow
from quickstart.trainers.watch import StopRequested

pytestmark = pytest.mark.usefixtures("process_variables")

Build = Callable[..., Any]


def pairs(count: int = 16) -> list[Any]:
    rows = tiny_models.arithmetic_rows(count + 1)[1:]  # the first one has the same answer twice: 0 + 0 and 0 - 0
    return [
        Pair(
            prompt=[{"role": "user", "content": row["prompt"]}],
            chosen=row["chosen"],
            rejected=row["rejected"],
            file="sums.jsonl",
            line=i + 1,
        )
        for i, row in enumerate(rows)
    ]


def labelled(count: int = 16) -> list[Any]:
    found: list[Any] = []
    for pair in pairs(count // 2):
        place = {"prompt": pair.prompt, "file": pair.file, "line": pair.line}
        found += [Labelled(completion=pair.chosen, label=True, **place)]
        found += [Labelled(completion=pair.rejected, label=False, **place)]
    return found


@pytest.fixture
def build(tiny_tied: Path, tmp_path: Path) -> Any:
    """Makes a trainer in a prepared process; `settings` are `section.key`."""
    with runs.ready():

        def make(kind: str = "dpo", *, steps: int = 4, evaluation: Any = (), **options: Any) -> Any:
            settings = {"rl.learning_rate": 1e-2, "data.shuffle": True, **options.pop("settings", {})}
            if kind == "kto":
                settings = {"rl.desirable_weight": "auto", "rl.undesirable_weight": "auto", **settings}
            if kind == "simpo":
                settings = {"rl.beta": 2.0, **settings}
            cfg = runs.settings(tiny_tied, kind, options.pop("root", tmp_path), **settings)
            rows = options.pop("rows", None) or (labelled() if kind == "kto" else pairs())
            memory = options.pop("memory", runs.Memory())
            trainer = runs.build(cfg, rows, list(evaluation), steps=steps, memory=memory, **options)
            trainer.memory = memory
            return trainer

        yield make


def test_log_probs_equal_a_plain_forward(build: Build, tiny_tied: Path) -> None:
    """Each row alone and unpadded through transformers; ours in batches by length."""
    from transformers import AutoModelForCausalLM

    trainer = build()
    model = AutoModelForCausalLM.from_pretrained(tiny_tied)
    rows = trainer.data.train.rows[:10]
    wanted = []
    for row in rows:
        ids = torch.tensor([row.prompt + row.answer])
        logits = model(ids).logits[0, :-1].log_softmax(-1)
        scores = logits.gather(-1, ids[0, 1:, None])[:, 0]
        wanted.append(scores[len(row.prompt) - 1 :].sum().item())
    for tokens in (1, 120, 10_000):
        found = trainer.policy.log_probs(rows, tokens=tokens)
        assert found.tolist() == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("kind", ["dpo", "simpo", "orpo"])
def test_learns_from_pairs(build: Build, kind: str) -> None:
    """Loss falls, and the answers' margin grows; dpo starts at ln 2."""
    trainer = build(kind, steps=12)
    trainer.fit()
    first, last = trainer.memory.updates[0], trainer.memory.updates[-1]
    assert last["loss"] < first["loss"]
    assert last["rewards/margins"] > first["rewards/margins"]
    assert last["rewards/accuracies"] > 0.8
    if kind == "dpo":
        assert first["loss"] == pytest.approx(math.log(2))
        assert first["rewards/accuracies"] == 0


@pytest.mark.parametrize("form", ["ipo", "hinge"])
def test_forms_of_dpo(build: Build, form: str) -> None:
    trainer = build(steps=8, settings={"rl.dpo_loss": form})
    trainer.fit()
    wanted = 1.0 if form == "hinge" else (1 / (2 * runs.trl.BETA)) ** 2
    assert trainer.memory.updates[0]["loss"] == pytest.approx(wanted)
    assert trainer.memory.updates[-1]["loss"] < wanted


def test_reference_free_needs_no_reference(build: Build) -> None:
    trainer = build(settings={"rl.reference_free": True})
    metrics = trainer.step(1)
    assert metrics["rewards/chosen"] == pytest.approx(runs.trl.BETA * metrics["logps/chosen"])
    assert trainer.memory.phases == []


def test_kto_learns_and_estimates_a_kl(build: Build) -> None:
    trainer = build("kto", steps=12)
    trainer.fit()
    updates = trainer.memory.updates
    assert updates[0]["loss"] == pytest.approx(0.5)
    assert updates[0]["kl"] == 0
    assert min(update["kl"] for update in updates) >= 0
    assert updates[-1]["rewards/margins"] > 0.1
    assert updates[-1]["loss"] < 0.5


def test_kto_weights_follow_the_counts(build: Build) -> None:
    """12 good to 4 bad: 12 / (4 w) = 4/3, so w = 2.25."""
    rows = [row for row in labelled(24) if row.label] + [row for row in labelled(24) if not row.label][:4]
    trainer = build("kto", rows=rows)
    assert trainer.data.objective.undesirable_weight == pytest.approx(2.25)
    assert "12 good and 4 bad" in trainer.data.notices[-1]


def test_metrics_have_trls_names(build: Build) -> None:
    trainer = build(steps=1)
    trainer.fit()
    update = trainer.memory.updates[0]
    for name in ("loss", "grad_norm", "learning_rate", "epoch", "logps/chosen", "logps/rejected"):
        assert isinstance(update[name], float)
    for name in ("chosen", "rejected", "margins", "accuracies"):
        assert f"rewards/{name}" in update
    assert update["actor/lr"] == update["learning_rate"] == pytest.approx(1e-2)
    assert update["perf/total_num_tokens"] > 100
    assert update["epoch"] == pytest.approx(0.5)  # 8 of 16 pairs


def test_learning_rate_is_the_one_of_the_update(build: Build) -> None:
    """Warm-up over 2 of 4 steps, then constant: 0, half, full, full."""
    trainer = build(steps=4, settings={"rl.warmup_ratio": 0.5})
    trainer.fit()
    rates = [update["learning_rate"] for update in trainer.memory.updates]
    assert rates == pytest.approx([0, 5e-3, 1e-2, 1e-2])


def test_evaluation_on_rows_of_its_own(build: Build) -> None:
    settings = {"training.eval_steps": 2, "training.eval_before_train": True, "data.eval_file": str(runs.ROWS)}
    trainer = build(steps=4, evaluation=pairs(7), settings=settings)
    trainer.fit()
    assert list(trainer.memory.evaluations) == [0, 2, 4]
    start, end = trainer.memory.evaluations[0], trainer.memory.evaluations[4]
    assert start["eval_loss"] == pytest.approx(math.log(2))
    assert end["eval_loss"] < start["eval_loss"]
    assert end["eval_rewards/margins"] > 0


def test_evaluation_of_kto_with_a_row_left_over(build: Build) -> None:
    """5 rows in blocks of 4: the last one joins the block before."""
    trainer = build("kto", evaluation=labelled(6)[:5], settings={"data.eval_file": str(runs.ROWS)})
    trainer.evaluate(0)
    assert trainer.memory.evaluations[0]["eval_loss"] == pytest.approx(0.5)


def test_samples_before_and_after(build: Build) -> None:
    """Written as rollouts 1 and steps + 1, scored by the run's reward, and told side by side."""

    def reward(*, data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> Any:
        assert {"chosen", "rejected", "file", "line"} <= extra_info.keys()
        return {"score": float(solution_str.startswith(ground_truth)), "note": 1}

    trainer = build(steps=3, reward=reward)
    trainer.fit()
    assert list(trainer.memory.rollouts) == [1, 4]
    rows = trainer.memory.rollouts[4]
    assert len(rows) == 8
    assert list(rows[0])[:3] == ["prompt", "response", "reward"]
    assert rows[0]["prompt"] == "Say 1 plus 7"
    assert rows[0]["finish_reason"] in ("stop", "length")
    assert "before and after training" in trainer.memory.phases[-1]
    assert "Say 1 plus 7" in trainer.memory.phases[-1]
    assert " -> " in trainer.memory.phases[-1]
    assert [trainer.memory.rollouts[step][0]["step"] for step in (1, 4)] == [0, 3]  # updates before them


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_what_a_gpu_run_replaces_changes_no_number(build: Build, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused head, lean layers, a graphed body, samples with a fixed cache: through training, reference and samples."""
    from verl.workers.engine.fsdp import transformer_impl

    from quickstart.plugin import graphed_body, shims
    from quickstart.trainers import preference_samples

    plain = build(kind, steps=3)
    plain.fit()
    arena = graphed_body.Arena()
    monkeypatch.setattr(graphed_body, "CAPTURE_AFTER", 1)
    monkeypatch.setattr(transformer_impl, "apply_fsdp2", shims.leave_whole(arena))
    monkeypatch.setattr(preference_samples, "can_replay", lambda module: True)
    other = build(kind, steps=3, settings={"verl": {"actor_rollout_ref.model.use_fused_kernels": True}})
    other.fit()
    assert arena._flat, "no pass was captured: the test shows nothing"
    for mine, theirs in zip(other.memory.updates, plain.memory.updates, strict=True):
        for name in ("loss", "rewards/margins", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    for step in (1, 4):
        texts = [[row["response"] for row in trainer.memory.rollouts[step]] for trainer in (plain, other)]
        assert texts[0] == texts[1]


def test_samples_of_kto_know_both_answers(build: Build) -> None:
    seen: list[dict[str, Any]] = []

    def reward(*, extra_info: dict[str, Any], **_: Any) -> float:
        seen.append(extra_info)
        return 0.0

    build("kto", reward=reward).sample(1)
    assert seen[0]["chosen"] == "8"
    assert seen[0]["rejected"] == "-6"


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_resumed_equals_undisturbed(build: Build, tmp_path: Path, kind: str) -> None:
    """Stopped after step 3 of 6, in the middle of an epoch; the last weights are equal bit for bit."""
    whole = build(kind, steps=6, root=tmp_path / "whole")
    whole.fit()
    stops = iter([False] * 3 + [True])
    settings = {"training.save_steps": "end"}
    first = build(kind, steps=6, root=tmp_path / "cut", stop=lambda: next(stops), settings=settings)
    with pytest.raises(StopRequested):
        first.fit()
    saved = first.memory.checkpoints[-1]
    assert saved.name == "global_step_3"
    again = build(kind, steps=6, root=tmp_path / "cut", resume=saved, settings=settings)
    again.fit()
    assert "read from" in again.memory.phases[0]
    losses = [update["loss"] for update in first.memory.updates + again.memory.updates]
    assert losses == [update["loss"] for update in whole.memory.updates]
    wanted, found = runs.weights_of(whole), runs.weights_of(again)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_checkpoints_are_whole_and_few(build: Build) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = build(steps=4, settings={"training.save_steps": 1, "training.save_total_limit": 2})
    trainer.fit()
    folder = trainer.memory.checkpoints[-1].parent
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_3", "global_step_4"]
    model = AutoModelForCausalLM.from_pretrained(folder / "global_step_4" / "model")
    weights = runs.weights_of(trainer)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())
    assert AutoTokenizer.from_pretrained(folder / "global_step_4" / "model").chat_template == tiny_models.CHATML


def test_lora_trains_adapters_only(build: Build) -> None:
    """The base stands still, so without adapters the policy is the reference; the export has both merged."""
    from transformers import AutoModelForCausalLM

    trainer = build(steps=3, settings={"model.lora_rank": 4, "training.save_steps": "end"})
    before = runs.weights_of(trainer)
    trainer.fit()
    after = runs.weights_of(trainer)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    rows = trainer.data.train.rows
    assert torch.equal(trainer.log_probs(rows, base=True), trainer.train._reference)
    trained = trainer.log_probs(rows)
    assert not torch.allclose(trained, trainer.train._reference, atol=1e-2)
    exported = AutoModelForCausalLM.from_pretrained(trainer.memory.checkpoints[-1] / "model")
    ids = torch.tensor([rows[0].prompt + rows[0].answer])
    scores = exported(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert scores[len(rows[0].prompt) - 1 :].sum().item() == pytest.approx(trained[0].item(), abs=1e-3)


def test_reference_is_computed_once_for_a_model_and_its_rows(build: Build, tmp_path: Path) -> None:
    first = build()
    again = build()
    assert "computed" in first.memory.phases[0]
    assert "read from" in again.memory.phases[0]
    assert torch.equal(first.train._reference, again.train._reference)
    changed = pairs()
    changed[3] = dataclasses.replace(changed[3], chosen="another")
    assert "computed" in build(rows=changed).memory.phases[0]
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_reference_of_another_model_is_another(build: Build, tmp_path: Path) -> None:
    from quickstart.trainers.preference_reference import weights_digest

    one = tiny_models.save_policy(tmp_path / "one", seed=1)
    two = tiny_models.save_policy(tmp_path / "two", seed=2)
    assert weights_digest(one) != weights_digest(two)
    assert weights_digest(one) == weights_digest(tiny_models.save_policy(tmp_path / "three", seed=1))


def test_weights_are_read_once_however_often_they_are_asked_for(tmp_path: Path, monkeypatch: Any) -> None:
    from quickstart.trainers import preference_reference as reference

    read: list[Path] = []
    monkeypatch.setattr(reference, "weights_digest", lambda folder: read.append(folder) or "digest")
    digest = reference.WeightsDigest(tmp_path)
    assert read == []
    digest.begin()
    assert [digest.value(), digest.value()] == ["digest", "digest"]
    assert read == [tmp_path]


def test_weights_that_cannot_be_read_are_told_to_who_asks(tmp_path: Path) -> None:
    from quickstart.trainers.preference_reference import WeightsDigest

    (tmp_path / "model.safetensors").mkdir()  # opening it fails
    digest = WeightsDigest(tmp_path)
    digest.begin()
    with pytest.raises(IsADirectoryError):
        digest.value()


def test_gradients_that_stay_broken_end_the_run(build: Build) -> None:
    """verl skips an update that is not finite; three in a row stop the run, with the weights as they were."""
    before: dict[str, torch.Tensor] = {}

    def breaks_after_the_first_step() -> bool:
        if trainer.global_step == 1:
            before.update(runs.weights_of(trainer))
            trainer.train._reference[:] = math.nan
        return False

    trainer = build(steps=9, stop=breaks_after_the_first_step)
    with pytest.raises(RunError, match="not finite in 3 steps"):
        trainer.fit()
    assert len(trainer.memory.updates) == 4
    after = runs.weights_of(trainer)
    assert before
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_loss_broken_from_the_start_ends_the_run_at_once(build: Build) -> None:
    trainer = build(steps=9)
    trainer.train._reference[:] = math.nan
    with pytest.raises(RunError, match="before the first update"):
        trainer.fit()
    assert len(trainer.memory.updates) == 1


def test_smoothing_of_another_loss_is_refused(build: Build) -> None:
    with pytest.raises(UserError, match="label smoothing belongs to the sigmoid loss"):
        build(settings={"rl.dpo_loss": "ipo", "rl.label_smoothing": 0.1})


def test_answer_sums_by_hand() -> None:
    """Two rows of 3 and 2 tokens, answers of 2 and 1: entry t scores token t + 1.

    row 1: tokens p a b, log-probs (of a) -1, (of b) -2, (of nothing) -9: sum -3, 2 tokens
    row 2: tokens p c,   log-probs (of c) -4, (of nothing) -inf:          sum -4, 1 token
    """
    from quickstart.plugin.training import answer_sums, jagged

    log_probs = jagged([torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-4.0, -math.inf])])
    mask = jagged([torch.tensor([0, 1, 1]), torch.tensor([0, 1])])
    sums, lengths = answer_sums(log_probs, mask)
    assert sums.tolist() == [-3, -4]
    assert lengths.tolist() == [2, 1]


def test_length_batches_hold_their_budget() -> None:
    from quickstart.plugin.training import length_batches

    rows = [TokenRow(prompt=[0] * n, answer=[1]) for n in (3, 1, 9, 2, 4)]
    order = sorted(range(5), key=lambda i: len(rows[i]))
    assert list(length_batches(order, [len(row) for row in rows], 12)) == [[1, 3, 0], [4], [2]]
    assert list(length_batches(order, [len(row) for row in rows], 1)) == [[1], [3], [0], [4], [2]]


class TestOutOfMemory:
    def fit(self, build: Build, *failing: int, size: int = 4) -> tuple[list[dict[str, float]], list[int]]:
        trainer = build(steps=2, settings={"rl.per_device_train_batch_size": size})
        memory = Memory(trainer.policy.engine, *failing)
        trainer._sampler = None
        trainer.fit()
        return trainer.memory.updates, memory.rows

    def test_stay_whole(self, build: Build, capsys: pytest.CaptureFixture[str]) -> None:
        wanted, _ = self.fit(build)
        found, rows = self.fit(build, 2)
        assert rows[:4] == [8, 8, 4, 4]
        assert set(rows[2:]) == {4}
        assert "in the update of the actor" in (out := capsys.readouterr().out)
        assert "2 instead of 4 pairs at a time" in out
        for ours, theirs in zip(found, wanted, strict=True):
            assert same(ours, theirs) == []

    def test_a_second_time_is_the_end(self, build: Build) -> None:
        with pytest.raises(RunError, match="update of the actor"):
            self.fit(build, 1, 2)

    def test_one_pair_cannot_be_halved(self, build: Build) -> None:
        with pytest.raises(RunError, match="a batch of one"):
            self.fit(build, 1, size=1)

    def test_log_probs_are_halved_too(self, build: Build) -> None:
        trainer = build(steps=1)
        rows = trainer.data.train.rows[:4]
        wanted = trainer.policy.log_probs(rows, tokens=10_000)
        memory = Memory(trainer.policy.engine, 1, forward_only=True)
        torch.testing.assert_close(trainer.policy.log_probs(rows, tokens=10_000), wanted, rtol=0, atol=1e-4)
        assert memory.rows == [4, 2, 2]
