"""The CPU as a device of verl: found through the entry point, chosen when asked for or when there is nothing else."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points

import psutil
import pytest
import torch
from verl.plugin.platform import PlatformBase

from quickstart.plugin import platform

ASK = """
import json, logging, sys
seen = []
class Keep(logging.Handler):
    def emit(self, record):
        seen.append(record.getMessage())
logging.getLogger().addHandler(Keep())
import verl
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_name
got = get_platform()
print(json.dumps({"name": got.device_name, "class": type(got).__module__, "verl": get_device_name(),
                  "ours": sorted(m for m in sys.modules if m.startswith("quickstart")), "seen": seen}))
"""


def fresh(**variables):
    """What a new process that imports verl says about its device. None removes a variable."""
    env = {k: v for k, v in (os.environ | variables).items() if v is not None}
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK], env=env, capture_output=True, text=True, check=True
    )
    return json.loads(out.stdout.splitlines()[-1])


class TestEntryPoint:
    def test_is_installed(self):
        found = [e.value for e in entry_points(group="verl.plugins") if e.name == "quickstart"]
        assert found == ["quickstart.plugin"]

    @pytest.fixture(scope="class")
    def asked_for(self):
        return fresh(VERL_PLATFORM="cpu")

    def test_verl_alone_finds_the_platform(self, asked_for):
        assert asked_for["name"] == asked_for["verl"] == "cpu"
        assert asked_for["class"] == "quickstart.plugin.platform"

    def test_it_loads_nothing_else_of_ours(self, asked_for):
        assert asked_for["ours"] == ["quickstart", "quickstart.plugin", "quickstart.plugin.platform"]

    @pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="verl asks nvidia-smi first")
    def test_without_being_asked_for_verl_takes_a_gpu_first_and_else_the_cpu(self):
        """verl probes the platforms in the order of registration; ours comes last and says no where CUDA is."""
        got = fresh(VERL_PLATFORM=None, CUDA_VISIBLE_DEVICES="")
        assert got["name"] == "cpu"
        assert not [line for line in got["seen"] if "No supported accelerator" in line]

    def test_control_without_the_plugin_verl_does_not_know_a_cpu(self):
        with pytest.raises(subprocess.CalledProcessError) as caught:
            fresh(VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_PLUGINS="none")
        assert "Unknown platform 'cpu'" in caught.value.stderr


class TestPlatform:
    def test_is_a_whole_platform(self):
        assert not platform.CpuPlatform.__abstractmethods__
        assert issubclass(platform.CpuPlatform, PlatformBase)

    def test_is_no_choice_where_cuda_is(self, monkeypatch):
        cpu = platform.CpuPlatform()
        for there in (True, False):
            monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
            assert cpu.is_platform_available() is not there
            assert cpu.is_available()

    def test_tensors_go_where_the_current_device_says(self):
        assert torch.zeros(1).to(platform.CpuPlatform().current_device()).device.type == "cpu"

    def test_what_ray_and_torch_distributed_are_told(self):
        cpu = platform.CpuPlatform()
        assert (cpu.communication_backend_name(), cpu.ray_resource_name(), cpu.device_count()) == ("gloo", "GPU", 1)

    def test_seeds(self):
        cpu = platform.CpuPlatform()
        drawn = []
        for seed in (cpu.manual_seed, cpu.manual_seed_all):
            seed(7)
            drawn.append(torch.rand(3))
        assert torch.equal(*drawn)


class TestMemory:
    def test_figures_are_those_of_the_process(self):
        device = platform.CpuPlatform.device_module
        resident, peak = device.memory_allocated(), device.max_memory_allocated()
        assert resident == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
        assert resident > 50 * 2**20
        assert resident <= peak * 1.05

    def test_they_grow_with_what_is_allocated(self):
        device = platform.CpuPlatform.device_module
        before = device.memory_allocated()
        block = torch.ones(64 * 2**20 // 4)
        assert device.memory_allocated() - before > 60 * 2**20
        assert device.max_memory_reserved() >= before + 60 * 2**20
        del block

    def test_free_and_total(self):
        free, total = platform.CpuPlatform.device_module.mem_get_info()
        assert 0 < free < total

    def test_every_name_that_verl_reads_on_the_fsdp_path(self):
        import verl_text
        from verl.trainer.ppo.v1 import trainer_base
        from verl.utils import fsdp_utils
        from verl.utils.checkpoint import checkpoint_manager
        from verl.utils.profiler import performance
        from verl.workers import engine_workers
        from verl.workers.engine.fsdp import transformer_impl

        device, read = platform.CpuPlatform.device_module, set()
        for module in (engine_workers, transformer_impl, fsdp_utils, performance, checkpoint_manager, trainer_base):
            read |= verl_text.attributes(verl_text.tree(module), "get_torch_device()")
        assert {"max_memory_allocated", "empty_cache", "mem_get_info", "get_rng_state"} <= read
        for name in read:
            assert callable(getattr(device, name)), name

    def test_random_state_is_torchs(self):
        device = platform.CpuPlatform.device_module
        state = device.get_rng_state()
        first = torch.rand(2)
        device.set_rng_state(state)
        assert torch.equal(torch.rand(2), first)
