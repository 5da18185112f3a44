"""What a run would need, from its shapes alone: every phase compiled ahead of time, no step taken."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jaxrl import keys
from jaxrl.mesh import make_mesh, partition, shardings, state_shardings
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Decoder, abstract_model, param_axes
from jaxrl.models.hf_config import read_config
from jaxrl.models.hf_folder import find_folder
from jaxrl.models.scoring import Reverse
from jaxrl.rl.algorithms import prepare, value_terms
from jaxrl.rl.critic import own_optimiser
from jaxrl.rl.optimiser import Optimiser, make_optimiser
from jaxrl.rl.update import STATIC, update
from jaxrl.sampling.ahead import compile_engine
from jaxrl.sampling.engines import own_engine
from jaxrl.train.collect import temperature_of
from jaxrl.train.experiment import Experiment, ModelSpec
from jaxrl.train.packed import abstract_layouts, check_packing
from jaxrl.train.setup import BASE_NEEDS, TEACHER_NEEDS, check_fit, check_start, check_vocabulary, total_updates
from jaxrl.train.stops import check_others
from jaxrl.train.supervised import BASE_CONFIG
from jaxrl.train.tasks import Task, make_task
from jaxrl.types import Graded, Pairs, Rollouts, Rows, Samples, TrainState, flatten_leading

MIB = 2**20


def dry_run(experiment: Experiment) -> Mapping[str, Any]:
    """Compile sampling and the update for an experiment; returns shapes and memory (MiB a device).

    The model is never loaded: only its config is read.
    """
    task = make_task(experiment, keys.root(experiment.seed))
    try:
        check_others(experiment)
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
    model = _on_devices(mesh, config)
    critic = x.algorithm.critic
    shared = critic is not None and critic.shared
    state = _state(
        mesh,
        replace(config, value_head=True) if shared else config,
        make_optimiser(x.optimiser, total=total_updates(x)),
    )
    graded = abstract_graded(x, task)
    minibatches, values = jax.eval_shape(lambda g: (prepare(x.algorithm, g), value_terms(x.algorithm, g)), graded)
    minibatches, values = on_mesh(mesh, minibatches), on_mesh(mesh, values)
    step = partial(_compiled, x, task, mesh, reference=_reference(x, model))
    compiled = {"update": step(state, minibatches[0], x.optimiser)}
    if values:
        own = own_optimiser(critic)
        fitted = _state(mesh, replace(config, tied=True, value_head=True), make_optimiser(own, total=total_updates(x)))
        compiled["critic update"] = step(fitted, values[0], own)
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
        **{f"{name} memory, MiB": memory(program) for name, program in compiled.items()},
        **{f"sampling ({name}) memory, MiB": memory(program) for name, program in sampler.items()},
        "data": task.notes.get("data", []),
    }


def _on_devices(mesh: Mesh, config: ModelConfig) -> Decoder:
    """A model's shapes, each where its array would lie."""
    model = abstract_model(config)
    place = shardings(mesh, param_axes(config), model)
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), model, place)


def _state(mesh: Mesh, config: ModelConfig, tx: optax.GradientTransformation) -> TrainState:
    """The shapes of a training state."""
    model = _on_devices(mesh, config)
    like = jax.eval_shape(tx.init, model)
    where = state_shardings(mesh, like, model, jax.tree.map(lambda a: a.sharding, model))
    opt_state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), like, where)
    return TrainState(_array((), jnp.int32), model, opt_state, jax.eval_shape(lambda: keys.root(0)))


def _reference(x: Experiment, model: Decoder) -> Any:
    """The frozen models of a step, a teacher taken to be as large as the policy."""
    base = model if x.algorithm.needs & BASE_NEEDS else None
    if not x.algorithm.needs & TEACHER_NEEDS:
        return base
    return {"teacher": model} | ({} if base is None else {"base": base})


def _compiled(
    x: Experiment, task: Task, mesh: Mesh, state: TrainState, terms: Any, optimiser: Optimiser, *, reference: Any
) -> Any:
    """One optimiser step."""
    step = jax.jit(update, static_argnames=STATIC, donate_argnums=0)
    return step.lower(
        state,
        terms,
        reference,
        tx=make_optimiser(optimiser, total=total_updates(x)),
        temperature=temperature_of(x.rollout.strategy),
        microbatch=optimiser.microbatch,
        score=Reverse(responses=x.rollout.max_new_tokens, mesh=mesh),
        layouts=abstract_layouts(terms, optimiser, task.pools["train"].width, mesh),
    ).compile()


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
        greedy_reward=_array((p,), jnp.float32) if "greedy_reward" in needs else None,
        ref_logps=tokens if "ref_logps" in needs else None,
        values=tokens if "values" in needs else None,
        end_values=_array((p, g), jnp.float32) if "end_values" in needs else None,
        chance=_array((p,), jnp.float32) if "chance" in needs else None,
        matched=_array((), jnp.int32) if "matched" in needs else None,
        base=_rollouts(p, count, width) if count else None,
        base_correct=_array((p, count), jnp.bool_) if count else None,
        base_logps=_array((p, count, width), jnp.float32) if "base_logps" in needs else None,
        stream=_samples(p, x.algorithm.samples("stream_samples"), width),
        teacher=_samples(p, x.algorithm.samples("teacher_samples"), width),
        demonstrations=_samples(p, x.algorithm.samples("demonstrations"), width),
        pairs=_pairs(p, task.pairs.rows.tokens.shape[-1]) if "pairs" in needs else None,
        **_probe(x, width),
    )


def _samples(p: int, n: int, width: int) -> Samples | None:
    return Samples(_rollouts(p, n, width).rows, _array((p, n), jnp.bool_)) if n else None


def _pairs(p: int, width: int) -> Pairs:
    rows = _rollouts(p, 2, width)
    return Pairs(rows.rows, rows.logps, _array((p,), jnp.bool_))


def _probe(x: Experiment, width: int) -> dict[str, Any]:
    """The probe as wide as rollouts, which it is at most."""
    if "probe" not in x.algorithm.needs:
        return {}
    rows = _rollouts(x.probe.prompts, x.probe.n, width)
    flat = jax.eval_shape(lambda r: flatten_leading(r, 2), rows)
    return {"probe": flat.rows, "probe_logps": flat.logps}


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
