"""Keys are pure functions of what they are for."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl import keys


def data(key):
    return np.asarray(jax.random.key_data(key))


def test_a_key_is_a_function_of_the_seed_and_its_parts():
    a, b = (keys.at(keys.root(3), "rollout", 5, 17, 2) for _ in range(2))
    np.testing.assert_array_equal(data(a), data(b))
    in_jit = jax.jit(lambda step, uid, g: keys.at(keys.root(3), "rollout", step, uid, g))(5, 17, 2)
    np.testing.assert_array_equal(data(a), data(in_jit))


@pytest.mark.x64
def test_double_precision_changes_no_key(x64):
    grid = keys.per_row(keys.at(keys.root(3), "rollout", 5), jnp.asarray([17]), 3)
    with jax.enable_x64(False):
        same = keys.per_row(keys.at(keys.root(3), "rollout", 5), jnp.asarray([17]), 3)
    np.testing.assert_array_equal(data(grid), data(same))


def test_the_stream_is_the_same_in_every_version_and_process():
    """Names are hashed by crc32, never by Python's salted hash. Pinned: a change breaks every resumed run."""
    assert data(keys.root(0)).tolist() == [0, 0]
    assert data(keys.at(keys.root(0), "rollout", 1, 2, 3)).tolist() == [166964677, 1120672867]


def test_every_part_and_its_place_matters():
    root = keys.root(0)
    paths = [
        *itertools.product(["rollout", "probe"], range(3), range(3), range(3)),
        ("rollout",), ("rollout", 0), ("rollout", 0, 0), (0, "rollout"), ("rollout", "probe"), ("probe", "rollout"), (),
    ]  # fmt: skip
    words = {data(keys.at(root, *path)).tobytes() for path in paths}
    assert len(words) == len(paths)
    assert len({data(keys.root(seed)).tobytes() for seed in range(20)}) == 20


def test_nothing_is_consumed():
    root = keys.root(1)
    before = data(root).copy()
    keys.at(root, "data", 3)
    np.testing.assert_array_equal(before, data(root))


def test_a_row_has_the_key_of_its_prompt_and_sample_index():
    root, uid = keys.at(keys.root(0), "rollout", 4), jnp.asarray([9, 0, 2**31 - 1])
    grid = keys.per_row(root, uid, 3)
    for p, g in np.ndindex(grid.shape):
        np.testing.assert_array_equal(data(grid[p, g]), data(keys.at(root, int(uid[p]), g)))
    np.testing.assert_array_equal(data(keys.per_row(root, uid, 2, first=1)), data(grid[:, 1:]))
    np.testing.assert_array_equal(data(keys.per_row(root, uid[::-1], 3)), data(grid[::-1]))


def test_placement_on_devices_changes_no_key():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    uid = jnp.arange(8)
    spread = jax.device_put(uid, NamedSharding(mesh, PartitionSpec("data")))
    split = jax.jit(lambda u: jax.random.key_data(keys.per_row(keys.root(0), u, 2)))
    np.testing.assert_array_equal(split(uid), split(spread))
