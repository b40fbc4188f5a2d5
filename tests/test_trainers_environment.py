"""The process made ready: variables, hidden packages, seeds, and a process group of one."""

from __future__ import annotations

import os
import random
import signal
import threading
import types
from types import SimpleNamespace
from typing import Any

import pytest

from quickstart.errors import RunError
from quickstart.trainers import environment


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that a test may change."""
    for name in (*environment.ONE_PROCESS, *environment.QUIET, "VERL_PLATFORM"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("variables")
class TestVariables:
    def test_what_the_user_has_set_stays(self, monkeypatch):
        monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
        environment.set_variables("cpu")
        assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"

    def test_the_process_group_is_ours(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "8")
        environment.set_variables("cpu")
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")

    def test_verl_is_told_of_a_cpu_only_on_a_cpu(self):
        environment.set_variables("cuda")
        assert "VERL_PLATFORM" not in os.environ
        environment.set_variables("cpu")
        assert os.environ["VERL_PLATFORM"] == "cpu"


class TestProcessGroup:
    def test_one_rank_and_gone_afterwards(self):
        import torch.distributed as dist

        with environment.process_group():
            assert (dist.get_world_size(), dist.get_rank()) == (1, 0)
        assert not dist.is_initialized()

    def test_one_that_is_there_is_used_and_stays(self):
        import torch.distributed as dist

        with environment.process_group():
            with environment.process_group():
                assert dist.is_initialized()
            assert dist.is_initialized()


class FakeCuda:
    """torch.cuda of a card of 48 GiB."""

    def __init__(self) -> None:
        self.fractions: list[float] = []

    def get_device_properties(self, number: int) -> Any:
        return types.SimpleNamespace(total_memory=48 * 2**30)

    def set_per_process_memory_fraction(self, fraction: float, number: int) -> None:
        self.fractions.append(fraction)


def test_a_seed_fixes_all_generators():
    import numpy as np
    import torch

    def draw() -> tuple[float, float, float]:
        environment.seed_everything(5)
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    assert draw() == draw()


class TestMemoryLimit:
    @pytest.fixture
    def cuda(self, monkeypatch) -> FakeCuda:
        import torch

        fake = FakeCuda()
        monkeypatch.setattr(torch, "cuda", fake)
        return fake

    @pytest.mark.parametrize(("budget", "share"), [(12.0, 0.2335), (96.0, 1.0)])
    def test_a_gpu_is_held_to_it_inside_the_block(self, cuda, budget, share):
        """Of 48 GiB, less what the CUDA context takes: 0.79 GiB."""
        with environment.memory_limit("cuda", budget):
            assert cuda.fractions == [pytest.approx(share, abs=1e-4)]
        assert cuda.fractions[1:] == [1.0]

    @pytest.mark.parametrize(("device", "budget"), [("cuda", None), ("cpu", 12.0)])
    def test_nothing_is_held_without_a_budget_or_a_gpu(self, cuda, device, budget):
        with environment.memory_limit(device, budget):
            pass
        assert cuda.fractions == []

    def test_running_out_is_told_as_what_it_is(self, cuda):
        import torch

        with pytest.raises(RunError, match=r"training\.memory_budget_gb: found 12") as caught:  # noqa: SIM117
            with environment.memory_limit("cuda", 12.0):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore words")
        assert "Tried to allocate 2 GiB" in caught.value.faults[0].rule
        assert cuda.fractions[-1] == 1.0


def interrupted(times, done):
    """Ctrl-C so many times, then the rest of the block."""
    with environment.imports_whole():
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        done.append("the rest of the block")


class TestImportsWhole:
    @pytest.mark.parametrize(("times", "rest"), [(1, ["the rest of the block"]), (2, [])])
    def test_the_first_interruption_waits_for_the_end_of_the_block_the_second_does_not(self, times, rest):
        done: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            interrupted(times, done)
        assert done == rest

    def test_the_handler_of_before_is_put_back(self):
        before = signal.getsignal(signal.SIGINT)
        with environment.imports_whole():
            assert signal.getsignal(signal.SIGINT) is not before
        assert signal.getsignal(signal.SIGINT) is before


class TestAwake:
    def of(self, device, **verl):
        return SimpleNamespace(training=SimpleNamespace(device=device), verl=verl)

    @pytest.fixture
    def asked(self, monkeypatch):
        """Devices that were given products."""
        devices = []
        monkeypatch.setattr(environment, "_first_product", devices.append)
        return devices

    @pytest.mark.parametrize(
        ("device", "verl", "wanted"),
        [
            ("cpu", {}, []),
            ("cuda", {}, ["cuda"]),
            ("cuda", {"actor_rollout_ref.actor.fsdp_config.full_determinism": True}, []),
        ],
    )
    def test_a_gpu_is_woken_unless_verl_is_to_set_it_up_first(self, asked, device, verl, wanted):
        with environment.awake(self.of(device, **verl)):
            pass
        assert asked == wanted

    def test_it_is_over_after_an_error_too(self, asked):
        with pytest.raises(ZeroDivisionError), environment.awake(self.of("cuda")):
            _ = 1 / 0
        assert not [t for t in threading.enumerate() if t.name == "quickstart-wake"]

    @pytest.mark.gpu
    def test_a_gpu_is_awake_after_it(self):
        import torch

        with environment.awake(self.of("cuda")):
            pass
        assert torch.cuda.is_initialized()

    @pytest.mark.parametrize("device", ["cpu", "cuda:99", "nonsense"])
    def test_what_is_wrong_is_left_to_the_run(self, device):
        environment._first_product(device)
