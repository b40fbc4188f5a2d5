"""`python -m quickstart doctor [--config FILE] [section.key=value ...] [--json]`: look at everything, start nothing.

Exit code 2 where a check is an error, 0 otherwise; warnings do not count.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import time
from collections.abc import Mapping, Sequence

from quickstart.arguments import ROLLOUT_TYPES
from quickstart.doctor import before, checks
from quickstart.doctor.facts import Facts
from quickstart.doctor.finding import Finding, has_error, summary, table
from quickstart.doctor.running import run_checks
from quickstart.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER
from quickstart.writing import to_json

REWARD_SECONDS = 5.0
NARROW, WIDE, PIPED = 80, 150, 140  # columns


def main(argv: Sequence[str]) -> int:
    """The command. argv: what stands behind `doctor`."""
    arguments = parser().parse_intermixed_args(list(argv))
    began = time.monotonic()
    try:
        findings = look(arguments.config, arguments.settings)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if arguments.json:
        print(to_json(before.report(findings), indent=2))
    else:
        print(table(findings, columns()))
        print(memory_tables(findings), end="")
        print(f"{summary(findings)} ({time.monotonic() - began:.1f} s)")
    return EXIT_USER if has_error(findings) else EXIT_DONE


def look(config: str | None, overrides: Sequence[str]) -> list[Finding]:
    """Run every check. The children import while the others read files."""
    facts = Facts(config, overrides)
    try:
        facts.start_children(questions(facts))
        return run_checks(
            [
                *checks.config_checks(facts),
                *checks.environment_checks(facts),
                *checks.disk_checks(facts),
                *checks.hub_checks(facts),
                *checks.model_checks(facts),
                *checks.run_checks_of(facts, REWARD_SECONDS),
                *checks.import_checks(facts),
            ]
        )
    finally:
        facts.close()


def questions(facts: Facts) -> list[str]:
    """The child processes that this machine calls for."""
    asked = ["stack"]
    if facts.device == "cuda" and facts.probe.gpus:
        asked.append("kernel")
    if importlib.util.find_spec("flash_attn") is not None:
        asked.append("flash")
    cfg = facts.cfg_or_none
    if cfg is not None and cfg.rl.rl_type in ROLLOUT_TYPES and cfg.rl.rollout_engine == "vllm":
        asked.append("vllm")
    return asked


def memory_tables(findings: Sequence[Finding]) -> str:
    """What each role holds in each phase, in MB, on the device and in host memory."""
    plans = [finding for finding in findings if finding.check.endswith("memory plan") and finding.data]
    return "".join(f"{finding.check}, MB\n{memory_table(finding.data or {})}\n\n" for finding in plans)


def memory_table(sizes: Mapping[str, Mapping[str, int]]) -> str:
    """role, kind | phase | phase ...; then the sum of each phase."""
    phases = list(next(iter(sizes.values())))
    width = max(len(name) for name in sizes)
    total = {phase: sum(row[phase] for row in sizes.values()) for phase in phases}
    lines = [" " * (width + 2) + "".join(f"{phase:>15}" for phase in phases)]
    for name, row in {**sizes, "sum": total}.items():
        lines.append(f"  {name:<{width}}" + "".join(f"{size_text(row[phase]):>15}" for phase in phases))
    return "\n".join(lines)


def size_text(size: int) -> str:
    """1,234; a dash for nothing."""
    return f"{size / 10**6:,.0f}" if size else "-"


def columns() -> int:
    """Width of the table: the terminal's, within reason."""
    if not sys.stdout.isatty():
        return PIPED
    return min(max(shutil.get_terminal_size().columns, NARROW), WIDE)


def parser() -> argparse.ArgumentParser:
    """The command line; argparse ends with 2 on one that it does not know."""
    made = argparse.ArgumentParser(prog="python -m quickstart doctor", allow_abbrev=False, description=__doc__)
    made.add_argument("--config", metavar="FILE", help="YAML file with the settings; default configs/ppo_min.yaml")
    made.add_argument("--json", action="store_true", help="the findings as JSON")
    made.add_argument("settings", nargs="*", metavar="section.key=value", help="settings, as for a training run")
    return made
