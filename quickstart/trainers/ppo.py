"""verl's synchronous PPO trainer in this process: what it does is verl's, what it tells is ours.

:class:`LocalPPOTrainer` overrides hooks only: it reports (rollouts, metrics, evaluations, checkpoints) and adds a few
measurements that a newcomer needs. The loop, rollout scheduling, advantages, losses, metrics, validation and
checkpoints are `verl.trainer.ppo.v1.trainer_base.PPOTrainer`, on objects of this process (plugin/local.py).
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer
from verl.utils.tracking import Tracking

from quickstart.arguments import ESTIMATORS
from quickstart.outputs import MODEL_FOLDER
from quickstart.plugin.agent_loop import LocalAgentLoopManager
from quickstart.plugin.local import LocalRun, in_process
from quickstart.plugin.retry import clear_end
from quickstart.plugin.shims import Shim, replace_names
from quickstart.trainers.export import export_model
from quickstart.trainers.resume import checkpoints, reading, write_manifest
from quickstart.trainers.watch import GradientWatch, Reporter, RewardWatch, StopRequested

NORMS = {"actor/grad_norm": "actor/loss", "critic/grad_norm": "critic/loss"}  # with their losses
REMEDY = "lower rl.learning_rate, rl.kl_coef or rl.max_grad_norm, or set model.torch_dtype=float32"

METHOD_OF = {estimator: rl_type for rl_type, estimator in ESTIMATORS.items()}


def dead_group_share(rows: Sequence[dict[str, Any]]) -> float:
    """Share of prompts whose answers all have the same reward: with a group baseline they teach nothing.

    Source: DAPO (Yu et al. 2025, arXiv 2503.14476), section 3.2. 0 with one answer a prompt: there is no group.
    """
    rewards: dict[str, set[float]] = defaultdict(set)
    sizes: dict[str, int] = defaultdict(int)
    for row in rows:
        rewards[row["uid"]].add(row["reward"])
        sizes[row["uid"]] += 1
    groups = [uid for uid, size in sizes.items() if size > 1]
    return sum(len(rewards[uid]) == 1 for uid in groups) / len(groups) if groups else 0.0


def log_ratio_metrics(policy: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """log policy - log reference over all answer tokens: mean (an unbiased KL estimate, k1) and largest size.

    verl's k3 estimate is clamped and goes flat at about 2.6 nats a token (core_algos.py:2240-2245); this one is not.

    Args:
        policy, reference: jagged or flat log-probs of the same tokens.
    """
    ratio = (policy.values() - reference.values()).float()
    return {"actor/ref_log_ratio_mean": ratio.mean().item(), "actor/ref_log_ratio_max": ratio.abs().max().item()}


class _ReportingTracking(Tracking):
    """verl's Tracking (for loggers that the user asked for), and every record to the reporter."""

    report: Callable[[dict[str, Any], int], None]

    def log(self, data: dict[str, Any], step: int, backend: Any = None) -> None:
        super().log(data=data, step=step, backend=backend)
        type(self).report(data, step)


class LocalPPOTrainer(PPOTrainerSync):
    """verl's PPOTrainerSync, reporting. Made and driven by :func:`local_trainer`.

    Args:
        config: verl's whole configuration, resolved.
        run: this process's stand-ins.
        reporter: told what happens.
        stop: asked between two steps; True ends the run.
    """

    def __init__(self, config: Any, run: LocalRun, reporter: Reporter, stop: Callable[[], bool]) -> None:
        super().__init__(config)
        self._run, self._reporter, self._stop = run, reporter, stop
        self._evaluated: list[dict[str, Any]] = []
        run.store.before_clear = self._keep_evaluated
        self._watch = GradientWatch(NORMS, REMEDY, self._scaler, reporter.phase)
        self._reward_watch = RewardWatch(reporter.phase)

    # ---- verl's hooks ----

    def on_step_begin(self) -> None:
        if self._stop():
            self.global_steps -= 1  # the last step that was finished
            raise StopRequested
        super().on_step_begin()

    def prepare_step(self) -> dict[str, Any]:
        """Generate and score one batch. verl's own `gen` timer starts too late for a rollout that does not wait."""
        with marked_timer("gen", self.timing_raw):
            metrics = super().prepare_step()
        rows = self._rows("train", self._answers("train"))
        self._reporter.rollout(self.global_steps, rows)
        dead = dead_group_share(rows)
        self._reward_watch.look([row["reward"] for row in rows], dead)
        metrics |= {
            "training/dead_group_share": dead,
            "response_length/finished_share": sum(r["finish_reason"] == "stop" for r in rows) / len(rows),
        }
        return metrics

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics=metrics)
        if self.use_reference_policy:
            data = self._run.store.kv_batch_get(batch.keys, batch.partition_id, ["old_log_probs", "ref_log_prob"])
            metrics.update(log_ratio_metrics(data["old_log_probs"], data["ref_log_prob"]))
        return batch

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """With LoRA the reference is the actor without adapter; verl leaves that wish on the batch, where the critic,
        which has none, would find it next (trainer_base.py:1704, engine_workers.py:425)."""
        batch = super()._compute_ref_log_prob(batch, metrics)
        batch.extra_info.pop("no_lora_adapter", None)
        return batch

    def _load_checkpoint(self) -> None:
        with reading(Path(self.config.trainer.resume_from_path or "")):
            super()._load_checkpoint()

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        assert self._run.actor is not None
        export_model(self._run.actor.worker.actor.engine, self.tokenizer, folder / MODEL_FOLDER)
        write_manifest(folder, METHOD_OF[self.config.algorithm.adv_estimator])
        for old in checkpoints(folder.parent.parent)[: -self.config.trainer.max_actor_ckpt_to_keep]:
            shutil.rmtree(old)  # verl removes its own folders in it, and none that a run before a resume has left
        self._reporter.saved(self.global_steps, folder)

    # ---- ours ----

    def report_metrics(self, data: dict[str, Any], step: int) -> None:
        """verl has logged one step (or, at step 0, an evaluation before training)."""
        metrics = {name: float(value) for name, value in data.items()}
        epoch = step / self.steps_per_epoch
        if self._evaluated:
            evaluation = {name: value for name, value in metrics.items() if name.startswith("val-")}
            self._reporter.evaluation(step, epoch, evaluation, self._evaluated)
            self._evaluated = []
        if "training/global_step" in metrics:
            self._reporter.update(step, epoch, metrics)
            self._watch.look(step, metrics)

    def _scaler(self, norm: str) -> Any:
        """The loss scaler of the engine with this gradient norm; None but in float16."""
        assert self._run.actor is not None
        worker = self.critic_wg.worker if norm.startswith("critic/") else self._run.actor.worker.actor
        return getattr(worker.engine, "scaler", None)

    def _keep_evaluated(self, keys: Sequence[str], partition: str) -> None:
        """verl hands out decoded templates of its evaluation (trainer_base.py:1108); the rows have the prompts."""
        answers = set(keys) & set(self._answers(partition)) if partition == "val" else set()
        if answers:
            self._evaluated += self._rows(partition, [key for key in keys if key in answers])

    def _answers(self, partition: str) -> list[str]:
        """Keys of the answers in the store; prompts have keys of their own."""
        tags = self._run.store.kv_list(partition).get(partition, {})
        return [key for key, tag in tags.items() if not tag.get("is_prompt", False)]

    def _rows(self, partition: str, keys: Sequence[str]) -> list[dict[str, Any]]:
        """Answers in the store as rollout rows: prompt, response, reward first."""
        fields = ["prompts", "responses", "rm_scores", "uid", "reward_model", "extra_fields", "raw_prompt"]
        data = self._run.store.kv_batch_get(keys, partition, fields)
        columns = {name: data[name].unbind() for name in ("prompts", "responses", "rm_scores")}
        columns |= {name: list(data[name]) for name in ("uid", "reward_model", "extra_fields", "raw_prompt")}
        return [self._row({name: column[i] for name, column in columns.items()}) for i in range(len(keys))]

    def _row(self, cell: dict[str, Any]) -> dict[str, Any]:
        messages = list(cell["raw_prompt"])
        return {
            "prompt": messages[-1]["content"] if len(messages) == 1 else messages,
            "response": self.tokenizer.decode(cell["responses"], skip_special_tokens=True),
            "reward": cell["rm_scores"].sum().item(),
            "step": self.global_steps,
            "uid": cell["uid"],
            "ground_truth": cell["reward_model"]["ground_truth"],
            "prompt_length": len(cell["prompts"]),
            "response_length": len(cell["responses"]),
            "finish_reason": cell["extra_fields"]["finish_reason"],
        }


@contextmanager
def local_trainer(config: Any, reporter: Reporter, stop: Callable[[], bool]) -> Iterator[LocalPPOTrainer]:
    """A trainer whose models are loaded, ready for :func:`fit`; its stand-ins are put back at the end."""
    with in_process(lambda what: reporter.phase(f"Initialising {what}")) as run:
        trainer = LocalPPOTrainer(config, run, reporter, stop)
        with clear_end(lambda: "loading the models"):
            trainer.init()
        run.rollout.tell = reporter.phase
        yield trainer


def fit(trainer: LocalPPOTrainer) -> None:
    """Run verl's loop to its end.

    Raises:
        StopRequested: `stop` said so; the last finished step is trainer.global_steps.
        RunError: the reward failed, gradients stayed non-finite, or memory ran out a second time.
    """
    run = trainer._run
    tracking = type("ReportingTracking", (_ReportingTracking,), {"report": staticmethod(trainer.report_metrics)})
    undo = replace_names(
        [
            Shim(
                module=trainer_base,
                name="Tracking",
                replacement=tracking,
                why="fit() makes its logger itself: there is no other place to receive every metric",
                where="verl/trainer/ppo/v1/trainer_base.py:421",
            )
        ]
    )
    try:
        with clear_end(lambda: f"step {trainer.global_steps}"):
            trainer.fit(LocalAgentLoopManager(trainer.config, run.rollout, run.reward_handles, run.loop))
    finally:
        undo()
