"""Faults that users of other trainers reported and no other file guards against, one or more tests each.

The number in a docstring is the line of the specification's list of faults. Each test states what holds here.
"""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_folders import config_json, random_tensors, write_folder
from jax.sharding import NamedSharding, PartitionSpec
from model_cases import largest
from rl_cases import SCORE, b8, quick_jit, scored, tiny_model
from safetensors.numpy import load_file
from tiny_tokenizer import save_tiny

from jaxrl import keys
from jaxrl.data.prompts import PromptPool
from jaxrl.data.synthetic import DIGIT, EOS, LNG, Msa0
from jaxrl.errors import UsageError
from jaxrl.influence import explicit, gradients
from jaxrl.mesh import make_mesh
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import abstract_model, hidden, init_model, logits, with_config
from jaxrl.models.hf import load_model, save_model
from jaxrl.models.logps import token_logps, token_scores
from jaxrl.rewards import Verdict
from jaxrl.rewards.shaping import Binary, Custom
from jaxrl.rl.algorithms import Algorithm, prepare
from jaxrl.rl.filters import KeepGreedyFails
from jaxrl.rl.losses import Clip, FullKl
from jaxrl.rl.metrics import clip_violations, sampler_gap
from jaxrl.rl.optimiser import Optimiser, make_optimiser
from jaxrl.rl.recipes import ALGORITHMS
from jaxrl.rl.regularisers import Kl
from jaxrl.sampling.engine import SlotEngine, SlotSpec
from jaxrl.sampling.strategies import Greedy, Temperature, TopK, TopP
from jaxrl.train import grading, loop
from jaxrl.train.collect import Collector, in_passes, score_rows, temperature_of
from jaxrl.train.evaluate import as_metrics, curve, sample_set
from jaxrl.train.experiment import (
    EvalSpec,
    Experiment,
    InfluenceSpec,
    MeshSpec,
    ModelSpec,
    Msa0Spec,
    ProbeSpec,
    ProblemsSpec,
    RolloutSpec,
)
from jaxrl.train.setup import set_up
from jaxrl.train.tasks import Msa0Task, problems_task
from jaxrl.types import STOP_EOS, STOP_LENGTH, STOP_NONE, Batch, Rollouts, Rows, Term, TrainState

CONFIG = ModelConfig(
    vocab_size=24, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    max_positions=16, init_std=0.5,
)  # fmt: skip
GRPO = Algorithm()
REVERSE_KL = Algorithm(regularisers=((0.1, Kl(direction="reverse", estimator="k2")),))


@pytest.fixture(scope="module")
def models():
    return tuple(init_model(CONFIG, keys.root(seed)) for seed in (0, 1))


def msa0(uid, tokens=None) -> Msa0Task:
    """The enumerable task with few training prompts; ``tokens`` replace the prompts' own."""
    prompts = Msa0().prompts(np.asarray(uid))
    return Msa0Task(Msa0(), {"train": PromptPool(tokens or prompts.tokens.tolist(), prompts.uid, 5)})


def collector(algorithm=GRPO, *, task=None, strategy=None, **changes) -> Collector:
    spec = RolloutSpec(prompts=4, n=3, max_new_tokens=5, strategy=strategy or Temperature(), log_greedy=False)
    task = msa0([0, 50, 130, 200]) if task is None else task
    return Collector(task, algorithm, dataclasses.replace(spec, **changes), Binary())


# ---- log-probabilities


@pytest.mark.parametrize("strategy", [TopP(p=0.95), TopK(k=10), Greedy()], ids=str)
def test_training_on_samples_of_a_truncated_support_is_refused(strategy):
    """1. Ratios of a truncated sampler over a full-vocabulary scorer are biased; the default truncates nothing."""
    with pytest.raises(UsageError, match=r"rollout\.strategy: .*restricts the support"):
        temperature_of(strategy)
    experiment = dataclasses.replace(tiny_experiment(), rollout=RolloutSpec(strategy=strategy))
    with pytest.raises(UsageError, match="restricts the support"):
        set_up(experiment)
    assert RolloutSpec().strategy == Temperature(value=1.0)


def test_old_and_reference_log_probs_are_at_the_rollouts_temperature(models):
    """2, 4. One temperature for sampler, policy and reference; so the sampler agrees with the trainer."""
    policy, reference = models
    graded = collector(REVERSE_KL, strategy=Temperature(value=0.6))(policy, reference, keys.root(0), 0).graded
    rows = graded.rollouts.rows
    for model, got in ((policy, graded.old_logps), (reference, graded.ref_logps)):
        at = {t: SCORE(model, rows.flat(), temperature=t).reshape(got.shape) for t in (0.6, 1.0)}
        np.testing.assert_allclose(got, at[0.6], rtol=0, atol=1e-5)
        assert np.abs(got - at[1.0]).max() > 0.1
    _, worst = sampler_gap(graded.rollouts.logps, graded.old_logps, rows.mask())
    assert worst < 1e-5


def test_base_samples_of_a_forward_kl_are_of_the_base_itself(models):
    """2. Whatever the rollouts' temperature, the base is sampled at temperature 1."""
    policy, base = models
    graded = collector(ALGORITHMS["fkl_only"], strategy=Temperature(value=0.6))(policy, base, keys.root(0), 0).graded
    rows = graded.base.rows
    want = SCORE(base, rows.flat(), temperature=1.0).reshape(rows.tokens.shape)
    np.testing.assert_allclose(graded.base.logps, want, rtol=0, atol=1e-5)
    assert rows.tokens.shape[:2] == (4, 4)


def test_in_half_precision_another_batch_shape_clips_no_token(models):
    """3. Rows scored in passes of another size differ by noise that stays far inside the clip range."""
    half = with_config(models[0], dtype="bfloat16")
    rows = jax.tree.map(jnp.asarray, collector()(models[0], None, keys.root(0), 0).graded.rollouts.rows.flat())
    old, new = score_rows(half, rows), score_rows(half, rows, at_once=5)
    assert old.dtype == jnp.float32
    got = clip_violations(new, old, rows.mask())
    assert (got["token"].value, got["sequence"].value) == (0, 0)
    assert got["ratio"].value == pytest.approx(1, abs=1e-2)
    exact = clip_violations(score_rows(half, rows), old, rows.mask())
    assert (exact["ratio"].value, exact["abs_log_ratio"].value) == (1, 0)


@pytest.mark.slow
def test_what_was_sampled_is_scored_even_where_its_text_has_other_ids(models, tmp_path):
    """5. Ids in, ids out: rollouts, old log-probs and terms hold the sampled ids; text only reaches the verifier."""
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"id": str(i), "problem": f"{i}?", "answer": "1"}) + "\n" for i in range(4))
    )
    folder = str(save_tiny(tmp_path / "tokenizer"))
    task = problems_task(ProblemsSpec(train=str(tmp_path / "p.jsonl"), template="plain"), folder)
    config = dataclasses.replace(CONFIG, vocab_size=task.vocab_limit, max_positions=64)
    model = init_model(config, keys.root(0))
    encode, read = task.tokenizer.encode, []
    task.tokenizer.backend.encode = lambda *_: pytest.fail("text was turned back into ids")
    decode = task.tokenizer.backend.decode
    task.tokenizer.backend.decode = lambda ids, skip: (read.append(ids), decode(ids, skip))[1]
    graded = collector(task=task)(model, None, keys.root(0), 0).graded
    task.close()
    del task.tokenizer.backend.encode
    rows = jax.device_get(graded.rollouts.rows)
    sampled = [grading.response(rows, p, g) for p, g in np.ndindex(4, 3)]
    assert read == sampled
    assert any(encode(task.tokenizer.decode(ids)) != ids for ids in sampled), "the hazard is there"
    np.testing.assert_allclose(graded.rollouts.logps, graded.old_logps, rtol=0, atol=1e-5)
    ((term,),) = prepare(Algorithm(), graded)
    np.testing.assert_array_equal(term.batch.rows.tokens, rows.tokens.reshape(12, -1))


# ---- truncation


class AlwaysRight:
    """A task whose verifier finds every response correct."""

    asked: list

    def grade(self, uid, responses):
        self.asked = list(uid)
        return [Verdict("correct", "1", "complete", "own") for _ in responses]


def test_a_response_that_was_cut_off_is_never_correct_and_an_empty_slot_is_not_graded():
    """16. No end is made up: a response that met the length limit stays truncated and wrong."""
    rows = Rows(np.zeros((1, 3, 4), np.int32), np.full((1, 3), 2, np.int32), np.asarray([[4, 4, 2]], np.int32))
    stop = np.asarray([[STOP_EOS, STOP_LENGTH, STOP_NONE]], np.int32)
    task = AlwaysRight()
    table = grading.grade(task, [7], Rollouts(rows, np.zeros((1, 3, 4)), stop))
    assert task.asked == [7, 7]
    assert [v and (v.status, v.rule) for v in table[0]] == [("correct", "own"), ("wrong", "truncated"), None]
    assert grading.correct(table).tolist() == [[True, False, False]]


# ---- groups


def test_prompts_of_equal_tokens_are_groups_of_their_own(models):
    """20. A prompt is its integer id: random numbers, verdicts and groups go by it and never by tokens."""
    same = Msa0().tokens[0].tolist()
    graded = collector(task=msa0([0, 1, 40, 80], [same] * 4))(models[0], None, keys.root(0), 0).graded
    assert sorted(np.asarray(graded.uid).tolist()) == [0, 1, 40, 80]
    rows = np.asarray(graded.rollouts.rows.tokens).reshape(12, -1)
    np.testing.assert_array_equal(rows[:, :5], np.tile(same, (12, 1)))
    assert len({row.tobytes() for row in rows}) > 6  # not one draw four times
    zero = [LNG, DIGIT, DIGIT, EOS]  # by their tokens both prompts ask for the digit 0
    assert [v.status for v in msa0([0, 40], [same] * 2).grade([0, 40], [zero, zero])] == ["correct", "wrong"]


@pytest.mark.slow
def test_rows_keep_their_advantage_and_old_log_probs_when_kept_prompts_come_first():
    """20. What the filter reorders, it reorders together."""
    graded = b8(greedy_correct=jnp.asarray([True, False, True]))
    graded = scored(tiny_model(0), graded)
    plain, moved = (
        prepare(Algorithm(keep=KeepGreedyFails(), minibatches=3, kept_first=first), graded) for first in (False, True)
    )

    def by_row(parts):
        batches = [term.batch for terms in parts for term in terms]
        fields = [np.concatenate([np.asarray(x) for x in column]) for column in zip(
            *((b.rows.tokens, b.advantage, b.old_logps, b.rows.mask()) for b in batches), strict=True
        )]  # fmt: skip
        return {row[0].tobytes(): row[1:] for row in zip(*fields, strict=True)}

    a, b = by_row(plain), by_row(moved)
    assert a.keys() == b.keys()
    assert len(a) == 12
    for tokens, values in a.items():
        for x, y in zip(values, b[tokens], strict=True):
            np.testing.assert_array_equal(x, y)
    assert not np.array_equal(plain[0][0].batch.rows.tokens, moved[0][0].batch.rows.tokens)


# ---- several updates a rollout batch


@pytest.mark.slow
def test_later_mini_batches_are_measured_against_the_policy_that_sampled():
    """21. Old log-probs are stored before the first update, so the second mini-batch's ratio is not 1."""
    model, tx = tiny_model(0), make_optimiser(Optimiser(type="sgd", lr=0.5), total=3)
    parts = prepare(Algorithm(minibatches=3), scored(model, b8()))
    state = TrainState(jnp.asarray(0), jax.tree.map(jnp.copy, model), tx.init(model), keys.root(0))
    state, _ = quick_jit(loop.update, static_argnames=("tx", "temperature", "microbatch"))(
        state, parts[0], None, tx=tx, temperature=1.0
    )
    later = parts[1][0].batch
    np.testing.assert_allclose(later.old_logps, SCORE(model, later.rows), rtol=0, atol=1e-6)
    moved = clip_violations(SCORE(state.model, later.rows), later.old_logps, later.weight != 0)
    assert moved["abs_log_ratio"].value > 1e-3
    with pytest.raises(ValueError, match="needs trainer_logps"):
        prepare(Algorithm(), b8(old_logps=None))


# ---- the reference model


@pytest.mark.parametrize(("coef", "kept"), [(0.0, False), (1e-4, True)])
def test_a_reference_is_held_and_sampled_only_where_its_coefficient_is_not_zero(models, coef, kept):
    """23. At beta 0 no reference is built, none of its samples is drawn and nothing is scored with it."""
    algorithm = dataclasses.replace(ALGORITHMS["fkl_only"], regularisers=((coef, Kl(samples=2)),))
    setup = set_up(dataclasses.replace(tiny_experiment(), algorithm=algorithm))
    assert (setup.reference is not None) is kept
    graded = collector(algorithm)(models[0], models[1] if kept else None, keys.root(0), 0).graded
    assert (graded.base is not None) is kept
    assert graded.ref_logps is None


# ---- metrics


def test_metrics_do_not_depend_on_the_number_of_devices():
    """24. Pairs of total and count, reduced once: rows of unequal length over 1, 2 and 4 devices."""
    rng = np.random.default_rng(0)
    old, new = (jnp.asarray(rng.normal(size=(8, 6)) * 0.2, jnp.float32) for _ in range(2))
    mask = jnp.asarray(np.arange(6)[None] < rng.integers(0, 7, 8)[:, None])
    measure = quick_jit(clip_violations)
    want = {name: mean.value for name, mean in measure(new, old, mask).items()}
    by_device = np.mean([measure(new[i:i+2], old[i:i+2], mask[i:i+2])["ratio"].value for i in range(0, 8, 2)])  # fmt: skip
    assert abs(by_device - want["ratio"]) > 1e-4  # a mean of means is another number
    for devices in (2, 4):
        mesh = make_mesh(data=devices, fsdp=1, devices=jax.devices()[:devices])
        rows = NamedSharding(mesh, PartitionSpec("data"))
        got = measure(*(jax.device_put(x, rows) for x in (new, old, mask)))
        assert {name: mean.value for name, mean in got.items()} == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(("n", "slots"), [(3, 6), (7, 3)])
def test_an_evaluation_counts_every_prompt_and_sample_once(models, n, slots):
    """26. However samples are laid on the engine's slots, each counts once, and n is reported."""
    task = msa0([0, 3, 50, 130, 200])
    engine = SlotEngine(SlotSpec(slots=slots, chunk=2))
    options = {"key": keys.root(0), "max_new_tokens": 5, "engine": engine}
    samples = sample_set(models[0], task, task.pools["train"], Temperature(), n=n, **options)
    found = sorted((r["uid"], r["sample"]) for r in samples.records)
    assert found == [(u, g) for u in (0, 3, 50, 130, 200) for g in range(n)]
    assert samples.correct.shape == (5,)
    assert samples.correct.sum() == sum(r["correct"] for r in samples.records)
    table = curve(samples, (1, n, n + 1))
    assert set(table) == {f"pass@{k}" for k in {1, n}}  # no k beyond the samples
    assert as_metrics(table, "eval", n)["eval/pass@1/n"] == n


# ---- weights


def test_a_trained_tied_model_is_exported_as_one_array_and_comes_back_tied(tmp_path):
    """31. One array: the flag is honoured, no head is written, and the trained embedding is the head on return."""
    states = jnp.asarray(np.random.default_rng(0).normal(size=(1, 32)), jnp.float32)
    for tied in (True, False):
        config = config_json(tie_word_embeddings=tied)
        folder = write_folder(tmp_path / f"in-{tied}", config, random_tensors(config))
        trained = jax.tree.map(lambda x: x + 0.25, load_model(folder))
        out = save_model(trained, tmp_path / f"out-{tied}")
        tensors = load_file(out / "model.safetensors")
        assert ("lm_head.weight" in tensors) is not tied
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is tied
        again = load_model(out)
        assert (again.head is None) is tied
        assert largest(again, trained) == 0
        np.testing.assert_array_equal(logits(again, states), logits(trained, states))
        if tied:
            head = tensors["model.embed_tokens.weight"]
            np.testing.assert_allclose(logits(again, states)[0], head @ states[0], rtol=0, atol=1e-4)


def test_the_gradient_of_tied_embeddings_is_that_of_both_uses():
    """31. The one array is trained through the input and through the head."""
    tied = init_model(CONFIG, keys.root(0))
    untied = init_model(dataclasses.replace(CONFIG, tied=False), keys.root(0))
    untied.head[...] = tied.embed[...].T
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (2, 6)), jnp.int32)

    def loss(model):
        return jnp.sum(jax.nn.log_softmax(logits(model, hidden(model, tokens)))[..., 3])

    one, two = (quick_jit(jax.grad(loss))(m) for m in (tied, untied))
    both = two.embed[...] + two.head[...].T
    np.testing.assert_allclose(one.embed[...], both, rtol=0, atol=1e-4)
    assert min(float(jnp.abs(x).max()) for x in (two.embed[...], two.head[...])) > 0.1


# ---- memory

VOCAB, WIDTH, ROWS = 65536, 1025, 2
ALL_LOGITS = ROWS * (WIDTH - 1) * VOCAB


def program(name):
    """The compiled program that a run calls, for a model whose logits dwarf everything else."""
    config = ModelConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8
    )
    model, key = abstract_model(config), jax.eval_shape(lambda: keys.root(0))
    rows = Rows(*(shape(s, jnp.int32) for s in ((ROWS, WIDTH), (ROWS,), (ROWS,))))
    token = shape((ROWS, WIDTH), jnp.float32)
    if name == "policy update with a forward KL":
        tx = make_optimiser(Optimiser(lr=1e-3), total=1)
        state = TrainState(shape((), jnp.int32), model, jax.eval_shape(tx.init, model), key)
        terms = tuple(Term(Batch(rows, token, token, token), loss) for loss in (Clip(), FullKl()))
        lowered = loop._update.lower(state, terms, model, tx=tx, temperature=1.0, microbatch=None)
    elif name == "old, reference and probe scoring":
        lowered = in_passes.lower(token_logps, model, rows, 1.0, at_once=None)
    elif name == "scores and entropy of the batch":
        lowered = in_passes.lower(token_scores, model, rows, 1.0, at_once=None)
    elif name == "predicted change of the probe":
        lowered = gradients._directional.lower(model, model, rows, token, logps=token_logps, chunk=None, order=1)
    else:
        lowered = explicit._gradients.lower(model, rows, token, logps=token_logps)
    return lowered.compile()


def shape(dims, dtype):
    return jax.ShapeDtypeStruct(dims, dtype)


@pytest.mark.parametrize(
    "name",
    [
        "policy update with a forward KL",
        "old, reference and probe scoring",
        "scores and entropy of the batch",
        "predicted change of the probe",
        "gradients of the kernel",
    ],
)
def test_no_pass_of_a_run_ever_holds_the_logits_of_all_positions(name):
    """33. Read from the compiled programs that training calls: no array of them is [rows, T, V], nor do all add up to it."""
    compiled = program(name)
    arrays = re.findall(r"\b(?:f16|bf16|f32|f64)\[([\d,]+)\]", compiled.as_text())
    biggest = max(math.prod(map(int, dims.split(","))) for dims in arrays)
    assert ROWS * VOCAB < biggest <= ALL_LOGITS / 8  # eight chunks of positions
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * ALL_LOGITS


# ---- a run


def by_length(verdict: Verdict) -> float:
    """A reward that a random model earns unevenly."""
    return float(len(verdict.answer or "") % 3)


def tiny_experiment() -> Experiment:
    """Two steps of an untrained model, computed in half precision, with two mini-batches each."""
    return Experiment(
        model=ModelSpec(init=CONFIG, dtype="bfloat16"),
        task=Msa0Spec(),
        reward=Custom(call=f"{__name__}:by_length"),
        algorithm=dataclasses.replace(ALGORITHMS["grpo"], minibatches=2),
        rollout=RolloutSpec(prompts=8, n=4, max_new_tokens=4, log_greedy=False),
        optimiser=Optimiser(lr=1e-3, microbatch=8),
        steps=2,
        mesh=MeshSpec(data=8, fsdp=1),
        probe=ProbeSpec(prompts=8, n=2),
        influence=InfluenceSpec(every=0),
        eval=EvalSpec(every=0, n=4, k=(1,)),
    )


@pytest.fixture(scope="module")
def run_lines(tmp_path_factory):
    folder = loop.train(tiny_experiment(), {}, out=tmp_path_factory.mktemp("run"), quiet=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_logs_what_would_betray_these_faults(run_lines):
    """3, 4, 16, 19, 24, 30. Mismatch before any clip, ratios of 1, truncation, dead groups, counts, swallowed updates."""
    train = [line for line in run_lines if line["kind"] == "train"]
    assert [line["step"] for line in train] == [0, 1]
    for line in train:
        assert line["clip/before_token"] == line["clip/before_active"] == line["clip/before_sequence"] == 0
        assert line["clip/before_ratio"] == pytest.approx(1, abs=1e-2)
        assert 0 <= line["kl/sampler_mean"] <= line["kl/sampler_max"] < 0.2
        assert 0 < line["rollout/truncated"] <= 1
        assert line["rollout/truncated/n"] == line["reward/mean/n"] == 32
        assert 0 <= line["reward/zero_signal_groups"] < 1
        assert line["optim/grad_norm/n"] == 2  # one observation a mini-batch
        assert line["optim/param_changed"] > 0.5
    assert [line["optim/updates"] for line in train] == [2, 4]


@pytest.mark.slow
def test_the_probe_of_a_run_telescopes(run_lines):
    """A2: step changes add up to the change since the base, as recorded."""
    probe = [line for line in run_lines if line["kind"] == "probe"]
    assert len(probe) == 2
    for scale in ("sum", "tok"):
        total = sum(line[f"probe/all_{scale}"] for line in probe)
        assert abs(total) > 1e-4
        assert total == pytest.approx(probe[-1][f"probe/cumulative_all_{scale}"], abs=1e-4)
