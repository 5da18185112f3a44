"""A rollout engine behind HTTP: what it asks, what it believes, and what it does when the server is not there."""

import dataclasses
import itertools
import json
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import PLAIN, table_model
from safetensors.numpy import load_file
from stub_server import StubServer, choice

from jaxrl import keys
from jaxrl.errors import JaxrlError
from jaxrl.models.decoder import build, param_shapes
from jaxrl.sampling.client import Backoff, Client, Lost, insist
from jaxrl.sampling.completions import BadAnswer, drawn_by, sample_seed
from jaxrl.sampling.export import export, some_probe
from jaxrl.sampling.remote import RemoteSpec
from jaxrl.sampling.remote_stream import ServerLost, StaleSample
from jaxrl.sampling.requests import CAPS, Request, Sampling
from jaxrl.sampling.server import WrongVersion
from jaxrl.sampling.strategies import Greedy, Temperature, TopK, TopKTopP, TopP
from jaxrl.types import STOP_EOS, STOP_LENGTH

VOCAB, STOP = 12, 3


def policy(seed: int):
    return table_model(np.random.default_rng(seed).normal(0, 1.5, (VOCAB, VOCAB)))


V0, V1 = policy(0), policy(1)


def requests(n=3, max_new=6):
    return [Request(uid=u, prompt=np.asarray([5, 7, 4 + u]), n=n, max_new=max_new) for u in (2, 5)]


def sampling(strategy=None, step=0):
    return Sampling(strategy or Temperature(), (STOP,), keys.root(0), step)


@pytest.fixture
def server():
    with StubServer(VOCAB) as stub:
        yield stub


def engine_for(stub, folder, reload=None, **changes):
    settings = dict(probe=8, tolerance=1e-4, timeout=5.0, backoff=0.01, ceiling=0.05, patience=1.0, concurrency=4)
    spec = RemoteSpec(url=stub.url, model="policy", folder=str(folder / "weights"), **(settings | changes))
    return spec.build(reload=reload)


@pytest.fixture
def engine(server, tmp_path):
    engine = engine_for(server, tmp_path)
    engine.load(V0, 0)
    server.questions.clear()
    return engine


def named(samples):
    return {(s.uid, s.index): s for s in samples}


ALL = {(u, g) for u in (2, 5) for g in range(3)}


def test_each_sample_comes_once_with_ids_logps_stop_and_version(engine, server):
    samples = list(engine.stream(requests(), sampling(Temperature(value=0.7))))
    assert sorted((s.uid, s.index) for s in samples) == sorted(ALL)
    for s in samples:
        path = [5, 7, 4 + s.uid, *s.tokens.tolist()]
        want = [server.logps(0.7)[a, b] for a, b in itertools.pairwise(path[2:])]
        np.testing.assert_allclose(s.logps, want, atol=1e-5)
        assert (s.version, s.processed, s.tokens.dtype, s.logps.dtype) == (0, True, np.int32, np.float32)
        assert s.stop == (STOP_EOS if s.tokens[-1] == STOP else STOP_LENGTH)
        assert (s.tokens[:-1] != STOP).all()
        assert len(s.tokens) == 6 or s.stop == STOP_EOS
    assert {s.stop for s in samples} == {STOP_EOS, STOP_LENGTH}
    assert engine.caps == {"logprobs", "processed_logprobs", "per_request_seed", "sleep"} <= set(CAPS)


def test_a_sample_depends_on_key_step_uid_and_index_alone(engine):
    one = named(engine.stream(requests(), sampling()))
    other = named(engine.stream([dataclasses.replace(requests()[1], first=2, n=1)], sampling()))
    assert one[5, 2].tokens.tolist() == other[5, 2].tokens.tolist()
    seeds = {sample_seed([0, k], s, u, g) for k in (0, 1) for s in (0, 1) for u in (0, 1) for g in (0, 1)}
    assert len(seeds) == 16
    assert max(seeds) < 2**53
    assert sample_seed([0, 1], 2, 3, 4) == sample_seed([0, 1], 2, 3, 4)


def test_what_shapes_the_distribution_is_asked_for_in_full(engine, server):
    list(engine.stream(requests(n=1), sampling(TopKTopP(k=4, p=0.9, temperature=0.5))))
    body = server.questions[0]
    assert (body["top_k"], body["top_p"], body["temperature"], body["min_p"]) == (4, 0.9, 0.5, 0.0)
    assert (body["stop_token_ids"], body["ignore_eos"], body["n"], body["max_tokens"]) == ([STOP], True, 1, 6)
    assert body["repetition_penalty"] == 1 != body["presence_penalty"] == body["frequency_penalty"] == 0
    assert drawn_by(Greedy()) == {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert drawn_by(TopK(k=2, temperature=0.5)) == drawn_by(Temperature(value=0.5)) | {"top_k": 2}
    assert drawn_by(TopP(p=0.5)) == drawn_by(Temperature()) | {"top_p": 0.5}


def test_load_writes_whole_folders_and_the_server_follows(engine, server, tmp_path):
    assert server.calls == [
        "/pause?mode=wait",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/resume",
        "/update_weight_version",
    ]
    old = server.logps()
    engine.load(V1, 1)
    assert np.abs(server.logps() - old).max() > 1
    assert {s.version for s in engine.stream(requests(), sampling())} == {1}
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["1"]
    assert json.loads((tmp_path / "weights" / "1" / "config.json").read_text())["vocab_size"] == VOCAB


def test_a_tied_model_is_written_with_a_head_of_its_own(tmp_path):
    rng = np.random.default_rng(0)
    leaves = {name: rng.normal(size=shape).astype(np.float32) for name, shape in param_shapes(PLAIN).items()}
    model = build(PLAIN, {name: jnp.asarray(x) for name, x in leaves.items()})
    folder = export(model, tmp_path, 3, "float32")
    tensors = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_raw_logps_are_recognised_and_flagged(tmp_path):
    with StubServer(VOCAB, processed=False) as server:
        engine = engine_for(server, tmp_path)
        engine.load(V0, 0)
        assert "processed_logprobs" not in engine.caps
        flags = [next(engine.stream(requests(), sampling(s))).processed for s in (Temperature(value=0.7), TopP(p=0.5))]
        plain = [next(engine.stream(requests(), sampling(s))).processed for s in (Temperature(), Greedy())]
        assert (flags, plain) == ([False, False], [True, True])
        with pytest.raises(JaxrlError, match=r"processed: True was declared, but .* nats a token"):
            engine_for(server, tmp_path, processed=True).load(V0, 0)


@pytest.mark.parametrize("labels", [True, False])
def test_a_server_with_other_weights_is_an_error_that_names_both_numbers(engine, server, labels):
    server.obeys, server.labels = False, labels
    with pytest.raises(WrongVersion, match=r"version 1: .* is -\d+\.\d+ nats and ours -\d+\.\d+; .* \d+\.\d+ apart"):
        engine.load(V1, 1)


def test_a_server_whose_answer_does_not_move_has_not_loaded(server, tmp_path):
    engine = engine_for(server, tmp_path, tolerance=9.0)  # wider than the step
    engine.load(V0, 0)
    server.obeys = False
    with pytest.raises(WrongVersion, match=r"moved by \d\.\d+ nats a token, the server's by 0.0000: it still serves"):
        engine.load(V1, 1)


def test_single_tokens_that_rounding_throws_far_off_are_no_other_version(engine, server):
    a, b = some_probe(V0, 8)[:2]
    server.scores[a, b] -= 6
    engine.still_served()
    server.scores += np.random.default_rng(0).normal(0, 0.01, server.scores.shape)
    with pytest.raises(WrongVersion, match="does not serve version 0"):
        engine.still_served()


def test_weights_that_change_under_a_stream_are_an_error(engine, server):
    stream = engine.stream(requests(), sampling())
    next(stream)
    server.label = "of another trainer"
    with pytest.raises(WrongVersion, match="of another trainer"):
        list(stream)


def _edit(**changes):
    return lambda answer: {"choices": [answer["choices"][0] | changes]}


def _logps(edit):
    def lie(answer):
        words = answer["choices"][0]["logprobs"]
        return _edit(logprobs=words | {"token_logprobs": edit(words["token_logprobs"])})(answer)

    return lie


def _answer(ids, stop=None):
    return lambda answer: choice(ids, [-1.0] * len(ids), prompt=answer["choices"][0]["prompt_token_ids"], stop=stop)


LIES = {
    "text only": (_edit(token_ids=None, logprobs={"tokens": ["a"], "token_logprobs": [-1.0]}), "return_token_ids"),
    "text alone": (_edit(token_ids=None, logprobs=None), "got text only.*return_token_ids"),
    "no log-probs": (_edit(logprobs=None), "expected log-probabilities, got none"),
    "NaN": (_logps(lambda x: [*x[:-1], float("nan")]), r"log-probability of token \d is nan"),
    "None": (_logps(lambda x: [None, *x[1:]]), "log-probability of token 0 is None"),
    "positive": (_logps(lambda x: [0.5, *x[1:]]), "log-probability of token 0 is 0.5"),
    "no mass": (_logps(lambda x: [-9999.0, *x[1:]]), "log-probability of token 0 is -9999"),
    "fewer log-probs": (_logps(lambda x: x[:-1]), r"\d token ids, but \d log-probabilities"),
    "two samples": (lambda a: {"choices": a["choices"] * 2}, "expected 1 sample, got 2"),
    "no sample": (lambda a: {"choices": []}, "expected 1 sample, got 0"),
    "not a completion": (lambda a: {"data": 3}, "is this a completions server"),
    "outside the vocabulary": (_answer([1, VOCAB, STOP], STOP), f"id {VOCAB} is outside the vocabulary of {VOCAB}"),
    "another prompt": (_edit(prompt_token_ids=[1, 5, 7, 6]), "prompt has 3 ids and the server read 4"),
    "past the stop id": (_answer([1, STOP, 1]), f"token 1 is the stop id {STOP}, and 1 tokens follow"),
    "stop id left out": (_answer([1, 1], STOP), "stopped after token 1, which is no stop id"),
    "too long": (_answer([1] * 7), "expected 1 to 6 tokens, got 7"),
    "cut": (_answer([1] * 5), "cut after 5 of 6 tokens.*--max-model-len"),
    "nothing": (_answer([]), "expected 1 to 6 tokens, got 0"),
}


@pytest.mark.parametrize("name", LIES)
def test_an_answer_that_is_no_sample_is_an_error_that_names_the_request(engine, server, name):
    server.lie, message = LIES[name]
    with pytest.raises(BadAnswer, match=f"uid 2, sample 0.*{message}"):
        list(engine.stream(requests(n=1)[:1], sampling()))


def test_ids_are_read_from_the_logprobs_where_they_are_given_there(engine, server):
    want = named(engine.stream(requests(), sampling()))
    server.lie = _edit(token_ids=None)
    got = named(engine.stream(requests(), sampling()))
    assert all(got[k].tokens.tolist() == want[k].tokens.tolist() for k in ALL)


@pytest.mark.parametrize(
    "fault", [lambda a: 503, lambda a: 429, lambda a: 500, lambda a: None, _edit(finish_reason="abort")]
)
def test_what_fails_for_a_while_is_asked_again(engine, server, fault):
    want = named(engine.stream(requests(), sampling()))
    server.faults.extend([fault] * 3)
    got = named(engine.stream(requests(), sampling()))
    assert all(got[k].tokens.tolist() == want[k].tokens.tolist() for k in ALL)


def test_a_refusal_is_not_asked_again(engine, server):
    server.faults.append(lambda a: 400)
    with pytest.raises(JaxrlError, match="status 400"):
        list(engine.stream(requests(n=1)[:1], sampling()))
    assert len(server.questions) == 1


def test_samples_stream_out_while_another_is_slow(engine, server):
    slow = threading.Event()
    server.faults.append(lambda a: (slow.wait(4), a)[1])
    stream = engine.stream(requests(), sampling())
    assert len([next(stream) for _ in range(5)]) == 5
    assert not slow.is_set()
    slow.set()
    assert len(list(stream)) == 1


def test_a_silent_server_is_asked_again(server, tmp_path):
    engine = engine_for(server, tmp_path, timeout=0.3, patience=5.0)
    engine.load(V0, 0)
    server.questions.clear()
    server.faults.append(lambda a: (server.dead.wait(2), a)[1])
    assert len(list(engine.stream(requests(n=1)[:1], sampling()))) == 1
    assert len(server.questions) >= 2
    assert server.questions[0] == server.questions[1]


def test_a_server_that_dies_and_comes_back_costs_only_what_was_unfinished(server, tmp_path):
    engine = engine_for(server, tmp_path, concurrency=2, patience=5.0)
    engine.load(V0, 0)
    want = named(engine.stream(requests(), sampling()))
    server.questions.clear()
    server.faults.extend([lambda a: a] * 2 + [lambda a: (server.dead.wait(4), None)[1]] * 2)
    stream = engine.stream(requests(), sampling())
    got = [next(stream), next(stream)]
    while len(server.questions) < 4:
        time.sleep(0.005)
    server.stop()
    threading.Timer(0.15, server.start).start()  # it comes back with the weights of nobody
    with pytest.warns(UserWarning, match="version 0 is loaded again"):
        got += list(stream)
    assert len(got) == 6
    got = named(got)
    assert all(got[k].tokens.tolist() == want[k].tokens.tolist() and got[k].version == 0 for k in ALL)
    asked = [(q["prompt"][-1], q["seed"]) for q in server.questions]
    assert len(asked) == 8  # six, and twice the two that were lost
    assert {asked.count(x) for x in asked[:2]} == {1}
    assert not engine.in_doubt


def test_a_server_lost_after_the_last_sample_is_no_error(engine, server):
    stream = engine.stream(requests(), sampling())
    assert len([next(stream) for _ in range(6)]) == 6
    server.stop()
    assert list(stream) == []


def test_a_stream_that_is_given_up_leaves_no_question_behind(engine, server):
    server.faults.extend([lambda a: a] + [lambda a: server.dead.wait(20)] * 9)
    stream = engine.stream(requests(), sampling())
    next(stream)
    stream.close()
    working = [thread for thread in threading.enumerate() if thread.name == "jaxrl-remote"]
    until = time.monotonic() + 3  # a question may take 5 s
    for thread in working:
        thread.join(max(0, until - time.monotonic()))
    assert not any(thread.is_alive() for thread in working)


def test_a_server_that_stays_away_is_an_error_that_names_what_is_missing(server, tmp_path):
    engine = engine_for(server, tmp_path, concurrency=1, patience=0.2)
    engine.load(V0, 0)
    server.faults.extend([lambda a: a, lambda a: (server.stop(), None)[1]])
    stream = engine.stream(requests(), sampling())
    assert next(stream).index == 0
    with pytest.raises(ServerLost, match=r"5 of 6 samples are missing \(uid 2: 1, 2; uid 5: 0, 1, 2\)") as caught:
        next(stream)
    assert set(caught.value.missing) == ALL - {(2, 0)}


def test_an_error_comes_after_what_was_finished(engine, server):
    go = threading.Event()
    server.faults.extend([lambda a: a, lambda a: (go.wait(4), 400)[1]])
    stream = engine.stream(requests(), sampling())
    next(stream)
    go.set()
    while any(thread.name == "jaxrl-remote" for thread in threading.enumerate()):
        time.sleep(0.005)  # until all else is answered
    assert len([next(stream) for _ in range(4)]) == 4
    with pytest.raises(JaxrlError, match="status 400"):
        next(stream)


def test_a_load_waits_for_questions_under_way_and_later_samples_are_of_the_new_version(server, tmp_path):
    engine = engine_for(server, tmp_path, concurrency=1)
    engine.load(V0, 0)
    begun, go = threading.Event(), threading.Event()
    server.faults.extend([lambda a: a, lambda a: (begun.set(), go.wait(4), a)[2]])
    stream = engine.stream(requests(), sampling())
    versions = [next(stream).version]
    assert begun.wait(4)
    loading = threading.Thread(target=engine.load, args=(V1, 1))
    loading.start()
    loading.join(0.1)
    assert engine.version == 0  # held up by the second question
    go.set()
    versions += [s.version for s in stream]
    loading.join()
    assert versions == [0, 0, 1, 1, 1, 1]


def test_samples_older_than_allowed_are_refused(server, tmp_path):
    engine = engine_for(server, tmp_path, max_staleness=0)
    engine.load(V0, 0)
    stream = engine.stream(requests(), sampling())
    next(stream)
    while len(server.questions) < 7:  # six, and the one of `load`
        time.sleep(0.005)
    engine.load(V1, 1)
    with pytest.raises(StaleSample, match=r"of version 0, 1 behind version 1; max_staleness allows 0"):
        next(stream)


def test_the_server_can_be_told_by_a_command_or_a_function(server, tmp_path):
    told = []
    engine = engine_for(server, tmp_path, reload=lambda folder, version: (server.load(folder), told.append(version)))
    engine.load(V0, 4)
    assert told == [4]
    assert "/collective_rpc" not in server.calls
    note = tmp_path / "told"
    command = ("sh", "-c", f"echo {{version}} > {note}")
    engine_for(server, tmp_path, reload_command=command).load(V0, 4)  # it serves these weights already
    assert note.read_text() == "4\n"
    with pytest.raises(JaxrlError, match="reload_command: sh failed with status 3: no"):
        engine_for(server, tmp_path, reload_command=("sh", "-c", "echo no >&2; exit 3")).load(V0, 4)


def test_a_reload_that_restarts_the_server_is_run_once(server, tmp_path):
    told = []

    def restart(folder, version):
        told.append(version)
        server.stop()
        threading.Timer(0.15, server.start, (folder,)).start()

    engine = engine_for(server, tmp_path, reload=restart, patience=5.0)
    engine.load(V0, 0)
    assert told == [0]
    assert {s.version for s in engine.stream(requests(), sampling())} == {0}


def test_the_key_of_the_server_is_sent_and_must_be_set(server, tmp_path, monkeypatch):
    with pytest.raises(JaxrlError, match="the environment variable ROLLOUT_KEY is not set"):
        engine_for(server, tmp_path, key_variable="ROLLOUT_KEY")
    monkeypatch.setenv("ROLLOUT_KEY", "secret")
    engine_for(server, tmp_path, key_variable="ROLLOUT_KEY").load(V0, 0)
    assert server.authorised == {"Bearer secret"}


def test_sleep_does_nothing_where_the_server_cannot_and_a_stream_needs_parameters(engine, server):
    engine.sleep()
    assert "sleep" not in engine.caps
    assert len(list(engine.stream(requests(), sampling()))) == 6
    with pytest.raises(RuntimeError, match="call load"):
        engine.spec.build().stream(requests(), sampling())


def test_requests_and_settings_that_cannot_be_are_refused(engine, server, tmp_path):
    for bad in (dict(n=0), dict(max_new=0), dict(prompt=np.asarray([])), dict(prompt=np.asarray([VOCAB]))):
        with pytest.raises(ValueError, match="uid 2"):
            engine.stream([dataclasses.replace(requests()[0], **bad)], sampling())
    server.room = 8
    engine.load(V0, 0)
    with pytest.raises(ValueError, match="exceed the model's context of 8"):
        engine.stream(requests(max_new=6), sampling())
    for bad in (dict(concurrency=0), dict(timeout=0.0), dict(max_staleness=-1), dict(keep=0)):
        with pytest.raises(ValueError, match=f"rollout.engine.{next(iter(bad))}"):
            engine_for(server, tmp_path, **bad)
    with pytest.raises(ValueError, match="url: expected http"):
        Client("localhost:8000", 1.0)
    with pytest.raises(JaxrlError, match="and no model 'other'"):
        engine_for(server, tmp_path).__class__(dataclasses.replace(engine.spec, model="other")).load(V0, 0)


def test_waiting_doubles_up_to_a_ceiling_and_ends():
    backoff = Backoff(base=1.0, ceiling=4.0, patience=100.0)
    for attempt, most in enumerate((1, 2, 4, 4, 4)):
        waits = [backoff.delay(attempt) for _ in range(50)]
        assert most / 2 <= min(waits) < max(waits) <= most
    asked = []

    def ask():
        asked.append(1)
        raise Lost("gone")

    with pytest.raises(Lost):
        insist(ask, Backoff(base=0.01, ceiling=0.02, patience=0.1))
    assert 4 <= len(asked) <= 20
    asked.clear()
    with pytest.raises(Lost):
        insist(ask, backoff, lambda seconds: True)  # nobody waits
    assert len(asked) == 1
