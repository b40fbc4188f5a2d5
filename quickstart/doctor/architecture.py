"""Whether the installed transformers knows a model, and how large it is. From files, without imports.

transformers' table of architectures is read as text: importing it imports torch. Not here: weight files (model.py),
tokenizers (tokens.py), reward models (rewards.model_check).
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from quickstart.doctor.finding import Finding, error, note, ok
from quickstart.doctor.parameters import ModelShape, millions

Task = Literal["CAUSAL_LM", "TOKEN_CLASSIFICATION"]
TASKS: tuple[Task, ...] = ("CAUSAL_LM", "TOKEN_CLASSIFICATION")
Table = Mapping[Task, Mapping[str, str]]  # task -> model_type -> class


@cache
def known_architectures() -> Table:
    """transformers' own mapping of model types to classes, for the tasks of this project; empty where not found."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return {}
    path = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    return read_table(path.read_text(encoding="utf-8")) if path.is_file() else {}


def read_table(source: str) -> Table:
    """MODEL_FOR_<task>_MAPPING_NAMES = OrderedDict([(model_type, class), ...]) out of Python text."""
    wanted = {f"MODEL_FOR_{task}_MAPPING_NAMES": task for task in TASKS}
    found: dict[Task, Mapping[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
            name = node.targets[0].id
            if name in wanted and node.value.args:
                pairs = ast.literal_eval(node.value.args[0])
                found[wanted[name]] = {kind: cls if isinstance(cls, str) else cls[0] for kind, cls in pairs}
    return found


def judge_policy(
    config: Mapping[str, Any], table: Table, field: str, *, trusts_code: bool, needs_critic: bool
) -> Finding:
    """A causal language model that the installed transformers builds, and a value model of the same body."""
    kind = str(config.get("model_type", ""))
    named = [str(name) for name in config.get("architectures") or ()]
    if not kind:
        fix = "use the config.json of the original model"
        return error(
            "architecture", "config.json without model_type", fix, field=field, rule="it names the architecture"
        )
    if named and all(name.endswith("ForSequenceClassification") for name in named):
        fix = "name a language model here, and this one as model.reward_model_name_or_path"
        return error("architecture", named[0], fix, field=field, rule="a reward model writes no text")
    if "auto_map" in config and kind not in table.get("CAUSAL_LM", {}):
        return judge_own_code(kind, field, trusts_code=trusts_code)
    if not table:
        return note("architecture", f"{kind}; transformers' own list could not be read")
    if kind not in table["CAUSAL_LM"]:
        near = difflib.get_close_matches(kind, table["CAUSAL_LM"], n=3)
        fix = "use a model of a known type" + (f", such as {', '.join(near)}" if near else "")
        rule = "the installed transformers has no causal language model of that type"
        return error("architecture", f"model_type {kind}", fix, field=field, rule=rule)
    if needs_critic and kind not in table["TOKEN_CLASSIFICATION"]:
        fix = "set rl.rl_type=grpo, which needs no value model, or use another model"
        rule = "transformers has no token classifier of that type, which is what ppo's value model is made of"
        return error("architecture", f"model_type {kind}", fix, field=field, rule=rule)
    return ok("architecture", f"{table['CAUSAL_LM'][kind]}, known to the installed transformers")


def judge_own_code(kind: str, field: str, *, trusts_code: bool) -> Finding:
    """A model that brings its own Python code."""
    if trusts_code:
        return note("architecture", f"{kind}, run by Python code that comes with the model", field=field)
    fix = "set model.trust_remote_code=true if you trust that code, or use another model"
    return error("architecture", f"model_type {kind}", fix, field=field, rule="it needs Python code that comes with it")


def judge_size(shape: ModelShape | None, field: str) -> Finding:
    """Parameters, from headers alone."""
    if shape is None:
        found = "config.json does not give the widths (hidden_size, num_hidden_layers, ...): no memory plan"
        return note("parameters", found, field=field)
    how = f"stored as {shape.stored}" if shape.counted else "estimated from the size of .bin files"
    head = "output head tied to the embedding" if shape.tied else "output head of its own"
    return ok("parameters", f"{millions(shape.parameters)} ({shape.parameters:,}), {how}, {head}")
