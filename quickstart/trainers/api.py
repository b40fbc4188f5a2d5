"""One run from settings to results: look, claim, load, train, close. The order is the promise.

Everything that a user can get wrong is found before the output folder is touched; the folder is claimed before anything
heavy is imported; and however the run ends, its files are complete and say how it ended. What trains is in `ppo` and
`preference`; what writes is in `record`.

    Trainer(model_args=ModelArguments(...), rl_args=RLArguments(rl_type="grpo"), training_args={...}).train()
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from quickstart import config, imports, verl_compose, verl_config
from quickstart.arguments import (
    PREFERENCE_TYPES,
    DataArguments,
    ModelArguments,
    RLArguments,
    RunConfig,
    TrainingArguments,
    algorithm_name,
)
from quickstart.config import Choice
from quickstart.data.prepare import cache_folder
from quickstart.doctor import before as doctor
from quickstart.errors import Fault, RunError, UserError
from quickstart.outputs import OutputFolder
from quickstart.record.capture import Capture
from quickstart.record.recorder import Recorder
from quickstart.trainers import checking, environment, resume, startup
from quickstart.trainers.checking import Foreseen, check
from quickstart.words import counted

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from quickstart.trainers.ppo import LocalPPOTrainer


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished run leaves: where it is, and the last record of its log_history."""

    output_dir: Path
    steps: int
    metrics: dict[str, Any]


class Trainer:
    """The Python way in: the same settings, the same run, the same files as the command line.

    Args:
        model_args, data_args, rl_args: argument objects, or mappings of their fields.
        training_args: TrainingArguments, or a mapping such as {"output_dir": "outputs", "logging_steps": 1}.
        verl: keys of verl's own configuration, nested or dotted.

    Raises:
        UserError: everything that is wrong with the settings, at once.
    """

    def __init__(
        self,
        model_args: ModelArguments | Mapping[str, Any] | None = None,
        data_args: DataArguments | Mapping[str, Any] | None = None,
        rl_args: RLArguments | Mapping[str, Any] | None = None,
        training_args: TrainingArguments | Mapping[str, Any] | None = None,
        verl: Mapping[str, Any] | None = None,
    ) -> None:
        resolved = config.resolve(config.from_arguments(model_args, data_args, rl_args, training_args, verl))
        self.cfg, self.choices = resolved.cfg, resolved.choices

    def train(self) -> RunResult:
        """Run it. Raises as :func:`train`."""
        return train(self.cfg, self.choices)


def train(cfg: RunConfig, choices: Sequence[Choice] = (), argv: Sequence[str] = ()) -> RunResult:
    """One run with resolved settings.

    Args:
        cfg: no "auto" left (config.resolve).
        choices: what was chosen for "auto", to be printed and recorded.
        argv: the command, for run.json.

    Raises:
        UserError: the user can fix it. Before the start nothing was written; a RunError came later, what was done is
            kept.
        KeyboardInterrupt: the user stopped it; what was done is kept.
    """
    with imports.set_aside():
        return _train(cfg, choices, argv, time.monotonic())


def _train(cfg: RunConfig, choices: Sequence[Choice], argv: Sequence[str], started: float) -> RunResult:
    check_built(cfg)
    run = check(cfg, choices)
    cfg = run.cfg
    with (
        OutputFolder.claim(cfg.training.output_dir, keep=run.point is not None) as outputs,
        Capture(outputs.log) as capture,
    ):
        recorder = Recorder(outputs, cfg, capture, choices=run.choices, argv=argv)
        recorder.settings(run.choices)
        if outputs.moved_to is not None:
            recorder.phase(f"The run that was here is now in {outputs.moved_to}")
        doctor.write(outputs.doctor, run.findings)
        for notice in run.notices:
            recorder.phase(notice)
        ready = run.ready
        recorder.fact(data_sha256=ready.rows.sha256, num_train=ready.rows.num_train, steps_planned=ready.steps)
        with ending(recorder), environment.memory_limit(cfg.training.device, cfg.training.memory_budget_gb):
            method = _preference if cfg.rl.rl_type in PREFERENCE_TYPES else _ppo
            method(ready, outputs, recorder, capture, run.point, started)
        return RunResult(output_dir=outputs.root, steps=recorder.step, metrics=recorder.last_metrics)


def foresee(cfg: RunConfig, choices: Sequence[Choice] = ()) -> Foreseen:
    """What :func:`train` would do, and whether it would begin. Starts and downloads nothing. Raises UserError."""
    check_built(cfg)
    with imports.set_aside():
        return checking.foresee(cfg, choices)


# Settings that are foreseen and not built: what they would need, and what to write instead.
NOT_YET: tuple[tuple[str, Callable[[RunConfig], bool], str, str], ...] = (
    (
        "training.backend",
        lambda c: c.training.backend == "ray",
        "several devices on Ray are not there yet; this version trains on one device",
        "write local or auto, with training.num_devices=1",
    ),
)


def check_built(cfg: RunConfig) -> None:
    """Only what exists can be asked for. Raises UserError."""
    faults = []
    for name, asked, rule, fix in NOT_YET:
        if asked(cfg):
            section, field = name.split(".")
            faults.append(Fault(field=name, found=str(vars(vars(cfg)[section])[field]), rule=rule, fix=fix))
    if faults:
        raise UserError(faults)


@contextlib.contextmanager
def ending(recorder: Recorder) -> Iterator[None]:
    """Whatever happens inside, the run's files are closed and say how it ended."""
    try:
        yield
    except KeyboardInterrupt:
        recorder.close("interrupted")
        raise
    except RunError as error:
        recorder.close(f"stopped: {error.faults[0].rule}")
        raise
    except BaseException as error:
        recorder.close(f"failed: {type(error).__name__}: {error}")
        raise
    recorder.close("completed")


class StopSwitch:
    """Ctrl-C once: stop after this step, with a checkpoint. Twice: stop now. Only in the main thread.

    Args:
        tell: told once, when the first Ctrl-C comes.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._asked = False

    def __call__(self) -> bool:
        return self._asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        self._tell("Stopping after this step (Ctrl-C again: stop now)")

    @contextlib.contextmanager
    def armed(self) -> Iterator[StopSwitch]:
        """While inside, Ctrl-C is ours; the handler of before is put back."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


def _ppo(
    ready: startup.Ready,
    outputs: OutputFolder,
    recorder: Recorder,
    capture: Capture,
    point: resume.Point | None,
    started: float,
) -> None:
    """verl's PPO trainer on one device."""
    cfg = ready.cfg
    with contextlib.ExitStack() as undone:  # whatever ends the run, verl's names and torch's settings are put back
        whole = _load_verl(ready, outputs, recorder, undone)
        from quickstart.trainers import ppo

        environment.seed_everything(cfg.training.seed)
        recorder.phase(f"Loading reward: {cfg.rl.reward}")
        ready.guard_terminal(capture.terminal)
        recorder.phase(f"Loading model {cfg.model.model_name_or_path}")
        switch = StopSwitch(recorder.phase)
        with environment.process_group(), ppo.local_trainer(whole, recorder, switch) as trainer:
            recorder.begin(ready.steps, point.history if point else ())
            recorder.phase(loop_line(ready, time.monotonic() - started))
            with switch.armed():
                _fit(trainer, recorder)


def _load_verl(
    ready: startup.Ready, outputs: OutputFolder, recorder: Recorder, undone: contextlib.ExitStack
) -> DictConfig:
    """Import verl, make it ready (undone: how that is undone), and give its whole configuration of this run."""
    cfg = ready.cfg
    engine = cfg.rl.rollout_engine
    loaded = "vllm and verl" if engine == "vllm" else "verl"
    recorder.phase(f"Loading {loaded} for {algorithm_name(cfg.rl.rl_type)} on {cfg.training.device}")
    environment.set_threads(int(cfg.training.num_threads))
    environment.keep_datasets_in(cache_folder(cfg))
    with environment.awake(cfg), imports.light(engine), environment.imports_whole():
        if engine == "vllm":
            from quickstart.plugin import vllm_engine

            vllm_engine.load()  # first: verl imports it too, and a broken one would end there with a traceback
        from quickstart.plugin import retry, shims
        from quickstart.trainers import ppo  # noqa: F401  (what takes time is imported here)

        keys = verl_config.translate(cfg, ready.paths(outputs), device=cfg.training.device, steps=ready.steps)
        whole = verl_compose.compose(keys, cfg.verl)
        undone.callback(
            shims.install(
                cfg.training.device,
                reference_on_device=cfg.rl.reference_offload is None,
                trust_remote_code=cfg.model.trust_remote_code,
                halving=retry.Halving(cfg.rl.per_device_train_batch_size, recorder.phase),
            )
        )
    return whole


def _fit(trainer: LocalPPOTrainer, recorder: Recorder) -> None:
    """verl's loop; a stop between two steps leaves a checkpoint first."""
    from quickstart.trainers import ppo

    try:
        ppo.fit(trainer)
    except ppo.StopRequested:
        if trainer.global_steps > 0 and trainer.config.trainer.save_freq > 0:
            trainer._save_checkpoint()
        raise KeyboardInterrupt from None


def _preference(
    ready: startup.Ready,
    outputs: OutputFolder,
    recorder: Recorder,
    capture: Capture,
    point: resume.Point | None,
    started: float,
) -> None:
    """DPO and its kin, on verl's engine."""
    cfg = ready.cfg
    assert ready.rows.preference is not None, "a method without rollouts"
    recorder.phase(f"Loading verl for {algorithm_name(cfg.rl.rl_type)} on {cfg.training.device}")
    environment.set_threads(int(cfg.training.num_threads))
    with environment.awake(cfg), imports.light(), environment.imports_whole():
        from quickstart.trainers import watch
        from quickstart.trainers.preference import run_preference
    ready.guard_terminal(capture.terminal)
    recorder.phase(f"Loading model {cfg.model.model_name_or_path}")
    switch = StopSwitch(recorder.phase)

    def begin() -> None:
        recorder.begin(ready.steps, point.history if point else ())
        recorder.phase(loop_line(ready, time.monotonic() - started))

    try:
        with switch.armed():
            run_preference(
                cfg,
                ready.rows.preference,
                tokenizer=ready.tokenizer,
                steps=ready.steps,
                folder=outputs.checkpoints,
                cache=cache_folder(cfg),
                reward=ready.reward,
                reporter=recorder,
                stop=switch,
                chat_template=startup.chat_template(cfg),
                resume=point.folder if point else None,
                ready=begin,
            )
    except watch.StopRequested:
        raise KeyboardInterrupt from None


def loop_line(ready: startup.Ready, seconds: float) -> str:
    """What is about to happen, in numbers."""
    cfg = ready.cfg
    if cfg.rl.rl_type in PREFERENCE_TYPES:
        each = counted(config.samples_per_update(cfg), "answer" if cfg.rl.rl_type == "kto" else "pair")
    else:
        samples = config.samples_per_step(cfg)
        updates = samples // config.samples_per_update(cfg) * cfg.rl.ppo_epochs
        each = f"{counted(cfg.rl.rollout_batch_size, 'prompt')}, {counted(samples, 'response')}, "
        each += counted(updates, "update")
    return f"Starting the training loop after {seconds:.1f} s: {counted(ready.steps, 'step')}, each of {each}"
