"""Which replica a request goes to: where most of its prompt was computed, unless that one is busier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import cast

from ..types import Prompt, PromptPart

__all__ = ["Affinity"]

_CHARACTERS = 64
_TOKENS = 16
_LONGEST = 256  # blocks of a prompt that are looked at


class Affinity:
    """Remembers which beginnings of prompts went where.

    A chat's next turn begins with the turns before, so a session finds its replica, too. The idea is that of
    cache-aware routing, as in SGLang's router.

    Args:
        slack: a replica may have so many requests more than the idlest one and still be preferred.
        remembered: blocks of prompts that are kept for each replica, the latest ones.
    """

    def __init__(self, *, slack: int = 4, remembered: int = 1 << 14) -> None:
        self._slack = slack
        self._remembered = remembered
        self._seen: dict[str, OrderedDict[int, None]] = {}

    def choose(self, prompt: Prompt, loads: Mapping[str, int]) -> str:
        """A replica's name.

        Args:
            prompt: of the request.
            loads: the replicas that there are, by name, with the requests that each has; not empty.
        """
        blocks = list(_blocks(prompt))
        least = min(loads.values())
        near = [name for name, load in loads.items() if load <= least + self._slack]
        name = max(near, key=lambda n: (self._known(n, blocks), -loads[n]))
        seen = self._seen.setdefault(name, OrderedDict())
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._remembered:
            seen.popitem(last=False)
        return name

    def forget(self, name: str) -> None:
        """What this replica had computed is gone."""
        self._seen.pop(name, None)

    def _known(self, name: str, blocks: list[int]) -> int:
        seen = self._seen.get(name, OrderedDict())
        return next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))


def _blocks(prompt: Prompt) -> Iterator[int]:
    """A hash for each beginning of a prompt, block by block; an unfinished block at the end is left out."""
    size = _CHARACTERS
    content: str | tuple[int, ...]
    if isinstance(prompt, str):
        content = prompt
    elif prompt and isinstance(prompt[0], PromptPart):
        content = "".join(cast(PromptPart, part).text for part in prompt)
    else:
        content, size = tuple(cast(int, token) for token in prompt), _TOKENS
    so_far = 0
    for end in range(size, min(len(content), _LONGEST * size) + 1, size):
        so_far = hash((so_far, content[end - size : end]))
        yield so_far
