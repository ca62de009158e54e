"""Broken model files, made from good ones: bit flips, cuts, extreme fields, splices."""

from __future__ import annotations

import random
import struct
from pathlib import Path

from llamaherd import files
from llamaherd.files.synthesize import synthesize

EXTREMES = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)


def seeds(folder: Path) -> dict[str, bytes]:
    """One small good file of every container and version, by name."""
    options = {"layers": 1, "n_embd": 32, "n_heads": 2, "n_ctx": 64}
    spm = synthesize(
        folder / "spm.gguf", "llama", tokenizer="spm", n_kv_heads=2, n_ff=96, type="q4_0", **options
    )
    bpe = synthesize(folder / "bpe.gguf", "gptneox", type="f16", **options)
    out = {"gguf3": spm.read_bytes(), "gguf3-bpe": bpe.read_bytes()}
    out["gguf2"] = out["gguf3"][:4] + struct.pack("<I", 2) + out["gguf3"][8:]
    out["gguf1"] = gguf_v1()
    out["gguf-big-endian"] = gguf_v3_big_endian()
    for path, name, containers in (
        (spm, "llama", ("ggml", "ggmf", "ggjt1", "ggjt2", "ggjt3")),
        (bpe, "gptneox", ("ggml", "ggjt3")),
    ):
        with files.open(path) as model:
            for to in containers:
                target = folder / f"{name}.{to}"
                files.convert(model, target, to=to, sync=False)
                out[f"{to}-{name}"] = target.read_bytes()
    for name in ("mpt", "falcon"):
        source = synthesize(folder / f"{name}.gguf", name, type="q8_0", tied=name == "mpt" or None, **options)
        with files.open(source) as model:
            files.convert(model, folder / name, to="ggjt3", sync=False)
        out[f"ggjt3-{name}"] = (folder / name).read_bytes()
    out["ggla"] = ggla()
    return out


def gguf_v1() -> bytes:
    """A GGUF version 1 file: counts, lengths and sides are u32."""

    def text(value: str) -> bytes:
        return struct.pack("<I", len(value)) + value.encode()

    pairs = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("llama.block_count") + struct.pack("<II", 4, 1),
        text("llama.scale") + struct.pack("<If", 6, 0.5),
        text("tokenizer.ggml.tokens") + struct.pack("<III", 9, 8, 3) + text("a") + text("bc") + text(""),
        text("tokenizer.ggml.scores") + struct.pack("<III", 9, 6, 3) + struct.pack("<3f", 0, -1, -2),
    ]
    tensor = text("token_embd.weight") + struct.pack("<III", 2, 8, 3) + struct.pack("<IQ", 0, 0)
    head = b"GGUF" + struct.pack("<III", 1, 1, len(pairs)) + b"".join(pairs) + tensor
    return head + bytes(-len(head) % 32) + struct.pack("<24f", *range(24))


def gguf_v3_big_endian() -> bytes:
    """A GGUF version 3 file of a big-endian machine."""

    def text(value: str) -> bytes:
        return struct.pack(">Q", len(value)) + value.encode()

    pairs = [
        text("general.architecture") + struct.pack(">I", 8) + text("llama"),
        text("llama.block_count") + struct.pack(">II", 4, 1),
        text("a.numbers") + struct.pack(">IIQ", 9, 5, 2) + struct.pack(">2i", -5, 7),
        text("tokenizer.ggml.tokens") + struct.pack(">IIQ", 9, 8, 2) + text("a") + text("bc"),
    ]
    tensor = text("token_embd.weight") + struct.pack(">IQQ", 2, 4, 2) + struct.pack(">IQ", 1, 0)
    head = b"GGUF" + struct.pack(">IQQ", 3, 1, len(pairs)) + b"".join(pairs) + tensor
    return head + bytes(-len(head) % 32) + struct.pack(">8e", *range(8)) + bytes(16)


def ggla() -> bytes:
    """A LoRA adapter of before GGUF: rank 2 on one 32 x 32 matrix."""
    out = bytearray(struct.pack("<4sIii", b"algg", 1, 2, 4))
    for letter, side in (("A", 32), ("B", 32)):
        name = f"layers.0.attention.wq.weight.lora{letter}".encode()
        out += struct.pack("<iiI2i", 2, len(name), 0, 2, side) + name
        out += bytes(-len(out) % 32)
        out += struct.pack(f"<{2 * side}f", *(i / 8 for i in range(2 * side)))
    return bytes(out)


def mutate(dice: random.Random, good: bytes, others: list[bytes]) -> bytes:
    """A broken copy of ``good``. Headers are hit far more often than weights."""
    data = bytearray(good)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        where = dice.randrange(min(len(data), dice.choice((64, 512, 4096, 32768, len(data)))) or 1)
        kind = dice.randrange(8)
        if kind == 0:
            data[where] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del data[where:]
        elif kind in (2, 3):
            width = dice.choice((1, 2, 4, 8))
            value = dice.choice((*EXTREMES, len(data), dice.getrandbits(64))) % (1 << 8 * width)
            data[where : where + width] = value.to_bytes(width, dice.choice(("little", "little", "big")))
        elif kind == 4:
            other = dice.choice(others)
            data[where:] = other[dice.randrange(len(other)) :]
        elif kind == 5:
            del data[where : where + dice.choice((1, 4, 8, 32, 500))]
        elif kind == 6:
            length = dice.choice((1, 4, 8, 32, 500))
            data[where:where] = data[where : where + length]
        else:
            data[where : where + 8] = dice.randbytes(8)
        if not data:
            break
    return bytes(data)


def cuts(good: bytes, header: int) -> list[bytes]:
    """``good`` cut after every byte of its first ``header`` ones."""
    return [good[:n] for n in range(min(header, len(good)))]
