"""What a run would need, from its shapes alone: every phase compiled ahead of time, no step taken."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxrl import keys
from jaxrl.mesh import make_mesh, partition, shardings, state_shardings
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import abstract_model, param_axes
from jaxrl.models.hf_config import read_config
from jaxrl.models.hf_folder import find_folder
from jaxrl.models.scoring import Reverse
from jaxrl.rl.algorithms import prepare
from jaxrl.rl.optimiser import make_optimiser
from jaxrl.rl.update import STATIC, update
from jaxrl.sampling.ahead import compile_engine
from jaxrl.sampling.engines import own_engine
from jaxrl.train.collect import temperature_of
from jaxrl.train.experiment import Experiment, ModelSpec
from jaxrl.train.packed import abstract_layouts, check_packing
from jaxrl.train.setup import check_fit, check_start, check_vocabulary, total_updates
from jaxrl.train.supervised import BASE_CONFIG
from jaxrl.train.tasks import Task, make_task
from jaxrl.types import Graded, Rollouts, Rows, TrainState

MIB = 2**20


def dry_run(experiment: Experiment) -> Mapping[str, Any]:
    """Compile sampling and the update for an experiment; returns shapes and memory (MiB a device).

    The model is never loaded: only its config is read.
    """
    task = make_task(experiment, keys.root(experiment.seed))
    try:
        check_start(experiment, task)
        return _dry_run(experiment, task)
    finally:
        task.close()


def _dry_run(x: Experiment, task: Task) -> Mapping[str, Any]:
    mesh = make_mesh(x.mesh.data, x.mesh.fsdp, x.mesh.tensor)
    config = model_config(x.model, task)
    check_vocabulary(task, config)
    check_fit(x, task, config)
    check_packing(x.optimiser, task.pools["train"].width + x.rollout.max_new_tokens, mesh)
    model = abstract_model(config)
    place = shardings(mesh, param_axes(config), model)
    model = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), model, place)
    tx = make_optimiser(x.optimiser, total=total_updates(x))
    like = jax.eval_shape(tx.init, model)
    where = state_shardings(mesh, like, model, place)
    opt_state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), like, where)
    state = TrainState(_array((), jnp.int32), model, opt_state, jax.eval_shape(lambda: keys.root(0)))
    minibatches = on_mesh(mesh, jax.eval_shape(lambda g: prepare(x.algorithm, g), abstract_graded(x, task)))
    reference = model if x.algorithm.needs & {"reference_model", "ref_logps", "base_samples"} else None
    step = jax.jit(update, static_argnames=STATIC, donate_argnums=0)
    compiled = step.lower(
        state,
        minibatches[0],
        reference,
        tx=tx,
        temperature=temperature_of(x.rollout.strategy),
        microbatch=x.optimiser.microbatch,
        score=Reverse(responses=x.rollout.max_new_tokens, mesh=mesh),
        layouts=abstract_layouts(minibatches[0], x.optimiser, task.pools["train"].width, mesh),
    ).compile()
    sampler = compile_engine(
        model,
        own_engine(x.rollout.engine).spec,
        prompts=x.rollout.prompts,
        width=task.pools["train"].width,
        n=x.rollout.n,
        max_new_tokens=x.rollout.max_new_tokens,
        stop_ids=task.stop_ids,
        strategy=x.rollout.strategy,
        mesh=mesh,
    )
    size = sum(math.prod(a.shape) for a in jax.tree.leaves(model))
    return {
        "model": {"parameters": size, "family": config.family, "dtype": config.dtype, "remat": config.remat},
        "mesh": dict(mesh.shape),
        "shapes": {
            "prompts": x.rollout.prompts,
            "rollouts a prompt": x.rollout.n,
            "prompt tokens": task.pools["train"].width,
            "row width": task.pools["train"].width + x.rollout.max_new_tokens,
            "rows a mini-batch": minibatches[0][0].batch.weight.shape[0],
            "terms": [term.loss.tag for term in minibatches[0]],
            "updates": total_updates(x),
        },
        "update memory, MiB": memory(compiled),
        **{f"sampling ({name}) memory, MiB": memory(program) for name, program in sampler.items()},
        "data": task.notes.get("data", []),
    }


def model_config(spec: ModelSpec, task: Task) -> ModelConfig:
    """The decoder config of a model spec, read without its weights."""
    if spec.base is not None:
        config = BASE_CONFIG
    elif spec.init is not None:
        config = spec.init
    else:
        config = read_config(find_folder(str(spec.path)) / "config.json")[0]
    return dataclasses.replace(
        config, dtype=spec.dtype, remat=spec.remat, attention=spec.attention, vocab_limit=task.vocab_limit
    )


def abstract_graded(x: Experiment, task: Task) -> Graded:
    """The shapes of one step's graded rollouts."""
    p, g = x.rollout.prompts, x.rollout.n
    width = task.pools["train"].width + x.rollout.max_new_tokens
    needs, count = x.algorithm.needs, x.algorithm.base_samples
    tokens = _array((p, g, width), jnp.float32)
    return Graded(
        rollouts=_rollouts(p, g, width),
        uid=_array((p,), jnp.int32),
        reward=_array((p, g), jnp.float32),
        correct=_array((p, g), jnp.bool_),
        prefiltered=_array((p,), jnp.bool_),
        old_logps=tokens if "trainer_logps" in needs else None,
        greedy_correct=_array((p,), jnp.bool_) if x.rollout.log_greedy or "greedy_correct" in needs else None,
        ref_logps=tokens if "ref_logps" in needs else None,
        base=_rollouts(p, count, width) if count else None,
        base_correct=_array((p, count), jnp.bool_) if count else None,
    )


def on_mesh(mesh: Mesh, tree: Any) -> Any:
    """Abstract arrays with a leading axis of rows, placed as the loop places them."""

    def place(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = partition(mesh, ("rows", *(None,) * (a.ndim - 1))[: a.ndim], a.shape)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def memory(compiled: Any) -> dict[str, float]:
    """Bytes that a compiled program takes beside and for its arguments, as MiB."""
    found = compiled.memory_analysis()
    parts = {"arguments": "argument", "results": "output", "temporary": "temp", "reused (donated)": "alias"}
    return {name: round(getattr(found, f"{part}_size_in_bytes") / MIB, 2) for name, part in parts.items()}


def _rollouts(p: int, g: int, width: int) -> Rollouts:
    rows = Rows(_array((p, g, width), jnp.int32), _array((p, g), jnp.int32), _array((p, g), jnp.int32))
    return Rollouts(rows, _array((p, g, width), jnp.float32), _array((p, g), jnp.int32))


def _array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
