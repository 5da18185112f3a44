"""From an experiment to models on a mesh: the task, the base model, the policy's first state."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Key

from jaxrl import keys
from jaxrl.errors import UsageError
from jaxrl.evaluation.exact import gates, require_gates
from jaxrl.mesh import make_mesh, shard_tree, state_shardings
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Decoder, init_model, param_axes, with_config
from jaxrl.models.hf import load_model, save_model
from jaxrl.rl.optimiser import make_optimiser
from jaxrl.train.experiment import Experiment, ModelSpec
from jaxrl.train.supervised import train_base
from jaxrl.train.tasks import Msa0Task, Task, base_seed, make_task
from jaxrl.types import TrainState


@dataclass(frozen=True)
class Setup:
    """What a run starts from. ``base`` is the model at step 0; ``reference`` it again where a piece needs it."""

    task: Task
    mesh: Mesh
    root: Key[Array, ""]
    base: Decoder
    reference: Decoder | None
    tx: optax.GradientTransformation

    def first_state(self) -> TrainState:
        """Step 0. The model is a copy: the state is donated to updates, the base must outlive them."""
        model = jax.tree.map(jnp.copy, self.base)
        shardings = jax.tree.map(lambda x: x.sharding, model)
        like = jax.eval_shape(self.tx.init, model)
        place = state_shardings(self.mesh, like, model, shardings)
        with jax.numpy_dtype_promotion("standard"):
            opt_state = jax.jit(self.tx.init, out_shardings=place)(model)
        key = jax.random.wrap_key_data(jnp.copy(jax.random.key_data(self.root)))  # donated with the state
        return TrainState(jnp.zeros((), jnp.int32), model, opt_state, key)


def set_up(
    experiment: Experiment, out: pathlib.Path | None = None, base: Decoder | None = None, *, gate: bool = True
) -> Setup:
    """Build everything that a run needs.

    A base that is trained or initialised here is kept in ``out/base`` as a Hugging Face folder and read back
    from there on resume. ``base`` is one that the caller already has. Raises ``GateFailed`` when the MSA-0 base
    may not be used.
    """
    root = keys.root(experiment.seed)
    mesh = make_mesh(experiment.mesh.data, experiment.mesh.fsdp, experiment.mesh.tensor)
    task = make_task(experiment, root)
    stored = None if out is None else out / "base"
    if base is None and stored is not None and (stored / "config.json").exists():
        base = load_model(stored)
    base = base or make_base(experiment, task, root)
    if gate and isinstance(task, Msa0Task):
        require_gates(gates(base, task.task, key=root))
    if stored is not None and experiment.model.path is None and not (stored / "config.json").exists():
        save_model(base, stored)
    base = place(base, experiment.model, task, mesh)
    needs = experiment.algorithm.needs & {"reference_model", "ref_logps", "base_samples"}
    tx = make_optimiser(experiment.optimiser, total=total_updates(experiment))
    return Setup(task, mesh, root, base, base if needs else None, tx)


def make_base(experiment: Experiment, task: Task, root: Key[Array, ""]) -> Decoder:
    """The base model: trained by the task, read from a folder or hub id, or random."""
    spec = experiment.model
    choices: dict[str, tuple[Any, Callable[[], Decoder]]] = {
        "base": (spec.base, lambda: train_base(base_seed(experiment))),
        "path": (spec.path, lambda: load_model(str(spec.path))),
        "init": (spec.init, lambda: init_model(_config(spec), keys.at(root, "init"))),
    }
    given = [name for name, (value, _) in choices.items() if value is not None]
    if len(given) != 1:
        raise UsageError(f"model: expected exactly one of path, init and base, got {', '.join(given) or 'none'}")
    return choices[given[0]][1]()


def place(model: Decoder, spec: ModelSpec, task: Task, mesh: Mesh) -> Decoder:
    """The model on the mesh, computing in the experiment's dtype, within the tokenizer's vocabulary."""
    limit = task.vocab_limit
    if limit is not None and limit > model.config.vocab_size:
        raise UsageError(
            f"task.tokenizer: it has {limit} ids, the model's vocabulary {model.config.vocab_size}; "
            "use the tokenizer that belongs to the model"
        )
    model = with_config(model, dtype=spec.dtype, remat=spec.remat, vocab_limit=limit)
    return shard_tree(mesh, param_axes(model.config), model)


def total_updates(experiment: Experiment) -> int:
    """Optimiser updates of the whole run."""
    return experiment.steps * experiment.algorithm.epochs * experiment.algorithm.minibatches


def _config(spec: ModelSpec) -> ModelConfig:
    if spec.init is None:
        raise UsageError("model.init: expected a decoder config")
    return spec.init
