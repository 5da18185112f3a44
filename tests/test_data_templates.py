"""Prompts are, to the character, those of the paper and of the models' own templates."""

import pytest
from tiny_tokenizer import CHATML, DATED, save_tiny

from jaxrl.data.prompts import load_tokenizer
from jaxrl.data.templates import TEMPLATES, Example, Template, make_template
from jaxrl.errors import UsageError

QUESTION = "What is 2 + 3?"
SENTENCE = "Let's think step by step and output the final answer within \\boxed{}."


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    return load_tokenizer(save_tiny(tmp_path_factory.mktemp("chatml"), chat_template=CHATML))


@pytest.fixture(scope="module")
def dated(tmp_path_factory):
    return load_tokenizer(save_tiny(tmp_path_factory.mktemp("dated"), chat_template=DATED))


def test_paper_is_question_newline_sentence_in_the_models_chat_template(chatml):
    assert make_template("paper").render(QUESTION, chatml) == (
        "<|im_start|>system\nDEFAULT<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}\n{SENTENCE}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_qwen_math_states_its_system_line(chatml):
    assert make_template("qwen2.5-math").render(QUESTION, chatml) == (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}\n{SENTENCE}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_llama_has_a_pinned_date_on_any_day(dated):
    expected = (
        "<bos><|head|>system<|tail|>\n\nToday Date: 26 Jul 2024\n\n<|eot|>"
        f"<|head|>user<|tail|>\n\n{QUESTION}\n{SENTENCE}<|eot|>"
        "<|head|>assistant<|tail|>\n\n"
    )
    assert make_template("llama-3.2").render(QUESTION, dated) == expected
    assert make_template("paper").render(QUESTION, dated) != expected


def test_chat_shows_worked_examples_as_earlier_turns(chatml):
    template = make_template("chat", examples=[{"problem": "1 + 1?", "answer": 2}], system="Be brief.")
    assert template.render(QUESTION, chatml) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n1 + 1?\n{SENTENCE}<|im_end|>\n"
        "<|im_start|>assistant\nThe answer is \\boxed{2}.<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}\n{SENTENCE}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_plain_is_examples_and_question_without_a_chat_template(chatml):
    examples = [
        Example(problem="1 + 1?", answer="2"),
        Example(problem="2 + 2?", solution="Two twos make 4.", answer="4"),
        Example(problem="3 + 3?", solution="So \\boxed{6}.", answer="6"),
    ]
    assert make_template("plain", examples=examples).render(QUESTION, chatml) == (
        "Problem: 1 + 1?\nSolution: The answer is \\boxed{2}.\n\n"
        "Problem: 2 + 2?\nSolution: Two twos make 4.\nThe answer is \\boxed{4}.\n\n"
        "Problem: 3 + 3?\nSolution: So \\boxed{6}.\n\n"
        f"Problem: {QUESTION}\nSolution:"
    )


def test_plain_can_open_with_an_instruction(chatml):
    text = make_template("plain", instruction="Box the answer.").render(QUESTION, chatml)
    assert text == f"Box the answer.\n\nProblem: {QUESTION}\nSolution:"


def test_braces_in_a_problem_are_left_alone(chatml):
    problem = "Find \\frac{1}{x} for {problem} and {0}."
    assert problem in make_template("paper").render(problem, chatml)
    assert problem in make_template("plain").render(problem, chatml)


def test_an_unknown_template_names_the_nearest():
    with pytest.raises(UsageError, match=r"unknown template 'qwen2\.5-maths'; did you mean 'qwen2\.5-math'\?"):
        make_template("qwen2.5-maths")


@pytest.mark.parametrize("name", ["paper", "qwen2.5-math", "llama-3.2"])
def test_the_papers_prompts_take_no_examples(name):
    with pytest.raises(UsageError, match=f"template '{name}' takes no worked examples .* use 'chat' or 'plain'"):
        make_template(name, examples=[{"problem": "1 + 1?", "answer": "2"}])


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"answer": "2"}, r"examples\[0\]: field 'problem' is missing; got answer"),
        ({"problem": "1?", "anwser": "2"}, r"examples\[0\]: unknown field 'anwser'; did you mean 'answer'"),
        ({"problem": "1 + 1?"}, "'1 \\+ 1\\?' needs an answer or a solution"),
    ],
)
def test_a_bad_example_is_named_with_its_field(example, message):
    with pytest.raises(UsageError, match=message):
        make_template("plain", examples=[example])


def test_templates_are_values_that_compare_and_hash():
    assert make_template("paper") == TEMPLATES["paper"] == Template()
    assert len({*TEMPLATES.values()}) == len(TEMPLATES)
