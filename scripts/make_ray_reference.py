"""Make the reference numbers of the parity test: stock verl on Ray, on a CPU, for the cases of tests/support/ray_case.

    python scripts/make_ray_reference.py            # all cases, 75 to 100 s each on 2 cores
    python scripts/make_ray_reference.py grpo       # one

Writes tests/data/ray_reference_<case>.json: versions, weight hashes, and all metrics of every step. Needed again only
when a case or the supported verl changes. Uses port numbers and processes of its own and stops its cluster at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "tests" / "support"
TRANSPORT = {
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,  # verl: 8 actors, 17 s of the start
    "trainer.logger": ["file"],
    "ray_kwargs.ray_init.num_cpus": 32,  # logical: storage units, workers and placement groups each reserve some
}


def prepare_process() -> None:
    """Variables that every process of the cluster inherits; before ray and verl are imported."""
    os.environ |= {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # picks the engines registered for cuda: the CPU has none in stock verl
        "VERL_USE_EXTERNAL_MODULES": "ray_stock",
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(ROOT)]),
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    sys.path.insert(0, str(SUPPORT))
    sys.path.insert(0, str(ROOT))


def stock_run(name: str, files: Any, work: Path) -> list[dict[str, Any]]:
    """The metrics that stock verl logs, one entry a record."""
    import ray
    import ray_case
    from omegaconf import OmegaConf
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    config = ray_case.configuration(name, files, work)
    for key, value in TRANSPORT.items():
        OmegaConf.update(config, key, value, force_add=True)
    extra = {"num_gpus": 1, "include_dashboard": False}  # a logical GPU: verl counts nothing else (ray/base.py:233)
    OmegaConf.update(config, "ray_kwargs.ray_init", extra, merge=True, force_add=True)
    log = work / "metrics.jsonl"
    os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
    try:
        run_ppo(config, TaskRunnerV1)
    finally:
        ray.shutdown()
    return [json.loads(line) for line in log.read_text().splitlines()]


def reference(name: str) -> dict[str, Any]:
    """A case's whole record."""
    import ray_case

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        files = ray_case.Files.make(work)
        started = time.monotonic()
        records = stock_run(name, files, work)
        return {
            "case": name,
            "made_by": "python scripts/make_ray_reference.py " + name,
            "seconds": round(time.monotonic() - started, 1),
            "versions": {package: metadata.version(package) for package in ("verl", "torch", "transformers", "ray")},
            "weights_sha256": files.sha256(),
            "records": [{"step": r["step"], "metrics": ray_case.comparable(r["data"])} for r in records],
        }


def main() -> None:
    """Make the cases that were named, or all."""
    prepare_process()
    import ray_case

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=", ".join(ray_case.CASES))
    for name in parser.parse_args().cases or ray_case.CASES:
        target = ROOT / "tests" / "data" / f"ray_reference_{name}.json"
        target.parent.mkdir(exist_ok=True)
        record = reference(name)
        target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{target}: {len(record['records'])} records in {record['seconds']} s")


if __name__ == "__main__":
    main()
