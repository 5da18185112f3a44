"""Base training: deterministic, reported, stopped when it diverges, and good enough to start from."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import keys
from jaxrl.data import synthetic
from jaxrl.data.synthetic import Msa0
from jaxrl.errors import GateFailed, JaxrlError
from jaxrl.evaluation.exact import exact, gates, require_gates
from jaxrl.models.decoder import init_model
from jaxrl.train import supervised as module
from jaxrl.train.progress import Progress
from jaxrl.train.supervised import BASE_CONFIG, nll, supervised, train_base

SHORT = {"steps": 200, "batch": 32}  # one setting for all tests: one compilation


@pytest.fixture(scope="module")
def undertrained():
    return train_base(0, **SHORT, quiet=True)


def test_the_base_is_the_specified_decoder():
    model = init_model(BASE_CONFIG, keys.root(0))
    assert sum(x.size for x in jax.tree.leaves(model)) == 26_016
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(model))
    assert (module.BASE_LR, module.BASE_STEPS, module.BASE_BATCH) == (4e-3, 3000, 128)


@pytest.mark.slow
def test_base_training_is_a_function_of_the_seed(undertrained):
    again, other = train_base(0, **SHORT, quiet=True), train_base(1, **SHORT, quiet=True)
    same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), undertrained, again)
    assert all(jax.tree.leaves(same))
    assert not np.array_equal(exact(undertrained).p, exact(other).p)


def test_base_training_learns(undertrained):
    rows = Msa0(0).supervised_batch(keys.root(9), 256)
    start = init_model(BASE_CONFIG, keys.at(keys.root(0), "base", "init"))
    assert jax.jit(nll)(start, rows) > 2.5
    assert jax.jit(nll)(undertrained, rows) < 1.2


def test_an_undertrained_base_is_stopped_by_a_named_gate(undertrained):
    with pytest.raises(GateFailed, match=r"the base model fails .* gates: .*correlation with the teacher: 0\.\d+"):
        require_gates(gates(undertrained, Msa0(0)))


def train(model, desc=""):
    teacher = jax.tree.map(jnp.asarray, Msa0(0).teacher())
    return supervised(model, synthetic.teacher_rows, teacher, keys.root(1), **SHORT, lr=4e-3, desc=desc)


def test_training_leaves_the_given_model_as_it_was():
    model = init_model(BASE_CONFIG, keys.root(0))
    before = jax.device_get(model.embed[...])
    after = train(model)
    assert np.array_equal(jax.device_get(model.embed[...]), before)
    assert not np.array_equal(jax.device_get(after.embed[...]), before)


def test_seeds_share_one_compiled_program(undertrained):
    before = module._chunk._cache_size()
    train_base(2, **SHORT, quiet=True)
    assert module._chunk._cache_size() == before


def test_a_loss_that_is_not_finite_stops_training_with_the_step():
    broken = jax.tree.map(lambda x: x * jnp.nan, init_model(BASE_CONFIG, keys.root(0)))
    with pytest.raises(JaxrlError, match=r"broken: the loss is nan at step 100; lower lr"):
        train(broken, desc="broken")


def test_progress_prints_plain_lines_when_not_on_a_terminal(monkeypatch):
    stream, clock = io.StringIO(), iter(range(0, 1000, 6))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    with Progress(4, "work", stream=stream) as bar:
        for i in range(4):
            bar.advance(1, loss=i)
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 2
    assert lines[-1].startswith("work: 4/4 steps in ")
    assert all("\r" not in line and "loss=" in line for line in lines)


def test_progress_is_a_bar_on_a_terminal():
    stream = io.StringIO()
    stream.isatty = lambda: True
    with Progress(2, "work", stream=stream) as bar:
        bar.advance(2, loss="0.5")
    assert "\r" in stream.getvalue()
    assert "work: 100%" in stream.getvalue()


@pytest.mark.slow
def test_the_base_of_seed_0_passes_all_gates():
    found = gates(train_base(0, quiet=True), Msa0(0))
    require_gates(found)
    assert len(found) == 7
