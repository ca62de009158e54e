"""What an architecture is made of: its weights and hyperparameters, as llama.cpp's loader asks for them.

Names and shapes are those of ``src/models/*.cpp`` (``load_arch_tensors``); shapes are in ggml's order,
columns first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from llamaherd.files.metadata import Value

__all__ = ["Architecture", "Role", "Shape", "Weight", "encoder", "encoder_decoder", "mamba", "mamba_keys"]


class Role(Enum):
    """What a weight does, which decides how its random values are scaled and whether it is quantised."""

    EMBEDDING = "embedding"
    HEAD = "head"
    MATRIX = "matrix"
    SHARP = "sharp"  # query and key projections: larger, so that attention prefers some tokens
    RESIDUAL = "residual"  # what a layer adds to the stream: larger, so that layers matter
    ROUTER = "router"
    NORM = "norm"
    SHARP_NORM = "sharp norm"  # of queries and keys
    OUTPUT_NORM = "output norm"
    BIAS = "bias"
    TABLE = "table"  # positions, token types
    DECAY = "decay"  # state-space A: negative
    CONVOLUTION = "convolution"


@dataclass(frozen=True)
class Weight:
    """One weight to be made: its name, its shape (ggml's order) and its role."""

    name: str
    shape: tuple[int, ...]
    role: Role = Role.MATRIX


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; ``n_head`` is the length of one attention head, ``n_rot`` its rotated part."""

    layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    n_head: int
    n_rot: int
    n_ff: int
    n_vocab: int
    n_ctx: int
    n_experts: int
    n_experts_used: int
    sliding_window: int

    @property
    def q(self) -> int:
        """Columns of all query heads."""
        return self.n_heads * self.n_head

    @property
    def kv(self) -> int:
        """Columns of all key (or value) heads."""
        return self.n_kv_heads * self.n_head


@dataclass(frozen=True)
class Architecture:
    """How one architecture differs from the others.

    name: what users call it; gguf: its ``general.architecture``. norm: "rms" or "layer"; norm_bias: its
    norms have one. qkv: "split" or "fused". qk_norm: None, "head" (one head's length) or "row" (all
    heads together). ffn: "gated", "fused" (gate and up in one), "plain" or "experts". head: "own",
    "tied" (to the token embedding; always), "either" or "none". head_size: a head's length where it is
    not n_embd / n_heads. rotary: the rotated part of a head. scaled_embedding: the graph multiplies
    embeddings by sqrt(n_embd). ffn_norm_name: where it is not "ffn_norm". leading_dense: layers before
    the first with experts. sinks: attention has sinks, and experts have biases. weights replaces the
    usual list; keys adds hyperparameters.
    """

    name: str
    gguf: str
    tokenizer: str = "bpe"
    norm: str = "rms"
    norm_bias: bool = False
    attn_norm: bool = True
    ffn_norm: bool = True
    output_norm: bool = True
    post_norms: bool = False
    qkv: str = "split"
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: str | None = None
    ffn: str = "gated"
    ffn_bias: bool = False
    shared_expert: bool = False
    positions: str = "rope"
    head: str = "either"
    head_bias: bool = False
    grouped_heads: bool = True
    head_size: int | None = None
    rotary: float = 1.0
    scaled_embedding: bool = False
    embedding_norm: bool = False
    ffn_norm_name: str = "ffn_norm"
    leading_dense: int = 0
    sinks: bool = False
    weights: Callable[[Architecture, Shape, bool], Iterator[Weight]] | None = None
    keys: Callable[[Shape], Mapping[str, Value]] = field(default=lambda shape: {})

    def list_weights(self, shape: Shape, tied: bool) -> list[Weight]:
        """Every weight in the file's order; ``tied`` leaves out the output head."""
        return list((self.weights or _transformer)(self, shape, tied))

    def hyperparameters(self, shape: Shape) -> dict[str, Value]:
        """The metadata of a model of ``shape``, under this architecture's prefix."""
        eps = "attention.layer_norm_rms_epsilon" if self.norm == "rms" else "attention.layer_norm_epsilon"
        keys: dict[str, Value] = {
            "context_length": shape.n_ctx,
            "embedding_length": shape.n_embd,
            "block_count": shape.layers,
            "feed_forward_length": shape.n_ff,
            "attention.head_count": shape.n_heads,
            "attention.head_count_kv": shape.n_kv_heads,
            eps: 1e-5,
        }
        if self.positions == "rope":
            keys["rope.dimension_count"] = shape.n_rot
            keys["rope.freq_base"] = 10000.0
        if self.head_size is not None:
            keys["attention.key_length"] = shape.n_head
            keys["attention.value_length"] = shape.n_head
        if self.ffn == "experts":
            keys["expert_count"] = shape.n_experts
            keys["expert_used_count"] = shape.n_experts_used
        keys.update(self.keys(shape))
        return {f"{self.gguf}.{key}": value for key, value in keys.items()}


# ------------------------------------------------------------------------- decoder-only transformers


def _transformer(a: Architecture, s: Shape, tied: bool) -> Iterator[Weight]:
    yield Weight("token_embd.weight", (s.n_embd, s.n_vocab), Role.EMBEDDING)
    if a.positions == "learned":
        yield Weight("position_embd.weight", (s.n_embd, s.n_ctx), Role.TABLE)
    if a.embedding_norm:
        yield from _norm(a, "token_embd_norm", s.n_embd)
    if a.output_norm:
        yield Weight("output_norm.weight", (s.n_embd,), Role.OUTPUT_NORM)
        if a.norm_bias:
            yield Weight("output_norm.bias", (s.n_embd,), Role.BIAS)
    if not tied:
        yield Weight("output.weight", (s.n_embd, s.n_vocab), Role.HEAD)
    if a.head_bias:
        yield Weight("output.bias", (s.n_vocab,), Role.BIAS)
    for layer in range(s.layers):
        yield from _attention(a, s, f"blk.{layer}.")
        dense = a.ffn != "experts" or layer < a.leading_dense
        yield from _feed_forward(a, s, f"blk.{layer}.", dense)


def _norm(a: Architecture, name: str, length: int) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (length,), Role.NORM)
    if a.norm_bias:
        yield Weight(f"{name}.bias", (length,), Role.BIAS)


def _linear(name: str, columns: int, rows: int, bias: bool, role: Role = Role.MATRIX) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (columns, rows), role)
    if bias:
        yield Weight(f"{name}.bias", (rows,), Role.BIAS)


def _attention(a: Architecture, s: Shape, blk: str) -> Iterator[Weight]:
    if a.attn_norm:
        yield from _norm(a, f"{blk}attn_norm", s.n_embd)
    if a.qkv == "fused":
        yield from _linear(f"{blk}attn_qkv", s.n_embd, s.q + 2 * s.kv, a.qkv_bias, Role.SHARP)
    else:
        yield from _linear(f"{blk}attn_q", s.n_embd, s.q, a.qkv_bias, Role.SHARP)
        yield from _linear(f"{blk}attn_k", s.n_embd, s.kv, a.qkv_bias, Role.SHARP)
        yield from _linear(f"{blk}attn_v", s.n_embd, s.kv, a.qkv_bias)
    if a.qk_norm:
        row = a.qk_norm == "row"
        yield Weight(f"{blk}attn_q_norm.weight", (s.q if row else s.n_head,), Role.SHARP_NORM)
        yield Weight(f"{blk}attn_k_norm.weight", (s.kv if row else s.n_head,), Role.SHARP_NORM)
    yield from _linear(f"{blk}attn_output", s.q, s.n_embd, a.out_bias, Role.RESIDUAL)
    if a.sinks:
        yield Weight(f"{blk}attn_sinks.weight", (s.n_heads,), Role.BIAS)
    if a.post_norms:
        yield Weight(f"{blk}post_attention_norm.weight", (s.n_embd,), Role.NORM)


def _feed_forward(a: Architecture, s: Shape, blk: str, dense: bool) -> Iterator[Weight]:
    if a.ffn_norm:
        yield from _norm(a, f"{blk}{a.ffn_norm_name}", s.n_embd)
    if not dense:
        yield from _experts(a, s, blk)
    else:
        if a.ffn in ("gated", "experts"):
            yield from _linear(f"{blk}ffn_gate", s.n_embd, s.n_ff, a.ffn_bias)
        up = 2 * s.n_ff if a.ffn == "fused" else s.n_ff
        yield from _linear(f"{blk}ffn_up", s.n_embd, up, a.ffn_bias)
        yield from _linear(f"{blk}ffn_down", s.n_ff, s.n_embd, a.ffn_bias, Role.RESIDUAL)
    if a.post_norms:
        yield Weight(f"{blk}post_ffw_norm.weight", (s.n_embd,), Role.NORM)


def _experts(a: Architecture, s: Shape, blk: str) -> Iterator[Weight]:
    n = s.n_experts
    yield Weight(f"{blk}ffn_gate_inp.weight", (s.n_embd, n), Role.ROUTER)
    yield Weight(f"{blk}ffn_gate_exps.weight", (s.n_embd, s.n_ff, n))
    yield Weight(f"{blk}ffn_up_exps.weight", (s.n_embd, s.n_ff, n))
    yield Weight(f"{blk}ffn_down_exps.weight", (s.n_ff, s.n_embd, n), Role.RESIDUAL)
    if a.sinks:
        yield Weight(f"{blk}ffn_gate_inp.bias", (n,), Role.BIAS)
        yield Weight(f"{blk}ffn_gate_exps.bias", (s.n_ff, n), Role.BIAS)
        yield Weight(f"{blk}ffn_up_exps.bias", (s.n_ff, n), Role.BIAS)
        yield Weight(f"{blk}ffn_down_exps.bias", (s.n_embd, n), Role.BIAS)
    if a.shared_expert:
        if not a.leading_dense:
            yield Weight(f"{blk}ffn_gate_inp_shexp.weight", (s.n_embd,), Role.BIAS)
        yield Weight(f"{blk}ffn_gate_shexp.weight", (s.n_embd, s.n_ff))
        yield Weight(f"{blk}ffn_up_shexp.weight", (s.n_embd, s.n_ff))
        yield Weight(f"{blk}ffn_down_shexp.weight", (s.n_ff, s.n_embd), Role.RESIDUAL)


# ------------------------------------------------------------------------------------------ others


def mamba(a: Architecture, s: Shape, tied: bool) -> Iterator[Weight]:
    """The weights of a state-space model (Mamba)."""
    inner, state, rank = 2 * s.n_embd, 16, max(s.n_embd // 16, 1)
    yield Weight("token_embd.weight", (s.n_embd, s.n_vocab), Role.EMBEDDING)
    yield Weight("output_norm.weight", (s.n_embd,), Role.OUTPUT_NORM)
    if not tied:
        yield Weight("output.weight", (s.n_embd, s.n_vocab), Role.HEAD)
    for layer in range(s.layers):
        blk = f"blk.{layer}."
        yield from _norm(a, f"{blk}attn_norm", s.n_embd)
        yield Weight(f"{blk}ssm_in.weight", (s.n_embd, 2 * inner))
        yield Weight(f"{blk}ssm_conv1d.weight", (4, inner), Role.CONVOLUTION)
        yield Weight(f"{blk}ssm_conv1d.bias", (inner,), Role.BIAS)
        yield Weight(f"{blk}ssm_x.weight", (inner, rank + 2 * state))
        yield Weight(f"{blk}ssm_dt.weight", (rank, inner), Role.ROUTER)
        yield Weight(f"{blk}ssm_dt.bias", (inner,), Role.BIAS)
        yield Weight(f"{blk}ssm_a", (state, inner), Role.DECAY)
        yield Weight(f"{blk}ssm_d", (inner,), Role.NORM)
        yield Weight(f"{blk}ssm_out.weight", (inner, s.n_embd), Role.RESIDUAL)


def mamba_keys(s: Shape) -> Mapping[str, Value]:
    """Its hyperparameters, over those of a transformer."""
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2 * s.n_embd,
        "ssm.state_size": 16,
        "ssm.time_step_rank": max(s.n_embd // 16, 1),
        "attention.head_count": 0,
        "attention.head_count_kv": 0,
        "feed_forward_length": 0,
    }


def encoder(a: Architecture, s: Shape, tied: bool) -> Iterator[Weight]:
    """The weights of a BERT-like encoder."""
    del tied  # an embedding model has no head
    yield Weight("token_embd.weight", (s.n_embd, s.n_vocab), Role.EMBEDDING)
    yield Weight("token_types.weight", (s.n_embd, 2), Role.TABLE)
    if a.positions == "learned":
        yield Weight("position_embd.weight", (s.n_embd, s.n_ctx), Role.TABLE)
    yield from _norm(a, "token_embd_norm", s.n_embd)
    for layer in range(s.layers):
        blk = f"blk.{layer}."
        if a.qkv == "fused":
            yield from _linear(f"{blk}attn_qkv", s.n_embd, s.q + 2 * s.kv, a.qkv_bias, Role.SHARP)
        else:
            for part in "qkv":
                yield from _linear(f"{blk}attn_{part}", s.n_embd, s.q, a.qkv_bias, Role.SHARP)
        yield from _linear(f"{blk}attn_output", s.q, s.n_embd, a.out_bias, Role.RESIDUAL)
        yield from _norm(a, f"{blk}attn_output_norm", s.n_embd)
        if a.ffn == "gated":
            yield from _linear(f"{blk}ffn_gate", s.n_embd, s.n_ff, False)
        yield from _linear(f"{blk}ffn_up", s.n_embd, s.n_ff, a.ffn_bias)
        yield from _linear(f"{blk}ffn_down", s.n_ff, s.n_embd, a.ffn_bias, Role.RESIDUAL)
        yield from _norm(a, f"{blk}layer_output_norm", s.n_embd)


def encoder_decoder(a: Architecture, s: Shape, tied: bool) -> Iterator[Weight]:
    """The weights of T5."""
    yield Weight("token_embd.weight", (s.n_embd, s.n_vocab), Role.EMBEDDING)
    yield Weight("enc.output_norm.weight", (s.n_embd,), Role.NORM)
    yield Weight("dec.output_norm.weight", (s.n_embd,), Role.OUTPUT_NORM)
    if not tied:
        yield Weight("output.weight", (s.n_embd, s.n_vocab), Role.HEAD)
    for side, attentions in (("enc", ("attn",)), ("dec", ("attn", "cross_attn"))):
        for layer in range(s.layers):
            blk = f"{side}.blk.{layer}."
            for attention in attentions:
                yield Weight(f"{blk}{attention}_norm.weight", (s.n_embd,), Role.NORM)
                for part in "qkv":
                    yield Weight(f"{blk}{attention}_{part}.weight", (s.n_embd, s.q))
                yield Weight(f"{blk}{attention}_o.weight", (s.q, s.n_embd), Role.RESIDUAL)
            if layer == 0:
                yield Weight(f"{blk}attn_rel_b.weight", (s.n_heads, 32), Role.TABLE)
            yield Weight(f"{blk}ffn_norm.weight", (s.n_embd,), Role.NORM)
            yield Weight(f"{blk}ffn_gate.weight", (s.n_embd, s.n_ff))
            yield Weight(f"{blk}ffn_up.weight", (s.n_embd, s.n_ff))
            yield Weight(f"{blk}ffn_down.weight", (s.n_ff, s.n_embd), Role.RESIDUAL)
