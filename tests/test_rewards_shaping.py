"""Rewards: which box counts, and what each verdict pays."""

import dataclasses

import pytest

from jaxrl.rewards import REWARDS, Binary, Custom, Paper, PlusMinus, ReleasedCode, Verdict, verify_math

FIVE_DEEP = r"\frac{\sqrt{\frac{a_{1}}{b^{2^{x}}}}}{c}"

EDGES = {
    "complete box, then a truncated one": (r"\boxed{5} and so \boxed{\frac{1}{2", "correct", "complete"),
    "only a truncated box": (r"so it is \boxed{\frac{1}{2", "no_box", "malformed"),
    "an empty box after a full one": (r"\boxed{5}. I have put the answer in \boxed{}.", "correct", "complete"),
    "empty": (r"\boxed{}", "no_box", "empty"),
    "blank inside": (r"\boxed{ \, $ $ \text{ } }", "no_box", "empty"),
    "taken back": (r"\boxed{3}. wait, actually \boxed{5}", "correct", "complete"),
    "taken back for a wrong one": (r"\boxed{5}. wait, actually \boxed{3}", "wrong", "complete"),
    "fbox": (r"\fbox{5}", "correct", "complete"),
    "space before the brace": (r"\boxed {5}", "correct", "complete"),
    "box only inside the thinking": (r"<think>\boxed{5}</think> The answer is 5.", "no_box", "none"),
    "unclosed thinking with a box": (r"<think> so \boxed{5}", "no_box", "none"),
    "thinking opened again and not closed": (r"<think>a</think><think> \boxed{5}", "no_box", "none"),
    "two ends of thinking": (r"<think>\boxed{3}</think>\boxed{4}</think>\boxed{5}", "correct", "complete"),
    "end of thinking without its start": (r"\boxed{3}</think> \boxed{5}", "correct", "complete"),
    "no box": ("The answer is 5.", "no_box", "none"),
    "a box, then 400 more characters": (r"\boxed{5} " + "and so on " * 40, "correct", "complete"),
    "box in a fenced code block, then prose": ("```latex\n\\boxed{5}\n```\nas was to be shown", "correct", "complete"),
    "a box in a box": (r"\boxed{\boxed{5}}", "correct", "complete"),
    "complete inside a truncated one": (r"\boxed{that is \boxed{5}", "correct", "complete"),
    "escaped braces inside": (r"\boxed{\{5\}}", "correct", "complete"),
    "an escaped brace does not close": (r"\boxed{5\}", "no_box", "malformed"),
    "stray braces before and after": (r"{ } } { \boxed{5} } {", "correct", "complete"),
    "the command without braces": (r"\boxed 5", "no_box", "malformed"),
    "a longer command": (r"\boxedtext{5}", "no_box", "none"),
}


@pytest.mark.parametrize("name", EDGES)
def test_which_box_counts(name):
    response, status, box = EDGES[name]
    gold = r"\{5\}" if "escaped braces" in name else "5"
    verdict = verify_math(gold, response)
    assert (verdict.status, verdict.box) == (status, box)


def test_nested_five_deep_gives_the_whole_content():
    verdict = verify_math(FIVE_DEEP, rf"so \boxed{{{FIVE_DEEP}}} holds")
    assert (verdict.status, verdict.answer) == ("correct", FIVE_DEEP)


def test_forty_thousand_unclosed_boxes_are_read_in_linear_time():
    verdict = verify_math("5", r"\boxed{" * 40_000)
    assert (verdict.status, verdict.box) == ("no_box", "malformed")


def verdict(status, box="complete"):
    return Verdict(status, None, box, "own")


PAYS = [
    # verdict, binary, pm1, paper, released_code
    (verdict("correct"), 1, 1, 1, 1),
    (verdict("wrong"), 0, -1, -0.5, -0.5),
    (verdict("no_box", "none"), 0, -1, -1, -0.5),
    (verdict("no_box", "empty"), 0, -1, -1, -0.5),
    (verdict("no_box", "malformed"), 0, -1, -1, -1),
    (verdict("timeout"), 0, -1, -0.5, -0.5),
    (verdict("error"), 0, -1, -0.5, -0.5),
]


@pytest.mark.parametrize("row", PAYS, ids=lambda row: f"{row[0].status}-{row[0].box}")
def test_what_each_shape_pays(row):
    assert tuple(shape()(row[0]) for shape in (Binary, PlusMinus, Paper, ReleasedCode)) == row[1:]


def test_an_empty_box_pays_no_more_than_saying_nothing():
    empty, silent = verify_math("5", r"\boxed{}"), verify_math("5", "I do not know.")
    assert all(REWARDS[tag]()(empty) == REWARDS[tag]()(silent) for tag in ("binary", "pm1", "paper", "released_code"))


def test_rewards_by_tag_are_frozen_and_comparable():
    assert list(REWARDS) == ["binary", "pm1", "paper", "released_code", "custom"]
    assert Paper() == Paper()
    with pytest.raises(dataclasses.FrozenInstanceError):
        Paper().x = 1


def half(verdict):
    return 0.5 * verdict.correct


def nothing(verdict):
    return None


def test_custom_reward_calls_the_named_function():
    assert Custom(call="test_rewards_shaping:half")(verdict("correct")) == 0.5
    assert Custom(call="test_rewards_shaping:half")(verdict("wrong")) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("half", "expected 'module:function', got 'half'"),
        ("no_such_module_here:half", "cannot import module 'no_such_module_here'"),
        ("test_rewards_shaping:hallf", "has no function 'hallf'; did you mean 'half'"),
    ],
)
def test_custom_reward_says_what_is_missing_when_it_is_made(call, message):
    with pytest.raises(ValueError, match=message):
        Custom(call=call)


def test_custom_reward_must_return_a_finite_number():
    with pytest.raises(ValueError, match=r"nothing returned None .* expected a finite number"):
        Custom(call="test_rewards_shaping:nothing")(verdict("wrong"))
