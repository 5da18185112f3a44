"""How a problem becomes a prompt.

``paper`` is the prompt of arXiv 2510.02230 and its released code: one user message, then the
tokenizer's chat template up to the assistant's turn. The others vary it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl.data.tokenizer import Message, Tokenizer
from jaxrl.errors import UsageError, nearest

BOX_SENTENCE = "Let's think step by step and output the final answer within \\boxed{}."
QWEN_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
LLAMA_DATE = "26 Jul 2024"  # the date that Llama 3.2's own template falls back to


@dataclass(frozen=True, kw_only=True)
class Example:
    """A worked example. ``solution`` is the text shown; without one, or without a box in it, the answer is boxed."""

    problem: str
    answer: str | None = None
    solution: str | None = None

    def __post_init__(self) -> None:
        if self.answer is None and self.solution is None:
            raise UsageError(f"task.examples: the example {self.problem[:40]!r} needs an answer or a solution")

    def worked(self) -> str:
        """The solution as the model should write it, ending in a box where an answer is given."""
        if self.answer is None or (self.solution is not None and "\\boxed{" in self.solution):
            return str(self.solution)
        boxed = f"The answer is \\boxed{{{self.answer}}}."
        return boxed if self.solution is None else f"{self.solution.rstrip()}\n{boxed}"


@dataclass(frozen=True, kw_only=True)
class Template:
    """Problem to prompt text. ``variables`` are handed to the tokenizer's chat template."""

    instruction: str = BOX_SENTENCE
    system: str | None = None
    chat: bool = True
    takes_examples: bool = False
    examples: tuple[Example, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    def render(self, problem: str, tokenizer: Tokenizer) -> str:
        """The prompt's text. Raises ``UsageError`` where a chat template is needed and the tokenizer has none."""
        if not self.chat:
            return self._plain(problem)
        messages: list[Message] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for example in self.examples:
            messages.append({"role": "user", "content": self._question(example.problem)})
            messages.append({"role": "assistant", "content": example.worked()})
        messages.append({"role": "user", "content": self._question(problem)})
        return tokenizer.chat(messages, **dict(self.variables))

    def _question(self, problem: str) -> str:
        return f"{problem}\n{self.instruction}" if self.instruction else problem

    def _plain(self, problem: str) -> str:
        head = [f"{text}\n\n" for text in (self.system, self.instruction) if text]
        shots = [f"Problem: {e.problem}\nSolution: {e.worked()}\n\n" for e in self.examples]
        return "".join([*head, *shots, f"Problem: {problem}\nSolution:"])


TEMPLATES: dict[str, Template] = {
    "paper": Template(),
    "qwen2.5-math": Template(system=QWEN_SYSTEM),
    "llama-3.2": Template(variables=(("date_string", LLAMA_DATE),)),
    "chat": Template(takes_examples=True),
    "plain": Template(chat=False, instruction="", takes_examples=True),
}


def make_template(
    name: str,
    *,
    examples: Sequence[Example | Mapping[str, Any]] = (),
    instruction: str | None = None,
    system: str | None = None,
) -> Template:
    """A named template with worked examples and, where given, another instruction or system line.

    Raises ``UsageError`` for an unknown name (with the nearest one), for examples given to a template
    that takes none, and for an example with unknown or missing fields.
    """
    if name not in TEMPLATES:
        raise UsageError(f"task.template: unknown template {name!r}; {nearest(name, TEMPLATES)}")
    template = TEMPLATES[name]
    if examples and not template.takes_examples:
        raise UsageError(
            f"task.examples: template {name!r} takes no worked examples (got {len(examples)}); use 'chat' or 'plain'"
        )
    changes: dict[str, Any] = {"examples": tuple(_example(i, e) for i, e in enumerate(examples))}
    if instruction is not None:
        changes["instruction"] = instruction
    if system is not None:
        changes["system"] = system
    return replace(template, **changes)


def _example(index: int, example: Example | Mapping[str, Any]) -> Example:
    if isinstance(example, Example):
        return example
    known = ("problem", "answer", "solution")
    unknown = [k for k in example if k not in known]
    if unknown:
        raise UsageError(f"task.examples[{index}]: unknown field {unknown[0]!r}; {nearest(unknown[0], known)}")
    if "problem" not in example:
        raise UsageError(f"task.examples[{index}]: field 'problem' is missing; got {', '.join(example) or 'nothing'}")
    return Example(**{k: None if v is None else str(v) for k, v in example.items()})
