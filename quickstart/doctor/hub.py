"""A model name becomes a local folder: given, cached, or downloaded; or one message with the ways out.

After this step every loader gets a path, so that nothing asks the hub again and a run works offline.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from quickstart.arguments import RunConfig
from quickstart.data.hub import DEFAULT_HUB, TIMEOUT_SECONDS, reachable
from quickstart.doctor.finding import Finding, error, ok
from quickstart.errors import Fault, UserError

BUNDLED_MODEL = "data/bundled_model"
WANTED_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.bin"]


def hub_address() -> str:
    """The hub or the mirror that HF_ENDPOINT names."""
    return os.environ.get("HF_ENDPOINT", DEFAULT_HUB).rstrip("/")


def hub_offline() -> bool:
    """Whether the user forbids asking the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")


def hub_reachable(address: str, timeout: float = TIMEOUT_SECONDS) -> bool:
    """Whether the hub may be asked (HF_HUB_OFFLINE) and answers."""
    return os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0") and reachable(address, timeout)


def looks_local(name: str) -> bool:
    """Whether a name can only be meant as a path: a hub id is `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/") or "\\" in name


def model_folder(name: str, field: str) -> Path:
    """The local folder of a model, downloading it where needed.

    Args:
        name: a folder, or an id on the hub.
        field: the setting that named it, for the message.

    Raises:
        UserError: no such folder; or not in the cache and the hub cannot be reached, or does not have it.
    """
    return find_local(name, field) or _download(name, field)


def find_local(name: str, field: str) -> Path | None:
    """The folder of a model that is on this machine: given as a path, or in the cache; None: on the hub only.

    Raises:
        UserError: the name can only be a path, and there is no such folder.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if looks_local(name):
        near = folder.parent
        here = ", ".join(sorted(p.name for p in near.iterdir() if p.is_dir())[:5]) if near.is_dir() else ""
        fix = f"folders in {near}: {here}" if here else "give the path of an existing model folder, or a hub name"
        raise UserError(Fault(field=field, found=name, rule="no folder of that name", fix=fix))
    return _cached(name)


def require_hub(name: str, field: str) -> None:
    """Raise UserError where the hub cannot be asked for a model."""
    address = hub_address()
    if not hub_reachable(address):
        raise UserError(_unreachable(name, field, address))


def needed_from_hub(cfg: RunConfig) -> list[str]:
    """The models and data sets in the settings that are not on this machine."""
    from quickstart.data.hub import is_cached
    from quickstart.data.ledger import Ledger
    from quickstart.data.sources import Wanted, expand

    named = [name for field, name in vars(cfg.model).items() if field.endswith("name_or_path") and name]
    models = [name for name in named if not Path(name).expanduser().is_dir() and not looks_local(name)]
    data = [names for names in (cfg.data.train_file, cfg.data.eval_file) if names is not None]
    files = [name for names in data for name in ([names] if isinstance(names, str) else names)]
    sources = expand(Wanted(setting="data.train_file", names=files, split=cfg.data.split), Ledger())
    sets = [source.name for source in sources if source.kind == "hub" and not is_cached(source.name)]
    return [name for name in models if _cached(name) is None] + sets


def judge_hub(needed: list[str], address: str, *, offline: bool, reachable: Callable[[], bool]) -> Finding:
    """Asked only where something is needed from it. needed: names that are not on this machine."""
    mirror = "" if address == DEFAULT_HUB else f" (a mirror, by HF_ENDPOINT; the hub is {DEFAULT_HUB})"
    if not needed:
        return ok("hub", f"not needed: everything is local{', HF_HUB_OFFLINE is set' if offline else ''}")
    names = ", ".join(needed)
    ways = "a mirror (export HF_ENDPOINT=https://...), a local folder, or the bundled model and rows"
    if offline:
        found = f"HF_HUB_OFFLINE forbids asking, and {names} is not on this machine"
        return error("hub", found, f"unset HF_HUB_OFFLINE, or one of: {ways}")
    if reachable():
        return ok("hub", f"{address} answers{mirror}; to be downloaded: {names}")
    found = f"{address}{mirror} does not answer within {TIMEOUT_SECONDS:.0f} s; needed: {names}"
    return error("hub", found, f"one of: {ways}")


def _cached(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=WANTED_FILES))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _download(name: str, field: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    require_hub(name, field)
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED_FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        fix = "check the spelling and, for a gated model, your token (`hf auth login`)"
        raise UserError(
            Fault(field=field, found=name, rule=f"{hub_address()} did not give it: {first}", fix=fix)
        ) from error


def _unreachable(name: str, field: str, address: str) -> Fault:
    return Fault(
        field=field,
        found=f"{name} (no such folder here, not in the local cache)",
        rule=f"{address} cannot be reached, so it cannot be downloaded",
        fix=(
            "one of three: a mirror (export HF_ENDPOINT=https://...), "
            f"a local folder ({field}=/path/to/model), or the bundled model ({field}={BUNDLED_MODEL})"
        ),
    )
