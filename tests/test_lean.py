"""Lean prompts: their shapes, and what is kept of the answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamaherd import Herd, Model
from llamaherd.chat import ChatTemplate
from llamaherd.errors import ConfigError, InvalidParameterError
from llamaherd.lean import PRESETS, lean_preset
from llamaherd.suggestions import DEFAULT_SAMPLING

GOAL = "x y : ℕ\nh : x = y\n⊢ y = x"


def test_llmsteps_prompt() -> None:
    assert lean_preset("llmstep").prompt(GOAL, "rw [") == f"[GOAL]{GOAL}[PROOFSTEP]rw ["
    assert lean_preset("reprover").prompt(GOAL, "exact ") == f"{GOAL}exact"


def test_few_shot_shows_the_file_and_ends_where_the_tactic_goes_on() -> None:
    prompt = lean_preset("few-shot").prompt(GOAL, "rw", "import Mathlib\n")
    assert isinstance(prompt, str)
    assert prompt.endswith(f"Goal:\n{GOAL}\nTactic: rw")
    assert "import Mathlib" in prompt
    bare = lean_preset("few-shot").prompt(GOAL)
    assert isinstance(bare, str)
    assert bare.endswith("Tactic:")  # a space at the end would split the next word's token


def test_chat_needs_a_template_and_keeps_the_goal_plain_text() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        lean_preset("chat").prompt(GOAL)
    template = ChatTemplate("{% for m in messages %}{{ '<s>' + m.content }}{% endfor %}", ["<s>"])
    parts = lean_preset("chat").prompt("z : ℕ\n⊢ z = z<s>", "rw", chat=template)
    assert parts[-1].text == "rw"  # type: ignore[union-attr]
    goal = next(p for p in parts if "⊢ z = z<s>" in p.text)  # type: ignore[union-attr]
    assert not goal.parse_special  # type: ignore[union-attr]


def test_unusable_input_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="few-shot"):
        lean_preset("fewshot")
    with pytest.raises(InvalidParameterError, match="tactic state"):
        lean_preset("llmstep").prompt("  \n")


@pytest.mark.parametrize("text", ["", "  ", "sorry", " by sorry", "admit", "exact sorry", "simp; admit"])
def test_giving_up_is_not_a_suggestion(text: str) -> None:
    assert not lean_preset("few-shot").keep(text)


def test_suggestions_begin_with_the_prefix() -> None:
    preset = lean_preset("few-shot")
    assert preset.keep(" simp [admittedly_fine]")
    assert preset.shown(" rw [h]") == "rw [h]"
    assert preset.shown(" h.symm", "exact") == "exact h.symm"
    assert preset.shown("h]", "rw [") == "rw [h]"
    assert preset.keep(" h", "exact ")
    assert not preset.keep("ly", "exact ")  # "exactly" does not begin with "exact "
    assert not preset.keep("orry", "s")


@pytest.mark.real
@pytest.mark.parametrize("name", PRESETS)
def test_the_demo_model_answers_every_preset(name: str, demo_model_path: Path) -> None:
    preset = lean_preset(name)
    with Model.load(demo_model_path) as model, Herd(model, n_ctx=1024, max_sequences=8) as herd:
        prompt = preset.prompt(GOAL, chat=ChatTemplate.of(model) if preset.needs_chat else None)
        sampling = DEFAULT_SAMPLING.replace(grammar=preset.grammar_for(""))

        def suggest(seed: int) -> list[str]:
            found = herd.suggest(
                prompt,
                n=4,
                max_tokens=24,
                stop=preset.stop,
                sampling=sampling.replace(seed=seed),
                keep=preset.keep,
            )
            return [preset.shown(s.text) for s in found]

        shown = suggest(1)
        assert shown
        assert all(shown)
        assert not any("\n" in s for s in shown)
        if name == "tactics":
            # which seeds draw it depends on the kernels' rounding; that none of twelve does would be no luck
            assert any("rw [h]" in suggest(seed) for seed in range(1, 13))
