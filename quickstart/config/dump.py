"""A RunConfig back as YAML: what `--print-config` shows and what outputs/config.yaml holds. `load` reads it again."""

from __future__ import annotations

from typing import Any

import yaml

from quickstart.arguments import SECTIONS, RunConfig


def to_mapping(cfg: RunConfig) -> dict[str, Any]:
    """Sections as plain mappings, in the order of the dataclasses."""
    mapping: dict[str, Any] = {section: dict(vars(vars(cfg)[section])) for section in SECTIONS}
    if cfg.verl:
        mapping["verl"] = dict(cfg.verl)
    return mapping


def to_yaml(cfg: RunConfig) -> str:
    """As YAML text; Chinese stays readable."""
    return yaml.safe_dump(to_mapping(cfg), sort_keys=False, allow_unicode=True, default_flow_style=False, width=1000)
