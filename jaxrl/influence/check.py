"""The kernel check in double precision: exactness, orders of remainders, bounds, and the optimiser (SCIENCE.md C).

It asks of one model, one training batch and one probe whether gradients predict what steps do, to which
order, and what the paper's bound adds to that. Everything is measured; what does not hold is named.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxrl.influence.account import Step, against_sgd, explained, step_account
from jaxrl.influence.audit import advantage_bound, batch_audit, naive_violations, order_audit, pair_audit
from jaxrl.influence.batch import batch_gradient, coefficients
from jaxrl.influence.exactness import chosen_rows, finite_difference_error, score_identity
from jaxrl.influence.gradients import at_temperature
from jaxrl.influence.kernels import gradient_kernel
from jaxrl.influence.outcome import verdicts, write_check
from jaxrl.influence.precision import precision_sweep
from jaxrl.influence.probe import counted
from jaxrl.influence.silent import silent_audit
from jaxrl.influence.slopes import fit_slope
from jaxrl.influence.sweep import BATCH_ETAS, Line, Pairs, line_sweep, pair_sweep, stratified
from jaxrl.influence.training import Training, training_audit
from jaxrl.models.decoder import Decoder, cast
from jaxrl.rl.optimiser import Optimiser
from jaxrl.types import Probe, Rows, Term

Progress = Callable[[str], None]


@dataclass(frozen=True)
class BatchSweep:
    """The policy term's SGD step, and its kernel rows with their coefficients ``w_n A_n``."""

    line: Line
    kernel: Float[np.ndarray, "N M"]
    weight_advantage: Float[np.ndarray, " N"]
    advantage: Float[np.ndarray, " N"]
    weight: Float[np.ndarray, " N"]
    norms: Float[np.ndarray, " M"]
    row_norms: Float[np.ndarray, " N"]
    term: Term  # its rows with a response
    descent: Any  # minus the loss gradient, a pytree like the parameters


def check_model(
    model: Decoder,
    optimiser: Optimiser,
    opt_state: Any,
    terms: tuple[Term, ...],
    probe: Probe,
    *,
    reference: Any = None,
    temperature: float = 1.0,
    total: int | None = None,
    pairs: int = 64,
    group_size: int = 8,
    enumerated: Rows | None = None,
    later: Mapping[int, Decoder] | None = None,
    training: Training | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run C1 to C15 and return what ``check.json`` holds; write the folder ``out`` if given.

    ``model`` and ``opt_state`` as they were before the step, ``terms`` the step's, the policy term
    first; ``reference`` and ``temperature`` as in training. ``total``: the run's number of updates,
    needed by a schedule that decays; one that has run out (rate 0) is checked at its peak rate.
    ``pairs``: training rows and probe rows of the pair sweep. ``group_size``: G of the bound's C. ``enumerated``: *every* response to one prompt with their
    truncated ends, for the score identity (C2). ``later``: parameters h steps on, for C10.
    ``training``: what is known beyond this step, for C13 to C15, and why the rest is left out.

    Needs double precision: call it under ``jax.enable_x64``; parameters are cast. The result's ``ok``
    says whether everything held, ``failures`` what did not. Raises ``ValueError`` without double
    precision, without rows, or when the batch carries no signal.
    """
    say = progress or (lambda message: None)
    model, reference, opt_state, terms = (double(x) for x in (model, reference, opt_state, terms))
    if total is None and optimiser.schedule != "constant":
        raise ValueError(f"total: the {optimiser.schedule} schedule needs the run's number of updates, got None")
    train, rows, same = chosen_rows(terms[0].batch.rows, probe.rows, counted(probe), pairs)
    bound_c = advantage_bound(group_size)

    say("gradients against finite differences")
    c1 = finite_difference_error(model, train, rows)
    c2 = None if enumerated is None else score_identity(model, enumerated, rows, c1["largest"])
    say("single pairs")
    swept = pair_sweep(model, train, stratified(len(train.start)), rows)
    say("whole batch")
    whole = batch_sweep(model, terms[0], rows, temperature=temperature)
    say("optimiser step")
    step = Step(optimiser, model, opt_state, terms, reference, total=total or 1, temperature=temperature)
    found: dict[str, Any] = {"c1": c1, "c2": c2}
    found |= pair_findings(swept, same, bound_c) | batch_findings(model, whole, rows, bound_c, temperature)
    found["c9"] = optimiser_audit(step, rows, whole, bound_c)
    found["c10"] = explained(model, {h: double(m) for h, m in (later or {}).items()}, rows, step)
    training = training or Training()
    more, blocks, arrays = training_audit(training, say)
    result = verdicts(found | more | {"left_out": dict(training.left_out)}, blocks)
    if out is not None:
        write_check(out, result, {"pairs": pair_arrays(swept, bound_c), "batch": batch_arrays(whole)} | arrays)
    return result


def pair_findings(swept: Pairs, same: Bool[np.ndarray, "N M"], bound_c: float) -> dict[str, Any]:
    """C3 and C4."""
    return {"c3": pair_slopes(swept, same), "c4": pair_audit(swept, bound_c)}


def batch_findings(model: Decoder, whole: BatchSweep, rows: Rows, bound_c: float, temperature: float) -> dict[str, Any]:
    """C5, C6 (with C7 and C8), C11 and C12."""
    return {
        "c5": batch_slopes(whole.line) | order_audit(whole.line) | {"kernel_error": _kernel_error(whole)},
        "c6": batch_audit(whole.line, whole.kernel, whole.weight, whole.weight_advantage, whole.norms, bound_c),
        "c11": silent_rows_audit(model, whole, rows, temperature),
        "c12": precision_sweep(model, whole.descent, rows, whole.line.first),
    }


def silent_rows_audit(model: Decoder, batch: BatchSweep, rows: Rows, temperature: float) -> dict[str, Any]:
    """C11 of the batch that was swept."""
    norms = (batch.row_norms, batch.norms)
    return silent_audit(model, batch.term, rows, batch.kernel, batch.weight_advantage, norms, temperature=temperature)


def optimiser_audit(step: Step, rows: Rows, batch: BatchSweep, bound_c: float) -> dict[str, Any]:
    """C9: the account of the step, and how it compares with what plain SGD and Eq. 4 would say of it."""
    account, line = step_account(step, rows)
    at = int(np.argmin(np.abs(line.eta - step.lr)))
    return account | {
        "against_sgd": against_sgd(line.delta[at], batch.line.first),
        "naive_violations": naive_violations(line.delta[at], line.eta[at], batch.kernel, batch.weight, bound_c),
    }


def pair_slopes(pairs: Pairs, same: Bool[np.ndarray, "N M"]) -> dict[str, Any]:
    """C3: slopes over all pairs with A != 0, and over same-prompt and cross-prompt pairs apart."""
    active = pairs.advantage != 0
    predicted = pairs.predicted[:, active]
    first = pairs.delta[:, active] - predicted
    second = first - pairs.second_order[:, active]
    found: dict[str, Any] = {
        "first": fit_slope(pairs.eta, first, predicted, pairs.scores)._asdict(),
        "second": fit_slope(pairs.eta, second, predicted, pairs.scores)._asdict(),
    }
    for name, pick in (("same_prompt", same[active]), ("cross_prompt", ~same[active])):
        if pick.any():
            found[name] = fit_slope(pairs.eta, first[:, pick], predicted[:, pick], pairs.scores)._asdict()
    return found | {"same_prompt_pairs": int(same.sum()), "pairs": int(same.size)}


def batch_slopes(line: Line) -> dict[str, Any]:
    """C5: slopes of one SGD step on the whole policy term."""
    first = line.delta - line.predicted
    second = first - line.curvature
    return {
        "first": fit_slope(line.eta, first, line.predicted, line.scores)._asdict(),
        "second": fit_slope(line.eta, second, line.predicted, line.scores)._asdict(),
    }


def batch_sweep(model: Decoder, term: Term, probe: Rows, *, temperature: float = 1.0) -> BatchSweep:
    """C5: the SGD step on ``term`` over a grid of eta, and the kernel whose weighted sum predicts it.

    Raises ``ValueError`` when no row of the term has a gradient.
    """
    live = np.flatnonzero(np.asarray(term.batch.rows.response_length()) > 0)
    term = Term(jax.tree.map(lambda x: jnp.asarray(x)[live], term.batch), term.loss)
    weighed = coefficients(model, term, logps=at_temperature(temperature))
    if not weighed.row.any():
        raise ValueError("the policy term carries no signal: every row has weight or advantage 0; check another step")
    kernel = gradient_kernel(
        model, term.batch.rows, probe, weights=jnp.asarray(weighed.token), temperature=(temperature, 1.0)
    )
    mask = np.asarray(term.batch.rows.mask())
    mean = [np.where(mask, np.asarray(x), 0).sum(1) / mask.sum(1) for x in (term.batch.advantage, term.batch.weight)]
    descent = jax.tree.map(jnp.negative, batch_gradient(model, (term,), temperature=temperature))
    return BatchSweep(
        line=line_sweep(model, descent, probe, BATCH_ETAS),
        kernel=np.asarray(kernel.values),
        weight_advantage=weighed.row,
        advantage=mean[0],
        weight=mean[1],
        norms=np.sqrt(np.asarray(kernel.sq_norms_b)),
        row_norms=np.sqrt(np.asarray(kernel.sq_norms_a)),
        term=term,
        descent=descent,
    )


def pair_arrays(pairs: Pairs, bound_c: float) -> dict[str, np.ndarray]:
    """What ``pairs.npz`` holds."""
    names = ("eta", "delta", "kernel", "advantage", "second_order")
    return {name: getattr(pairs, name) for name in names} | {"bound_c": np.float64(bound_c)}


def batch_arrays(sweep: BatchSweep) -> dict[str, np.ndarray]:
    """What ``batch.npz`` holds."""
    line = sweep.line
    return {
        "eta": line.eta,
        "measured": line.delta,
        "predicted": line.predicted,
        "predicted_second": line.predicted + line.curvature,
        "kernel": sweep.kernel,
        "weight_advantage": sweep.weight_advantage,
        "advantage": sweep.advantage,
        "weight": sweep.weight,
        "probe_norm": sweep.norms,
    }


def _kernel_error(sweep: BatchSweep) -> float:
    """How far ``sum_n w_n A_n K_nj`` is from minus the loss gradient dotted with the probe's, relative to the largest."""
    first = sweep.line.first
    return float(np.abs(sweep.weight_advantage @ sweep.kernel - first).max() / np.abs(first).max())


def double(tree: Any) -> Any:
    """Parameters, moments, batches and references in float64, integers as they are.

    On one device the arrays forget the mesh they were trained on: placed alike, they share programs.
    """
    if jnp.result_type(float) != jnp.float64:
        raise ValueError("the kernel check needs double precision; call it under jax.enable_x64(True)")

    def widen(x: Any) -> Any:
        if isinstance(x, Decoder):  # Adam's moments are trees like the model, its static dtype included
            return cast(jax.tree.map(_unplaced, x), "float64")
        return _unplaced(x.astype("float64") if jnp.issubdtype(x.dtype, jnp.floating) else x)

    return jax.tree.map(widen, tree, is_leaf=lambda x: isinstance(x, Decoder))


def _unplaced(x: Any) -> Any:
    return x if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1 else jnp.asarray(np.asarray(x))
