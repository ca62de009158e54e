"""Bad input, each in a process of its own: an abort fails the test and not the runner.

Every snippet ends by showing that another request still gives what it gives alone.
"""

import subprocess
import sys
import textwrap

import pytest

from llamaherd.files.synthesize import synthesize

PRELUDE = """
import sys
import numpy as np
from llamaherd import *
from llamaherd.errors import *
GREEDY = SamplingConfig(temperature=0)
path = sys.argv[1]

def expect(kind, call, **attributes):
    try:
        call()
    except kind as error:
        for name, value in attributes.items():
            assert getattr(error, name) == value, (name, getattr(error, name), value)
        message = str(error)
        assert len(message) > 20, message
        return error
    raise AssertionError(f"no {kind.__name__}")

def healthy(herd, expected=None):
    final = herd.generate(GenerationRequest("fine", max_tokens=8, sampling=GREEDY, ignore_eos=True))
    tokens = final.completions[0].tokens
    assert len(tokens) == 8 and (expected is None or tokens == expected)
    return tokens
"""

HERD = """
model = Model.load(path)
herd = Herd(model, n_ctx=256, max_sequences=4, n_threads=1, n_threads_batch=1)
fine = healthy(herd)
"""


def run(snippet, path, prelude=PRELUDE + HERD):
    code = prelude + textwrap.dedent(snippet) + "\nprint('survived')\n"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr[-3000:]}"
    assert done.stdout.strip().endswith("survived")


def test_files_that_are_missing_or_no_models(tiny_model_path, tmp_path):
    for name, data in {
        "empty.gguf": b"",
        "text.gguf": b"hello, I am no model at all",
        "magic.gguf": b"GGUF",
        "zeros.gguf": bytes(4096),
        "cut.gguf": tiny_model_path.read_bytes()[:5000],
        "cut_tensors.gguf": tiny_model_path.read_bytes()[:-5000],
    }.items():
        (tmp_path / name).write_bytes(data)
    run(
        f"""
        folder = {str(tmp_path)!r}
        expect(ModelNotFoundError, lambda: Model.load(folder + "/none.gguf"))
        expect(ModelNotFoundError, lambda: Model.load(folder))
        expect(NotAModelFileError, lambda: Model.load(folder + "/text.gguf"))
        expect(NotAModelFileError, lambda: Model.load(folder + "/zeros.gguf"))
        for name in ("empty", "magic", "cut", "cut_tensors"):
            expect(MalformedFileError, lambda: Model.load(f"{{folder}}/{{name}}.gguf"))
        healthy(herd, fine)
        """,
        tiny_model_path,
    )


def test_duplicate_vocabulary_entries(tiny_model_path, tmp_path):
    bad = synthesize(tmp_path / "bad.gguf", "llama", defects=["duplicate-token"])
    run(
        f"""
        error = expect(DuplicateTokenError, lambda: Model.load({str(bad)!r}))
        assert error.first != error.second
        expect(DuplicateTokenError, lambda: Model.load({str(bad)!r}, vocab_only=True))
        healthy(herd, fine)
        """,
        tiny_model_path,
    )


def test_prompts_that_do_not_fit(tiny_model_path):
    run(
        """
        error = expect(PromptTooLongError, lambda: herd.submit(GenerationRequest([5] * 256)), n_prompt=256, n_ctx=256)
        assert "256" in str(error)
        expect(PromptTooLongError, lambda: herd.submit(GenerationRequest("word " * 10_000)))
        final = herd.generate(GenerationRequest([5] * 250, max_tokens=10**9, ignore_eos=True))
        assert final.completions[0].finish_reason == "length"
        assert final.usage.completion_tokens == 6
        healthy(herd, fine)
        """,
        tiny_model_path,
    )


def test_empty_prompt_without_bos(tmp_path):
    path = synthesize(tmp_path / "nobos.gguf", "llama", bos=False)
    run(
        """
        expect(EmptyPromptError, lambda: herd.submit(GenerationRequest("")))
        expect(EmptyPromptError, lambda: herd.submit(GenerationRequest([])))
        healthy(herd, fine)
        """,
        path,
    )


def test_empty_prompt_with_bos(tiny_model_path):
    run(
        """
        final = herd.generate(GenerationRequest("", max_tokens=3, ignore_eos=True))
        assert final.usage.prompt_tokens == 1
        """,
        tiny_model_path,
    )


def test_ids_out_of_range(tiny_model_path):
    run(
        """
        from llamaherd.engine.protocol import Batch
        n = model.vocabulary.n_tokens
        for token in (-1, n, 2**31 - 1):
            expect(TokenError, lambda: herd.submit(GenerationRequest([1, token])), token=token, n_vocab=n, index=1)
            expect(TokenError, lambda: herd.submit(GenerationRequest("x", stop_tokens=[token])))
        expect(TokenError, lambda: herd.submit(GenerationRequest("x", sampling=SamplingConfig(logit_bias={n: 1.0}))))

        context = Context(model, n_ctx=256, n_seq_max=2, n_threads=1)
        one = lambda x: np.array([x], np.int32)
        def decode(token, position, sequence):
            return context.decode(Batch(one(token), one(position), one(sequence), np.array([True])))
        sequence = context.memory.allocate()
        for token in (-1, n, 2**31 - 1):
            expect(TokenError, lambda: decode(token, 0, sequence))
        for position in (-1, 5, 2**31 - 1):
            expect(PositionError, lambda: decode(1, position, sequence))
        for bad in (-1, 1, 2, 255, 256, 2**31 - 1):
            expect(SequenceError, lambda: decode(1, 0, bad))
            expect(SequenceError, lambda: context.memory.fork(bad))
            expect(SequenceError, lambda: context.memory.trim(bad, 0))
            expect(SequenceError, lambda: context.memory.shift(bad, 0, 1))
        assert decode(1, 0, sequence).shape == (1, n)
        healthy(herd, fine)
        """,
        tiny_model_path,
    )


def test_more_sequences_than_there_are(tiny_model_path):
    run(
        """
        expect(InvalidParameterError, lambda: Context(model, n_seq_max=257))
        expect(ConfigError, lambda: Herd(model, max_sequences=1000))
        context = Context(model, n_ctx=256, n_seq_max=2, n_threads=1)
        context.memory.allocate(), context.memory.allocate()
        expect(OutOfSequencesError, context.memory.allocate, limit=2, free=0)
        expect(OutOfSequencesError, lambda: herd.submit(GenerationRequest("x", beams=5)), wanted=5, limit=4)
        # more candidates than sequences are no fault: they run in waves
        final = herd.generate(GenerationRequest("x", n=13, max_tokens=3, ignore_eos=True))
        assert [c.index for c in final.completions] == list(range(13))
        assert all(len(c.tokens) == 3 for c in final.completions)
        healthy(herd, fine)
        """,
        tiny_model_path,
    )


def test_nan_logits(tmp_path, tiny_model_path):
    bad = synthesize(tmp_path / "nan.gguf", "llama", defects=["nan-weights"])
    run(
        f"""
        with Model.load({str(bad)!r}) as broken, Herd(broken, n_ctx=256, n_threads=1) as other:
            for request in (
                GenerationRequest("x"),
                GenerationRequest("x", n=3, sampling=SamplingConfig(mirostat=2)),
                GenerationRequest("x", beams=3),
            ):
                error = expect(LogitsError, lambda: other.generate(request))
                assert "NaN" in str(error)
            assert other.stats().running == 0
        healthy(herd, fine)
        """,
        tiny_model_path,
    )


def test_nan_logits_of_one_request_among_others(tiny_model_path):
    run(
        """
        # a bias of the largest finite float overflows to +inf in the model's own arithmetic only for one
        # request; here the engine's logits are poisoned for one sequence, as a faulty kernel would
        real = herd.engine.decode
        poisoned = set()
        def decode(batch):
            logits = real(batch).copy()
            for row, sequence in enumerate(batch.sequences[batch.outputs].tolist()):
                if 77 in batch.tokens[batch.sequences == sequence].tolist():
                    poisoned.add(sequence)
                if sequence in poisoned:
                    logits[row, 3] = np.nan
            return logits
        herd.engine.decode = decode
        good = herd.submit(GenerationRequest("fine", max_tokens=8, sampling=GREEDY, ignore_eos=True))
        bad = herd.submit(GenerationRequest([1, 77], max_tokens=8))
        expect(LogitsError, bad.result)
        assert good.result().completions[0].tokens == fine
        """,
        tiny_model_path,
    )


def test_grammars(tiny_model_path):
    run(
        r"""
        for grammar in ("", " ", "root ::= (", "root ::= missing", "not a grammar", 'r ::= "x"', "\0", "root ::= \0",
                        "root ::= root", 'root ::= root "x"', "root ::= " + "(" * 5000, 'root ::= "\\x"'):
            expect(GrammarError, lambda: herd.submit(GenerationRequest("x", sampling=SamplingConfig(grammar=grammar))))
        bad = SamplingConfig(grammar='start ::= "x"')
        expect(GrammarError, lambda: herd.submit(GenerationRequest("x", sampling=bad)))
        good = SamplingConfig(grammar='start ::= [0-9]+', grammar_root="start", seed=1)
        text = herd.generate(GenerationRequest("x", max_tokens=10, sampling=good)).text
        assert text.isdigit(), text
        healthy(herd, fine)
        """,
        tiny_model_path,
    )


def test_use_after_close(tiny_model_path):
    run(
        """
        handle = herd.submit(GenerationRequest("x", max_tokens=200, ignore_eos=True))
        herd.close()
        expect(ClosedError, lambda: handle.result(10))
        expect(ClosedError, lambda: herd.submit(GenerationRequest("x")))
        expect(ClosedError, lambda: herd.engine.memory.allocate())
        expect(ClosedError, lambda: herd.engine.make_sampler and herd.engine.save_sequence(0))
        again = Herd(model, n_ctx=256, n_threads=1)
        healthy(again, fine)
        model.close()
        expect(ClosedError, lambda: again.generate(GenerationRequest("x")))
        expect(ClosedError, lambda: Herd(model))
        again.close()
        """,
        tiny_model_path,
    )


def test_two_threads_on_one_context(tiny_model_path):
    run(
        """
        import threading
        from llamaherd.engine.protocol import Batch
        context = Context(model, n_ctx=2048, n_seq_max=8, n_threads=1)
        failures = []
        def work(seed):
            rng = np.random.default_rng(seed)
            try:
                for _ in range(30):
                    sequence = context.memory.allocate()
                    n = int(rng.integers(1, 40))
                    context.decode(Batch(
                        rng.integers(3, 300, n).astype(np.int32), np.arange(n, dtype=np.int32),
                        np.full(n, sequence, np.int32), np.ones(n, bool)))
                    context.memory.release(context.memory.fork(sequence))
                    context.memory.release(sequence)
            except BaseException as error:
                failures.append(error)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not failures, failures
        assert context.memory.used_cells == 0
        """,
        tiny_model_path,
    )


def test_out_of_cells_in_mid_decode(tiny_model_path):
    run(
        """
        # together these need three times the cells that there are: the younger ones wait, all end
        requests = [GenerationRequest([5 + i] * 60, max_tokens=150, sampling=GREEDY, ignore_eos=True) for i in range(4)]
        handles = [herd.submit(r) for r in requests]
        finals = [h.result(100) for h in handles]
        assert all(len(f.completions[0].tokens) == 150 for f in finals)

        from llamaherd.engine.protocol import Batch
        context = Context(model, n_ctx=256, n_seq_max=2, n_threads=1)
        sequence = context.memory.allocate()
        def decode(n):
            start = context.memory.length(sequence)
            return context.decode(Batch(np.full(n, 5, np.int32), np.arange(start, start + n, dtype=np.int32),
                                        np.full(n, sequence, np.int32), np.ones(n, bool)))
        decode(200)
        other = context.memory.allocate()
        error = expect(OutOfCellsError, lambda: context.decode(Batch(
            np.full(100, 5, np.int32), np.arange(100, dtype=np.int32), np.full(100, other, np.int32), np.ones(100, bool))),
            wanted=100, used=200, limit=256)
        decode(56)
        healthy(herd, fine)
        """,
        tiny_model_path,
    )


@pytest.mark.parametrize(
    "values", ["temperature=-1", "top_p=2", "seed=-1", "mirostat=3", "logit_bias={-1: 0.0}"]
)
def test_sampling_settings_out_of_range(tiny_model_path, values):
    run(f"expect(InvalidParameterError, lambda: SamplingConfig({values}))", tiny_model_path, prelude=PRELUDE)


def test_parameters_on_which_llama_cpp_aborts(tiny_model_path):
    run(
        """
        for key, value in (("block_count", 0), ("block_count", 10**6), ("expert_count", 5)):
            expect(InvalidParameterError, lambda: Model.load(path, kv_overrides={f"llama.{key}": value}))
        for key, value in (("x", 2**70), ("\\ud800", 1), ("x", "\\ud800"), ("a\\0b", 1)):
            expect(InvalidParameterError, lambda: Model.load(path, kv_overrides={key: value}))
        expect(InvalidParameterError, lambda: Model.load(path, tensor_split=[float("nan")]))
        from llamaherd.engine.context import Context
        with Model.load(path) as model:
            for kind in ("q8_1", "q2_k", "i8", "f64"):
                expect(InvalidParameterError, lambda: Context(model, n_ctx=256, type_k=kind))
            for number in (10**400, 1e308, float("nan")):
                expect(InvalidParameterError, lambda: Context(model, n_ctx=256, rope_freq_base=number))
        """,
        tiny_model_path,
        prelude=PRELUDE,
    )


def test_resumed_tokens_that_the_grammar_forbids(tiny_model_path):
    run(
        """
        other, = model.vocabulary.encode("z", add_special=False)
        for tokens in ([other], [model.vocabulary.eos]):
            sampling = SamplingConfig(grammar='root ::= "aaaa"')
            expect(GrammarError, lambda: herd.submit(GenerationRequest("x", sampling=sampling, resume={0: tokens})))
        healthy(herd, fine)
        """,
        tiny_model_path,
    )


def test_a_herd_that_runs_when_the_interpreter_exits(tiny_model_path):
    run(
        "[herd.submit(GenerationRequest(f'{i}', max_tokens=200, ignore_eos=True)) for i in range(4)]",
        tiny_model_path,
    )
