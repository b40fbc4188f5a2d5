"""verl's own configuration files, with our keys and then the user's applied.

Reads YAML, does not import verl. Keys of the user's `verl:` section come last; each must be a key of verl's, hold a
value of the kind that verl's default is of, and not be one that a setting of ours is there for (verl_owned). Not here:
which keys ours are translated to (verl_config).
"""

from __future__ import annotations

import difflib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

from quickstart.errors import Fault, UserError
from quickstart.verl_owned import owners_of

# The parts of verl's configuration that a run without rollouts reads, and their files.
ACTOR_FILES = {"actor": "actor/dp_actor", "model": "model/hf_model"}

# Keys that verl's YAML does not list but its dataclasses read: to be added, not overridden.
EXTRA_KEYS = ("mixed_precision", "attn_implementation", "reward_kwargs")

# As EXTRA_KEYS, but the names stand elsewhere in verl's YAML too: ours alone may add them, under these full keys.
ENGINE_KEYS = (
    "critic.fsdp.use_dynamic_bsz",
    "critic.fsdp.micro_batch_size_per_gpu",
    "critic.fsdp.infer_micro_batch_size_per_gpu",
)


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} and {"a.b": 1} alike -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def compose(keys: dict[str, Any], user_keys: dict[str, Any]) -> Any:
    """verl's `ppo_trainer` configuration with our keys, then the user's, applied and resolved.

    Raises:
        UserError: a key of the user's `verl:` section cannot be taken; all of them at once.
    """
    from omegaconf import OmegaConf

    config = _verl_defaults()
    for key, value in keys.items():
        added = key in ENGINE_KEYS or key.rsplit(".", 1)[-1] in EXTRA_KEYS
        OmegaConf.update(config, key, value, merge=False, force_add=added)
    _check_known(config, user_keys)
    for key, value in user_keys.items():
        OmegaConf.update(config, key, value, merge=True, force_add=_is_extra(key))
    OmegaConf.resolve(config)
    return config


def compose_preference(keys: dict[str, Any], user_keys: dict[str, Any]) -> Any:
    """As :func:`compose`, but without the parts that a run without rollouts does not read: a third of the time.

    The user's keys are checked against the whole configuration.
    """
    if user_keys:
        return compose(keys, user_keys)
    from omegaconf import OmegaConf

    parts: Any = {
        part: OmegaConf.to_container(_defaults(file)[part], resolve=False) for part, file in ACTOR_FILES.items()
    }
    del parts["actor"]["profiler"]  # takes its values from a part that is not there; Policy uses none
    config = OmegaConf.create({"actor_rollout_ref": parts})
    OmegaConf.set_struct(config, True)
    for key, value in keys.items():
        OmegaConf.update(config, key, value, merge=False, force_add=key.rsplit(".", 1)[-1] in EXTRA_KEYS)
    OmegaConf.resolve(config)
    return config


def check_keys(user_keys: dict[str, Any]) -> None:
    """The check of :func:`compose` before anything starts; half a second, and none where there are no such keys."""
    if user_keys:
        _check_known(_verl_defaults(), user_keys)


def _check_known(config: Any, user_keys: dict[str, Any]) -> None:
    faults = [fault for key, value in user_keys.items() for fault in _faults_of(config, key, value)]
    if faults:
        raise UserError(faults)


def _faults_of(config: Any, key: str, value: Any) -> list[Fault]:
    if not known_key(config, key):
        return [_unknown_key(config, key, value)]
    owners = owners_of(key)
    if owners:
        return [_owned_key(name, owner, value) for name, owner in owners[:1]]
    wanted = None if _is_extra(key) else kind_wanted(config, key)
    if wanted is None or is_of_kind(value, wanted):
        return []
    rule = f"verl's own value is {wanted[1]}"
    return [Fault(field=f"verl.{key}", found=repr(value), rule=rule, fix=f"write {wanted[0]}, or leave the key out")]


def _owned_key(key: str, owner: str, value: Any) -> Fault:
    is_setting = "." in owner
    rule = "this key of verl's has a setting here, which is checked" if is_setting else f"cannot be changed: {owner}"
    fix = f"write {owner} instead" if is_setting else "leave it out"
    return Fault(field=f"verl.{key}", found=repr(value), rule=rule, fix=fix)


def kind_wanted(config: Any, key: str) -> tuple[str, str] | None:
    """(the kind of value that a key takes, verl's default as text); None where that tells nothing."""
    from omegaconf import OmegaConf

    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    if node is None or OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name):
        return None
    default = node[name]
    if OmegaConf.is_config(default):
        return ("a list" if OmegaConf.is_list(default) else "keys below it"), "a section"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text"}
    kind = kinds.get(type(default))
    return None if kind is None else (kind, repr(default))


def is_of_kind(value: Any, wanted: tuple[str, str]) -> bool:
    """Whether a value read from YAML is of that kind; null always is."""
    if value is None:
        return wanted[1] != "a section"
    kinds: dict[str, type | tuple[type, ...]] = {
        "true or false": bool,
        "a number": (int, float),
        "text": str,
        "a list": list,
        "keys below it": dict,
    }
    is_bool = isinstance(value, bool)
    return isinstance(value, kinds[wanted[0]]) and (not is_bool or wanted[0] == "true or false")


def _verl_defaults() -> Any:
    """verl's configuration as shipped, no key to be added by mistake."""
    from omegaconf import OmegaConf

    config = _defaults("ppo_trainer")
    OmegaConf.set_struct(config, True)
    return config


def _defaults(name: str) -> Any:
    """One of verl's configuration files with all that it includes. Reads YAML, does not import verl."""
    import hydra

    package = importlib.util.find_spec("verl")
    assert package is not None, "a dependency"
    assert package.origin is not None, "not a namespace package"
    folder = Path(package.origin).parent / "trainer" / "config"
    with warnings.catch_warnings(), hydra.initialize_config_dir(str(folder), version_base=None):
        warnings.simplefilter("ignore")  # hydra warns of verl's own deprecated defaults lists
        return hydra.compose(name)


def _is_extra(key: str) -> bool:
    if key in ENGINE_KEYS or "override_config" in key or "engine_kwargs" in key:
        return True
    return any(part in EXTRA_KEYS for part in key.split("."))


def known_key(config: Any, key: str) -> bool:
    """Whether verl's configuration has this dotted key (free-form dictionaries take any)."""
    if _is_extra(key):
        return True
    node = config
    for part in key.split("."):
        if not hasattr(node, "keys") or part not in list(node.keys()):  # `in` denies a key without a default
            return False
        node = node._get_node(part) if hasattr(node, "_get_node") else node[part]
    return True


def all_keys(config: Any) -> list[str]:
    """Every dotted leaf of verl's configuration."""
    from omegaconf import OmegaConf

    container: Any = OmegaConf.to_container(config, resolve=False)
    return list(flatten(container))


def _unknown_key(config: Any, key: str, value: Any) -> Fault:
    keys = all_keys(config)
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.4)
    same_end = [k for k in keys if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    hint = (same_end or near or ["see verl/trainer/config/ppo_trainer.yaml"])[0]
    return Fault(
        field=f"verl.{key}",
        found=repr(value),
        rule="this key is not in verl 0.9.1's ppo_trainer configuration",
        fix=f"did you mean verl.{hint}?",
    )
