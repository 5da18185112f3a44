"""The streamed kernel on a mesh: the same numbers, and exactly the traffic that the formula says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from influence_world import small_model, some_rows
from two_processes import run_in_two_processes

from jaxrl.hlo import collective_bytes
from jaxrl.influence import tiling
from jaxrl.influence.cost import exchange_bytes
from jaxrl.influence.gradients import row_weights
from jaxrl.influence.kernels import _block_index, gradient_kernel
from jaxrl.mesh import make_mesh, shard_tree
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init_model, param_axes
from jaxrl.types import Rows

SHAPES = [(2, 2, 1), (1, 8, 1), (8, 1, 1), (2, 2, 2), (1, 1, 8)]
KINDS = {
    "tied": {},
    "tied, few tokens occur": {"vocab_size": 300},
    "untied": {"tied": False, "qkv_bias": True, "mlp_bias": True, "qk_norm": True, "num_kv_heads": 2},
}


def on_mesh(model, shape: tuple[int, int, int]):
    mesh = make_mesh(*shape, devices=jax.devices()[: int(np.prod(shape))])
    return shard_tree(mesh, param_axes(model.config), model)


def assert_same_on_the_mesh(kind: dict, shape: tuple[int, int, int], metric: bool = False) -> None:
    model, a, b = small_model(**kind), some_rows(6), some_rows(5, seed=1, width=11)
    diagonal = jax.tree.map(lambda x: 0.5 + x**2, model) if metric else None
    expected = gradient_kernel(model, a, b, method="reference", precondition=diagonal)
    kernel = gradient_kernel(on_mesh(model, shape), a, b, method="streamed", precondition=diagonal)
    scale = np.linalg.norm(expected.values)
    assert np.linalg.norm(kernel.values - expected.values) <= 1e-12 * scale
    np.testing.assert_allclose(kernel.sq_norms_a, expected.sq_norms_a, rtol=1e-12)
    np.testing.assert_allclose(kernel.sq_norms_b, expected.sq_norms_b, rtol=1e-12)
    assert "on a mesh of" in kernel.why


@pytest.mark.slow
@pytest.mark.x64
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("metric", [False, True], ids=["plain", "preconditioned"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_mesh_gives_the_same_kernel(kind, shape, metric):
    assert_same_on_the_mesh(KINDS[kind], shape, metric)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("listed", [False, True], ids=["whole vocabulary", "tokens that occur"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_compiled_program_exchanges_what_the_formula_says(shape, listed, tied):
    """All-to-all of 4 (N + M) P / D bytes a device, and one sum of the kernel at the end."""
    config = ModelConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
        tied=tied, qkv_bias=True, qk_norm=True,
    )  # fmt: skip
    model = on_mesh(init_model(config, jax.random.key(0)), shape)
    tokens, n = np.random.default_rng(0).integers(0, 64, (2, 8, 32)), 8
    full = jnp.full(n, 32, jnp.int32)
    sides = tuple(Rows(jnp.asarray(t, jnp.int32), full // 2, full) for t in tokens)
    job = tiling.Streaming(
        model, tuple((x, row_weights(x), 1.0) for x in sides), None, _block_index(model, "total"), 1 << 30,
        dense=not listed, chunk=32,
    )  # fmt: skip
    given = tiling.arguments(job, job.sides)
    text = tiling.stream.lower(*given).compile().as_text()
    ids = given[3]
    expected = exchange_bytes(model, job.mesh, 2 * n, 0 if ids is None else ids.size)
    if shape == (2, 2, 1) and tied and not listed:
        assert expected == 4 * 2 * n * sum(x.size for x in jax.tree.leaves(model)) // 4
    assert collective_bytes(text, "shard_map")["all-to-all"] == expected
    assert collective_bytes(text, "reduce_sum")["all-reduce"] >= 4 * (n * n + 2 * n)


PROCESS = """
import numpy as np
from influence_world import small_model, some_rows
from jaxrl.influence.kernels import gradient_kernel
from jaxrl.mesh import make_mesh, shard_tree, to_host
from jaxrl.models.decoder import param_axes
model, a, b = to_host((small_model(dtype="float32"), some_rows(6), some_rows(5, seed=1, width=11)))
whole = shard_tree(make_mesh(2, 2, 1), param_axes(model.config), model)
kernel = gradient_kernel(whole, a, b, method="streamed", noise=0)
np.save(sys.argv[2], np.asarray(kernel.values))
"""


@pytest.mark.x64
@pytest.mark.usefixtures("x64")
def test_token_by_token_is_for_one_device():
    with pytest.raises(ValueError, match="method 'ghost' is for one device"):
        gradient_kernel(on_mesh(small_model(), (1, 2, 1)), some_rows(2), some_rows(2), method="ghost")


@pytest.mark.slow
def test_two_processes_give_the_kernel_of_one(tmp_path):
    found = [np.load(f"{name}.npy") for name in run_in_two_processes(PROCESS, tmp_path)]
    model, a, b = small_model(dtype="float32"), some_rows(6), some_rows(5, seed=1, width=11)
    expected = gradient_kernel(model, a, b, method="reference", noise=0).values
    for values in found:
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
