"""The device mesh: sizes, placement rules, optimiser states, and arrays between host and devices."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from model_cases import FULL, every_row, gradient, largest, some_model

from jaxrl.errors import UsageError
from jaxrl.mesh import (
    AXES,
    RULES,
    is_main,
    make_mesh,
    partition,
    process_count,
    process_index,
    shard_tree,
    shardings,
    state_shardings,
    to_host,
    to_mesh,
)
from jaxrl.models.decoder import abstract_model, param_axes


def four(**sizes):
    return make_mesh(**sizes, devices=jax.devices()[:4])


# Sizes


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (1, 4, 1)),
        (dict(fsdp=2, tensor=2), (1, 2, 2)),
        (dict(data=-1, fsdp=1), (4, 1, 1)),
        (dict(data=2, tensor=2), (2, 1, 2)),
        (dict(fsdp=1, tensor=-1), (1, 1, 4)),
    ],
)
def test_one_size_may_be_left_to_the_number_of_devices(sizes, shape):
    mesh = four(**sizes)
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == shape
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_all_devices_are_used_by_default():
    assert make_mesh().devices.size == len(jax.devices()) == 8


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(fsdp=3), "mesh: data=1, fsdp=3, tensor=1 needs 3 devices, but there are 4"),
        (dict(data=8, fsdp=1), "data=8, fsdp=1, tensor=1 needs 8 devices, but there are 4"),
        (dict(tensor=3), "data=1, fsdp=-1, tensor=3 needs a multiple of 3 devices, but there are 4"),
        (dict(data=-1), "at most one of them -1.*got data=-1, fsdp=-1, tensor=1"),
        (dict(tensor=0), "expected positive sizes.*tensor=0"),
        (dict(tensor=-2), "expected positive sizes.*tensor=-2"),
    ],
)
def test_incompatible_sizes_are_named_with_the_number_of_devices(sizes, message):
    with pytest.raises(UsageError, match=message):
        four(**sizes)


# Placement


def test_every_logical_axis_of_a_model_has_a_rule():
    named = {a for axes in jax.tree.leaves(param_axes(FULL), is_leaf=lambda x: isinstance(x, tuple)) for a in axes}
    assert named <= set(RULES)


def test_placement_follows_the_rules():
    mesh = four(fsdp=2, tensor=2)
    assert partition(mesh, ("layers", "embed", "heads", "head_dim"), (3, 32, 4, 8)) == PartitionSpec(
        None, "fsdp", "tensor", None
    )
    assert partition(mesh, ("rows", None), (8, 5)) == PartitionSpec(("data", "fsdp"), None)


def test_a_dimension_that_does_not_divide_is_held_whole():
    mesh = four(fsdp=2, tensor=2)
    assert partition(mesh, ("layers", "embed", "kv_heads", "head_dim"), (3, 32, 3, 8)) == PartitionSpec(
        None, "fsdp", None, None
    )
    assert partition(mesh, ("rows",), (7,)) == PartitionSpec(None)
    x = to_mesh(mesh, np.arange(7))
    assert x.sharding.is_fully_replicated
    np.testing.assert_array_equal(to_host(x), np.arange(7))


def test_a_wrong_axis_name_or_count_is_refused():
    mesh = four()
    with pytest.raises(ValueError, match="unknown logical axis 'head'; did you mean 'heads'"):
        partition(mesh, ("head",), (4,))
    with pytest.raises(ValueError, match=r"one logical axis a dimension, got axes \('embed',\) for shape \(4, 4\)"):
        partition(mesh, ("embed",), (4, 4))


@pytest.mark.slow
def test_a_sharded_model_is_split_over_the_devices_and_keeps_its_numbers():
    mesh, model = four(fsdp=2, tensor=2), some_model()
    sharded = shard_tree(mesh, param_axes(FULL), model)
    assert sharded.layers.gate[...].addressable_shards[0].data.shape == (2, 16, 24)
    assert largest(to_host(sharded), model) == 0
    assert jax.tree.structure(sharded) == jax.tree.structure(model)


# Optimiser states


def placed(tree):
    return [x.sharding for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def sharded_adam():
    mesh = four(fsdp=2, tensor=2)
    where = shardings(mesh, param_axes(FULL), abstract_model(FULL))
    model = jax.device_put(some_model(), where)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    with jax.numpy_dtype_promotion("standard"):
        state_where = state_shardings(mesh, jax.eval_shape(tx.init, model), model, where)
        state = jax.jit(tx.init, out_shardings=state_where)(model)
    return mesh, where, model, tx, state_where, state


def test_adam_moments_are_placed_like_the_parameters(sharded_adam):
    mesh, where, model, _, _, state = sharded_adam
    adam = state[1][0]
    for moments in (adam.mu, adam.nu):
        for got, want, x in zip(placed(moments), jax.tree.leaves(where), jax.tree.leaves(model), strict=True):
            assert got.is_equivalent_to(want, x.ndim)
    assert adam.count.sharding == NamedSharding(mesh, PartitionSpec())
    split = adam.mu.layers.gate[...]
    assert split.addressable_shards[0].data.size == split.size // 4


def test_placement_survives_an_update(sharded_adam):
    _, where, model, tx, state_where, state = sharded_adam

    def update(model, state, rows):
        with jax.numpy_dtype_promotion("standard"):
            changes, state = tx.update(gradient(model, rows), state, model)
            return optax.apply_updates(model, changes), state

    step = jax.jit(update, out_shardings=(where, state_where))
    new_model, new_state = step(model, state, every_row(3))
    for got, want, x in zip(
        placed((new_model, new_state)), placed((model, state)), jax.tree.leaves((model, state)), strict=True
    ):
        assert got.is_equivalent_to(want, x.ndim)


# Host and processes


def test_arrays_go_to_the_mesh_and_back(sharded_adam):
    mesh = sharded_adam[0]
    rows = every_row(3)
    there = to_mesh(mesh, rows)
    assert there.tokens.sharding.spec == PartitionSpec(("data", "fsdp"), None)
    assert there.start.sharding.spec == PartitionSpec(("data", "fsdp"))
    assert largest(to_host(there), rows) == 0
    scalar = to_mesh(mesh, {"step": np.int32(3)})["step"]
    assert scalar.sharding.is_fully_replicated
    assert isinstance(to_host(jnp.ones(3)), np.ndarray)


def test_this_is_the_only_process_and_the_main_one():
    assert (process_index(), process_count(), is_main()) == (0, 1, True)


def test_the_mesh_knows_nothing_of_models():
    """It is below them: importing it loads neither flax nor any model."""
    code = "import sys, jaxrl.mesh; print([m for m in sys.modules if m.startswith(('flax', 'jaxrl.models'))])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
