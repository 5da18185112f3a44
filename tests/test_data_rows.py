"""Rows written by people: JSONL of prompt, response and labels as token rows."""

import json
import pathlib

import numpy as np
import pytest
from tiny_tokenizer import EOS, SPECIALS, save_tiny

from jaxrl.data.datasets import DataError
from jaxrl.data.prompts import load_tokenizer
from jaxrl.data.rows import read_rows

VOCAB = 263


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One token a byte; two tokens end a response."""
    return load_tokenizer(save_tiny(tmp_path_factory.mktemp("tokenizer"), stop=[EOS, SPECIALS.index("<|im_end|>")]))


def jsonl(folder: pathlib.Path, *records) -> pathlib.Path:
    file = folder / "a.jsonl"
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return file


@pytest.fixture
def read(tokenizer, tmp_path):
    """Reads records as the rows of a file."""

    def reading(*records, **options):
        options = {"vocab_size": VOCAB, "context": 64, **options}
        return read_rows(jsonl(tmp_path, *records), lambda: tokenizer, **options)

    return reading


def parts(found) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids) of each row."""
    rows = zip(found.rows.tokens.tolist(), found.rows.start, found.rows.length, strict=True)
    return [(line[:start], line[start:length]) for line, start, length in rows]


def test_prompt_and_response_are_tokenised_apart_as_they_stand(read, tokenizer):
    found = read({"prompt": "<bos>2+2=", "response": "4"}, {"prompt": "two", "response": " 2!"})
    first, second = parts(found)
    assert first == ([0, *tokenizer.encode("2+2=")], [*tokenizer.encode("4"), EOS])
    assert second == (tokenizer.encode("two"), [*tokenizer.encode(" 2!"), EOS])
    assert len(second[0]) == 3  # nothing was put before it
    assert found.rows.tokens.shape == (2, 7)
    assert not found.rows.tokens[np.arange(7) >= found.rows.length[:, None]].any()


def test_an_end_token_is_added_unless_there_is_one_or_the_response_is_not_complete(read, tokenizer):
    whole = {"prompt": "1+1=", "response": "2"}
    (two,) = tokenizer.encode("2")
    end = SPECIALS.index("<|im_end|>")
    forms = {
        "complete": (whole, [two, EOS]),
        "not complete": (whole | {"complete": False}, [two]),
        "ended": (whole | {"response": "2<eos>"}, [two, EOS]),
        "ended otherwise": (whole | {"response": "2<|im_end|>"}, [two, end]),
        "ids": (whole | {"response": [two]}, [two]),
    }
    found = parts(read(*(record for record, _ in forms.values())))
    assert dict(zip(forms, [r for _, r in found], strict=True)) == {name: ids for name, (_, ids) in forms.items()}


def test_ids_need_no_tokenizer(tmp_path):
    file = jsonl(tmp_path, {"prompt": [5, 6], "response": [7]})
    found = read_rows(file, lambda: pytest.fail("asked for a tokenizer"), vocab_size=8, context=3)
    assert parts(found) == [([5, 6], [7])]


def test_labels_are_kept_as_given_and_rows_without_one_have_none(read):
    found = read(
        {"prompt": "a", "response": "b", "group": "x", "correct": True},
        {"prompt": "c", "response": "b", "difficulty": 0.5, "other": [1]},
        {"prompt": "a", "response": "d"},
    )
    labels = dict(found.labels)
    prompts = labels.pop("prompt")
    assert labels == {"group": ["x", None, None], "correct": [True, None, None], "difficulty": [None, 0.5, None]}
    assert prompts[0] == prompts[2] != prompts[1]


def test_only_the_first_rows_are_read_when_asked(read):
    found = read({"prompt": "a", "response": "b"}, "not even JSON", limit=1)
    assert len(parts(found)) == 1


def test_rows_are_cut_at_the_end_of_the_response(read, tokenizer):
    found = read({"prompt": "1+1=", "response": "23456"}, {"prompt": "1", "response": "2"}, max_tokens=6)
    assert parts(found)[0] == (tokenizer.encode("1+1="), tokenizer.encode("23"))
    assert found.cut == 1
    with pytest.raises(DataError, match=r"line 1: the prompt alone has 4 tokens, so that --max-tokens 4 leaves no"):
        read({"prompt": "1+1=", "response": "23456"}, max_tokens=4)


BAD = [
    ('{"prompt": "a", ', r"line 2: not valid JSON \("),
    ("[1]", "line 2: expected a JSON object a line, got list"),
    ({"prompt": "a", "respons": "b"}, r"line 2: field 'response' is missing; expected .* got 'prompt', 'respons'"),
    ({"prompt": "a", "response": ""}, "line 2: field 'response' is empty, and a row needs a response token"),
    ({"prompt": "", "response": "b"}, "line 2: field 'prompt' is empty, and a row needs its first token"),
    ({"prompt": "a", "response": 7}, "line 2: field 'response' must be text or a list of token ids, got '7'"),
    ({"prompt": [1], "response": [True]}, "line 2: field 'response' must be text or a list of token ids"),
    (
        {"prompt": [1], "response": [263]},
        "line 2: field 'response' holds id 263, outside the model's vocabulary of 263",
    ),
    ({"prompt": "a", "response": "b", "complete": "yes"}, "line 2: field 'complete' must be true or false"),
    ({"prompt": "a", "response": "b", "group": ["x"]}, "line 2: label 'group' must be text, a number, true or false"),
    ({"prompt": "a" * 60, "response": "bbbb"}, "line 2: the row has 65 tokens, more than the model's context of 64"),
]


@pytest.mark.parametrize(("line", "said"), BAD)
def test_a_bad_row_is_named_by_file_and_line(read, line, said):
    with pytest.raises(DataError, match=rf"a\.jsonl, {said}"):
        read({"prompt": "a", "response": "b"}, line)


def test_a_file_without_rows_is_refused(read):
    with pytest.raises(
        DataError, match=r"a\.jsonl: holds no rows; expected at least one line with prompt and response"
    ):
        read("")
