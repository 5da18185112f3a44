"""Configs: every error's message, overrides, recipes, the echo and what a resumed run may change."""

import dataclasses
import json
import pathlib
import re
import types
import typing

import pytest
import yaml

from jaxrl.config import RANGES, SCHEMA, changed, check_resume, from_tree, load_config, to_tree
from jaxrl.data.arithmetic import DIGITS, SETS, arithmetic_problems, write_arithmetic
from jaxrl.errors import UsageError
from jaxrl.rl.algorithms import Algorithm
from jaxrl.rl.filters import SampleGreedyFails
from jaxrl.rl.recipes import ALGORITHMS
from jaxrl.rl.regularisers import Kl
from jaxrl.rl.weights import TokenMean
from jaxrl.sampling.strategies import Temperature
from jaxrl.schema import Range, hints, members
from jaxrl.train.experiment import Experiment, Msa0Spec, ProblemsSpec

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))

MINIMAL = """\
model: {base: msa0}
task: {type: msa0}
algorithm: grpo
optimiser: {lr: 1e-3}
steps: 20
"""


@pytest.fixture
def load(tmp_path):
    """``load(text, *overrides)`` with ``text`` in a file ``c.yaml``."""

    def load(text=MINIMAL, *overrides):
        file = tmp_path / "c.yaml"
        file.write_text(text)
        return load_config(file, overrides)

    return load


def message(load, text=MINIMAL, *overrides) -> str:
    with pytest.raises(UsageError) as error:
        load(text, *overrides)
    return re.sub(r"(?m)^\S*c\.yaml", "c.yaml", str(error.value))


# ---------------------------------------------------------------- what is read


def test_defaults_are_filled_in(load):
    x = load()
    assert x.algorithm == ALGORITHMS["grpo"]
    assert (x.steps, x.seed, x.rollout.n, x.optimiser.lr, x.eval.k) == (20, 0, 8, 1e-3, (1, 16, 64, 256))
    assert isinstance(x.task, Msa0Spec)
    assert x.rollout.strategy == Temperature(value=1.0)


def test_the_config_of_the_interface_loads(load, shared):
    text = (shared / "spec" / "INTERFACES.md").read_text().split("```yaml\n")[1].split("```")[0]
    x = load(text)
    assert isinstance(x.algorithm.prefilter, SampleGreedyFails)
    assert x.algorithm.regularisers == ((0.1, Kl(direction="forward", scope="token", estimator="full", samples=4)),)
    assert x.eval.presets == ("full", "yue")


def test_numbers_in_scientific_notation_are_numbers_and_no_is_text(load):
    assert load(MINIMAL.replace("1e-3", "2e-4")).optimiser.lr == 2e-4
    assert load(MINIMAL.replace("1e-3", "1")).optimiser.lr == 1.0
    problems = MINIMAL.replace("{base: msa0}", "{path: no}").replace("{type: msa0}", "{type: problems, train: off}")
    x = load(problems)
    assert (x.model.path, x.task.train) == ("no", "off")


def test_a_tag_alone_is_a_piece_with_its_defaults(load):
    assert load(MINIMAL, "reward=paper", "algorithm.weights=token_mean").algorithm.weights == TokenMean()


def test_worked_examples_and_the_verdict_rule_are_read(load):
    text = MINIMAL.replace("{base: msa0}", "{path: owner/model}").replace(
        "{type: msa0}",
        "{type: problems, train: a.jsonl, eval: [b.jsonl], template: chat,"
        " examples: [{problem: p, answer: '7'}], rule: {relative_tolerance: 1e-4}}",
    )
    task = load(text).task
    assert isinstance(task, ProblemsSpec)
    assert (task.eval, task.examples[0].answer, task.rule.relative_tolerance) == (("b.jsonl",), "7", 1e-4)


def test_a_decoder_with_fresh_weights_is_read(load):
    sizes = "vocab_size: 24, hidden_size: 16, intermediate_size: 32, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 8"
    x = load(MINIMAL.replace("{base: msa0}", f"{{init: {{{sizes}, windows: [null, 4]}}}}"))
    assert x.model.init.windows == (None, 4)
    bad = MINIMAL.replace("{base: msa0}", f"{{init: {{{sizes}, family: lama}}}}")
    assert "c.yaml:1: model.init" in message(load, bad)
    assert "'lama'" in message(load, bad)


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_recipe_can_be_named_and_round_trips(load, name):
    taught = ALGORITHMS[name].needs & {"teacher_samples", "teacher_model"}
    x = load(MINIMAL + ("teacher: {base: oracle}\n" if taught else ""), f"algorithm={name}")
    assert x.algorithm == ALGORITHMS[name]
    assert from_tree(json.loads(json.dumps(to_tree(x)))) == x


def test_a_name_with_pieces_changes_these_pieces_alone(load):
    x = load(MINIMAL.replace("grpo", "{name: self, epochs: 2, loss: {high: 0.28}}"))
    expected = ALGORITHMS["self"]
    assert x.algorithm == dataclasses.replace(expected, epochs=2, loss=dataclasses.replace(expected.loss, high=0.28))


def test_another_type_beside_a_name_starts_from_that_types_defaults(load):
    x = load(MINIMAL.replace("grpo", "{name: grpo_released_code, weights: {type: sequence_mean_token_sum}}"))
    assert x.algorithm.weights == ALGORITHMS["grpo"].weights


def test_pieces_without_a_name_start_from_the_class_defaults(load):
    assert load(MINIMAL.replace("grpo", "{loss: {type: clip, low: 0.1}}")).algorithm == dataclasses.replace(
        Algorithm(), loss=dataclasses.replace(Algorithm().loss, low=0.1)
    )


# ---------------------------------------------------------------- overrides


def test_overrides_reach_recipes_lists_and_missing_sections(load):
    x = load(
        MINIMAL,
        "algorithm.regularisers.0.coef=0.5",
        "algorithm.name=self",
        "algorithm.loss.high=0.28",
        "eval.k=[1, 4]",
        "eval.k.1=8",
        "probe.every=3",
        "optimiser.clip=1",
        "optimiser.clip=null",
    )
    assert x.algorithm.regularisers[0][0] == 0.5
    assert isinstance(x.algorithm.prefilter, SampleGreedyFails)
    assert (x.algorithm.loss.high, x.eval.k, x.probe.every, x.optimiser.clip) == (0.28, (1, 8), 3, None)


def test_an_override_of_the_name_keeps_the_pieces_of_the_file(load):
    text = MINIMAL.replace("grpo", "{name: grpo, weights: {type: token_mean}}")
    assert load(text, "algorithm.name=fkl_only").algorithm == dataclasses.replace(
        ALGORITHMS["fkl_only"], weights=TokenMean()
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            "algorithm.loss.hihg=0.3",
            "--set algorithm.loss.hihg=0.3: algorithm.loss.hihg: unknown key; did you mean 'high'?",
        ),
        ("stesp=3", "--set stesp=3: stesp: unknown key; did you mean 'steps'?"),
        ("steps", "--set steps: expected KEY=VALUE, for example --set algorithm.loss.high=0.28"),
        (".a=1", "--set .a=1: expected KEY=VALUE"),
        ("steps.x=3", "--set steps.x=3: steps is 20, which has no keys below it"),
        ("algorithm.regularisers.3.coef=1", "algorithm.regularisers is a list with no entries, and 3 is none of them"),
        ("eval.k=[1", "--set eval.k:1:3: not valid YAML: "),
        ("algorithm=slef", "--set algorithm=slef: algorithm.name: unknown algorithm 'slef'; did you mean 'self'?"),
    ],
)
def test_a_wrong_override_says_which_and_why(load, change, expected):
    assert expected in message(load, MINIMAL, change)


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rolout: {n: 4}", "c.yaml:6: rolout: unknown key; did you mean 'rollout'? (one of: seed, base_seed, model,"),
        ("rollout: {m: 4}", "c.yaml:6: rollout.m: unknown key; expected one of: prompts, n, max_new_tokens,"),
        ("rollout: {n: 0}", "c.yaml:6: rollout.n: expected an integer from 1 to 1000000000, got 0"),
        ("rollout: {n: 2.5}", "c.yaml:6: rollout.n: expected an integer from 1 to 1000000000, got 2.5"),
        ("rollout: {n: true}", "c.yaml:6: rollout.n: expected an integer from 1 to 1000000000, got True"),
        ("rollout: {n: '4'}", "c.yaml:6: rollout.n: expected an integer from 1 to 1000000000, got '4'"),
        ("rollout: 4", "c.yaml:6: rollout: expected a section with keys (prompts, n,"),
        (
            "rollout: {engine: {slots: many}}",
            "c.yaml:6: rollout.engine.slots: expected an integer from 1 to 10000000, got 'many'",
        ),
        ("rollout: {engine: {slot: 3}}", "c.yaml:6: rollout.engine.slot: unknown key; did you mean 'slots'?"),
        (
            "rollout: {engine: {type: slots, chunk: 0}}",
            "c.yaml:6: rollout.engine.chunk: expected an integer from 1 to 10000000, got 0",
        ),
        (
            "rollout: {strategy: {type: temprature}}",
            "rollout.strategy.type: unknown type 'temprature'; did you mean 'temperature'?",
        ),
        (
            "rollout: {strategy: {value: 1}}",
            "c.yaml:6: rollout.strategy: a `type` is needed, one of: greedy, temperature,",
        ),
        (
            "rollout: {strategy: {type: top_k, k: 5}}",
            "c.yaml:6: rollout.strategy: training samples from the whole distribution",
        ),
        (
            "rollout: {strategy: {type: temperature, value: 0}}",
            "rollout.strategy.value: expected a number above 0 and of at most 100",
        ),
        (
            "rollout: {n: 1}",
            "c.yaml:6: rollout.n: the advantage compares the responses of one prompt: expected 2 or more",
        ),
        ("mesh: {data: -1}", "c.yaml:6: mesh.fsdp: expected at least 1 device an axis and at most one -1"),
        ("mesh: {tensor: 0}", "c.yaml:6: mesh.tensor: expected at least 1 device an axis"),
        ("eval: {k: [1, 512]}", "c.yaml:6: eval.k: pass@512 is not defined for eval.n = 256 samples"),
        ("eval: {k: [1, 0]}", "c.yaml:6: eval.k.1: expected an integer from 1 to 1000000000, got 0"),
        ("eval: {k: 4}", "c.yaml:6: eval.k: expected a list, each entry an integer from 1 to 1000000000, got 4"),
        ("eval: {presets: [yeu]}", "c.yaml:6: eval.presets.0: unknown value 'yeu'; did you mean 'yue'?"),
        (
            "probe: {temperature: .inf}",
            "c.yaml:6: probe.temperature: expected a number above 0 and of at most 100, got inf",
        ),
        ("influence: {method: colums}", "influence.method: unknown value 'colums'; did you mean 'columns'?"),
        ("reward: {type: papr}", "c.yaml:6: reward.type: unknown type 'papr'; did you mean 'paper'?"),
        ("seed: -1", "c.yaml:6: seed: expected an integer from 0 to 4294967295, got -1"),
    ],
)
def test_a_wrong_line_is_named_with_what_was_expected(load, line, expected):
    assert expected in message(load, f"{MINIMAL}{line}\n")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("{lr: 1e-3}", "{lr: -1e-3}", "c.yaml:4: optimiser.lr: expected a number from 0 to 10, got -0.001"),
        ("{lr: 1e-3}", "{lr: .nan}", "c.yaml:4: optimiser.lr: expected a number from 0 to 10, got nan"),
        ("{lr: 1e-3}", "{}", "c.yaml:4: optimiser.lr: this key is needed and has no default"),
        ("{lr: 1e-3}", "{lr: 1, type: adam}", "c.yaml:4: optimiser.type: expected one of adamw, sgd, got 'adam'; did you mean 'adamw'?"),
        ("{lr: 1e-3}", "{lr: 1, warmup: 20}", "c.yaml:4: optimiser.warmup: 20 updates of warm-up, but the run has only 20"),
        ("steps: 20\n", "", "c.yaml: steps: this key is needed and has no default"),
        ("grpo", "grppo", "c.yaml:3: algorithm.name: unknown algorithm 'grppo'; did you mean 'grpo'?"),
        ("grpo", "{minibatches: 3}", "c.yaml:3: algorithm.minibatches: 16 prompts do not split into 3 equal mini-batches"),
        ("grpo", "{keep: {type: solve_rate, max: 2}}", "c.yaml:3: algorithm.keep.max: expected a number from 0 to 1, got 2"),
        ("grpo", "{loss: {type: clip, low: 0.1, hi: 0.3}}", "c.yaml:3: algorithm.loss.hi: unknown key; did you mean 'high'?"),
        ("grpo", "{regularisers: [{type: kl}]}", "c.yaml:3: algorithm.regularisers.0: expected a section with `coef` and `type`"),
        ("grpo", "{regularisers: [{coef: -1, type: kl}]}", "algorithm.regularisers.0.coef: expected a number from 0 to 1000000"),
        ("grpo", "{regularisers: {coef: 1}}", "c.yaml:3: algorithm.regularisers: expected a list, got {'coef': 1}"),
        ("grpo", "{regularisers: [{coef: 1, type: kl, estimator: k1}]}", "forward token k1 is refused: k1 used as a loss"),
        ("grpo", "5", "c.yaml:3: algorithm: expected a section with keys (prefilter,"),
        ("{base: msa0}", "{}", "c.yaml:1: model: expected exactly one of path (a folder or hub id), init and base, got none of them"),
        ("{base: msa0}", "{base: msa0, path: x}", "c.yaml:1: model: expected exactly one of path"),
        ("{base: msa0}", "{base: msa0, dtype: fp32}", "c.yaml:1: model.dtype: unknown value 'fp32'; expected one of: float32, bfloat16"),
        ("{type: msa0}", "{type: msa1}", "c.yaml:2: task.type: unknown type 'msa1'; did you mean 'msa0'?"),
        ("{type: msa0}", "{type: problems, train: a}", "c.yaml:1: model: problems are text, and base brings no tokenizer"),
        ("{type: msa0}", "{type: problems}", "c.yaml:2: task.train: this key is needed and has no default"),
        ("{type: msa0}", "{type: problems, train: a, tokenizer: b, template: papr}", "task.template: unknown template 'papr'; did you mean 'paper'?"),
        ("{type: msa0}", "{type: problems, train: a, tokenizer: b, template: chat, examples: [{problem: p}]}", "task.examples"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_was_expected(load, old, new, expected):
    assert expected in message(load, MINIMAL.replace(old, new))


def test_a_custom_reward_is_looked_up_when_the_config_is_read(load):
    assert load(MINIMAL, "reward={type: custom, call: 'math:sqrt'}").reward.call == "math:sqrt"
    said = message(load, f"{MINIMAL}reward: {{type: custom, call: 'math:sqrd'}}\n")
    assert "c.yaml:6: reward.call: module 'math' has no function 'sqrd'; did you mean 'sqrt'?" in said


def test_all_problems_are_said_at_once(load):
    said = message(load, MINIMAL.replace("1e-3", "x"), "stesp=3", "rollout.n=0").split("\n")
    assert [line.split(": ")[1] for line in said] == ["stesp", "rollout.n", "optimiser.lr"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: [1\nsteps: 3", "c.yaml:2:6: not valid YAML: "),
        ("a: 1\na: 2", "c.yaml:2: a is written twice; keep one of the two"),
        ("p: {q: {a: 1,\n a: 2}}", "c.yaml:2: p.q.a is written twice"),
        ("3: x", "c.yaml:1: keys are text, got 3; quote it if it is meant"),
        ("a: 1\n---\nb: 2", "c.yaml:2:1: not valid YAML: "),
        ("a: !!int abc", "c.yaml: not valid YAML: invalid literal for int()"),
        ("a: !!python/name:os.system ''", "c.yaml:1:4: not valid YAML: "),
        ("a: &x {b: *x}", "c.yaml: not valid YAML here: a value contains itself"),
        ("b: 1\na: \x01", "c.yaml:2: not valid YAML: the character '\\x01'"),
        ("", "c.yaml: expected a config with keys model, task, algorithm, ...; found nothing"),
        ("- 1", "c.yaml: expected a config with keys model, task, algorithm, ...; found [1]"),
    ],
)
def test_text_that_is_no_config_names_file_and_line(load, text, expected):
    assert expected in message(load, text)


def test_a_missing_or_unreadable_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"x\.yaml: the config cannot be read: No such file"):
        load_config(tmp_path / "x.yaml")
    with pytest.raises(UsageError, match="the config cannot be read: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"seed: \xff")
    with pytest.raises(UsageError, match="a config is UTF-8 text, and byte 6 is not"):
        load_config(tmp_path / "b.yaml")


# ---------------------------------------------------------------- ranges


def numbers(cls, seen):
    """(class, field) of every number of ``cls`` and of what it can hold."""
    if cls in seen:
        return
    seen.add(cls)
    for name, hint in hints(cls).items():
        stack = [hint]
        while stack:
            h = stack.pop()
            if h in SCHEMA.registries:
                for piece in SCHEMA.registries[h].values():
                    yield from numbers(piece, seen)
            elif typing.get_origin(h) is tuple or isinstance(h, types.UnionType):
                stack += [a for a in (*typing.get_args(h),) if a is not Ellipsis]
            elif dataclasses.is_dataclass(h):
                yield from numbers(h, seen)
            elif h in (int, float):
                yield cls, name


def test_every_number_has_a_range_and_every_range_a_number():
    found = list(numbers(Experiment, set()))
    assert len(found) > 40
    assert [f"{c.__name__}.{n}" for c, n in found if SCHEMA.range_of(c, n) is None] == []
    used = {key for c, n in found for key in (f"{c.__name__}.{n}", n)}
    assert set(RANGES) - used == set()


def test_ranges_read_as_words():
    assert str(Range(0, 1)) == "from 0 to 1"
    assert str(Range(0, 1, above=True)) == "above 0 and of at most 1"
    assert str(Range(0, 1, below=True)) == "of at least 0 and below 1"
    assert str(Range(1)) == "of at least 1"


def test_every_hint_of_a_config_is_understood():
    for cls, _ in numbers(Experiment, set()):
        for hint in hints(cls).values():
            assert all(m is not typing.Any for m in members(hint))


# ---------------------------------------------------------------- echo and resume


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: str(f.relative_to(ROOT / "configs")))
def test_every_config_loads_and_its_echo_round_trips_exactly(file):
    header = file.read_text().split("\nseed:")[0]
    overrides = ["task.train=file.jsonl"] if "--set task.train=" in header and "local copy" not in header else []
    x = load_config(file, overrides)
    tree = to_tree(x)
    assert from_tree(json.loads(json.dumps(tree, allow_nan=False))) == x
    assert from_tree(yaml.safe_load(yaml.safe_dump(tree))) == x


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: str(f.relative_to(ROOT / "configs")))
def test_every_config_opens_with_command_device_time_memory_and_result(file):
    lines = file.read_text().split("\n")
    header = "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])
    assert f"jaxrl train configs/{file.relative_to(ROOT / 'configs')}" in header
    for word in ("Device:", "ime", "emory", "xpect"):
        assert word in header or "not yet run" in header


def test_the_echo_of_an_unregistered_piece_is_refused(load):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(TokenMean):
        pass

    x = load()
    x = dataclasses.replace(x, algorithm=dataclasses.replace(x.algorithm, weights=Mine()))
    with pytest.raises(UsageError, match="Mine has no type tag"):
        to_tree(x)


def test_a_resumed_run_may_go_on_longer_and_write_more_often(load):
    old = to_tree(load())
    new = to_tree(load(MINIMAL, "steps=40", "eval.every=5", "eval.k=[1]", "checkpoint.every=1", "rollout.log_every=1"))
    assert changed(old, new) == []
    check_resume(old, new, "runs/x")


def test_a_resumed_run_may_lay_out_its_engine_otherwise_and_have_been_written_before_a_key_existed(load):
    old, new = to_tree(load()), to_tree(load(MINIMAL, "rollout.engine.slots=4"))
    check_resume(old, new, "runs/x")
    del old["rollout"]["engine"], old["algorithm"]["old_logps"]
    check_resume(old, new, "runs/x")


def test_a_resumed_run_may_not_change_what_is_trained(load):
    old = to_tree(load())
    new = to_tree(load(MINIMAL, "optimiser.lr=1e-2", "algorithm.loss.high=0.3", "seed=1", "steps=40"))
    assert changed(old, new) == ["seed", "algorithm.loss.high", "optimiser.lr"]
    with pytest.raises(UsageError) as error:
        check_resume(old, new, "runs/x")
    said = str(error.value)
    assert said.startswith("runs/x: cannot resume with a changed config")
    assert "  optimiser.lr: 0.001 -> 0.01" in said
    assert "steps" not in said


def test_another_piece_is_a_change_whatever_it_shares(load):
    old, new = to_tree(load()), to_tree(load(MINIMAL, "algorithm=self"))
    assert changed(old, new) == ["algorithm.prefilter.type", "algorithm.regularisers"]


def test_a_resumed_run_may_not_move_the_end_of_its_schedule(load):
    schedule = MINIMAL.replace("lr: 1e-3", "lr: 1e-3, schedule: cosine")
    assert changed(to_tree(load(schedule)), to_tree(load(schedule, "steps=40"))) == ["steps"]


# ---------------------------------------------------------------- the built-in problems


def operands(problem):
    """(a, operation, b) read back from the text."""
    left, operation, right = re.fullmatch(r"What is (\w+) (plus|times) (\w+)\?", problem["problem"]).groups()
    return DIGITS.index(left), operation, DIGITS.index(right)


def test_arithmetic_answers_are_right():
    for problem in arithmetic_problems("arithmetic") + arithmetic_problems("arithmetic-heldout"):
        a, operation, b = operands(problem)
        assert problem["answer"] == str(a + b if operation == "plus" else a * b)


def test_no_held_out_arithmetic_is_trained_on_in_either_order():
    train, heldout = ([operands(p) for p in arithmetic_problems(name)] for name in SETS)
    assert len(train) + len(heldout) == len({*train, *heldout}) == 200
    assert not {frozenset((a, b)) for a, _, b in train} & {frozenset((a, b)) for a, _, b in heldout}
    assert {a for a, _, _ in heldout} == set(range(10))
    assert 0.15 < len(heldout) / 200 < 0.3


def test_the_arithmetic_file_is_the_same_every_time(tmp_path):
    first, second = (write_arithmetic(tmp_path / name / "a.jsonl").read_bytes() for name in "xy")
    assert first == second
    assert [json.loads(line) for line in first.decode().splitlines()] == arithmetic_problems()
    with pytest.raises(ValueError, match="unknown built-in set 'algebra'"):
        arithmetic_problems("algebra")
