"""Which node holds which layers."""

from __future__ import annotations

import itertools

import pytest

from llamaherd import files
from llamaherd.errors import CapacityError, InvalidParameterError, UnknownParameterError
from llamaherd.files.slice import plan_slice
from llamaherd.files.synthesize import synthesize
from llamaherd.shard.costs import ModelCosts, costs_of_file, costs_on_paper
from llamaherd.shard.picture import picture
from llamaherd.shard.plan import Node, even_cuts, plan

COSTS = ModelCosts(
    "made up", tuple([100] * 4 + [300] * 2 + [100] * 6), embedding=250, head=400, everywhere=10,
    kv_token=0.5, n_embd=8, n_vocab=50,
)  # fmt: skip


def brute_force(costs: ModelCosts, nodes: list[Node], n_ctx: int, n_ubatch: int) -> float | None:
    """The slowest node's seconds in the best of all cuts."""
    layers = len(costs.layers)
    best = None
    for cuts in itertools.combinations_with_replacement(range(layers + 1), len(nodes) - 1):
        edges = (0, *cuts, layers)
        slowest = 0.0
        for node, (a, b) in zip(nodes, itertools.pairwise(edges), strict=True):
            if a == b:
                continue
            size = costs.weights(a, b) + costs.kv_cache(a, b, n_ctx) + costs.compute(a, b, n_ubatch)
            if size > node.memory or a % costs.period:
                break
            slowest = max(slowest, costs.read(a, b) / node.bandwidth)
        else:
            best = slowest if best is None else min(best, slowest)
    return best


@pytest.mark.parametrize(
    "memories", [[10**6] * 3, [2500, 10**6, 2400], [2300, 2300, 2300, 2600], [3000, 2500], [100, 10**6]]
)
@pytest.mark.parametrize("speeds", [[1.0, 1.0, 1.0, 1.0], [1.0, 3.0, 2.0, 5.0]])
def test_no_other_cut_is_better(memories, speeds):
    nodes = [Node(str(i), m, s) for i, (m, s) in enumerate(zip(memories, speeds, strict=False))]
    best = brute_force(COSTS, nodes, 256, 1)
    if best is None:
        with pytest.raises(CapacityError, match="made up"):
            plan(COSTS, nodes, n_ctx=256, n_ubatch=1)
        return
    found = plan(COSTS, nodes, n_ctx=256, n_ubatch=1)
    assert max(s.seconds for s in found.shares) == pytest.approx(best)
    assert found.cuts[0] == 0
    assert found.cuts[-1] == 12
    assert all(s.total <= s.node.memory for s in found.shares)
    assert found.alone <= found.together(2) <= found.together(8)


def test_a_node_that_is_too_small_is_left_out():
    found = plan(COSTS, [Node("tiny", 10), Node("large", 10**9)], n_ctx=1, n_ubatch=1)
    assert [s.node.name for s in found.shares] == ["large"]


def test_no_room_says_how_much_is_missing():
    with pytest.raises(CapacityError, match=r"needs .* with n_ctx = 512, the 2 nodes give"):
        plan(COSTS, [Node("a", 500), Node("b", 500)], n_ctx=512)
    with pytest.raises(CapacityError, match="not layer by layer"):
        plan(COSTS, [Node(str(i), 290) for i in range(20)], n_ctx=1, n_ubatch=1)


@pytest.mark.parametrize("bad", [{"n_ctx": 0}, {"sequences": 0}, {"n_ubatch": 0}])
def test_sizes_are_positive(bad):
    with pytest.raises(InvalidParameterError):
        plan(COSTS, [Node("a", 10**9)], **bad)
    with pytest.raises(InvalidParameterError):
        plan(COSTS, [])


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2moe", "gpt2", "smollm3"])
def test_costs_are_those_of_the_slices(tmp_path, name):
    layers = 8
    path = synthesize(tmp_path / "m.gguf", name, layers=layers, type="q8_0")
    with files.open(path) as model:
        costs = costs_of_file(model)
        for start, end in ((0, 4), (4, 8), (0, 8)):
            size = plan_slice(model, start, end).nbytes
            # a slice also holds small stand-ins of what it does not need
            assert costs.weights(start, end) <= size <= costs.weights(start, end) * 1.5 + 60_000


def test_a_model_on_paper_has_the_sizes_of_its_file(tmp_path):
    path = synthesize(
        tmp_path / "m.gguf", "llama", layers=3, n_embd=64, n_heads=4, n_kv_heads=2, n_ff=160, type="q8_0"
    )
    with files.open(path) as model:
        real = costs_of_file(model)
    paper = costs_on_paper(
        f"llama:layers=3,n_embd=64,n_heads=4,n_kv_heads=2,n_ff=160,n_vocab={real.n_vocab},type=q8_0,head_type=q8_0"
    )
    assert paper.kv_token == real.kv_token
    assert paper.layers == real.layers


def test_405_billions_on_paper():
    costs = costs_on_paper("llama:layers=126,n_embd=16384,n_heads=128,n_kv_heads=8,n_ff=53248")
    assert 200 < costs.weights(0, 126) / 2**30 < 240
    found = plan(costs, [Node(str(i), 8 << 30) for i in range(40)], sequences=40)
    assert found.cuts[-1] == 126
    assert "<svg" in picture(found)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("llama:layers=3", InvalidParameterError),
        ("nobody:layers=3", InvalidParameterError),
        ("t5:layers=3,n_embd=64,n_heads=4,n_kv_heads=2,n_ff=160", InvalidParameterError),
        ("llama:layers=3,heads=4", UnknownParameterError),
        ("llama:layers=-3,n_embd=64,n_heads=4,n_kv_heads=2,n_ff=160", InvalidParameterError),
        ("llama:layers=3,n_embd=64,n_heads=4,n_kv_heads=2,n_ff=160,type=q9", InvalidParameterError),
        ("llama:layers=999999999,n_embd=64,n_heads=4,n_kv_heads=2,n_ff=160", InvalidParameterError),
        ("llama:layers=2,n_embd=16385,n_heads=128,n_kv_heads=8,n_ff=5", InvalidParameterError),
    ],
)
def test_bad_models_on_paper(text, error):
    with pytest.raises(error):
        costs_on_paper(text)


@pytest.mark.parametrize("field", ["bandwidth", "link", "latency"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_speeds_of_nodes_are_checked(field, value):
    if (field, value) == ("latency", 0.0):
        assert Node("a", 1, latency=0.0).latency == 0
        return
    with pytest.raises(InvalidParameterError, match=field):
        Node("a", 1, **{field: value})


@pytest.mark.parametrize("stages", range(1, 13))
def test_even_cuts(stages):
    cuts = even_cuts(COSTS, stages)
    assert len(cuts) == stages + 1
    assert cuts == sorted(set(cuts))
    assert (cuts[0], cuts[-1]) == (0, 12)


def test_even_cuts_keep_a_pattern_and_know_their_limit():
    costs = ModelCosts("m", (1,) * 9, 0, 0, 0, 1, 8, 8, period=4)
    assert even_cuts(costs, 3) == [0, 4, 8, 9]
    for stages in (0, 4):
        with pytest.raises(InvalidParameterError, match="from 1 to 3"):
            even_cuts(costs, stages)
