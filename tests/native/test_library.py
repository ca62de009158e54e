"""What llamaherd relies on is checked when libllama is loaded."""

import logging
import subprocess
import sys
import textwrap

import pytest

from llamaherd.errors import LibraryError
from llamaherd.native import library


def run(code):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_installed_library_passes():
    info = library.library_info()
    assert info["llama_cpp_python"]
    assert info["ggml"]


def test_a_shifted_struct_is_noticed(monkeypatch):
    real = library.L.llama_context_default_params

    def shifted():
        params = real()
        params.swa_full, params.kv_unified = False, True
        return params

    monkeypatch.setattr(library.L, "llama_context_default_params", shifted)
    with pytest.raises(LibraryError, match="swa_full"):
        library._check_structs()


@pytest.mark.parametrize("name", ["llama_decode", "llama_memory_seq_cp", "llama_set_abort_callback"])
def test_a_missing_function_is_named(monkeypatch, name):
    monkeypatch.delattr(library.L, name)
    with pytest.raises(LibraryError, match=name):
        library._check_functions()


def test_it_fails_at_import_with_the_reason():
    done = run(
        """
        from llama_cpp import llama_cpp
        del llama_cpp.llama_decode
        import llamaherd
        try:
            llamaherd.Model
        except ImportError as error:
            print(error)
        """
    )
    assert done.returncode == 0, done.stderr
    assert "no function llama_decode" in done.stdout
    assert "pip install llama-cpp-python==" in done.stdout


def test_without_llama_cpp_the_way_out_is_named():
    done = run(
        """
        import sys
        sys.modules["llama_cpp"] = None
        import llamaherd
        try:
            llamaherd.Model
        except ImportError as error:
            print(error)
        """
    )
    assert "llama-cpp-python cannot be imported" in done.stdout


def test_importing_llamaherd_loads_nothing_heavy():
    done = run(
        """
        import sys
        import llamaherd
        heavy = {"llama_cpp", "torch", "transformers", "gguf", "ray"} & set(sys.modules)
        assert not heavy, heavy
        """
    )
    assert done.returncode == 0, done.stderr


def test_llama_cpp_is_quiet_and_its_log_goes_to_logging(tiny_model_path):
    code = """
        import logging, sys
        if "loud" in sys.argv: logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
        from llamaherd import Model
        Model.load(sys.argv[1]).close()
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(tiny_model_path)]
    quiet = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    assert quiet.stdout == quiet.stderr == ""
    loud = subprocess.run([*arguments, "loud"], capture_output=True, text=True, timeout=60, check=True)
    assert "llamaherd.llama_cpp" in loud.stdout


def test_log_levels(caplog):
    with caplog.at_level(logging.WARNING, "llamaherd.llama_cpp"):
        library._on_log(4, b"an error\n", None)
        library._on_log(5, b" goes on\n", None)
        library._on_log(2, b"an info\n", None)
        library._on_log(3, b"\xff\n", None)
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("ERROR", "an error"),
        ("ERROR", " goes on"),
        ("WARNING", "\ufffd"),
    ]


def test_a_model_runs_without_the_kernels_too(tiny_model_path):
    done = run(
        f"""
        import os, sys
        os.environ["LLAMAHERD_KERNELS"] = "on"
        sys.modules["llamaherd_kernels"] = None
        from llamaherd import Model
        from llamaherd.native.kernels import enable_kernels
        with Model.load({str(tiny_model_path)!r}):
            print(enable_kernels())
        """
    )
    assert "stock llama.cpp" in done.stdout, done.stderr
