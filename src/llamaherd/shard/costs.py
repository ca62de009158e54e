"""What each layer of a model takes, from its file or from its sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidParameterError, UnknownParameterError, UnsupportedFileError
from ..files.architectures import ARCHITECTURES
from ..files.block_types import BlockType, named_type
from ..files.blueprint import Shape
from ..files.contents import contents_of
from ..files.cut_rules import CUT_RULES
from ..files.layers import BLOCK, count_layers
from ..files.model_file import ModelFile
from ..files.slice import check_cut
from ..files.summary import memory_needed

__all__ = ["ModelCosts", "costs_of_file", "costs_on_paper"]

_PADDED = 256  # cells: libllama pads a context to a multiple


@dataclass(frozen=True)
class ModelCosts:
    """What a plan has to know of a model. Sizes in bytes.

    Attributes:
        name: for people.
        layers: bytes of each layer's weights.
        embedding, head: of the first stage and of the last one beside their layers.
        tied: whether embedding and head are one tensor, which a stage that needs both holds once.
        everywhere: of every stage (tables of frequencies and the like).
        kv_token: of the KV cache, a token and a layer, f16.
        n_embd, n_vocab: widths of what travels.
        period: a stage may begin at multiples of this many layers.
    """

    name: str
    layers: tuple[int, ...]
    embedding: int
    head: int
    everywhere: int
    kv_token: float
    n_embd: int
    n_vocab: int
    period: int = 1
    tied: bool = False

    def weights(self, start: int, end: int) -> int:
        """Bytes of the weights of a stage of layers [start, end)."""
        last = end == len(self.layers)
        total = self.read(start, end)
        return total + (self.embedding if start == 0 and not (self.tied and last) else 0)

    def read(self, start: int, end: int) -> int:
        """Bytes of them that are read for a token: of an embedding it is one row."""
        total = sum(self.layers[start:end]) + self.everywhere
        return total + (self.head if end == len(self.layers) else 0)

    def kv_cache(self, start: int, end: int, n_ctx: int) -> int:
        """Bytes of its KV cache of ``n_ctx`` tokens in all."""
        return int(self.kv_token * (end - start) * -(-n_ctx // _PADDED) * _PADDED)

    def compute(self, start: int, end: int, n_ubatch: int) -> int:
        """Bytes of its compute buffers, roughly: some activations wide, and the logits at the end."""
        width = 12 * self.n_embd + (self.n_vocab if end == len(self.layers) else 0)
        return 4 * width * n_ubatch


def costs_of_file(model: ModelFile) -> ModelCosts:
    """The costs of a model's file. Raises UnsupportedFileError: it cannot be cut, with the reason."""
    # what cannot be cut at all need not have layers that can be counted
    layers = count_layers(model) if model.architecture in CUT_RULES else 1
    rule = check_cut(model, 0, layers)
    by_layer = [0] * layers
    embedding = head = everywhere = 0
    for tensor in model.tensors.values():
        block = BLOCK.fullmatch(tensor.name)
        if block is not None:
            by_layer[int(block[1])] += tensor.nbytes
        elif tensor.name in ("token_embd.weight", "position_embd.weight"):
            embedding += tensor.nbytes
        elif tensor.name.startswith("output"):
            head += tensor.nbytes
        else:
            everywhere += tensor.nbytes
    contents = contents_of(model)
    values = contents.values()
    n_embd = values.get(f"{model.architecture}.embedding_length")
    token_embd = model.tensors.get("token_embd.weight")
    if not isinstance(n_embd, int) or token_embd is None:
        raise UnsupportedFileError(model.path, "it does not say how wide its layers are")
    tied = "output.weight" not in model.tensors
    head += token_embd.nbytes if tied else 0
    return ModelCosts(
        name=str(values.get("general.name") or model.path.name),
        layers=tuple(by_layer),
        embedding=embedding,
        head=head,
        everywhere=everywhere,
        kv_token=memory_needed(contents, _PADDED).kv_cache / _PADDED / layers,
        n_embd=n_embd,
        n_vocab=token_embd.shape[1],
        period=rule.period,
        tied=tied,
    )


_PAPER = {
    "layers": None, "n_embd": None, "n_heads": None, "n_kv_heads": None, "n_ff": None, "n_vocab": 128256,
    "n_experts": 8, "n_experts_used": 2, "type": "q4_k", "head_type": "q6_k",
}  # fmt: skip
_MOST_LAYERS = 1000  # every cut of them is considered


def costs_on_paper(text: str) -> ModelCosts:
    """The costs of a model of which only the sizes are known.

    Args:
        text: ``ARCHITECTURE:layers=126,n_embd=16384,n_heads=128,n_kv_heads=8,n_ff=53248``, and if they differ
            from Llama 3's or from a Q4_K file ``n_vocab``, ``type`` (of matrices), ``head_type`` (of
            embeddings and output); of mixtures ``n_experts`` and ``n_experts_used``.

    Raises:
        InvalidParameterError, UnknownParameterError: a size is missing, or nobody's.
    """
    name, _, rest = text.partition(":")
    given: dict[str, str] = dict(part.partition("=")[::2] for part in rest.split(",") if part)
    for key in given:
        if key not in _PAPER:
            raise UnknownParameterError(key, tuple(_PAPER), of="a model on paper")
    row = ARCHITECTURES.get(name)
    if row is None or row.gguf not in CUT_RULES:
        known = sorted(k for k, a in ARCHITECTURES.items() if a.gguf in CUT_RULES)
        raise InvalidParameterError("architecture", name, f"one of {', '.join(known)}")
    sizes = {key: _number(key, given.get(key, value)) for key, value in _PAPER.items() if "type" not in key}
    if sizes["layers"] > _MOST_LAYERS:
        raise InvalidParameterError("layers", sizes["layers"], f"at most {_MOST_LAYERS}")
    n_head = row.head_size or sizes["n_embd"] // max(1, sizes["n_heads"])
    shape = Shape(**sizes, n_head=n_head, n_rot=int(n_head * row.rotary), n_ctx=1, sliding_window=1)
    matrices, ends = (_type(key, given.get(key, str(_PAPER[key]))) for key in ("type", "head_type"))
    by_layer = [0] * shape.layers
    embedding = head = everywhere = 0
    for weight in row.list_weights(shape, row.head == "tied"):
        block = BLOCK.fullmatch(weight.name)
        kind = named_type("f32") if len(weight.shape) == 1 else matrices if block else ends
        try:
            size = kind.nbytes(weight.shape)
        except ValueError as error:
            raise InvalidParameterError(
                weight.name, weight.shape, f"of a type that fits; {error}: take another type or head_type"
            ) from error
        if block is not None:
            by_layer[int(block[1])] += size
        elif weight.name in ("token_embd.weight", "position_embd.weight"):
            embedding += size
        elif weight.name.startswith("output"):
            head += size
        else:
            everywhere += size
    return ModelCosts(
        name=text,
        layers=tuple(by_layer),
        embedding=embedding,
        head=head + (embedding if row.head == "tied" else 0),
        everywhere=everywhere,
        kv_token=4.0 * shape.n_kv_heads * n_head,
        n_embd=shape.n_embd,
        n_vocab=shape.n_vocab,
        period=CUT_RULES[row.gguf].period,
        tied=row.head == "tied",
    )


def _type(key: str, name: str) -> BlockType:
    try:
        return named_type(name)
    except KeyError as error:
        raise InvalidParameterError(key, name, "a block type such as q4_k, q8_0 or f16") from error


def _number(key: str, value: object) -> int:
    text = str(value)
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 1 << 31:
        raise InvalidParameterError(
            key, value, "a positive whole number; give all of layers, n_embd, n_heads, n_kv_heads and n_ff"
        )
    return int(text)
