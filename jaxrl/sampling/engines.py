"""The rollout engines by name, as a config declares them. Each spec has one method, ``build(mesh) -> Engine``."""

from __future__ import annotations

from jaxrl.sampling.engine import SlotSpec

EngineSpec = SlotSpec
ENGINES: dict[str, type[EngineSpec]] = {"slots": SlotSpec}
