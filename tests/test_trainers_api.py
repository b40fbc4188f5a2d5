"""The order of a run without a run: what is refused before the start, Ctrl-C's switch, how an ending is recorded."""

from __future__ import annotations

import gc
import os
import signal
import threading
from typing import Any

import pytest
import torch

from quickstart import Trainer, config
from quickstart.errors import Fault, RunError, UserError
from quickstart.trainers import api
from quickstart.words import counted


class FakeRecorder:
    """Keeps how it was closed."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def close(self, reason: str) -> None:
        self.reasons.append(reason)


class TestEnding:
    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (KeyboardInterrupt(), "interrupted"),
            (RunError(Fault(field="step 3", found="nan", rule="a reward is a number", fix="-")), "stopped: a reward"),
            (RuntimeError("shapes differ"), "failed: RuntimeError: shapes differ"),
            (SystemExit(1), "failed: SystemExit"),
        ],
    )
    def test_an_error_goes_on_and_is_recorded(self, error, reason):
        recorder: Any = FakeRecorder()
        with pytest.raises(type(error)), api.ending(recorder):
            raise error
        assert len(recorder.reasons) == 1
        assert recorder.reasons[0].startswith(reason)

    def test_the_end(self):
        recorder: Any = FakeRecorder()
        with api.ending(recorder):
            pass
        assert recorder.reasons == ["completed"]


class TestStopSwitch:
    def test_once_asks_twice_raises_and_the_handler_of_before_comes_back(self):
        told: list[str] = []
        before = signal.getsignal(signal.SIGINT)
        with api.StopSwitch(told.append).armed() as switch:
            assert not switch()
            os.kill(os.getpid(), signal.SIGINT)
            assert switch()
            assert len(told) == 1
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before

    def test_in_another_thread_signals_are_left_alone(self):
        before = signal.getsignal(signal.SIGINT)
        seen: list[bool] = []

        def work() -> None:
            with api.StopSwitch(lambda text: None).armed() as switch:
                seen.append(switch())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == [False]
        assert signal.getsignal(signal.SIGINT) is before


class TestTrainer:
    def test_all_faults_when_it_is_made(self):
        with pytest.raises(UserError) as caught:
            Trainer(rl_args={"learning_rate": -1, "temperature": 0}, training_args={"device": "cpu"})
        assert len(caught.value.faults) == 2

    def test_verl_keys_nested_or_dotted(self):
        nested = Trainer(training_args={"device": "cpu"}, verl={"trainer": {"project_name": "mine"}})
        dotted = Trainer(training_args={"device": "cpu"}, verl={"trainer.project_name": "mine"})
        assert nested.cfg.verl == dotted.cfg.verl == {"trainer.project_name": "mine"}

    @pytest.mark.parametrize("name", [name for name, *_ in api.NOT_YET])
    def test_what_is_not_built_is_refused_by_name(self, name):
        values = {"training.backend": "ray"}
        section, field = name.split(".")
        cfg = config.from_arguments({"model_name_or_path": "x/y"}, None, None, None)
        changed = {**vars(vars(cfg)[section]), field: values[name]}
        object.__setattr__(cfg, section, type(vars(cfg)[section])(**changed))  # whatever this machine would allow
        with pytest.raises(UserError, match=name):
            api.check_built(cfg)


@pytest.mark.parametrize(("number", "text"), [(1, "1 update"), (0, "0 updates"), (5, "5 updates")])
def test_counts(number, text):
    assert counted(number, "update") == text


def test_a_run_that_ends_while_verl_is_loaded_puts_everything_back(tiny_job, tmp_path, monkeypatch):
    """Ctrl-C during imports waits for their end, by which time verl's names are replaced."""
    from verl.utils import model

    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGINT)
        return "a configuration"

    monkeypatch.setattr(api.verl_compose, "compose", interrupted)
    before = (model.load_valuehead_model, torch.backends.cuda.cudnn_sdp_enabled(), gc.get_freeze_count())
    cfg = config.resolve(config.load(None, [*tiny_job, f"training.output_dir={tmp_path / 'out'}"])).cfg
    with pytest.raises(KeyboardInterrupt):
        api.train(cfg)
    assert (model.load_valuehead_model, torch.backends.cuda.cudnn_sdp_enabled(), gc.get_freeze_count()) == before
