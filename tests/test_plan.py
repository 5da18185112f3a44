"""Ahead-of-time plans: the shapes are those of a real run, the counts those of a hand count, and nothing is allocated."""

import gc
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import plan
from jaxrl.errors import UsageError
from jaxrl.hlo import collective_bytes
from jaxrl.influence import tiling
from jaxrl.influence.abstract import abstract_arguments, abstract_job
from jaxrl.influence.gradients import row_weights
from jaxrl.influence.kernels import _block_index
from jaxrl.influence.stream import stream
from jaxrl.mesh import make_mesh, shard_tree
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init_model, param_axes, param_shapes
from jaxrl.types import Rows

VOCAB, WIDTH = 512, 32


def config(**changes) -> ModelConfig:
    shape = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 8,
    }  # fmt: skip
    return ModelConfig(**(shape | changes))


def mesh_of(shape: tuple[int, int, int]):
    return make_mesh(*shape, devices=jax.devices()[: math.prod(shape)])


def real_arguments(config, mesh, n: int, m: int, occur: int):
    """What a run with ``occur`` different tokens gives to the program."""
    rng = np.random.default_rng(0)
    sides = []
    for count in (n, m):
        tokens = np.resize(rng.permutation(occur), (count, WIDTH)).astype(np.int32)
        length = jnp.full(count, WIDTH, jnp.int32)
        rows = Rows(jnp.asarray(tokens), length // 2, length)
        sides.append((rows, row_weights(rows), 1.0))
    model = shard_tree(mesh, param_axes(config), init_model(config, jax.random.key(0)))
    job = tiling.Streaming(model, tuple(sides), None, _block_index(model, "total"), 1 << 62, chunk=64)
    return tiling.arguments(job, job.sides)


def described(tree) -> list:
    """Shapes, dtypes and, on a mesh, places of all arrays."""

    def place(x):
        mesh = getattr(x.sharding, "mesh", None)
        return None if mesh is None or mesh.size == 1 else x.sharding

    return [(x.shape, x.dtype, place(x)) for x in jax.tree.leaves(tree)]


@pytest.mark.slow
@pytest.mark.parametrize("occur", [100, 400], ids=["listed", "whole vocabulary"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_a_plans_arguments_are_those_of_a_run(shape, tied, occur):
    c, mesh = config(tied=tied, qkv_bias=not tied), mesh_of(shape)
    real = real_arguments(c, mesh, 14, 13, occur)
    job = abstract_job(c, mesh, n=14, m=13, width=WIDTH, scored=WIDTH // 2, chunk=64)
    shapes = abstract_arguments(job, occur)
    assert jax.tree.structure(shapes[:-1]) == jax.tree.structure(real[:-1])
    assert described(shapes[:-1]) == described(real[:-1])
    assert shapes[-1] == real[-1]
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(real[:-1]))
    assert plan.held_bytes(shapes[:-1]) == held
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(shapes[:-1]))


@pytest.fixture(scope="module")
def planned():
    """A plan on 2 x 2 x 2 devices, the bytes of arrays that came to be meanwhile and stayed, and the program's text."""
    texts = []

    def read(text: str, within: str = "") -> dict[str, int]:
        texts.append(text)
        return collective_bytes(text, within)

    gc.collect()
    before = {id(x) for x in jax.live_arrays()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "collective_bytes", read)
        found = plan.plan_kernel(
            config(), mesh_of((2, 2, 2)), n=8, m=8, width=WIDTH, scored=16, listed=128, chunk=64, block=1 << 16
        )
    return found, sum(x.nbytes for x in jax.live_arrays() if id(x) not in before), texts[0]


@pytest.mark.slow
def test_a_plan_allocates_nothing(planned):
    assert planned[1] == 0


@pytest.mark.slow
def test_a_plan_states_memory_and_traffic_of_the_compiled_program(planned):
    found, c = planned[0], config()
    shards = sum(math.prod(s) for s in param_shapes(c).values())
    assert 4 * shards // 8 < found.parameters <= 4 * shards // 2
    small = abstract_arguments(abstract_job(c, mesh_of((2, 2, 2)), n=8, m=8, width=WIDTH, scored=16, chunk=64), 128)
    held = plan.held_bytes(small[:-1])
    assert found.parameters < found.arguments <= held
    assert held - found.arguments < 4 * 8 * WIDTH * 4  # what the program never reads, it is not given
    assert found.total >= found.arguments + found.temp + found.output
    assert found.exchanged == found.exchange > 0
    assert found.collectives["all-to-all"] >= found.exchanged
    assert found.flops > found.once * 8
    assert json.loads(json.dumps(vars(found)))["listed"] == 128
    assert "8 x 8 rows of 32 tokens (16 scored, 128 entries" in found.lines()[0]


@pytest.mark.slow
def test_no_device_gathers_the_vocabulary_only_to_take_a_chunk_of_it(planned):
    """Left to itself the partitioner gathers all of a matrix that is split when a part of it is needed whole."""
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", planned[2])
    assert len(gathered) > 10
    assert not {str(VOCAB), str(VOCAB // 2)} & {size for shape in gathered for size in shape.split(",")}


@pytest.mark.parametrize("kind", ["listed", "whole", "untied", "ghost"])
def test_operations_are_those_of_the_traced_program(kind):
    """Products counted one by one in the traced program, loops as often as they run."""
    c = config(tied=kind != "untied", qkv_bias=True, qk_norm=True)
    n, m, listed, scored = 4, 8, {"whole": 0}.get(kind, 128), 16
    job = abstract_job(c, mesh_of((1, 1, 1)), n=n, m=m, width=WIDTH, scored=scored, chunk=64)
    job = tiling.Streaming(**{**vars(job), "ghost": kind == "ghost", "dense": kind == "whole"})
    given = abstract_arguments(job, listed)
    traced = products(jax.make_jaxpr(stream, static_argnums=5)(*given).jaxpr)
    unused = 2 * (n + m) * WIDTH * c.num_layers * c.intermediate_size * c.hidden_size  # see kernel_flops: down
    counted = plan.kernel_flops(c, n, m, WIDTH, scored, listed, given[-1].consumer.ghost)
    assert traced - unused == counted


def products(jaxpr) -> int:
    """Operations of all matrix products of a traced program."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (left, _), _ = eqn.params["dimension_numbers"]
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[i] for i in left)
        assert eqn.primitive.name != "while", "a loop that does not say how often it runs"
        inner = [x for v in eqn.params.values() for x in (v if isinstance(v, tuple) else (v,))]
        times = eqn.params.get("length", 1)
        total += times * sum(
            products(getattr(x, "jaxpr", x)) for x in inner if hasattr(x, "eqns") or hasattr(x, "jaxpr")
        )
    return total


def test_a_loop_without_a_known_count_runs_as_often_as_its_condition_says():
    text = """
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %g = f32[4]{0} all-gather(%x), dimensions={0}
}
%cond (p: (s32[], f32[4])) -> pred[] {
  %limit.1 = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit.1), direction=DIRECTION
}
ENTRY %main (p: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]) while(%t), condition=%cond, body=%body
}
"""
    assert collective_bytes(text.replace("DIRECTION", "LT"))["all-gather"] == 7 * 16
    with pytest.raises(ValueError, match="does not say how often"):
        collective_bytes(text.replace("DIRECTION", "GT"))


def test_the_command_says_what_is_wrong(capsys):
    assert plan.sizes("data=2,fsdp=-1") == {"data": 2, "fsdp": -1}
    for text, said in (("dat=2", "did you mean 'data'"), ("data=x", "expected an integer for data")):
        with pytest.raises(UsageError, match=said):
            plan.sizes(text)
    assert plan.main(["kernel", "--config", "qwen2.5-math-15b"]) == 2
    assert "did you mean 'qwen2.5-math-1.5b'" in capsys.readouterr().err
    assert plan.main(["kernel", "--config", "qwen2.5-math-1.5b", "-n", "0"]) == 2
    assert "n=0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_that_does_not_fit_the_device_is_exit_code_3(planned, capsys, monkeypatch):
    monkeypatch.setattr(plan, "plan_kernel", lambda *args, **options: planned[0])
    command = ["kernel", "--config", "qwen2.5-math-1.5b", "--json"]
    assert plan.main(command) == 0
    assert json.loads(capsys.readouterr().out)["total"] == planned[0].total
    monkeypatch.setitem(plan.DEVICE_BYTES, "cpu", planned[0].total - 1)
    assert plan.main(command) == 3
    assert "do not fit" in capsys.readouterr().err
