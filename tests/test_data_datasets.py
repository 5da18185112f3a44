"""Problem files are read whole or refused with file, line and field; repeated problems are reported."""

import builtins
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl.data.datasets import (
    DataError,
    Problem,
    duplicate_prompts,
    duplicates_report,
    load_problems,
    overlap,
)

ROWS = [
    {"id": "a/0", "problem": "One\u2028line", "answer": "1", "level": 3},
    {"id": "a/1", "problem": "Zwölf?", "answer": 12},
    {"id": "a/2", "problem": "None?", "answer": ""},
]


def write(path, *lines: str):
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_jsonl_keeps_golds_as_published_and_other_fields_aside(tmp_path):
    file = write(tmp_path / "p.jsonl", *(json.dumps(r, ensure_ascii=False) for r in ROWS), "")
    assert load_problems(file) == [
        Problem("a/0", "One\u2028line", "1"),
        Problem("a/1", "Zwölf?", "12"),
        Problem("a/2", "None?", ""),
    ]
    assert load_problems(file)[0].extra == {"level": 3}


def test_parquet_gives_the_same_problems(tmp_path):
    rows = [{**r, "answer": str(r["answer"]), "level": r.get("level")} for r in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    write(tmp_path / "p.jsonl", *(json.dumps(r) for r in rows))
    assert load_problems(tmp_path / "p.parquet") == load_problems(str(tmp_path / "p.jsonl"))


def test_columns_can_be_renamed_andparquet_rows_without_ids_are_numbered(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"question": "1?", "answer": "1"}, {"question": "2?", "answer": "2"}]),
                   tmp_path / "q.parquet")  # fmt: skip
    assert load_problems(tmp_path / "q.parquet", fields={"problem": "question"}) == [
        Problem("0", "1?", "1"),
        Problem("1", "2?", "2"),
    ]


GOOD = json.dumps(ROWS[0])
BAD_FILES = [
    ("malformed line", [GOOD, "", '{"id": "b", '], r"p\.jsonl, line 3: not valid JSON \(.* at column 13\)"),
    ("not an object", [GOOD, "[1]"], r"line 2: expected a JSON object a line, got list"),
    ("missing field", [GOOD, '{"id": "b", "problem": "x"}'], r"line 2: field 'answer' is missing; the row has 'id', "),
    ("null field", ['{"id": "b", "problem": null, "answer": "1"}'], "line 1: field 'problem' is missing"),
    ("empty problem", ['{"id": "b", "problem": " ", "answer": "1"}'], "line 1: field 'problem' is empty"),
    ("list as answer", ['{"id": "b", "problem": "x", "answer": ["1"]}'], "'answer' must be text or a number, got list"),
    ("empty file", [""], r"p\.jsonl: holds no problems; expected at least one row with id, problem, answer"),
    ("repeated id", [GOOD, json.dumps(ROWS[1]), GOOD], "id 'a/0' occurs twice, as problems 1 and 3"),
    (
        "NaN as answer",
        [GOOD, '{"id": "b", "problem": "x", "answer": NaN}'],
        "line 2: .*'answer' .* finite number, got nan",
    ),
    ("1e400", [GOOD, '{"id": "b", "problem": "x", "answer": 1e400}'], "line 2: .*'answer' .* finite number, got inf"),
    ("5000 digits", [GOOD, '{"id": "b", "problem": "x", "answer": ' + "9" * 5000 + "}"], "line 2: cannot be read"),
    (
        "nested",
        [GOOD, '{"id": "b", "x": ' + "[" * 10**5 + "]" * 10**5 + "}"],
        "line 2: cannot be read .nested too deep",
    ),
    ("repeated key", [GOOD, '{"id": "b", "id": "c", "problem": "x", "answer": 1}'], "line 2: .*key 'id' occurs twice"),
]


@pytest.mark.parametrize(("lines", "message"), [b[1:] for b in BAD_FILES], ids=[b[0] for b in BAD_FILES])
def test_a_bad_file_is_refused_with_its_line(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        load_problems(write(tmp_path / "p.jsonl", *lines))


def test_a_missing_file_and_a_wrong_kind_are_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file"):
        load_problems(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match=r"expected a \.jsonl or \.parquet file or a hub data set .*got suffix '\.csv'"):
        load_problems(write(tmp_path / "p.csv", "id,problem,answer"))
    with pytest.raises(DataError, match=r"got suffix '\.json'"):
        load_problems("data/absent.json")
    with pytest.raises(DataError, match="got a folder"):
        load_problems(tmp_path)


def test_a_file_of_another_encoding_or_format_is_named(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"id": "ä"}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl: not UTF-8 text"):
        load_problems(tmp_path / "latin.jsonl")
    with pytest.raises(DataError, match=r"p\.parquet: not a readable parquet file"):
        load_problems(write(tmp_path / "p.parquet", "text"))


def test_a_hub_data_set_without_the_extra_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(DataError, match=r"needs the `data` extra; pip install 'jaxrl\[data\]'"):
        load_problems("agentica-org/DeepScaleR-1.5")


def test_a_hub_data_set_is_read_by_split_and_numbered(monkeypatch):
    import sys
    import types

    def load_dataset(name, split):
        assert (name, split) == ("owner/name", "test")
        return [{"problem": "1?", "answer": "1"}, {"problem": "2?", "answer": "2"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    found = load_problems("owner/name:test")
    assert [p.id for p in found] == ["owner/name/0", "owner/name/1"]


def problems(*texts: str, prefix: str = "t") -> list[Problem]:
    return [Problem(f"{prefix}/{i}", text, "1") for i, text in enumerate(texts)]


def test_duplicates_are_found_through_spacing_case_and_punctuation():
    found = duplicate_prompts(problems("What is $2+3$?", "Other", "what is 2 + 3", "What is 23?"))
    assert found == [("t/0", "t/2", "t/3")]  # letters and digits only: a report to read, not a filter


def test_overlap_lists_training_and_evaluation_ids():
    train = problems("A b.", "C", "a B")
    assert overlap(train, problems("x", "AB!", prefix="e")) == [("t/0", "e/1"), ("t/2", "e/1")]


def test_the_report_counts_duplicates_and_overlap_by_set():
    train = problems("A b.", "C", "a B")
    report = duplicates_report(train, {"held": problems("c", prefix="e"), "other": problems("q", prefix="o")})
    assert report.lines() == [
        "training: 3 problems, 1 of them repeat another",
        "  same text: t/0, t/2",
        "held: 1 evaluation problems are also training problems",
        "  e/0 is t/1",
        "other: 0 evaluation problems are also training problems",
    ]


def test_the_published_train_files_share_no_problem_with_the_benchmarks(shared):
    data = shared / "data"
    train = [p for n in ("math_train7474", "gsm8k_train2000") for p in load_problems(data / f"{n}.jsonl")]
    evals = {n: load_problems(data / f"{n}.jsonl") for n in ("aime24", "aime25", "math500", "minerva", "gsm8k_test")}
    report = duplicates_report(train, evals)
    assert report.problems == 9474
    assert all(not pairs for pairs in report.overlaps.values())
    assert sum(p.answer == "" for p in train) == 4
    assert len(evals["minerva"]) == 272
