"""The plug-in inside unmodified llama.cpp: on, off, refused, broken; results bitwise the same in any batch."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("llamaherd_kernels", reason="pip install ./kernels")
from llamaherd_kernels.library import available_levels

needs_level = pytest.mark.skipif(not available_levels(), reason="this CPU runs none of the levels")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One cache for all, so that the self-test runs once."""
    return str(tmp_path_factory.mktemp("cache"))


def run(code, cache, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XDG_CACHE_HOME": cache, **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


STATUS = """
    import json, dataclasses
    from llamaherd.native.kernels import enable_kernels
    print(json.dumps(dataclasses.asdict(enable_kernels())))
"""


def works(cache):
    """Whether a level passes its self-test here: a CPU with a level never run before may lack one that does."""
    return run(STATUS, cache, LLAMAHERD_KERNELS="on")["active"]


@needs_level
def test_it_is_on_by_default_and_says_what_it_takes(cache):
    status = run(STATUS, cache, LLAMAHERD_KERNELS="")
    if not status["active"]:
        assert "self-test" in status["reason"]
        return
    assert status["level"] in available_levels()
    assert "Q4_1" in status["types"]


def test_off_is_stock(cache):
    status = run(STATUS, cache, LLAMAHERD_KERNELS="off")
    assert not status["active"]
    assert "off" in status["reason"]


def test_an_unknown_word_is_refused(cache):
    code = """
        import json
        from llamaherd.errors import LibraryError
        from llamaherd.native.kernels import enable_kernels
        try:
            enable_kernels()
        except LibraryError as error:
            print(json.dumps(str(error)))
    """
    assert "on, off, require" in run(code, cache, LLAMAHERD_KERNELS="maybe")


def test_require_says_why_it_cannot(cache):
    code = """
        import json, sys
        sys.modules["llamaherd_kernels"] = None
        from llamaherd.errors import LibraryError
        from llamaherd.native.kernels import enable_kernels
        try:
            enable_kernels()
        except LibraryError as error:
            print(json.dumps(str(error)))
    """
    assert "not installed" in run(code, cache, LLAMAHERD_KERNELS="require")


BROKEN = """
    import json, dataclasses
    import llamaherd_kernels
    from llamaherd_kernels import enabling
    {}
    print(json.dumps(dataclasses.asdict(llamaherd_kernels.enable())))
"""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("enabling.available_levels = lambda: []", "none of the instruction sets"),
        ("enabling.sys.executable = '/bin/false'", "died with status 1"),
        ("enabling.sys.executable = '/nonexistent'", "did not end"),
        ("enabling.platform.system = lambda: 'Plan9'", "Plan9"),
        ("enabling._self_test = lambda level: {'passed': [], 'failed': {}}", "self-test failed"),
        ("enabling.library_path = lambda: 1 / 0", "ZeroDivisionError"),
    ],
)
@needs_level
def test_what_goes_wrong_leaves_stock(tmp_path, change, reason):
    status = run(BROKEN.format(change), str(tmp_path))
    assert not status["active"]
    assert reason in status["reason"]


SPOILT = """
    import numpy as np
    from llamaherd_kernels import selftest
    from llamaherd_kernels.library import available_levels
    whole = selftest._product
    def spoilt(ggml, kind, shape, weights, x, buffer, threads=1, ids=None):
        out = whole(ggml, kind, shape, weights, x, buffer, threads, ids)
        if buffer == "LLAMAHERD" and {condition}:
            {change}
        return out
    selftest._product = spoilt
    selftest.main([available_levels()[0], "Q4_1", "Q6_K"])
"""


@pytest.mark.parametrize(
    ("condition", "change", "reason"),
    [
        ("kind == 3 and len(x) == 37 and ids is None", "out[-1, -1] += 1", "differ from stock's"),
        ("kind == 3 and len(x) == 6", "out[5] = np.nextafter(out[5], 9)", "6 rows on 1 threads"),
        ("kind == 3 and threads == 3", "out[0, 0] = np.nextafter(out[0, 0], 9)", "on 3 threads"),
        ("kind == 3 and ids is not None", "out = np.nextafter(out, 9)", "from those of a matrix"),
        ("kind == 3", "out[1, 1] = np.nan", "differ from stock's"),
    ],
)
@needs_level
def test_the_self_test_finds_what_is_wrong_in_one_type_only(cache, condition, change, reason):
    result = run(SPOILT.format(condition=condition, change=change), cache)
    if "Q6_K" not in result["passed"]:
        pytest.skip("the best level does not pass its self-test here")
    assert reason in result["failed"]["Q4_1"]
    assert "Q4_1" not in result["passed"]


@needs_level
def test_instructions_that_the_cpu_lacks_kill_only_the_self_test(tmp_path):
    """A level is claimed that this CPU may not have: its self-test must decide, and this process live."""
    code = BROKEN.format("enabling.available_levels = lambda: ['avx512vnni', 'avx2']")
    status = run(code, str(tmp_path))
    assert status["level"] in ("avx512vnni", "avx2", "")


@needs_level
def test_a_missing_function_leaves_stock(tmp_path):
    """Another library in libllama's place: nothing of ggml is found there."""
    code = """
        import ctypes, json
        from llamaherd_kernels.library import available_levels, load
        libc = ctypes.CDLL("libc.so.6")
        print(json.dumps(load().llamaherd_kernels_install(libc._handle, available_levels()[0].encode(), 4, 1).decode()))
    """
    assert "llama.cpp has no function" in run(code, str(tmp_path))


LOGITS = """
    import json, sys
    import numpy as np
    from llamaherd import Context, Model
    from llamaherd.engine.protocol import Batch
    from llamaherd_kernels.enabling import counts

    def decode(context, tokens, positions, sequences):
        n = len(tokens)
        return context.decode(Batch(np.array(tokens, np.int32), np.array(positions, np.int32),
                                    np.array(sequences, np.int32), np.ones(n, bool)))

    def prefill(chunks, threads):
        with Context(model, n_ctx=512, n_threads=threads, n_threads_batch=threads) as context:
            root, at, rows = context.memory.allocate(), 0, []
            for n in chunks:
                rows.append(decode(context, tokens[at:at + n], range(at, at + n), [root] * n).copy())
                at += n
            return np.concatenate(rows)

    with Model.load({path!r}) as model:
        tokens = np.random.default_rng(0).integers(3, 250, 48).tolist()
        whole = prefill([48], 2)
        {then}
"""


@needs_level
@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0", "q4_k_m", "q6_k", "f16", "bf16"])
def test_a_model_gives_bitwise_the_same_in_any_chunks_and_threads(cache, tmp_path, kind):
    status = run(STATUS, cache, LLAMAHERD_KERNELS="on")
    if not status["active"]:
        pytest.skip("no level passes its self-test here")
    if kind == "bf16" and "BF16" not in status["types"]:
        pytest.skip("stock llama.cpp multiplies bf16 at this level")
    path = model_of(tmp_path, kind)
    then = """
        same = [bool(np.array_equal(prefill(chunks, threads), whole))
                for chunks, threads in (([48], 1), ([1] * 48, 1), ([1] * 48, 2), ([5, 13, 30], 2), ([32, 16], 3))]
        print(json.dumps([same, counts()]))
    """
    same, (tensors, products, attentions) = run(
        LOGITS.format(path=str(path), then=then.strip()), cache, LLAMAHERD_KERNELS="require"
    )
    assert all(same)
    assert attentions > 100
    assert tensors > 5, "no weights were taken"
    assert products > 100


DEEP = """
    import json
    import numpy as np
    from llamaherd import Context, Model
    from llamaherd.engine.protocol import Batch

    def decode(context, tokens, positions, sequences):
        n = len(tokens)
        return context.decode(Batch(np.array(tokens, np.int32), np.array(positions, np.int32),
                                    np.array(sequences, np.int32), np.ones(n, bool))).copy()

    def prefill(context, sequence, tokens, chunks, at=0):
        rows = []
        for n in chunks:
            rows.append(decode(context, tokens[at:at + n], range(at, at + n), [sequence] * n))
            at += n
        return np.concatenate(rows)

    def context_of(threads, unified=True, n_ctx=4096, cache="f16"):
        return Context(model, n_ctx=n_ctx, n_batch=512, n_seq_max=8, n_threads=threads, n_threads_batch=threads,
                       kv_unified=unified, type_k=cache, type_v=cache)

    with Model.load({path!r}) as model:
        random = np.random.default_rng(0)
        texts = random.integers(3, 250, (8, 640)).tolist()
        {then}
"""


@needs_level
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_any_chunks_at_depth_give_the_same_bits(cache, tmp_path, cache_type):
    """Past 64 tokens a chunk, and past 512 cells, stock takes other ways."""
    if not works(cache):
        pytest.skip("no level passes its self-test here")
    then = """
        found = []
        for threads, chunks in ((2, [512, 128]), (1, [512, 128]), (3, [64] * 10), (2, [100, 300, 63, 177]),
                                (1, [1] * 640), (2, [512] + [1] * 128)):
            with context_of(threads, cache={cache!r}) as context:
                found.append(prefill(context, context.memory.allocate(), texts[0], chunks))
        print(json.dumps([bool(np.array_equal(found[0], other)) for other in found]))
    """.replace("{cache!r}", repr(cache_type))
    path = model_of(tmp_path, "q4_1")
    assert all(run(DEEP.format(path=str(path), then=then.strip()), cache, LLAMAHERD_KERNELS="require"))


@needs_level
def test_who_else_is_in_the_cache_changes_no_bit(cache, tmp_path):
    """Eight texts that come in pieces, one after the other, and decode together; and each alone, in any cache."""
    if not works(cache):
        pytest.skip("no level passes its self-test here")
    then = """
        alone = []
        for i, text in enumerate(texts):
            with context_of(1 + i % 3, unified=i % 2 == 0) as context:
                alone.append(prefill(context, context.memory.allocate(), text[:340], [300] + [1] * 40))
        same = []
        for unified in (True, False):
            with context_of(2, unified, 8192) as context:
                sequences = [context.memory.allocate() for _ in texts]
                first = {i: [] for i in sequences}
                for begin, n in ((0, 100), (100, 37), (137, 163)):
                    for i, text in zip(sequences, texts):
                        first[i].append(prefill(context, i, text, [n], begin))
                for i, expected in zip(sequences, alone):
                    same.append(np.array_equal(np.concatenate(first[i]), expected[:300]))
                for at in range(300, 340):
                    rows = decode(context, [text[at] for text in texts], [at] * 8, sequences)
                    same += [np.array_equal(row, expected[at]) for row, expected in zip(rows, alone)]
        print(json.dumps([bool(x) for x in same]))
    """
    path = model_of(tmp_path, "q4_1")
    same = run(DEEP.format(path=str(path), then=then.strip()), cache, LLAMAHERD_KERNELS="require")
    assert len(same) == 2 * (8 + 40 * 8)
    assert all(same)


@needs_level
def test_forks_of_a_long_prompt_decode_as_if_alone(cache, tmp_path):
    if not works(cache):
        pytest.skip("no level passes its self-test here")
    then = """
        prompt = texts[0][:520]
        with context_of(2) as context:
            root = context.memory.allocate()
            prefill(context, root, prompt, [512, 8])
            sequences = [root, *(context.memory.fork(root) for _ in range(7))]
            together = [decode(context, [text[at] for text in texts], [520 + at] * 8, sequences) for at in range(20)]
        same = []
        for i, text in enumerate(texts):
            with context_of(1) as context:
                rows = prefill(context, context.memory.allocate(), prompt + text[:20], [500, 40])[520:]
                same += [bool(np.array_equal(row, step[i])) for row, step in zip(rows, together)]
        print(json.dumps(same))
    """
    path = model_of(tmp_path, "q4_1")
    same = run(DEEP.format(path=str(path), then=then.strip()), cache, LLAMAHERD_KERNELS="require")
    assert len(same) == 8 * 20
    assert all(same)


@needs_level
def test_attention_can_be_left_out(cache):
    code = """
        import json, dataclasses
        import llamaherd_kernels
        print(json.dumps(dataclasses.asdict(llamaherd_kernels.enable(attention=False))))
    """
    status = run(code, cache)
    if status["active"]:
        assert not status["attention"]
        assert run(STATUS, cache, LLAMAHERD_KERNELS="on")["attention"]


SPOILT_ATTENTION = """
    import numpy as np
    from llamaherd_kernels import attention_test, selftest
    from llamaherd_kernels.library import available_levels
    whole = attention_test._attend
    def spoilt(ggml, case, q, k, v, mask, sinks, *, ours=True, threads=1):
        out = whole(ggml, case, q, k, v, mask, sinks, ours=ours, threads=threads)
        if ours and {condition}:
            {change}
        return out
    attention_test._attend = spoilt
    selftest.main([available_levels()[0], "Q4_1", "attention"])
"""


@needs_level
@pytest.mark.parametrize(
    ("condition", "change", "reason"),
    [
        ("case.cap", "out[0, 0, 0, 0] += 1e-3", "attention differs from stock's"),
        ("case.keys == 'Q8_0'", "out[0, -1, -1, -1] = np.nan", "attention differs from stock's"),
        ("q.shape[1] == 1", "out = np.nextafter(out, 9)", "1 tokens on 3 threads"),
        ("threads == 3 and q.shape[1] > 1", "out = np.nextafter(out, 9)", "on 3 threads"),
        ("k.shape[1] > case.cells", "out = np.nextafter(out, 9)", "where cells lie elsewhere"),
        ("True", "out = None", "does not give us attention"),
    ],
)
def test_the_self_test_finds_what_is_wrong_in_attention(cache, condition, change, reason):
    result = run(SPOILT_ATTENTION.format(condition=condition, change=change), cache)
    assert reason in result["failed"]["attention"]
    assert "attention" not in result["passed"]


@needs_level
def test_attention_that_fails_is_left_to_stock(tmp_path):
    code = BROKEN.format(
        "enabling._self_test = lambda level: {'passed': ['Q4_1'], 'failed': {'attention': 'is wrong'}}"
    )
    status = run(code, str(tmp_path))
    assert status["active"]
    assert not status["attention"]
    assert "attention: is wrong" in status["reason"]


def model_of(folder, kind):
    from llamaherd.engine.quantize import quantize
    from llamaherd.files.synthesize import synthesize

    whole = synthesize(folder / "f32.gguf", "llama", n_ctx=512, n_embd=256, n_ff=512)
    quantize(whole, folder / f"{kind}.gguf", kind)
    return folder / f"{kind}.gguf"


@needs_level
@pytest.mark.real
def test_the_demo_model_is_as_near_to_its_f32_activations_as_stock(cache, demo_model_path):
    """KL divergence to the same weights with f32 activations (as f32 file), and the likelihood of a real text."""
    if not works(cache):
        pytest.skip("no level passes its self-test here")
    code = """
        import json, sys
        import numpy as np
        from llamaherd import Context, Model
        from llamaherd.engine.protocol import Batch
        text = open({text!r}).read()[:6000]
        with Model.load({path!r}) as model:
            tokens = list(model.vocabulary.encode(text))[:384]
            n = len(tokens)
            with Context(model, n_ctx=512) as context:
                root = context.memory.allocate()
                logits = context.decode(Batch(np.array(tokens, np.int32), np.arange(n, dtype=np.int32),
                                        np.full(n, root, np.int32), np.ones(n, bool)))
                np.save({out!r}, logits)
        print(json.dumps(tokens))
    """
    import tempfile
    from pathlib import Path

    import numpy as np

    from llamaherd.files import open_model
    from llamaherd.files.convert import convert

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exact = folder / "f32.gguf"
        with open_model(demo_model_path) as source:
            convert(source, exact, type="f32")
        text = str(Path(__file__).parents[2] / "docs" / "decisions.md")
        found = {}
        for label, path, mode in (
            ("f32", exact, "off"),
            ("stock", demo_model_path, "off"),
            ("ours", demo_model_path, "require"),
        ):
            out = str(folder / f"{label}.npy")
            tokens = run(code.format(text=text, path=str(path), out=out), cache, LLAMAHERD_KERNELS=mode)
            logits = np.load(out).astype(np.float64)
            found[label] = (
                logits
                - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
                - logits.max(-1, keepdims=True)
            )
    exact_p = np.exp(found["f32"])
    kl = {
        label: float((exact_p * (found["f32"] - found[label])).sum(-1).mean()) for label in ("stock", "ours")
    }
    nll = {label: -float(found[label][np.arange(len(tokens) - 1), tokens[1:]].mean()) for label in found}
    print(kl, nll)
    assert kl["ours"] < kl["stock"] * 1.05
    assert abs(nll["ours"] - nll["f32"]) < 0.01
