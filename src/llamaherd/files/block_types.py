"""How many elements and bytes a block of each tensor type has, in each era of the ggml family.

The numbers are ggml's (``enum ggml_type``); a number kept its meaning over the years, but the blocks behind
some of them changed twice. ``era`` 3 is today's layout; 1 and 2 are those of GGML, GGMF and GGJT 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

__all__ = ["BlockType", "block_type", "named_type"]


@dataclass(frozen=True, slots=True)
class BlockType:
    """One tensor type: ``block_size`` elements of a row lie in ``block_bytes`` bytes.

    Both are 0 for a type this table does not know. ``era`` tells layouts of one number apart.
    """

    name: str
    number: int
    block_size: int
    block_bytes: int
    era: int = 3

    @property
    def known(self) -> bool:
        """Whether the layout's size is known."""
        return self.block_size > 0

    @property
    def removed(self) -> bool:
        """Whether today's libllama no longer reads this type."""
        return not self.known or self.era != 3 or self.number in _REMOVED

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of ``shape`` (ggml order: shape[0] is the length of a row).

        Raises ValueError for an unknown type or a row that is not whole blocks.
        """
        if not self.known:
            raise ValueError(f"the size of tensor type {self.name} is not known")
        row = shape[0] if shape else 1
        if row % self.block_size:
            raise ValueError(f"a row of {row} is not whole {self.name} blocks of {self.block_size}")
        return prod(shape) // self.block_size * self.block_bytes

    def __str__(self) -> str:
        return self.name if self.era == 3 else f"{self.name}/v{self.era}"


# number: (name, elements a block, bytes a block) of today's ggml
_TODAY = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 36),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    31: ("q4_0_4_4", 32, 18),
    32: ("q4_0_4_8", 32, 18),
    33: ("q4_0_8_8", 32, 18),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    36: ("iq4_nl_4_4", 32, 18),
    37: ("iq4_nl_4_8", 32, 18),
    38: ("iq4_nl_8_8", 32, 18),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
    42: ("q2_0", 64, 18),
}

_REMOVED = frozenset({4, 5, 31, 32, 33, 36, 37, 38})

# era: number: (elements a block, bytes a block), where a block differs from today's
_OLD = {
    1: {2: (32, 20), 3: (32, 24), 4: (16, 10), 5: (16, 12), 6: (32, 22), 7: (32, 24), 8: (32, 36)},
    2: {2: (32, 20), 3: (32, 24), 8: (32, 36)},
}

_ERA_1_NAMES = {4: "q4_2", 5: "q4_3"}

_TYPES: dict[tuple[int, int], BlockType] = {}
for _number, (_name, _size, _bytes) in _TODAY.items():
    _TYPES[3, _number] = BlockType(_name, _number, _size, _bytes)
for _era, _table in _OLD.items():
    for _number, (_size, _bytes) in _table.items():
        _name = _ERA_1_NAMES[_number] if _number in _ERA_1_NAMES else _TODAY[_number][0]
        _TYPES[_era, _number] = BlockType(_name, _number, _size, _bytes, _era)


def block_type(number: int, era: int = 3) -> BlockType:
    """The type with ggml's ``number`` as files of ``era`` (1, 2 or 3) store it.

    A type whose blocks were the same then as today comes as today's. An unknown number gives a type
    named after it, with ``known`` False: one odd tensor does not make a file unreadable.
    """
    found = _TYPES.get((era, number)) or _TYPES.get((3, number))
    return found or BlockType(f"type_{number}", number, 0, 0)


def named_type(name: str, era: int = 3) -> BlockType:
    """The type called ``name`` (any case) in ``era``. Raises KeyError if that era has none of that name."""
    for (of, _), found in _TYPES.items():
        if found.name == name.lower() and (of == era or (of == 3 and (era, found.number) not in _TYPES)):
            return found
    raise KeyError(name)
