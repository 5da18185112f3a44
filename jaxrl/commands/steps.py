"""``kernel --verify``: does the kernel say what a step on the rows of A does to the rows of B?

One SGD step and one AdamW step from zero moments raise ``J = 1/N sum_i A_i phi_i`` over the rows of
A (``A_i`` their ``advantage``, 1 where the file has none). To first order SGD changes row j of B by
``lr/N sum_i A_i K_ij``, and AdamW by the same with the kernel in the metric of its step
(``jaxrl.influence.precondition``). Both are held against the scores under the updated float32
parameters, and against forward-mode passes along the optimiser's update and along the change of the
stored parameters. These two differ by what rounding to float32 makes of a small update.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxrl.commands.compared import Compared, Side
from jaxrl.errors import JaxrlError
from jaxrl.influence.batch import batch_gradient
from jaxrl.influence.gradients import parameter_change, predicted_change, row_weights, scores
from jaxrl.influence.kernels import gradient_kernel
from jaxrl.influence.lines import influence_line
from jaxrl.influence.precondition import preconditioner, step_parts
from jaxrl.models.decoder import Decoder, cast, with_config
from jaxrl.rl.losses import Nll
from jaxrl.rl.optimiser import Optimiser, make_optimiser
from jaxrl.train.arrays import ArrayStore
from jaxrl.types import Batch, Kernel, Rows, Term

# Without a given rate the median row changes by so much of the median |score|: below, float32 parameters lose too much
# of the update; above, the second order shows.
SHARE = 0.003
ROWS = 2  # rows a pass
AGAIN = 4  # rows that are scored in double precision too
KERNEL, UPDATE, CHANGE = "kernel", "update", "change"  # ways to a prediction: the kernel, and two forward-mode passes


@dataclass(frozen=True, eq=False)
class Step:
    """One step and what it did to the rows of B: changes of their scores, nats.

    ``predicted``: by way (``KERNEL``, ``UPDATE``, ``CHANGE``). ``size`` is ``|dtheta|``. ``floor`` is the largest error of
    ``measured`` over the rows that were scored in double precision too.
    """

    name: str
    lr: float
    given: bool  # the rate, by the user
    size: float
    predicted: Mapping[str, Float[np.ndarray, " M"]]
    measured: Float[np.ndarray, " M"]
    floor: float

    def error(self, way: str) -> float:
        """The median over rows of ``|predicted - measured| / |measured|``."""
        error = np.abs(self.predicted[way] - self.measured)
        size = np.abs(self.measured)
        return float(np.median(np.divide(error, size, out=np.full_like(size, np.inf), where=size > 0)))

    def gap(self, way: str) -> float:
        """How far a prediction is from that of the kernel: norm of the difference over the norm."""
        size = float(np.linalg.norm(self.predicted[way]))
        return float(np.linalg.norm(self.predicted[KERNEL] - self.predicted[way])) / size if size else float("nan")

    def row(self, way: str) -> dict[str, Any]:
        """One line of the table."""
        line = influence_line(self.measured, self.predicted[way])
        return {
            "lr": self.lr,
            "lr given": self.given,
            "|dtheta|": self.size,
            "median |predicted|": float(np.median(np.abs(self.predicted[way]))),
            "median relative error": self.error(way),
            "correlation": line.get("influence/correlation"),
            "sign agreement": line.get("influence/sign_agreement"),
            "noise floor": self.floor,
            "gap to kernel": self.gap(way),
        }


def verified(compared: Compared, kernel: Kernel, arguments: argparse.Namespace) -> list[Step]:
    """The two steps from ``compared.model``; ``kernel`` is that of its two sides.

    Raises ``JaxrlError`` when the rows of A carry no signal.
    """
    model, (a, b) = compared.model, compared.sides
    weight = objective(a)
    scored = row_weights(b.rows, kernel.normalise)
    gradient = loss_gradient(model, a.rows, weight, kernel.normalise)
    before = _scores(model, b.rows, scored)
    aim = SHARE * float(np.median(np.abs(before)))
    look = partial(_look, model, gradient, b.rows, scored, kernel.normalise, before)

    plain = weight @ np.asarray(kernel.values, np.float64)
    found = [look(Optimiser(lr=_rate(arguments.lr, plain, aim), type="sgd"), plain, arguments.lr)]

    unit = Optimiser(lr=1.0, weight_decay=arguments.weight_decay or 0.0)
    diagonal = _metric(model, gradient, unit)
    metric = gradient_kernel(
        model, a.rows, b.rows, precondition=diagonal, normalise=kernel.normalise, noise=0,
        method="auto" if arguments.method == "ghost" else arguments.method,
        **({} if arguments.memory is None else {"memory": arguments.memory}),
    )  # fmt: skip
    del diagonal
    changed = weight @ np.asarray(metric.values, np.float64)
    if unit.weight_decay:
        changed = changed + _along(model, _decay(model, gradient, unit), b.rows, kernel.normalise)
    rate = _rate(arguments.adam_lr, changed, aim)
    return [*found, look(Optimiser(lr=rate, weight_decay=unit.weight_decay), changed, arguments.adam_lr)]


def objective(side: Side) -> Float[np.ndarray, " N"]:
    """The weight of each row: its ``advantage`` (1 where it says none) over their number."""
    given = side.labels.get("advantage") or [None] * len(side.rows.start)
    advantage = np.array([1.0 if value is None else float(value) for value in given])
    if not advantage.any():
        raise JaxrlError(
            "every row of --a has advantage 0: a step on them changes nothing, so there is nothing to verify"
        )
    return advantage / len(advantage)


def loss_gradient(model: Decoder, rows: Rows, weight: np.ndarray, normalise: str) -> Decoder:
    """The gradient of ``-sum_i weight_i phi_i``, a few rows at a time with rematerialised layers."""
    tokens = row_weights(rows, normalise)
    batch = Batch(
        rows=rows,
        advantage=jnp.zeros_like(tokens),
        old_logps=jnp.zeros_like(tokens),
        weight=tokens * jnp.asarray(weight, tokens.dtype)[:, None],
    )
    lean = with_config(model, remat="full")
    return with_config(batch_gradient(lean, (Term(batch, Nll()),), microbatch=ROWS), remat=model.config.remat)


def store_verified(arrays: ArrayStore, found: Sequence[Step]) -> None:
    """``measured/NAME`` and ``predicted/NAME-WAY`` of every step, nats, with the lines of the table beside them."""
    for step in found:
        about = {"lr": step.lr, "lr_given": step.given, "size": step.size, "noise_floor": step.floor}
        arrays.put(f"measured/{step.name.lower()}", step.measured, about)
        for way, values in step.predicted.items():
            arrays.put(f"predicted/{step.name.lower()}-{way}", values, step.row(way))


def step_table(found: Sequence[Step]) -> dict[str, dict[str, dict[str, Any]]]:
    """Step and way of prediction to the line of the table."""
    return {step.name: {way: step.row(way) for way in step.predicted} for step in found}


def _look(
    model: Decoder, gradient: Decoder, rows: Rows, weights: Array, normalise: str, before: np.ndarray,
    spec: Optimiser, unit: np.ndarray, given: float | None,
) -> Step:  # fmt: skip
    """Take one step and measure. ``unit``: the change that is predicted at rate 1."""
    again = np.unique(np.linspace(0, len(before) - 1, min(AGAIN, len(before))).round().astype(int))
    few = (jax.tree.map(lambda x: x[again], rows), weights[again])
    update = _update(model, gradient, spec)
    along = {UPDATE: _along(model, update, rows, normalise)}
    after = _added(model, update)
    del update
    measured = _scores(after, rows, weights) - before
    exact = _double(after, *few) - _double(model, *few)
    change = parameter_change(after, model)
    del after
    along[CHANGE] = _along(model, change, rows, normalise)
    return Step(
        name={"sgd": "SGD", "adamw": "AdamW"}[spec.type],
        lr=spec.lr,
        given=given is not None,
        size=float(optax.tree_utils.tree_norm(change)),
        predicted={KERNEL: spec.lr * unit, **along},
        measured=measured,
        floor=float(np.max(np.abs(measured[again] - exact))),
    )


def _rate(given: float | None, unit: np.ndarray, aim: float) -> float:
    """The rate given, or the one at which the median change is ``aim``."""
    if given is not None:
        return given
    middle = float(np.median(np.abs(unit)))
    if not 0 < middle < np.inf:
        raise JaxrlError(
            f"the median change at rate 1 is {middle} nats, which no rate can scale; give --lr and --adam-lr"
        )
    return aim / middle


@partial(jax.jit, static_argnames=("spec",))
def _update(model: Decoder, gradient: Decoder, spec: Optimiser) -> Decoder:
    """The optimiser's first update; its zero moments are never held."""
    tx = make_optimiser(spec, total=1)
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies Python scalars into every dtype
        return tx.update(gradient, tx.init(model), model)[0]


_added = jax.jit(optax.apply_updates)


@partial(jax.jit, static_argnames=("spec",))
def _metric(model: Decoder, gradient: Decoder, spec: Optimiser) -> Decoder:
    return preconditioner(spec, model, make_optimiser(spec, total=1).init(model), gradient, total=1)


@partial(jax.jit, static_argnames=("spec",))
def _decay(model: Decoder, gradient: Decoder, spec: Optimiser) -> Decoder:
    return step_parts(spec, model, make_optimiser(spec, total=1).init(model), gradient, total=1)["decay"]


def _along(model: Decoder, change: Decoder, rows: Rows, normalise: str) -> np.ndarray:
    return np.asarray(predicted_change(model, change, rows, normalise=normalise, chunk=ROWS), np.float64)


@jax.jit
def _rescored(model: Decoder, rows: Rows, weights: Array) -> Array:
    def one(x: tuple[Rows, Array]) -> Array:
        row, weight = jax.tree.map(lambda leaf: leaf[None], x)
        return scores(model, row, weight)[0]

    return jax.lax.map(one, (rows, weights), batch_size=ROWS)


def _scores(model: Decoder, rows: Rows, weights: Array) -> np.ndarray:
    return np.asarray(_rescored(model, rows, weights), np.float64)


def _double(model: Decoder, rows: Rows, weights: Array) -> np.ndarray:
    """The scores of the same parameters, computed in double precision."""
    with jax.enable_x64(True):
        return _scores(cast(model, "float64"), rows, weights)
