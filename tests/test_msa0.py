"""MSA-0 is the task that SCIENCE D.1 defines, and grades as it says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import keys
from jaxrl.data import synthetic as msa
from jaxrl.data.synthetic import BOS, COD, DIGIT, EOS, EQUALS, FAMILY, LNG, PAD, Msa0
from jaxrl.types import Rows

ALL = np.arange(320)


def test_the_vocabulary_has_24_distinct_tokens():
    ids = {PAD, BOS, *range(DIGIT, DIGIT + 10), *range(FAMILY, FAMILY + 8), LNG, COD, EOS, EQUALS}
    assert ids == set(range(24)) == set(range(msa.VOCAB_SIZE))
    assert len(set(msa.NAMES)) == 24


def test_the_320_prompts_are_all_of_the_grid_once():
    prompts = Msa0().prompts()
    assert prompts.tokens.shape == (320, 5)
    assert (prompts.length == 5).all()
    assert prompts.uid.tolist() == list(range(320))
    grid = {(BOS, FAMILY + f, DIGIT + a, DIGIT + b, EQUALS) for f in range(8) for a in range(10) for b in range(4)}
    assert {tuple(row) for row in prompts.tokens.tolist()} == grid


def test_a_prompt_number_says_which_prompt_it_is():
    uid = 40 * 3 + 4 * 7 + 2
    assert Msa0().prompts(np.array([uid])).tokens.tolist() == [[BOS, FAMILY + 3, DIGIT + 7, DIGIT + 2, EQUALS]]
    assert [int(x) for x in msa.digits(uid)] == [3, 7, 2]
    assert int(msa.answer(uid)) == (7 + 3) % 10
    assert Msa0().decode(Msa0().tokens[uid].tolist()) == "BOS F3 7 2 ="


def test_families_are_those_of_the_specification():
    rows = [(f.role, f.language, f.code, f.code_share, f.trained) for f in msa.FAMILIES]
    assert rows == [
        ("easy", 0.75, 0.5, 0.15, True),
        ("easy", 0.70, 0.5, 0.15, True),
        ("mid", 0.45, 0.45, 0.15, True),
        ("hard", 0.0, 0.5, 0.05, True),
        ("hard", 0.0, 0.5, 0.05, True),
        ("minerva", 0.0, 0.6, 0.25, False),
        ("easy", 0.70, 0.5, 0.15, False),
        ("hard", 0.0, 0.5, 0.08, False),
    ]
    assert msa.roles(np.array([0, 39, 40, 200])).tolist() == ["easy", "easy", "easy", "minerva"]


def test_splits_hold_out_a_fifth_of_each_trained_family_and_all_of_the_others():
    split = Msa0().split()
    assert {name: len(uid) for name, uid in split.items()} == {"train": 160, "heldout": 40, "ood": 120}
    assert sorted(np.concatenate(list(split.values())).tolist()) == list(range(320))
    assert np.bincount(split["heldout"] // 40, minlength=8).tolist() == [8] * 5 + [0] * 3
    assert split["ood"].tolist() == list(range(200, 320))


def test_splits_are_a_function_of_the_named_key_alone():
    first, again, other = (Msa0(seed).split(keys.root(k)) for seed, k in ((0, 3), (5, 3), (0, 4)))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["heldout"], other["heldout"])


def test_teacher_success_has_the_family_means_and_is_zero_where_they_are():
    success = Msa0(0).success
    for number, family in enumerate(msa.FAMILIES):
        drawn = success[40 * number : 40 * number + 40]
        for column, mean in enumerate((family.language, family.code)):
            if mean == 0:
                assert (drawn[:, column] == 0).all()
                continue
            sd = np.sqrt(mean * (1 - mean) / 9)  # Beta(8m, 8(1-m))
            assert abs(drawn[:, column].mean() - mean) < 4 * sd / np.sqrt(40)
            assert 0.5 * sd < drawn[:, column].std() < 1.6 * sd


def test_teacher_success_depends_on_the_base_seed_and_not_on_double_precision():
    assert not np.array_equal(Msa0(0).success, Msa0(1).success)
    single = Msa0(2).success
    with jax.enable_x64(True):
        assert np.array_equal(single, Msa0(2).success)


def test_the_teacher_distribution_sums_to_one_and_agrees_with_its_parts():
    task = Msa0(0)
    dense = task.teacher_probability(ALL)
    np.testing.assert_allclose(dense.sum(axis=(1, 2, 3)), 1, rtol=0, atol=1e-12)
    family, a, b = msa.digits(ALL)
    truth, distractor = (a + family) % 10, (a + family + 1) % 10
    np.testing.assert_allclose(dense.sum(axis=(1, 2))[ALL, truth], task.true_p(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(dense.sum(axis=(1, 2))[ALL, distractor], 1 - task.true_p(), rtol=0, atol=1e-12)
    shares = np.array([f.code_share for f in msa.FAMILIES])
    np.testing.assert_allclose(dense.sum(axis=(2, 3))[:, 1], shares[family], rtol=0, atol=1e-12)
    work = dense.sum(axis=(1, 3))
    np.testing.assert_allclose(work[ALL, a], np.where(a == b, 1, 0.7), rtol=0, atol=1e-12)
    np.testing.assert_allclose(work[ALL, b], np.where(a == b, 1, 0.3), rtol=0, atol=1e-12)


def test_supervised_batches_follow_the_teacher_distribution():
    task, n = Msa0(0), 40_000
    rows = jax.device_get(jax.jit(lambda key: task.supervised_batch(key, n))(keys.root(1)))
    assert rows.tokens.shape == (n, 9)
    assert (rows.start == 5).all()
    assert (rows.length == 9).all()
    index = {tuple(p): i for i, p in enumerate(task.tokens.tolist())}
    uid = np.array([index[tuple(p)] for p in rows.tokens[:, :5].tolist()])
    response = rows.tokens[:, 5:]
    assert msa.well_formed(response, np.full(n, 4)).all()
    assert abs(np.bincount(uid, minlength=320) - n / 320).max() < 5 * np.sqrt(n / 320)
    counts = np.zeros((2, 10, 10))
    np.add.at(counts, (response[:, 0] - LNG, response[:, 1] - DIGIT, response[:, 2] - DIGIT), 1)
    expected = n * task.teacher_probability(uid).mean(axis=0)
    assert (abs(counts - expected) <= 5 * np.sqrt(expected)).all()
    right = task.correct(uid, response, np.full(n, 4))
    for family in range(8):
        mine = uid // 40 == family
        assert abs(right[mine].mean() - task.true_p(uid[mine]).mean()) < 4 * 0.5 / np.sqrt(mine.sum())


def test_supervised_batches_do_not_depend_on_double_precision():
    def draw():
        return jax.device_get(jax.jit(msa.teacher_rows, static_argnums=2)(keys.root(1), Msa0(0).teacher(), 64)).tokens

    single = draw()
    with jax.enable_x64(True):
        assert np.array_equal(single, draw())


UID = 40 * 2 + 4 * 9 + 1  # family 2, a 9, b 1: the answer is 1
RESPONSES = [
    ("language", [LNG, DIGIT + 9, DIGIT + 1, EOS], 4, True),
    ("code", [COD, DIGIT + 1, DIGIT + 1, EOS], 4, True),
    ("a work digit that the teacher never writes", [LNG, DIGIT + 5, DIGIT + 1, EOS], 4, True),
    ("padding after the end is not read", [LNG, DIGIT + 9, DIGIT + 1, EOS, COD], 4, True),
    ("the distractor", [LNG, DIGIT + 9, DIGIT + 2, EOS], 4, False),
    ("no strategy", [DIGIT + 9, DIGIT + 1, EOS, PAD], 3, False),
    ("a strategy twice", [LNG, LNG, DIGIT + 1, EOS], 4, False),
    ("a family in the place of the work digit", [COD, FAMILY, DIGIT + 1, EOS], 4, False),
    ("a family in the place of the answer", [COD, DIGIT, FAMILY + 1, EOS], 4, False),
    ("no work digit", [LNG, DIGIT + 1, EOS, PAD], 3, False),
    ("cut off before EOS", [LNG, DIGIT + 9, DIGIT + 1, PAD], 3, False),
    ("EOS outside the response", [LNG, DIGIT + 9, DIGIT + 1, EOS], 3, False),
    ("padding in the place of EOS", [LNG, DIGIT + 9, DIGIT + 1, PAD], 4, False),
    ("one token too many", [LNG, DIGIT + 9, DIGIT + 1, DIGIT + 1, EOS], 5, False),
    ("rambling to the limit", [LNG, DIGIT + 9, DIGIT + 1, DIGIT + 1, DIGIT + 1], 5, False),
    ("EOS at once", [EOS, PAD, PAD, PAD], 1, False),
    ("nothing", [PAD, PAD, PAD, PAD], 0, False),
]


@pytest.mark.parametrize(("tokens", "length", "expected"), [r[1:] for r in RESPONSES], ids=[r[0] for r in RESPONSES])
def test_a_response_is_correct_only_when_well_formed_and_right(tokens, length, expected):
    assert bool(Msa0().correct(np.array(UID), np.array(tokens), np.array(length))) is expected


def test_responses_shorter_than_four_tokens_are_all_wrong():
    assert not Msa0().correct(np.array([UID]), np.array([[EOS]]), np.array([1])).any()


def test_twenty_of_the_200_well_formed_responses_are_correct_for_each_prompt():
    every = msa.well_formed_responses()
    assert len({tuple(r) for r in every.tolist()}) == 200
    uid = np.repeat(ALL, 200)
    right = Msa0().correct(uid, np.tile(every, (320, 1)), np.full(len(uid), 4)).reshape(320, 200)
    assert (right.sum(axis=1) == 20).all()
    listed = msa.correct_responses(ALL)
    for i in (0, 137, 319):
        assert np.array_equal(listed[i], every[right[i]])
    assert (listed[:, :10, 0] == LNG).all()
    assert (listed[:, 10:, 0] == COD).all()


def test_rows_of_a_group_are_graded_against_their_own_prompt():
    task, uid = Msa0(), np.array([0, 41, 319])
    right = msa.correct_responses(uid)[:, [0, 15]]
    wrong = right.copy()
    wrong[:, 1, 2] = DIGIT + (msa.answer(uid) + 3) % 10
    prompts = np.repeat(task.tokens[uid][:, None], 2, axis=1)
    tokens = np.concatenate([prompts, wrong, np.full((3, 2, 1), COD)], axis=2).astype(np.int32)
    rows = Rows(jnp.asarray(tokens), jnp.full((3, 2), 5), jnp.full((3, 2), 9))
    assert task.grade(uid, rows).tolist() == [[True, False]] * 3
    single = Rows(rows.tokens[:2, 0], rows.start[:2, 0], rows.length[:2, 0])
    assert task.grade(uid[:2], single).tolist() == [True, True]
    assert task.grade(uid[1::-1], single).tolist() == [False, False]


def test_the_mode_is_named_by_the_first_token():
    tokens = np.array([[LNG, PAD], [COD, EOS], [EOS, COD], [COD, PAD]])
    assert msa.mode(tokens, np.array([1, 2, 1, 0])).tolist() == [msa.MODE_LANGUAGE, msa.MODE_CODE, -1, -1]


def test_enumeration_lists_the_12720_responses_of_three_tokens_once():
    tokens, length = msa.enumerate_responses(3)
    assert len(tokens) == 12_720
    assert len({(*t, n) for t, n in zip(tokens.tolist(), length.tolist(), strict=True)}) == 12_720
    assert [int((length == n).sum()) for n in (1, 2, 3)] == [1, 23, 23**2 + 23**3]
    ended = tokens[np.arange(len(tokens)), length - 1] == EOS
    assert int(ended.sum()) == 1 + 23 + 23**2
    inside = np.arange(3) < (length - 1)[:, None]
    assert not ((tokens == EOS) & inside).any()


def test_tasks_of_one_seed_are_equal_and_hashable():
    assert Msa0(3) == Msa0(3) != Msa0(4)
    assert hash(Msa0(3)) == hash(Msa0(3))
    assert dataclasses.replace(Msa0(3), seed=4) == Msa0(4)
    assert Msa0().stop_ids == {EOS}
