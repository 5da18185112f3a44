"""What goes wrong is said in one message, and nothing half-written is left."""

import contextlib
import json
import resource
from dataclasses import replace

import numpy as np
import pytest
from train_world import GRPO, SMALL, Killed, assert_same_run, experiment, lines, stop_before_update, use_devices

import jaxrl
from jaxrl import keys
from jaxrl.config import to_tree
from jaxrl.errors import GateFailed, JaxrlError, UsageError
from jaxrl.models.decoder import init_model
from jaxrl.rewards.shaping import Custom
from jaxrl.rl.optimiser import Optimiser
from jaxrl.sampling.strategies import Greedy, TopK, TopP
from jaxrl.train import pending, setup
from jaxrl.train.arrays import ArrayStore
from jaxrl.train.checkpoint import Checkpoints
from jaxrl.train.experiment import EvalSpec, InfluenceSpec, MeshSpec, ModelSpec, RolloutSpec
from jaxrl.train.loop import Run
from jaxrl.train.progress import Progress
from jaxrl.train.record import WriteFailed, append, write_json, write_jsonl

X = experiment(GRPO, influence=InfluenceSpec(every=0), eval=EvalSpec(every=0, n=4, k=(1,)))


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    use_devices(monkeypatch, 1)


@contextlib.contextmanager
def full_disk():
    """The system refuses every write beyond the first bytes of a file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---------------------------------------------------------------- the run folder


def test_a_folder_that_holds_a_run_is_not_trained_over(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="already holds a run; add --resume to go on with it, or name another folder"):
        jaxrl.train(X, out=tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["checkpoints", "base", "probe.npz"])
def test_what_another_run_left_is_not_mixed_with_a_new_one(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=f"holds {name} but no config.json, so it is no run to go on with; remove"):
        jaxrl.train(X, out=tmp_path)


def test_nothing_can_be_resumed_from_an_empty_folder(tmp_path):
    with pytest.raises(UsageError, match=r"nothing to resume, it holds no config.json; start without --resume"):
        jaxrl.train(X, out=tmp_path, resume=True)


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/run"])
def test_a_run_folder_that_cannot_be_written_fails_before_any_work(place, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl.train.loop.set_up", lambda *given: pytest.fail("work began"))
    (tmp_path / "file").write_text("")
    with pytest.raises(JaxrlError, match=r"the run folder cannot be written \(.+\); choose another --out"):
        jaxrl.train(X, out=tmp_path / place)


@pytest.mark.slow
def test_a_resumed_run_refuses_a_changed_config_and_names_the_key(tmp_path, monkeypatch):
    stop_before_update(monkeypatch, 0)
    with pytest.raises(Killed):
        jaxrl.train(X, out=tmp_path / "run", quiet=True)
    other = replace(X, optimiser=Optimiser(lr=1e-3))
    with pytest.raises(UsageError, match=r"cannot resume with a changed config.*\n.*optimiser.lr: 0.002 -> 0.001"):
        jaxrl.train(other, out=tmp_path / "run", resume=True)


@pytest.mark.slow
def test_a_start_that_fails_leaves_the_folder_free_for_the_next(tmp_path):
    wrong = replace(X, rollout=replace(X.rollout, prompts=1000))
    with pytest.raises(UsageError, match=r"rollout.prompts: 1000 prompts a step, but the training set has \d+"):
        jaxrl.train(wrong, out=tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
    assert jaxrl.train(replace(X, steps=1), out=tmp_path / "run", quiet=True) == tmp_path / "run"


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize("strategy", [Greedy(), TopP(p=0.9), TopK(k=5)])
def test_training_refuses_a_sampler_that_restricts_the_support(strategy, tmp_path):
    x = replace(X, rollout=replace(X.rollout, strategy=strategy))
    with pytest.raises(
        UsageError, match=r"rollout.strategy: \w+ restricts the support.*train with {type: temperature}"
    ):
        jaxrl.train(x, out=tmp_path)


def test_a_mesh_that_the_devices_do_not_fill_is_refused(tmp_path):
    with pytest.raises(UsageError, match="mesh: data=3, fsdp=1, tensor=1 needs 3 devices, but there are 1"):
        jaxrl.train(replace(X, mesh=MeshSpec(data=3, fsdp=1)), out=tmp_path)


def test_a_response_that_the_context_cannot_hold_is_refused(tmp_path):
    x = replace(X, rollout=RolloutSpec(prompts=8, n=4, max_new_tokens=40))
    with pytest.raises(
        UsageError, match=r"longest prompt has 5 tokens, which with 40 new ones exceeds .* context of 16"
    ):
        jaxrl.train(x, out=tmp_path)


def test_a_base_that_fails_its_gates_stops_before_any_reinforcement_learning(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "go", lambda self: pytest.fail("training began"))
    x = replace(X, model=ModelSpec(base="msa0"))
    with pytest.raises(GateFailed, match=r"the base model fails .* gates"):
        jaxrl.train(x, out=tmp_path / "run", base=init_model(SMALL, keys.root(0)))
    assert list((tmp_path / "run").iterdir()) == []


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A checkpoint of step 0."""
    with pytest.MonkeyPatch.context() as patch:
        use_devices(patch, 1)
        folder = tmp_path_factory.mktemp("stored")
        checkpoints = Checkpoints(folder, X.checkpoint)
        checkpoints.save(setup.set_up(X).first_state())
        yield checkpoints
        checkpoints.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": ModelSpec(init=replace(SMALL, hidden_size=32))},
            r"model.embed has shape \(24, 16\), expected shape \(24, 32\)",
        ),
        ({"model": ModelSpec(init=replace(SMALL, tied=False))}, r"model.head is not there, expected shape \(16, 24\)"),
        (
            {"optimiser": Optimiser(lr=1.0, type="sgd")},
            r"opt_state.0.mu.embed has shape \(24, 16\), expected no such array",
        ),
    ],
)
def test_a_checkpoint_of_another_model_or_optimiser_is_refused_by_its_first_array(changes, message, stored):
    state = setup.set_up(replace(X, **changes)).first_state()
    with pytest.raises(JaxrlError, match=f"/0: {message}; the checkpoint is of another model or optimiser"):
        stored.restore(state)


def test_a_step_without_a_checkpoint_is_answered_with_those_there_are(stored):
    with pytest.raises(JaxrlError, match="no checkpoint of step 7; there are: 0"):
        stored.restore(setup.set_up(X).first_state(), 7)


# ---------------------------------------------------------------- a full disk


@pytest.mark.parametrize(
    ("owner", "method", "file"),
    [
        (Checkpoints, "save", "checkpoints/4"),
        (ArrayStore, "write", "arrays.zarr/"),
        (Run, "flush", "metrics.jsonl"),
        (Run, "collect", "pending.npz"),
    ],
)
def test_a_full_disk_stops_the_run_at_its_last_checkpoint(owner, method, file, whole, monkeypatch, tmp_path):
    run, real, now = tmp_path / "run", getattr(owner, method), {}

    def limited(self, *given):
        with full_disk() if now.get("step", 0) >= 3 else contextlib.nullcontext():
            return real(self, *given)

    step = Run.step
    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", lambda self, number: now.update(step=number) or step(self, number))
        patch.setattr(owner, method, limited)
        with pytest.raises(WriteFailed) as raised:
            jaxrl.train(X, out=run, quiet=True)
    assert file in str(raised.value)
    assert "nothing half-written was left" in str(raised.value)
    last = 4 if method == "collect" else 2
    assert f"the checkpoint of step {last} stands; make room and add --resume" in str(raised.value)
    assert [f for f in run.rglob("*") if "tmp" in f.name or f.name.endswith((".part", ".__lock"))] == []
    assert all(line["kind"] for line in lines(run))  # whole lines
    jaxrl.train(X, out=run, resume=True, quiet=True)
    assert_same_run(run, whole)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        use_devices(patch, 1)
        return jaxrl.train(X, out=tmp_path_factory.mktemp("whole") / "run", quiet=True)


@pytest.mark.parametrize("write", [write_json, write_jsonl])
def test_a_file_that_cannot_be_written_keeps_its_old_content(write, tmp_path):
    file = tmp_path / "file.json"
    write(file, [{"old": 1}])
    before = file.read_text()
    with full_disk(), pytest.raises(WriteFailed, match=r"file.json: cannot be written: File too large"):
        write(file, [{"new": "x" * 1000}])
    assert file.read_text() == before
    assert [f.name for f in tmp_path.iterdir()] == ["file.json"]


def test_a_line_that_does_not_fit_is_taken_back(tmp_path):
    file = tmp_path / "lines.jsonl"
    append(file, json.dumps({"whole": 1}) + "\n")
    before = file.read_bytes()
    with full_disk(), pytest.raises(WriteFailed, match=r"lines.jsonl: cannot be written: File too large"):
        append(file, json.dumps({"cut": "x" * 1000}) + "\n")
    assert file.read_bytes() == before


# ---------------------------------------------------------------- a run that has lost a part of itself


def done_run(folder, steps=2, recorded=2):
    """What the checks before a resumed run look at, without the training."""
    (folder / "checkpoints" / str(steps)).mkdir(parents=True)
    (folder / "arrays.zarr" / "reward").mkdir(parents=True)
    (folder / "arrays.zarr" / "reward" / ".zarray").write_text("{}")
    records = [{"step": step, "kind": "train"} for step in range(recorded)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    (folder / "config.json").write_text(json.dumps({"experiment": to_tree(X)}))
    return folder


def raises_refused(folder, steps, match, kind=UsageError):
    """The run is refused, and every file is as it was."""
    before = {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    with pytest.raises(kind, match=match):
        jaxrl.train(replace(X, steps=steps), out=folder, resume=True)
    assert {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()} == before


def test_a_run_past_the_steps_asked_for_is_left_as_it_is(tmp_path):
    raises_refused(done_run(tmp_path, 4, 4), 3, "4 steps are done; steps must be at least 4, got 3")


def test_a_checkpoint_without_what_was_recorded_before_it_is_refused(tmp_path):
    (done_run(tmp_path / "a") / "metrics.jsonl").unlink()
    raises_refused(
        tmp_path / "a", 6, "cannot resume at step 2: metrics.jsonl of the steps before it is missing; put it back"
    )
    (done_run(tmp_path / "b") / "arrays.zarr" / "reward" / ".zarray").unlink()
    raises_refused(tmp_path / "b", 6, "arrays.zarr of the steps before it is missing")
    raises_refused(
        done_run(tmp_path / "c", 4, 2), 6, "metrics.jsonl ends with step 1, so it is older than the checkpoint"
    )


@pytest.mark.parametrize("line", ["5", '{"step": 1e400}', "{"])
def test_a_damaged_metric_line_is_named_when_a_run_is_resumed(line, tmp_path):
    file = done_run(tmp_path) / "metrics.jsonl"
    file.write_text('{"step": 0, "kind": "train"}\n' + line + "\n")
    raises_refused(tmp_path, 6, r"metrics\.jsonl:2: expected one JSON object", JaxrlError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected a JSON object, got list"),
        ("5", "expected a JSON object, got int"),
        ('{"experiment": null}', "expected the settings of a run under experiment, got None"),
        ("{\n,", r":2: malformed JSON"),
    ],
)
def test_a_damaged_config_is_named_when_a_run_is_resumed(text, message, tmp_path):
    (done_run(tmp_path) / "config.json").write_text(text)
    raises_refused(tmp_path, 6, rf"config\.json.*{message}", JaxrlError)


@pytest.mark.parametrize("content", [b"cut", b""])
def test_pending_rollouts_that_cannot_be_read_are_collected_again(content, tmp_path):
    (tmp_path / pending.FILE).write_bytes(content)
    assert pending.load(tmp_path, 0) is None


@pytest.mark.parametrize("arrays", [{}, {"note": "5"}, {"note": '{"step": 0, "verdicts": [], "generated_tokens": 1}'}])
def test_pending_rollouts_that_lack_a_part_are_collected_again(arrays, tmp_path):
    np.savez(tmp_path / pending.FILE, **arrays)
    assert pending.load(tmp_path, 0) is None


def test_a_run_without_a_checkpoint_says_so(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", X.checkpoint)
    with pytest.raises(JaxrlError, match="this run has no checkpoint yet"):
        checkpoints.restore({})
    checkpoints.close()


def test_the_progress_of_a_resumed_run_counts_the_whole_run(capsys):
    with Progress(10, "run", done=6) as bar:
        bar.advance(4)
    assert "run: 10/10 steps" in capsys.readouterr().err


# ---------------------------------------------------------------- refused before the base is made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": replace(X.rollout, prompts=1000)}, "rollout.prompts: 1000 prompts a step, but the training set"),
        ({"rollout": replace(X.rollout, max_new_tokens=40)}, "exceeds the model's context of 16"),
        ({"reward": Custom(call="math:sqrt")}, r"reward.call: math:sqrt raised TypeError.*Verdict\(status='correct'"),
    ],
)
def test_what_cannot_train_is_refused_before_the_base_is_made(changes, message, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "train_base", lambda *given: pytest.fail("the base was trained"))
    with pytest.raises(JaxrlError, match=message):
        jaxrl.train(replace(X, model=ModelSpec(base="msa0"), **changes), out=tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
