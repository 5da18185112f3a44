"""The rollout engines by name, as a config declares them. Each spec has one method, ``build(mesh) -> Engine``."""

from __future__ import annotations

from jax.sharding import Mesh

from jaxrl.sampling.engine import SlotEngine, SlotSpec
from jaxrl.sampling.remote import RemoteSpec

EngineSpec = SlotSpec | RemoteSpec
ENGINES: dict[str, type[EngineSpec]] = {"slots": SlotSpec, "server": RemoteSpec}


def own_engine(spec: EngineSpec, mesh: Mesh | None = None) -> SlotEngine:
    """The engine of this process: as ``spec`` lays it out, or with the defaults where ``spec`` names a server."""
    return (spec if isinstance(spec, SlotSpec) else SlotSpec()).build(mesh)
