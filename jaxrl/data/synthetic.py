"""MSA-0: arithmetic with two strategies, small enough that every probability is exact.

A prompt is ``[BOS, family, a, b, =]`` with a in 0-9 and b in 0-3 (320 prompts), a response
``[LNG | COD, work digit, answer digit, EOS]``. It is correct when it is well-formed and its answer
is ``(a + family) mod 10``; the work digit is free, so that each prompt has 20 correct responses
(two strategies times ten work digits) and a model's probability of being right is a sum of 20 terms.

The teacher's probability of the right answer depends on prompt, family and strategy. In four families
only code is ever right; three families are never trained on by RL.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxrl import keys
from jaxrl.data.prompts import response_tokens
from jaxrl.types import Prompts, Rows

PAD, BOS, DIGIT, FAMILY, LNG, COD, EOS, EQUALS = 0, 1, 2, 12, 20, 21, 22, 23
VOCAB_SIZE = 24
NAMES = ("PAD", "BOS", *"0123456789", *(f"F{i}" for i in range(8)), "LNG", "COD", "EOS", "=")

PROMPT_LENGTH = 5
RESPONSE_LENGTH = 4  # of a well-formed response, EOS included
MAX_NEW_TOKENS = 5  # one more than needed: rambling is possible, and wrong
PROMPTS = 320
WORK_HABIT = 0.7  # the teacher writes a as work digit, else b

MODE_NONE, MODE_LANGUAGE, MODE_CODE = -1, 0, 1


@dataclass(frozen=True)
class Family:
    """Mean probability of a right answer by language and by code, share of code, and use in RL."""

    role: str
    language: float
    code: float
    code_share: float
    trained: bool


FAMILIES = (
    Family("easy", 0.75, 0.5, 0.15, True),
    Family("easy", 0.70, 0.5, 0.15, True),
    Family("mid", 0.45, 0.45, 0.15, True),
    Family("hard", 0.0, 0.5, 0.05, True),
    Family("hard", 0.0, 0.5, 0.05, True),
    Family("minerva", 0.0, 0.6, 0.25, False),
    Family("easy", 0.70, 0.5, 0.15, False),
    Family("hard", 0.0, 0.5, 0.08, False),
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Teacher:
    """The base data's distribution as arrays over the 320 prompts, so that seeds share one program."""

    prompts: Int[Array, "X 5"]
    answer: Int[Array, " X"]
    code_share: Float[Array, " X"]
    success: Float[Array, "X 2"]  # probability of the right answer by language, by code


@dataclass(frozen=True)
class Msa0:
    """The task. ``seed`` fixes how good the teacher is on each prompt; prompts and answers are the same for all.

    A prompt's ``uid`` is its number, ``40 * family + 4 * a + b``.
    """

    seed: int = 0

    @property
    def stop_ids(self) -> frozenset[int]:
        """The one token that ends a response."""
        return frozenset({EOS})

    def prompts(self, uid: Int[np.ndarray, " P"] | None = None) -> Prompts:
        """The prompts numbered ``uid`` (default: all 320)."""
        uid = np.arange(PROMPTS) if uid is None else np.asarray(uid)
        tokens = self.tokens[uid]
        return Prompts(tokens, np.full(len(uid), PROMPT_LENGTH, np.int32), uid.astype(np.int32))

    @cached_property
    def tokens(self) -> Int[np.ndarray, "320 5"]:
        """Token ids of every prompt."""
        family, a, b = digits(np.arange(PROMPTS))
        columns = [np.full(PROMPTS, BOS), FAMILY + family, DIGIT + a, DIGIT + b, np.full(PROMPTS, EQUALS)]
        return np.stack(columns, axis=1).astype(np.int32)

    @cached_property
    def success(self) -> Float[np.ndarray, "320 2"]:
        """The teacher's probability of the right answer by (language, code): Beta(8m, 8(1-m)), 0 where m = 0."""
        family = digits(np.arange(PROMPTS))[0]
        mean = np.array([[f.language, f.code] for f in FAMILIES], np.float32)[family]
        some = np.where(mean > 0, mean, np.float32(0.5))
        with jax.ensure_compile_time_eval():  # a batch may be asked for inside jit first
            key = keys.at(keys.root(self.seed), "msa0", "success")
            drawn = jax.random.beta(key, 8 * some, 8 * (1 - some), dtype=jnp.float32)
        return np.where(mean > 0, np.asarray(drawn, np.float64), 0.0)

    def true_p(self, uid: Int[np.ndarray, "*X"] | None = None) -> Float[np.ndarray, "*X"]:
        """The teacher's probability of a correct response (default: of every prompt)."""
        uid = np.arange(PROMPTS) if uid is None else np.asarray(uid)
        share = _code_share()[uid]
        success = self.success[uid]
        return (1 - share) * success[..., 0] + share * success[..., 1]

    def teacher_probability(self, uid: Int[np.ndarray, "*X"]) -> Float[np.ndarray, "*X 2 10 10"]:
        """The teacher's whole distribution, over (language or code, work digit, answer digit)."""
        uid = np.asarray(uid)
        _, a, b = digits(uid)
        share = _code_share()[uid][..., None]
        mode = np.concatenate([1 - share, share], axis=-1)
        one = np.eye(10)
        work = WORK_HABIT * one[a] + (1 - WORK_HABIT) * one[b]
        right, distractor = one[answer(uid)], one[(answer(uid) + 1) % 10]
        success = self.success[uid][..., None]
        said = success * right[..., None, :] + (1 - success) * distractor[..., None, :]
        return mode[..., :, None, None] * work[..., None, :, None] * said[..., :, None, :]

    def teacher(self) -> Teacher:
        """The distribution as arrays, for ``teacher_rows``."""
        share = _code_share().astype(np.float32)
        truth = answer(np.arange(PROMPTS)).astype(np.int32)
        return Teacher(self.tokens, truth, share, self.success.astype(np.float32))

    def supervised_batch(self, key: Key[Array, ""], n: int) -> Rows:
        """``n`` fresh teacher samples on uniformly drawn prompts of all families; can be jitted."""
        return teacher_rows(key, self.teacher(), n)

    def split(self, key: Key[Array, ""] | None = None) -> dict[str, Int[np.ndarray, " X"]]:
        """Prompt numbers of ``train``, ``heldout`` (a fifth of each trained family, drawn by ``key``) and ``ood``.

        ``key`` is the run's root key; the default is the task seed's.
        """
        key = keys.root(self.seed) if key is None else key
        family = digits(np.arange(PROMPTS))[0]
        parts: dict[str, list[np.ndarray]] = {"train": [], "heldout": [], "ood": []}
        for number, record in enumerate(FAMILIES):
            members = np.flatnonzero(family == number)
            if not record.trained:
                parts["ood"].append(members)
                continue
            drawn = jax.random.permutation(keys.at(key, "split", number), members.astype(np.int32))
            held = np.sort(np.asarray(drawn)[: len(members) // 5])
            parts["heldout"].append(held)
            parts["train"].append(np.setdiff1d(members, held))
        return {name: np.concatenate(uids).astype(np.int64) for name, uids in parts.items()}

    def correct(
        self, uid: Int[np.ndarray, "*X"], tokens: Int[np.ndarray, "*X T"], length: Int[np.ndarray, "*X"]
    ) -> np.ndarray:
        """Whether responses are well-formed and answer right. A response cut off before EOS is wrong."""
        tokens, length = np.asarray(tokens), np.asarray(length)
        if tokens.shape[-1] < RESPONSE_LENGTH:
            return np.zeros(length.shape, bool)
        said = tokens[..., 2] == DIGIT + answer(np.asarray(uid))
        return well_formed(tokens, length) & said

    def grade(self, uid: Int[np.ndarray, " P"], rows: Rows) -> np.ndarray:
        """``correct`` of rows ``[P]`` or ``[P G]`` whose prompts are numbered ``uid [P]``."""
        tokens, length = response_tokens(rows)
        uid = np.asarray(uid).reshape(np.shape(uid) + (1,) * (length.ndim - np.ndim(uid)))
        return self.correct(np.broadcast_to(uid, length.shape), tokens, length)

    def decode(self, ids: list[int]) -> str:
        """Token names separated by blanks, as in ``COD 7 0 EOS``."""
        return " ".join(NAMES[i] for i in ids)


def digits(uid: Int[np.ndarray, "*X"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Family, a and b of prompt numbers."""
    uid = np.asarray(uid)
    return uid // 40, uid % 40 // 4, uid % 4


def answer(uid: Int[np.ndarray, "*X"]) -> Int[np.ndarray, "*X"]:
    """The right answer digit, ``(a + family) mod 10``."""
    family, a, _ = digits(uid)
    return (a + family) % 10


def roles(uid: Int[np.ndarray, "*X"]) -> np.ndarray:
    """Role name of each prompt's family."""
    return np.array([f.role for f in FAMILIES])[digits(uid)[0]]


def mode(tokens: Int[np.ndarray, "*X T"], length: Int[np.ndarray, "*X"]) -> Int[np.ndarray, "*X"]:
    """The strategy that the first token names: ``MODE_LANGUAGE``, ``MODE_CODE`` or ``MODE_NONE``."""
    first = np.where(np.asarray(length) > 0, np.asarray(tokens)[..., 0], PAD)
    return np.select([first == LNG, first == COD], [MODE_LANGUAGE, MODE_CODE], MODE_NONE)


def well_formed(tokens: Int[np.ndarray, "*X T"], length: Int[np.ndarray, "*X"]) -> np.ndarray:
    """Whether responses read ``[LNG | COD, digit, digit, EOS]`` and nothing else."""
    strategy, work, said, end = (tokens[..., i] for i in range(RESPONSE_LENGTH))
    is_digit = lambda x: (x >= DIGIT) & (x < DIGIT + 10)  # noqa: E731
    shape = np.isin(strategy, (LNG, COD)) & is_digit(work) & is_digit(said) & (end == EOS)
    return shape & (length == RESPONSE_LENGTH)


def well_formed_responses() -> Int[np.ndarray, "200 4"]:
    """Every well-formed response, ordered by strategy, work digit, answer digit."""
    s, w, d = (x.ravel() for x in np.meshgrid([LNG, COD], np.arange(10), np.arange(10), indexing="ij"))
    return np.stack([s, DIGIT + w, DIGIT + d, np.full_like(s, EOS)], axis=1).astype(np.int32)


def correct_responses(uid: Int[np.ndarray, " X"]) -> Int[np.ndarray, "X 20 4"]:
    """The 20 correct responses of each prompt: ten by language, then ten by code, by work digit."""
    every = well_formed_responses().reshape(20, 10, RESPONSE_LENGTH)
    return every[:, answer(np.asarray(uid))].swapaxes(0, 1)


def teacher_rows(key: Key[Array, ""], teacher: Teacher, n: int) -> Rows:
    """``n`` teacher samples with their prompts, as rows of width 9; can be jitted with ``n`` static."""
    k_uid, k_mode, k_work, k_said = jax.random.split(key, 4)
    uid = jax.random.randint(k_uid, (n,), 0, PROMPTS, jnp.int32)
    prompts = jnp.asarray(teacher.prompts)[uid]
    code = jax.random.bernoulli(k_mode, jnp.asarray(teacher.code_share)[uid])
    work = jnp.where(jax.random.bernoulli(k_work, jnp.float32(WORK_HABIT), (n,)), prompts[:, 2], prompts[:, 3])
    success = jnp.where(code, jnp.asarray(teacher.success)[uid, 1], jnp.asarray(teacher.success)[uid, 0])
    wrong = ~jax.random.bernoulli(k_said, success)
    said = DIGIT + (jnp.asarray(teacher.answer)[uid] + wrong.astype(jnp.int32)) % 10
    response = jnp.stack([jnp.where(code, COD, LNG).astype(jnp.int32), work, said, jnp.full(n, EOS, jnp.int32)], axis=1)
    tokens = jnp.concatenate([prompts, response], axis=1)
    start = jnp.full(n, PROMPT_LENGTH, jnp.int32)
    return Rows(tokens, start, start + RESPONSE_LENGTH)


def oracle(teacher: Teacher) -> Teacher:
    """The teacher that is always right, by language and by code at even odds: what a model could learn at best."""
    return replace(teacher, code_share=np.full_like(teacher.code_share, 0.5), success=np.ones_like(teacher.success))


def oracle_responses(uid: Int[np.ndarray, " P"], n: int, key: Key[Array, ""]) -> Int[np.ndarray, "P n 4"]:
    """``n`` responses of the oracle to each prompt; those to a prompt depend on the key and the prompt alone."""
    _, a, b = digits(uid)
    drawn = jax.vmap(lambda u: jax.random.uniform(keys.at(key, u), (n, 2)))(jnp.asarray(uid, jnp.int32))
    code, habit = np.asarray(drawn)[..., 0] < 0.5, np.asarray(drawn)[..., 1] < WORK_HABIT
    work = np.where(habit, a[:, None], b[:, None]) + DIGIT
    said = np.broadcast_to(answer(uid)[:, None] + DIGIT, work.shape)
    return np.stack([np.where(code, COD, LNG), work, said, np.full_like(work, EOS)], axis=-1).astype(np.int32)


def enumerate_responses(
    max_new_tokens: int, *, vocab_size: int = VOCAB_SIZE, stop_id: int = EOS
) -> tuple[Int[np.ndarray, "Y T"], Int[np.ndarray, " Y"]]:
    """Every response that a sampler can return within ``max_new_tokens``: those that stop, and those cut off.

    12,720 of them for three tokens of this vocabulary. Their probabilities sum to one, which the
    well-formed responses' do not: identities over all responses (SCIENCE R1) hold on this set only.
    """
    tokens = np.zeros((1, 0), np.int32)
    done: list[np.ndarray] = []
    for _ in range(max_new_tokens):
        last = np.tile(np.arange(vocab_size, dtype=np.int32), len(tokens))
        tokens = np.concatenate([np.repeat(tokens, vocab_size, axis=0), last[:, None]], axis=1)
        stopped = tokens[:, -1] == stop_id
        done.append(tokens[stopped])
        tokens = tokens[~stopped]
    done.append(tokens)
    length = np.concatenate([np.full(len(t), t.shape[1], np.int32) for t in done])
    padded = [np.pad(t, ((0, 0), (0, max_new_tokens - t.shape[1]))) for t in done]
    return np.concatenate(padded).astype(np.int32), length


def _code_share() -> Float[np.ndarray, " 320"]:
    return np.array([f.code_share for f in FAMILIES])[digits(np.arange(PROMPTS))[0]]
