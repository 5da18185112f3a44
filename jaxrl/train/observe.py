"""What an update did: to its own batch, to the probe, and what gradients said it would do.

The probe is fixed at step 0. Every observed step scores it before and after; every few steps the
parameter change itself is kept, so that one forward-mode pass predicts all probes' changes and the
exact kernel between the live batch and the probe is stored beside them.
"""

from __future__ import annotations

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
from jaxrl.influence import changes
from jaxrl.influence.gradients import predicted_change
from jaxrl.influence.kernels import gradient_kernel
from jaxrl.influence.probe import build_probe, load_probe, save_probe
from jaxrl.influence.structure import structure
from jaxrl.mean import Mean
from jaxrl.models.decoder import Decoder
from jaxrl.models.logps import token_scores
from jaxrl.rl.metrics import clip_violations
from jaxrl.sampling.generate import generate
from jaxrl.sampling.strategies import Temperature
from jaxrl.train.collect import Collector, score_rows
from jaxrl.train.experiment import Experiment
from jaxrl.train.record import ArrayStore
from jaxrl.train.setup import Setup
from jaxrl.types import Batch, Probe, Rows, Term, TrainState

Finish = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class BatchView:
    """The policy term's rows of one step, all mini-batches together, and their log-probs before it."""

    batch: Batch
    clip_range: tuple[float, float]
    temperature: float
    at_once: int | None
    before: Float[Array, "N L"]
    entropy: Float[Array, "N L"]

    @classmethod
    def of(
        cls, model: Decoder, minibatches: tuple[tuple[Term, ...], ...], temperature: float, at_once: int | None
    ) -> BatchView:
        """Join the mini-batches' first terms and score them with ``model``."""
        policy = [terms[0] for terms in minibatches]
        batch = jax.tree.map(lambda *x: jnp.concatenate(x), *[term.batch for term in policy])
        before, entropy = scored(model, batch.rows, temperature, at_once)
        return cls(batch, policy[0].loss.clip_range, temperature, at_once, before, entropy)

    def metrics(self, after: Float[Array, "N L"]) -> dict[str, Mean]:
        """Clip violations (A23 a, b) before and after the step, and the sampled policy's entropy (A18)."""
        return _batch_metrics(self.batch, self.before, after, self.entropy, *self.clip_range)


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


@jax.jit
def _score(model: Decoder, rows: Rows, temperature: Array) -> tuple[Float[Array, "N L"], Float[Array, "N L"]]:
    return token_scores(model, rows, temperature=temperature)


def scored(
    model: Decoder, rows: Rows, temperature: float, at_once: int | None
) -> tuple[Float[Array, "N L"], Float[Array, "N L"]]:
    """Log-probabilities and entropies of ``[N L]`` rows, ``at_once`` rows a pass."""
    n = rows.tokens.shape[0]
    size = min(at_once or n, n)
    index = [np.minimum(np.arange(i, i + size), n - 1) for i in range(0, n, size)]
    parts = [_score(model, rows[i], jnp.float32(temperature)) for i in index]
    return tuple(jnp.concatenate(x)[:n] for x in zip(*parts, strict=True))  # type: ignore[return-value]


@jax.jit
def _difference(after: Any, before: Any) -> Any:
    """fp32 master difference; never in the compute dtype, which would swallow small updates."""
    return jax.tree.map(lambda a, b: a - b, after, before)


class Observer:
    """Follows one run's probe. ``before`` and ``after`` frame the updates of a step."""

    def __init__(
        self, experiment: Experiment, setup: Setup, collector: Collector, folder: pathlib.Path, arrays: ArrayStore
    ) -> None:
        self.x, self.setup, self.collector, self.arrays = experiment, setup, collector, arrays
        self.probe = self._probe(folder / "probe.npz")
        self.at_once = experiment.optimiser.microbatch
        rows = jax.tree.map(jnp.asarray, self.probe.rows)
        self.rows: Rows = rows
        self.base_logps = np.asarray(self._score(setup.base))
        self.scopes = self._scopes()
        self.current: Float[Array, "M L"] | None = None
        self.kept_model: Decoder | None = None
        self.kernel: tuple[Any, Any] | None = None
        m = len(self.base_logps)
        arrays.require("probe_logp_sum", (experiment.steps + 1, m), "f4")
        arrays.put("probe_length", np.asarray(self.probe.rows.response_length(), np.int32))
        arrays.write("probe_logp_sum", 0, self.base_logps.sum(-1))

    def before(self, step: int, state: TrainState, view: BatchView) -> None:
        """Score the probe, and on influence steps keep the parameters and take the kernel."""
        if not self.observes(step):
            return
        if self.current is None:
            self.current = self._score(state.model)
        if self.measures(step):
            self.kept_model = jax.tree.map(jnp.copy, state.model)
            self.kernel = self._kernel(state.model, view)

    def after_batch(self, state: TrainState, view: BatchView) -> dict[str, Mean]:
        """Metrics of the step's own rows after all its updates."""
        after, _ = scored(state.model, view.batch.rows, view.temperature, view.at_once)
        return view.metrics(after)

    def after(self, step: int, state: TrainState, update_norm: Any) -> list[tuple[str, Any, Finish]]:
        """Lines to write once their device values have arrived: ``(kind, device values, finish)``."""
        if not self.observes(step):
            return []
        before, after = self.current, self._score(state.model)
        self.current = after if self.observes(step + 1) else None
        values = {"before": before, "after": after, "update_norm": update_norm}
        in_batch = np.asarray(self.setup.task.pools["train"].take(self.setup.root, step, self.x.rollout.prompts).uid)
        lines: list[tuple[str, Any, Finish]] = [("probe", values, partial(self._probe_line, step, in_batch))]
        if self.kept_model is not None:
            direction = _difference(state.model, self.kept_model)
            predicted = predicted_change(self.kept_model, direction, self.rows, chunk=self.at_once)
            values = {"before": before, "after": after, "predicted": predicted}
            lines.append(("influence", values, partial(self._influence_line, step, self.kernel)))
            self.kept_model, self.kernel = None, None
        return lines

    def observes(self, step: int) -> bool:
        """Whether the probe is scored around this step."""
        return step % self.x.probe.every == 0 or self.measures(step)

    def measures(self, step: int) -> bool:
        """Whether gradients are taken at this step."""
        return bool(self.x.influence.every) and step % self.x.influence.every == 0

    def _probe(self, path: pathlib.Path) -> Probe:
        """The run's fixed probe: read back, or sampled from the base on prompts of every set."""
        if path.exists():
            return load_probe(path)
        spec, task = self.x.probe, self.setup.task
        drawn = []
        for name, count in shares(spec.prompts, {n: len(p) for n, p in task.pools.items()}).items():
            pool = task.pools[name]
            order = jax.random.permutation(keys.at(self.setup.root, "probe", name), len(pool))
            prompts = pool.select(np.sort(np.asarray(order)[:count]))
            rollouts = generate(
                self.setup.base,
                prompts,
                Temperature(value=spec.temperature),
                n=spec.n,
                key=keys.at(self.setup.root, "probe"),
                max_new_tokens=self.x.rollout.max_new_tokens,
                stop_ids=task.stop_ids,
            )
            drawn.append((prompts.uid, rollouts, self.collector.correct(prompts, rollouts)))
        probe = build_probe(drawn)
        save_probe(path, probe)
        return probe

    def _scopes(self) -> dict[str, np.ndarray]:
        """Where each probe's prompt stands: a set's name -> bool[M] (A7)."""
        uid = np.asarray(self.probe.uid)
        return {name: np.isin(uid, np.asarray(pool.uid)) for name, pool in self.setup.task.pools.items()}

    def _score(self, model: Decoder) -> Float[Array, "M L"]:
        return score_rows(model, self.rows, 1.0, self.at_once)

    def _kernel(self, model: Decoder, view: BatchView) -> tuple[Any, np.ndarray]:
        """The exact kernel of some of the batch's trained rows with as many probes, by the loss's own weights."""
        count = self.x.influence.rows
        trained = np.flatnonzero(np.asarray(jnp.any(view.batch.weight != 0, axis=-1)))
        chosen = trained[:count] if len(trained) else np.arange(min(count, view.batch.weight.shape[0]))
        chosen = np.resize(chosen, min(count, view.batch.weight.shape[0]))  # one shape, so one program
        rows = jax.tree.map(lambda x: x[chosen], view.batch.rows)
        probe = jax.tree.map(lambda x: x[: min(count, len(self.base_logps))], self.rows)
        return gradient_kernel(model, rows, probe, method=self.x.influence.method), chosen

    def _probe_line(self, step: int, in_batch: np.ndarray, values: Mapping[str, Any]) -> dict[str, Any]:
        raise AssertionError

    def _influence_line(self, step: int, kernel: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        raise AssertionError


def shares(total: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """How many probe prompts come from each set: half from training, the rest evenly; bounded by the sets."""
    others = [name for name in sizes if name != "train"]
    wanted = {"train": total - total // 2 if others else total}
    for i, name in enumerate(others):
        wanted[name] = (total // 2) // len(others) + (i < (total // 2) % len(others))
    return {name: min(count, sizes[name]) for name, count in wanted.items() if min(count, sizes[name])}
