"""Prompts that ask a model for the next tactic of a Lean 4 proof, and what to do with its answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from .chat import ChatTemplate
from .errors import ConfigError, InvalidParameterError
from .types import Prompt, PromptPart

__all__ = ["PRESETS", "LeanPreset", "lean_preset"]

_EXAMPLES = (
    ("p q : Prop\nhp : p\n⊢ p ∨ q", "left"),
    ("x y : ℕ\nh : x = y\n⊢ y = x", "rw [h]"),
    ("x : ℕ\n⊢ x + 0 = x", "simp"),
    ("p q : Prop\nhp : p\n⊢ p", "exact hp"),
    ("p q : Prop\n⊢ p → q", "intro hp"),
    ("a b : ℕ\nh : a ≤ b\n⊢ a < b + 1", "omega"),
    ("p q : Prop\n⊢ p ∧ q", "constructor"),
    ("x : ℝ\n⊢ x * x = x ^ 2", "ring"),
    ("p q : Prop\nh : p ∨ q\n⊢ q ∨ p", "cases h"),
    ("f : ℕ → ℕ\nhf : ∀ n, f n = 0\n⊢ f 3 = 0", "apply hf"),
)
_TASK = "Given a Lean 4 goal, answer with one tactic that makes progress on it, and nothing else."

_ALONE = """
abel aesop assumption bound constructor contradiction decide exfalso ext field_simp fun_prop gcongr group
infer_instance left linarith measurability nlinarith norm_cast norm_num omega positivity push_cast push_neg
rfl right ring ring_nf rintro simp simp_all split split_ifs subst_vars symm tauto trivial
"""
_WITH_TERM = """
apply by_cases by_contra calc cases convert exact exact_mod_cast funext generalize have induction intro intros
lift obtain rcases refine replace rintro set show simpa specialize subst suffices trans unfold use
"""
_WITH_LIST = "erw linarith nlinarith norm_num nth_rw rw rwa simp simp_all simp_rw simpa"


def _words(names: str) -> str:
    return " | ".join(f'"{name}"' for name in sorted(names.split()))


_GRAMMAR = f"""\
root ::= " "? (alone | term-tactic " " term | list-tactic (" only")? " [" term "]" (" at " name)?) end
alone ::= {_words(_ALONE)}
term-tactic ::= {_words(_WITH_TERM)}
list-tactic ::= {_words(_WITH_LIST)}
term ::= word (" " word){{0,5}}
word ::= [^ \\n\\[\\]]{{1,24}}
name ::= [^ \\n\\[\\](){{}}]{{1,8}}
end ::= "\\n"
"""


@dataclass(frozen=True)
class LeanPreset:
    """One way to ask.

    Attributes:
        name: what ``--preset`` and the server's settings call it.
        summary: for whom it is, in a line.
        style: how the prompt is laid out.
        stop: texts that end a suggestion.
        grammar: a GBNF grammar that suggestions follow when they begin from nothing (no prefix), or None.
    """

    name: str
    summary: str
    style: Literal["llmstep", "bare", "examples", "chat"]
    stop: tuple[str, ...]
    grammar: str | None = None

    @property
    def needs_chat(self) -> bool:
        """Whether prompt() needs the model's chat template."""
        return self.style == "chat"

    def prompt(
        self, goal: str, prefix: str = "", context: str = "", *, chat: ChatTemplate | None = None
    ) -> Prompt:
        """The prompt for a goal.

        Args:
            goal: Lean's tactic state: hypotheses, then ``⊢`` and what is to be shown.
            prefix: how the suggestions must begin, e.g. ``"exact"``.
            context: the file up to the tactic, for the presets that show it to the model.
            chat: the model's chat template, for the preset "chat".

        Raises:
            InvalidParameterError: the goal is empty.
            ConfigError: "chat" without a template.
        """
        goal, begun = goal.strip(), prefix.rstrip()
        if not goal:
            raise InvalidParameterError("goal", goal, "a tactic state such as 'p : Prop\\nh : p\\n⊢ p'")
        if self.style == "llmstep":
            return f"[GOAL]{goal}[PROOFSTEP]{begun}"
        if self.style == "bare":
            return f"{goal}{begun}"
        if self.style == "chat":
            if chat is None:
                raise ConfigError(f"the Lean preset {self.name!r} needs a model with a chat template")
            return (*chat.render(_messages(goal, context)), PromptPart(begun))
        return _examples(goal, begun, context)

    def grammar_for(self, prefix: str) -> str | None:
        """The grammar to use with this prefix; it describes whole tactics, so only with none."""
        return None if prefix.strip() else self.grammar

    def shown(self, text: str, prefix: str = "") -> str:
        """A suggestion as the user sees it: prefix and generated text."""
        return (prefix.rstrip() + text).strip()

    def keep(self, text: str, prefix: str = "") -> bool:
        """Whether a generated text is worth showing: it says something, and does not give up."""
        if not text.strip() or "\ufffd" in text:
            return False
        if prefix and prefix[-1].isspace() and not text[0].isspace():
            return False  # it goes on with the prefix's last word, which was complete
        return re.search(r"\b(sorry|admit)\b", self.shown(text, prefix)) is None


def _examples(goal: str, prefix: str, context: str) -> str:
    shots = "".join(f"Goal:\n{state}\nTactic: {tactic}\n---\n" for state, tactic in _EXAMPLES)
    file = f"File:\n{context.rstrip()}\n---\n" if context.strip() else ""
    return f"{_TASK}\n---\n{shots}{file}Goal:\n{goal}\nTactic:" + (f" {prefix}" if prefix else "")


def _messages(goal: str, context: str) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": _TASK}]
    for state, tactic in _EXAMPLES:
        messages.append({"role": "user", "content": state})
        messages.append({"role": "assistant", "content": tactic})
    file = f"The file so far:\n{context.rstrip()}\n\nThe goal:\n" if context.strip() else ""
    return [*messages, {"role": "user", "content": file + goal}]


PRESETS = {
    preset.name: preset
    for preset in (
        LeanPreset("llmstep", "models trained for llmstep", "llmstep", ("\n", "[GOAL]", "[PROOFSTEP]")),
        LeanPreset("reprover", "models trained on state -> tactic, as ReProver's", "bare", ("\n",)),
        LeanPreset("few-shot", "base models that have seen Lean", "examples", ("---", "\n")),
        LeanPreset("chat", "instruct models that have seen Lean", "chat", ("---", "\n")),
        LeanPreset(
            "tactics",
            "any model: few-shot, held to the shape of a tactic",
            "examples",
            ("---", "\n"),
            _GRAMMAR,
        ),
    )
}
"""The presets by name."""


def lean_preset(name: str) -> LeanPreset:
    """The preset of that name.

    Raises:
        InvalidParameterError: there is none.
    """
    if name not in PRESETS:
        raise InvalidParameterError("preset", name, f"one of {', '.join(PRESETS)}")
    return PRESETS[name]
