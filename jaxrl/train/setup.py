"""From an experiment to models on a mesh: the task, the base model, the policy's first state."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Key

from jaxrl import keys
from jaxrl.errors import UsageError
from jaxrl.evaluation.exact import gates, require_gates
from jaxrl.mesh import make_mesh, replicated, shard_tree, state_shardings
from jaxrl.models.config import ModelConfig
from jaxrl.models.critic import critic_of, with_value_head
from jaxrl.models.decoder import Decoder, init_model, param_axes, with_config
from jaxrl.models.hf import load_model, save_model
from jaxrl.rewards.shaping import try_reward
from jaxrl.rl.critic import Critic, own_optimiser
from jaxrl.rl.optimiser import Optimiser, make_optimiser
from jaxrl.train.collect import temperature_of
from jaxrl.train.experiment import Experiment, ModelSpec
from jaxrl.train.packed import check_packing
from jaxrl.train.supervised import BASE_CONFIG, train_base, train_oracle
from jaxrl.train.tasks import Msa0Task, Task, base_seed, make_task
from jaxrl.types import TrainState


@dataclass(frozen=True)
class Setup:
    """What a run starts from. ``base`` is the model at step 0; ``reference`` it again where a piece needs it.

    With a teacher, ``reference`` is a dict of ``teacher`` and, where a piece needs it, ``base``. A run releases ``base``
    once its own state and its probe are made of it. ``critic``: the algorithm's, with ``critic_tx`` for a trunk of its own.
    """

    task: Task
    mesh: Mesh
    root: Key[Array, ""]
    base: Decoder
    reference: Any
    tx: optax.GradientTransformation
    critic: Critic | None = None
    critic_tx: optax.GradientTransformation | None = None

    def first_state(self) -> TrainState:
        """Step 0. The model is a copy: the state is donated to updates, the base must outlive them."""
        if self.critic is None:
            return self._state(self.base, self.tx)
        if self.critic_tx is None:
            return self._state(with_value_head(self.base), self.tx)
        critic = self._state(critic_of(self.base), self.critic_tx)
        return replace(self._state(self.base, self.tx), critic=critic)

    def _state(self, model: Decoder, tx: optax.GradientTransformation) -> TrainState:
        model = shard_tree(self.mesh, param_axes(model.config), jax.tree.map(jnp.copy, model))
        shardings = jax.tree.map(lambda x: x.sharding, model)
        like = jax.eval_shape(tx.init, model)
        place = state_shardings(self.mesh, like, model, shardings)
        with jax.numpy_dtype_promotion("standard"):
            opt_state = jax.jit(tx.init, out_shardings=place)(model)
        key = jax.random.wrap_key_data(self.everywhere(jax.random.key_data(self.root)))
        return TrainState(self.count(0), model, opt_state, key)

    def count(self, step: int) -> Array:
        """A step counter where the parameters are, so that a restored state and a running one are placed alike."""
        return self.everywhere(np.int32(step))

    def everywhere(self, value: Any) -> Array:
        """A small array, held whole by every device."""
        return jax.device_put(np.asarray(value), replicated(self.mesh))


def set_up(experiment: Experiment, out: pathlib.Path | None = None, base: Decoder | None = None) -> Setup:
    """Build everything that a run needs, and refuse what could only fail later.

    A base that is trained or initialised here is kept in ``out/base`` as a Hugging Face folder and read back
    from there when the run is opened again. ``base`` is one that the caller already has.

    Raises ``GateFailed`` when the MSA-0 base may not be used, and ``UsageError`` when devices, tokenizer, prompts
    or lengths do not fit the experiment.
    """
    root = keys.root(experiment.seed)
    temperature_of(experiment.rollout.strategy)
    mesh = make_mesh(experiment.mesh.data, experiment.mesh.fsdp, experiment.mesh.tensor)
    task = make_task(experiment, root)
    try:
        check_start(experiment, task, base)
        width = task.pools["train"].width + experiment.rollout.max_new_tokens
        check_packing(experiment.optimiser, width, mesh)
        base = place(_base(experiment, task, mesh, root, out, base), experiment.model, task, mesh)
        check_fit(experiment, task, base.config)
    except BaseException:
        task.close()
        raise
    tx = cached_optimiser(experiment.optimiser, total_updates(experiment))
    critic = experiment.algorithm.critic
    own = (
        None if critic is None or critic.shared else cached_optimiser(own_optimiser(critic), total_updates(experiment))
    )
    return Setup(task, mesh, root, base, _reference(experiment, task, mesh, out, base), tx, critic, own)


# What asks for the base model, and for a teacher, beside the policy.
BASE_NEEDS = frozenset({"reference_model", "ref_logps", "base_samples", "base_logps", "stream_samples", "pairs"})
TEACHER_NEEDS = frozenset({"teacher_samples", "teacher_model"})


def _reference(experiment: Experiment, task: Task, mesh: Mesh, out: pathlib.Path | None, base: Decoder) -> Any:
    """The frozen models that the pieces ask for: None, the base, or a dict of them."""
    needs = experiment.algorithm.needs
    held = base if needs & BASE_NEEDS else None
    if not needs & TEACHER_NEEDS:
        return held
    teacher = place(_teacher(experiment, mesh, out), experiment.model, task, mesh)
    if teacher.config.vocab_size != base.config.vocab_size:
        raise UsageError(
            f"teacher: its vocabulary has {teacher.config.vocab_size} ids, the policy's {base.config.vocab_size}; "
            "a teacher shares the policy's tokens"
        )
    return {"teacher": teacher} | ({} if held is None else {"base": held})


def _teacher(experiment: Experiment, mesh: Mesh, out: pathlib.Path | None) -> Decoder:
    """The teacher: read from a folder, or trained once a run and kept in ``out/teacher``."""
    spec, dtype = experiment.teacher, experiment.model.dtype
    if spec is None:
        raise UsageError("teacher: the algorithm distils from one; add teacher: {path: FOLDER} (or {base: oracle})")
    if spec.path is not None:
        return load_model(spec.path, dtype=dtype, mesh=mesh)
    stored = None if out is None else out / "teacher"
    if stored is not None and (stored / "config.json").exists():
        return load_model(stored, dtype=dtype, mesh=mesh)
    model = train_oracle(base_seed(experiment))
    if stored is not None:
        save_model(model, stored)
    return model


def cached_optimiser(spec: Optimiser, total: int) -> optax.GradientTransformation:
    """One object for one setting: it is static under jit, so runs of one process share their programs.

    A constant rate does not ask how long the run is.
    """
    return _optimiser(spec, 1 if spec.schedule == "constant" else total)


@cache
def _optimiser(spec: Optimiser, total: int) -> optax.GradientTransformation:
    return make_optimiser(spec, total=total)


def _base(
    experiment: Experiment,
    task: Task,
    mesh: Mesh,
    root: Key[Array, ""],
    out: pathlib.Path | None,
    given: Decoder | None,
) -> Decoder:
    """The base model: the caller's, the one that this run kept, or a new one that passes its task's gates."""
    stored = None if out is None or experiment.model.path is not None else out / "base"
    held = stored is not None and (stored / "config.json").exists()
    if given is None and held:
        return load_model(stored, dtype=experiment.model.dtype, mesh=mesh)
    base = make_base(experiment, mesh, root) if given is None else given
    if experiment.model.base is not None and isinstance(task, Msa0Task):
        require_gates(gates(base, task.task, key=root))
    if stored is not None and not held:
        save_model(base, stored)
    return base


def check_start(experiment: Experiment, task: Task, base: Decoder | None = None) -> None:
    """What can be refused before there is a base model, which may take a while to train.

    Raises ``UsageError`` when a step asks for more prompts than there are, or when the known shape of a model does
    not hold the prompts or the tokenizer's ids; and what the reward raises on a verdict of each kind.
    """
    pool, rollout, spec = task.pools["train"], experiment.rollout, experiment.model
    if rollout.prompts > len(pool):
        raise UsageError(f"rollout.prompts: {rollout.prompts} prompts a step, but the training set has {len(pool)}")
    config = base.config if base is not None else BASE_CONFIG if spec.base is not None else spec.init
    if config is not None:
        check_vocabulary(task, config)
        check_fit(experiment, task, config)
    try_reward(experiment.reward)


def check_vocabulary(task: Task, config: ModelConfig) -> None:
    """Raise ``UsageError`` when the tokenizer has ids that the model lacks."""
    limit = task.vocab_limit
    if limit is not None and limit > config.vocab_size:
        raise UsageError(
            f"task.tokenizer: it has {limit} ids, the model's vocabulary {config.vocab_size}; "
            "use the tokenizer that belongs to the model"
        )


def check_fit(experiment: Experiment, task: Task, config: ModelConfig) -> None:
    """Raise ``UsageError`` when prompts and responses need more tokens than the context holds."""
    rollout = experiment.rollout
    longest = max(len(tokens) for pool in task.pools.values() for tokens in pool.tokens)
    if longest + rollout.max_new_tokens > config.max_positions:
        raise UsageError(
            f"rollout.max_new_tokens: the longest prompt has {longest} tokens, which with {rollout.max_new_tokens} new "
            f"ones exceeds the model's context of {config.max_positions}; lower it, or task.max_prompt"
        )


def make_base(experiment: Experiment, mesh: Mesh, root: Key[Array, ""]) -> Decoder:
    """The base model: trained by the task, read from a folder or hub id, or random."""
    spec = experiment.model
    choices: dict[str, tuple[Any, Callable[[], Decoder]]] = {
        "base": (spec.base, lambda: train_base(base_seed(experiment))),
        "path": (spec.path, lambda: load_model(str(spec.path), dtype=spec.dtype, mesh=mesh)),
        "init": (spec.init, lambda: init_model(_config(spec), keys.at(root, "init"))),
    }
    given = [name for name, (value, _) in choices.items() if value is not None]
    if len(given) != 1:
        raise UsageError(f"model: expected exactly one of path, init and base, got {', '.join(given) or 'none'}")
    return choices[given[0]][1]()


def place(model: Decoder, spec: ModelSpec, task: Task, mesh: Mesh) -> Decoder:
    """The model on the mesh, computing in the experiment's dtype, within the tokenizer's vocabulary."""
    check_vocabulary(task, model.config)
    model = with_config(
        model, dtype=spec.dtype, remat=spec.remat, attention=spec.attention, vocab_limit=task.vocab_limit
    )
    return shard_tree(mesh, param_axes(model.config), model)


def total_updates(experiment: Experiment) -> int:
    """Optimiser updates of the whole run."""
    return experiment.steps * experiment.algorithm.epochs * experiment.algorithm.minibatches


def _config(spec: ModelSpec) -> ModelConfig:
    if spec.init is None:
        raise UsageError("model.init: expected a decoder config")
    return spec.init
