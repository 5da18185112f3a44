"""Grading while decoding goes on gives what grading at the end gives."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from tiny_tokenizer import save_tiny

from jaxrl import keys
from jaxrl.data.synthetic import correct_responses
from jaxrl.rewards import Verdict
from jaxrl.train.experiment import ProblemsSpec
from jaxrl.train.grading import Grader, grade
from jaxrl.train.tasks import msa0_task, problems_task
from jaxrl.types import STOP_EOS, STOP_LENGTH, STOP_NONE, Rollouts, Rows

JOIN = 20  # seconds after which a thread that does not end counts as hung


def rollouts_of(responses, stop):
    """Host rollouts from nested lists of token ids, behind one prompt token."""
    stop = np.asarray(stop, np.int32)
    length = np.asarray([[1 + len(r) for r in row] for row in responses], np.int32)
    tokens = np.zeros((*stop.shape, int(length.max())), np.int32)
    for (p, g), end in np.ndenumerate(length):
        tokens[p, g, 1:end] = responses[p][g]
    return Rollouts(Rows(tokens, np.ones_like(length), length), np.zeros(tokens.shape, np.float32), stop)


def streamed(task, uid, responses, stop, *, order, batch, pause=0.0):
    with Grader(task, uid, len(responses[0]), batch=batch) as grader:
        for p, g in order:
            if stop[p][g] != STOP_NONE:
                grader.add(p, g, np.asarray(responses[p][g]), stop[p][g])
                time.sleep(pause)
        return grader.finish()


def timeless(table):
    return [[v and replace(v, seconds=0.0) for v in row] for row in table]


def check(task, uid, responses, stop):
    """In any order and batches of any size."""
    cells = [(p, g) for p in range(len(responses)) for g in range(len(responses[0]))]
    found = [
        timeless(streamed(task, uid, responses, stop, order=order, batch=batch, pause=pause))
        for order, batch, pause in ((cells, 1, 0.0), (cells[::-1], 3, 1e-3), (cells[1::2] + cells[::2], 100, 0.0))
    ]
    want = timeless(grade(task, uid, rollouts_of(responses, stop)))
    assert found == [want] * 3
    return want


def test_streaming_grades_the_enumerable_task_as_one_call_does():
    task = msa0_task(0, keys.root(0))
    uid = np.asarray([5, 40, 3, 200])
    right = correct_responses(uid)[:, :4].tolist()
    responses = [[row[0], row[1][:2], row[2], row[3][::-1]] for row in right]
    stop = [[STOP_EOS, STOP_LENGTH, STOP_LENGTH, STOP_EOS]] * 3 + [[STOP_NONE] * 4]
    table = check(task, uid, responses, stop)
    assert [[v.status for v in row] for row in table[:3]] == [["correct", "no_box", "wrong", "no_box"]] * 3
    assert table[3] == [None] * 4
    assert table[0][2].rule == "truncated"


@pytest.mark.slow
def test_streaming_grades_problems_as_one_call_does(tmp_path):
    """Some by comparison alone, some by the pool of workers, which then starts on the grader's thread."""
    task = problems_task(ProblemsSpec(train="arithmetic", template="plain", limit=3), str(save_tiny(tmp_path / "t")))
    try:
        uid = task.pools["train"].uid
        texts = [f"\\boxed{{{task.golds[int(u)]}}}" for u in uid]
        responses = [[task.tokenizer.encode(t) for t in (text, "\\boxed{x + 7}", "no answer")] for text in texts]
        table = check(task, uid, responses, [[STOP_EOS, STOP_EOS, STOP_LENGTH]] * 3)
        assert task.verifier._pool is not None
    finally:
        task.close()
    assert [[v.status for v in row] for row in table] == [["correct", "wrong", "no_box"]] * 3


class Slow:
    """A task that grades by the first token and keeps what it was asked; ``hold`` stops it until set."""

    def __init__(self, fail=False, short=False):
        self.fail, self.short, self.calls, self.hold = fail, short, [], threading.Event()

    def grade(self, uid, responses):
        self.hold.wait(JOIN)
        self.calls.append((threading.current_thread().name, len(uid)))
        if self.fail:
            raise OSError("the verifier is gone")
        verdicts = [
            Verdict("correct" if r[0] else "wrong", str(u), "complete", "x", 0.0)
            for u, r in zip(uid, responses, strict=True)
        ]
        return verdicts[: -1 if self.short else None]


def test_a_sample_is_graded_while_others_are_still_missing_and_never_waited_for():
    task = Slow()
    with Grader(task, [7, 8], 8, batch=4) as grader:
        for g in range(8):
            grader.add(0, g, [1], STOP_EOS)  # returns although nothing can be graded
        assert task.calls == []
        task.hold.set()
        until = time.monotonic() + JOIN
        while sum(n for _, n in task.calls) < 8 and time.monotonic() < until:
            time.sleep(1e-3)
        assert {name for name, _ in task.calls} == {"grader"}
        grader.add(1, 0, [0], STOP_EOS)
        table = grader.finish()
    assert [v.status for v in table[0]] == ["correct"] * 8
    assert (table[1][0].status, table[1][0].answer, table[1][1:]) == ("wrong", "8", [None] * 7)
    assert max(n for _, n in task.calls) <= 4


def test_nothing_added_is_a_table_of_nothing():
    with Grader(Slow(), [1, 2], 2) as grader:
        assert grader.finish() == [[None, None], [None, None]]


@pytest.mark.parametrize(("how", "error"), [({"fail": True}, OSError), ({"short": True}, ValueError)])
def test_what_grading_raises_surfaces_at_the_end_and_nothing_hangs(how, error):
    task = Slow(**how)
    task.hold.set()
    with Grader(task, [1], 6, batch=1) as grader:
        for g in range(6):
            grader.add(0, g, [1], STOP_EOS)
        with pytest.raises(error):
            grader.finish()
    assert len(task.calls) == 1  # the rest is not graded in vain
    assert not any(t.name == "grader" for t in threading.enumerate())


def test_an_exception_in_the_decoding_loop_ends_the_thread():
    task = Slow()
    task.hold.set()

    def decode():
        with Grader(task, [1], 2) as grader:
            grader.add(0, 0, [1], STOP_EOS)
            raise KeyError("decoding")

    with pytest.raises(KeyError):
        decode()
    assert not any(t.name == "grader" for t in threading.enumerate())


def test_a_sample_that_is_out_of_place_is_refused():
    with Grader(Slow(), [1], 2) as grader:
        grader._task.hold.set()
        grader.add(0, 1, [1], STOP_EOS)
        for cell, message in (((0, 1), "added twice"), ((0, 2), "outside 1 prompts by 2"), ((1, 0), "outside")):
            with pytest.raises(ValueError, match=message):
                grader.add(*cell, [1], STOP_EOS)
        grader.finish()
        with pytest.raises(RuntimeError, match="after finish"):
            grader.add(0, 0, [1], STOP_EOS)
    with pytest.raises(ValueError, match="batch >= 1"):
        Grader(Slow(), [1], 1, batch=0)
