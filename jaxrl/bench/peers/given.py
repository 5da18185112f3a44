"""The rows of a step benchmark as other libraries take them: prompts and completions apart."""

import numpy as np


def split(world):
    """``prompts [N, S]``, ``completions [N, T]``, ``mask [N, T]``, ``old_logps [N, T]``: padding is the last id."""
    width = int(world["start"][0])
    if (world["start"] != width).any():
        raise ValueError("expected prompts of one length")
    mask = np.arange(width, world["tokens"].shape[1]) < world["length"][:, None]
    completions = np.where(mask, world["tokens"][:, width:], world["config"]["pad"])
    return world["tokens"][:, :width], completions, mask, world["old_logps"][:, width:]


def parts(world, case):
    """Rows of each micro-batch, as slices: all at once, or ``config["peer_microbatch"]`` where the case says so."""
    rows = len(world["tokens"])
    size = min(rows, world["config"]["peer_microbatch"]) if case.endswith(", micro-batches") else rows
    if rows % size:
        raise ValueError(f"{rows} rows do not split into micro-batches of {size}")
    return [slice(i, i + size) for i in range(0, rows, size)]


def checked(call, world):
    """The losses of the first steps, ``[1, steps]``."""
    return [[float(call()) for _ in range(world["config"]["checked"])]]


def counted(call, world):
    """``call``, returning the number of response tokens that a step trains on."""
    tokens = int((world["length"] - world["start"]).sum())

    def made():
        call()
        return tokens

    return made
