"""What plugs into verl, through verl's own doors. verl loads this module by the entry-point group `verl.plugins`.

Rooms: `platform` (a CPU as a verl device), `shims` (the few verl functions that need a replacement, each with its
reason), `engine` (token generation with transformers), `rollout` (that engine behind verl's rollout interface),
`store` (rows of a batch, in memory), `local` (Ray's objects as plain ones) and `agent_loop` (verl's agent loop without
actors). Not here: any algorithm; those are verl's.

Loading this module only registers the CPU platform, so that `import verl` stays what it is for other programs in the
same environment; everything else happens in :func:`quickstart.plugin.shims.install`.
"""

from __future__ import annotations

from quickstart.plugin import platform

SUPPORTED_VERL = "0.9.1"

__all__ = ["SUPPORTED_VERL", "platform"]
