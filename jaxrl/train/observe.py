"""What an update did: to its own batch, to the probe, and what gradients said it would do.

The probe is fixed at step 0. Every observed step scores it before and after; every few steps the
parameter change itself is kept, so that one forward-mode pass predicts all probes' changes and the
exact kernel between the live batch and the probe is stored beside them.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl import keys
from jaxrl.influence.gradients import parameter_change, predicted_change
from jaxrl.influence.lines import influence_line, probe_line
from jaxrl.influence.probe import build_probe, load_probe, save_probe, scope_masks
from jaxrl.influence.structure import structure
from jaxrl.mean import Mean
from jaxrl.models.decoder import Decoder
from jaxrl.models.scoring import REVERSE, Scorer, WithEntropy
from jaxrl.rl.losses import TokenLoss
from jaxrl.rl.metrics import clip_violations
from jaxrl.sampling.generate import generate
from jaxrl.sampling.strategies import Temperature
from jaxrl.train.arrays import ArrayStore
from jaxrl.train.collect import Collector, in_passes, score_rows
from jaxrl.train.experiment import Experiment
from jaxrl.train.kernels import StepKernels, step_kernels, store_step
from jaxrl.train.setup import Setup
from jaxrl.train.sketches import StepSketches, step_sketches, store_sketches
from jaxrl.types import Batch, Probe, Rows, Term, flatten_leading

Finish = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class BatchView:
    """The rows of a step's first term, all mini-batches together, and their log-probs before it.

    That is the policy term where there is one. ``before`` and ``entropy`` are None on steps that are not observed,
    which saves two forward passes, and where there is no policy term.
    """

    batch: Batch
    loss: TokenLoss
    temperature: float
    at_once: int | None
    before: Float[Array, "N L"] | None
    entropy: Float[Array, "N L"] | None
    score: Scorer = REVERSE

    @classmethod
    def of(
        cls,
        model: Decoder | None,
        minibatches: tuple[tuple[Term, ...], ...],
        temperature: float,
        at_once: int | None,
        score: Scorer = REVERSE,
    ) -> BatchView:
        """Join the mini-batches' first terms and score them with ``model``, if one is given."""
        first = [terms[0] for terms in minibatches]
        batch, loss = first[0].batch, first[0].loss
        if len(first) > 1:
            batch = jax.tree.map(lambda *x: jnp.concatenate(x), *[term.batch for term in first])
        before, entropy = (None, None) if model is None else scored(model, batch.rows, temperature, at_once, score)
        return cls(batch, loss, temperature, at_once, before, entropy, score)

    @property
    def term(self) -> Term:
        """What kernels of this step are of: rows ``[N L]``, the two of a pair each a row with its pair's weight."""
        batch = self.batch
        if batch.weight.ndim == 2:
            return Term(batch, self.loss)
        both = jnp.broadcast_to(jnp.max(batch.weight, axis=(1, 2), keepdims=True), batch.weight.shape)
        return Term(flatten_leading(dataclasses.replace(batch, weight=both), 2), self.loss)

    def metrics(self, model: Decoder) -> dict[str, Mean]:
        """Clip violations (A23 a, b) before and after the step, and the sampled policy's entropy (A18).

        ``model`` is the policy after all updates of the step.
        """
        if self.before is None:
            return {}
        after, _ = scored(model, self.batch.rows, self.temperature, self.at_once, self.score)
        return _batch_metrics(self.batch, self.before, after, self.entropy, *self.loss.clip_range)


@partial(jax.jit, static_argnames=("low", "high"))
def _batch_metrics(
    batch: Batch, before: Array, after: Array, entropy: Array, low: float, high: float
) -> dict[str, Mean]:
    mask = batch.rows.mask() & (batch.weight != 0)
    metrics = {"entropy/token": Mean.of(entropy, batch.rows.mask())}
    for when, logps in (("before", before), ("after", after)):
        found = clip_violations(logps, batch.old_logps, mask, low=low, high=high, advantage=batch.advantage)
        metrics |= {f"clip/{when}_{name}": value for name, value in found.items()}
    return metrics


def scored(
    model: Decoder, rows: Rows, temperature: float, at_once: int | None, score: Scorer = REVERSE
) -> tuple[Float[Array, "N L"], Float[Array, "N L"]]:
    """Log-probabilities and entropies of ``[N L]`` rows, ``at_once`` rows a pass."""
    return in_passes(WithEntropy(score), model, rows, temperature, at_once=at_once)


class Observer:
    """Follows one run's probe. ``before`` and ``after`` frame the updates of a step.

    The base model is needed to begin with and not held on to.
    """

    def __init__(
        self, experiment: Experiment, setup: Setup, collector: Collector, folder: pathlib.Path, arrays: ArrayStore
    ) -> None:
        self.x, self.task, self.root, self.arrays = experiment, setup.task, setup.root, arrays
        self.at_once = experiment.optimiser.microbatch
        path = folder / "probe.npz"
        if not path.exists():
            save_probe(path, sampled_probe(experiment, setup, collector))
        self.probe = load_probe(path)
        self.rows: Rows = collector.place(self.probe.rows)
        self.splits = {name: np.asarray(pool.uid) for name, pool in setup.task.pools.items()}
        self.clip_range = experiment.algorithm.loss.clip_range
        self.base_logps = np.asarray(self._score(setup.base))
        self.current: Float[Array, "M L"] | None = None
        self.kept_model: Decoder | None = None
        self.kernels: StepKernels | None = None
        self.sketches: StepSketches = {}
        m = len(self.base_logps)
        arrays.require("probe_logp_sum", (experiment.steps + 1, m), "f4")
        arrays.put("probe_length", np.asarray(self.rows.response_length(), np.int32))
        arrays.write("probe_logp_sum", 0, self.base_logps.sum(-1))

    def before(self, step: int, model: Decoder, view: BatchView) -> None:
        """Score the probe, and on influence steps keep the parameters and take the kernel."""
        if not self.observes(step):
            return
        if self.current is None:
            self.current = self._score(model)
        if self.measures(step):
            self.kept_model = jax.tree.map(jnp.copy, model)
            spec = self.x.influence
            self.kernels = step_kernels(
                model,
                view.term,
                self.rows,
                rows=spec.rows,
                temperature=view.temperature,
                method=spec.method,
                blocks="layer" if spec.layers else "total",
            )
            if spec.sketch:
                self.sketches = step_sketches(
                    model,
                    view.term.batch,
                    self.rows,
                    rows=spec.rows,
                    size=spec.sketch,
                    temperature=view.temperature,
                )

    def after(self, step: int, model: Decoder, update_norm: Mean | None) -> list[tuple[str, Any, Finish]]:
        """Lines to write once their device values have arrived: ``(kind, device values, finish)``.

        ``update_norm`` is ``|dtheta|`` of the whole step, None where it is not known.
        """
        if not self.observes(step):
            return []
        before, after = self.current, self._score(model)
        self.current = after if self.observes(step + 1) else None
        values = {"before": before, "after": after, "update_norm": update_norm}
        in_batch = np.asarray(self.task.pools["train"].take(self.root, step, self.x.rollout.prompts).uid)
        lines: list[tuple[str, Any, Finish]] = [("probe", values, partial(self._probe_line, step, in_batch))]
        if self.kept_model is not None:
            direction = parameter_change(model, self.kept_model)
            predicted = predicted_change(self.kept_model, direction, self.rows, chunk=self.at_once)
            values = {"before": before, "after": after, "predicted": predicted}
            lines.append(("influence", values, partial(self._influence_line, step, self.kernels, self.sketches)))
            self.kept_model, self.kernels, self.sketches = None, None, {}
        return lines

    def observes(self, step: int) -> bool:
        """Whether the probe is scored around this step."""
        return step % self.x.probe.every == 0 or self.measures(step)

    def measures(self, step: int) -> bool:
        """Whether gradients are taken at this step."""
        return bool(self.x.influence.every) and step % self.x.influence.every == 0

    def _score(self, model: Decoder) -> Float[Array, "M L"]:
        return score_rows(model, self.rows, 1.0, self.at_once)

    def _probe_line(self, step: int, in_batch: np.ndarray, values: Mapping[str, Any]) -> dict[str, Any]:
        """Influence of this step and since step 0, clip violations, perplexity; rows of ``probe_logp_sum``."""
        before, after = np.asarray(values["before"]), np.asarray(values["after"])
        self.arrays.write("probe_logp_sum", step, before.sum(-1))
        self.arrays.write("probe_logp_sum", step + 1, after.sum(-1))
        return probe_line(
            self.probe,
            self.base_logps,
            before,
            after,
            scopes=scope_masks(self.probe, self.splits, in_batch),
            update_norm=None if values["update_norm"] is None else values["update_norm"].value,
            clip=self.clip_range,
        )

    def _influence_line(
        self, step: int, kernels: StepKernels, sketches: StepSketches, values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """First-order prediction against measurement (C10), and the structure of the probe's kernel (A.4)."""
        before, after = np.asarray(values["before"]).sum(-1), np.asarray(values["after"]).sum(-1)
        predicted = np.asarray(values["predicted"])
        self.arrays.put(f"predicted/{step}", predicted)
        store_step(self.arrays, kernels, f"/{step}")
        store_sketches(self.arrays, sketches, step)
        measured = after.astype(np.float64) - before.astype(np.float64)
        shape = structure(np.asarray(kernels.probe.values), uid=np.asarray(self.probe.uid)[kernels.probe_rows])
        line = {f"kernel/{name}": value for name, value in shape.items() if not np.isnan(value)}
        return influence_line(measured, predicted, before) | line


def sampled_probe(experiment: Experiment, setup: Setup, collector: Collector) -> Probe:
    """The run's fixed probe: samples of the base on prompts of every set."""
    spec, task = experiment.probe, setup.task
    drawn = []
    for name, count in shares(spec.prompts, {n: len(p) for n, p in task.pools.items()}).items():
        pool = task.pools[name]
        order = jax.random.permutation(keys.at(setup.root, "probe", name), len(pool))
        prompts = pool.select(np.sort(np.asarray(order)[:count]))
        rollouts = generate(
            setup.base,
            collector.place(prompts),
            Temperature(value=spec.temperature),
            n=spec.n,
            key=keys.at(setup.root, "probe"),
            max_new_tokens=experiment.rollout.max_new_tokens,
            stop_ids=task.stop_ids,
        )
        drawn.append((prompts.uid, rollouts, collector.correct(prompts, rollouts)))
    return build_probe(drawn)


def shares(total: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """How many probe prompts come from each set: half from training, the rest evenly; bounded by the sets."""
    others = [name for name in sizes if name != "train"]
    wanted = {"train": total - total // 2 if others else total}
    for i, name in enumerate(others):
        wanted[name] = (total // 2) // len(others) + (i < (total // 2) % len(others))
    return {name: min(count, sizes[name]) for name, count in wanted.items() if min(count, sizes[name])}
