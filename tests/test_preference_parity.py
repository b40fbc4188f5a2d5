"""Ours against TRL 1.16 on the bundled model in float32, from the numbers that scripts/make_trl_reference.py stored.

And the controls: what is known to train wrongly must be seen here as wrong. Formulas: test_losses.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import preference_runs as runs

LOSS, REWARD, KL, WEIGHT = 1e-6, 1e-5, 1e-5, 1e-5
GRAD_NORM = 1e-4  # relative
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
DYNAMIC = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 700}
PACKED = {f"{MODEL}.use_remove_padding": True}
BFLOAT = {f"{ACTOR}.fsdp_config.mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}

pytestmark = [
    pytest.mark.skipif(not runs.BUNDLED.is_dir(), reason="the bundled model is not there"),
    pytest.mark.usefixtures("process_variables"),
]


@cache
def stored(case: str) -> dict[str, Any]:
    found = json.loads((Path(__file__).parent / "data" / f"trl_reference_{case}.json").read_text(encoding="utf-8"))
    told = "data/bundled_model has changed: run scripts/make_trl_reference.py again"
    assert found["model_sha256"] == runs.trl.digest(runs.BUNDLED), told
    return found


def run(folder: Path, case: str, *, steps: int = 0, **changes: Any) -> dict[str, Any]:
    """Train a stored case with our trainer; the same record."""
    facts = runs.trl.CASES[case]
    if facts.get("lora"):
        changes |= {"model.lora_rank": runs.trl.LORA_RANK, "model.lora_alpha": runs.trl.LORA_ALPHA}
    if "learning_rate" in facts:
        changes["rl.learning_rate"] = facts["learning_rate"]
    if "loss_type" in facts:
        changes["rl.dpo_loss"] = facts["loss_type"]
    cfg = runs.settings(runs.BUNDLED, facts["kind"], folder, **changes)
    with runs.ready():
        memory, before, after = runs.train(
            cfg, facts["kind"], steps=steps or facts["steps"], fill=bool(facts.get("lora"))
        )
    return {"steps": memory.updates, "weights": runs.trl.fingerprint(before, after)}


def worst(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> float:
    """Largest difference of a metric over the steps that we ran."""
    pairs = [(a[name], b[name]) for a, b in zip(ours["steps"], theirs["steps"], strict=False) if name in b]
    assert pairs
    return max(abs(a - b) for a, b in pairs)


def check_steps(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    scale = max(1.0, theirs["steps"][0]["loss"])  # ipo begins at 25, where float32 has steps of 2e-6
    assert worst(ours, theirs, "loss") <= LOSS * scale
    for name in ("rewards/chosen", "rewards/rejected"):
        assert worst(ours, theirs, name) <= REWARD
    for name in ("logps/chosen", "logps/rejected"):  # sums of 100 log-probs: 1e-5 of a nat in 100
        assert worst(ours, theirs, name) <= 1e-3
    for a, b in zip(ours["steps"], theirs["steps"], strict=False):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=GRAD_NORM)


def check_kl(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Against TRL with its sums of log-probs in float64; in float32 an answer of 500 nats is good to 3e-5 only."""
    exact = {"steps": [{"kl": step["kl_float64"]} for step in theirs["steps"]]}
    assert worst(ours, exact, "kl") <= KL
    assert worst(ours, theirs, "kl") <= 10 * KL


def check_weights(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Kept entries, and the length of each weight's way, which no entry can hide from."""
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, weight in theirs["weights"].items():
        mine = ours["weights"][name]
        assert mine["entries"] == pytest.approx(weight["entries"], abs=WEIGHT)
        assert mine["move"] == pytest.approx(weight["move"], rel=1e-2)


@pytest.mark.parametrize("case", ["dpo", "dpo_lora", "dpo_ipo", "dpo_hinge", "kto", "kto_lora"])
def test_equals_trl_under_accumulation(tmp_path: Path, case: str) -> None:
    ours, theirs = run(tmp_path, case), stored(case)
    check_steps(ours, theirs)
    check_weights(ours, theirs)
    if case.startswith("kto"):
        check_kl(ours, theirs)


@pytest.mark.parametrize("batches", [DYNAMIC, PACKED], ids=["dynamic", "packed"])
@pytest.mark.parametrize("case", ["dpo", "kto"])
def test_equals_trl_in_other_batches(tmp_path: Path, case: str, batches: dict[str, Any]) -> None:
    """Rows cut by tokens instead of by count, and rows laid end to end: the numbers stay."""
    ours, theirs = run(tmp_path, case, steps=3, verl=batches), stored(case)
    check_steps(ours, theirs)
    if case == "kto":
        check_kl(ours, theirs)


def test_resume_equals_trl(tmp_path: Path) -> None:
    """Steps 5 to 10 from the checkpoint of step 4, reference log-probs from the cache."""
    theirs = stored("dpo")
    cfg = runs.settings(runs.BUNDLED, "dpo", tmp_path, **{"training.save_steps": 4})
    with runs.ready():
        memory = runs.Memory()
        stops = iter([False] * 4 + [True])
        first = runs.build(cfg, runs.rows_of("dpo"), steps=10, memory=memory, stop=lambda: next(stops))
        first._sampler = None
        from quickstart.trainers.watch import StopRequested

        with pytest.raises(StopRequested):
            first.fit()
        again = runs.Memory()
        trainer = runs.build(cfg, runs.rows_of("dpo"), steps=10, memory=again, resume=memory.checkpoints[-1])
        trainer._sampler = None
        trainer.fit()
    # entries only: TRL's way is from the very start, ours from step 4
    ours = {"steps": memory.updates + again.updates}
    check_steps(ours, theirs)
    assert "read from" in again.phases[0]
    after = runs.weights_of(trainer)
    for name, weight in theirs["weights"].items():
        flat = after[name].flatten()
        found = [flat[i].item() for i in runs.trl.places(flat.numel())]
        assert found == pytest.approx(weight["entries"], abs=WEIGHT)


def test_unscaled_mean_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: micro batches' means added up instead of weighed by their share."""
    from quickstart.plugin.training import Policy

    right = Policy._verl_loss

    def unscaled(self: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        loss, metrics = right(self, model_output, data, dp_group)
        return loss / (len(data) / self._group / data["global_batch_size"]), metrics

    monkeypatch.setattr(Policy, "_verl_loss", unscaled)
    assert worst(run(tmp_path, "dpo", steps=1), stored("dpo"), "loss") > 0.1


def test_torn_pairs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without force_group_size dynamic batches tear pairs apart; the loss asserts that they do not."""
    from quickstart.plugin import training

    right = training.pack

    def without_groups(sequences: Any, columns: Any, facts: Any) -> Any:
        return right(sequences, columns, {**facts, "force_group_size": 1})

    monkeypatch.setattr(training, "pack", without_groups)
    with pytest.raises(AssertionError, match="pairs must stay together"):
        run(tmp_path, "dpo", steps=1, verl=DYNAMIC)


def test_bfloat16_is_seen(tmp_path: Path) -> None:
    """Control: verl's default precision is not float32, and the numbers say so."""
    ours = run(tmp_path, "dpo", steps=3, verl=BFLOAT)
    assert worst(ours, stored("dpo"), "rewards/chosen") > 10 * REWARD


@pytest.mark.slow
def test_two_ranks_equal_trl(tmp_path: Path) -> None:
    """Two processes with gloo and sharded weights, one micro batch each, against TRL's two on one."""
    script = Path(__file__).parent / "support" / "preference_runs.py"
    common = [sys.executable, str(script), str(runs.BUNDLED)]
    ranks = [
        subprocess.Popen(
            [*common, str(rank), "2", str(tmp_path / "store"), str(tmp_path / "out.json")],
            stdout=subprocess.DEVNULL,
            stderr=open(tmp_path / f"rank{rank}.log", "w"),  # noqa: SIM115  (closed with the child)
        )
        for rank in range(2)
    ]
    codes = [process.wait(timeout=300) for process in ranks]
    assert codes == [0, 0], (tmp_path / "rank0.log").read_text()[-2000:]
    ours = json.loads((tmp_path / "out.json").read_text())
    check_steps(ours["dpo"], stored("dpo"))
    check_weights(ours["dpo"], stored("dpo"))
    check_steps(ours["kto"], stored("kto"))
    check_kl(ours["kto"], stored("kto"))
