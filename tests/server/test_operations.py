"""Health, metrics, logs, an orderly end, several models, a cache that outlives the process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Server, free_port, serving, wait_for

pytestmark = pytest.mark.real


def complete(server: Server, **fields: Any) -> httpx.Response:
    with server.client() as client:
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, **fields}
        return client.post("/v1/completions", json=body)


def test_the_server_process_never_loads_libllama(server: Server) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libllama" not in maps
    assert "libggml" not in maps
    (worker,) = server.workers
    assert "libllama" in Path(f"/proc/{worker.pid}/maps").read_text()


def test_the_sockets_are_private(server: Server) -> None:
    (worker,) = server.workers
    names = [c.laddr for c in worker.net_connections("unix") if c.laddr]
    folders = {Path(name).parent for name in names if "llamaherd-" in name}
    assert folders
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)


def test_metrics(server: Server) -> None:
    assert complete(server).status_code == 200
    with server.client() as client:
        text = client.get("/metrics").text
    for name in (
        'llamaherd_time_to_first_token_seconds_count{model="demo"}',
        'llamaherd_time_between_tokens_seconds_count{model="demo"}',
        'llamaherd_queue_seconds_count{model="demo"}',
        'llamaherd_tokens_total{kind="generated",model="demo"}',
        'llamaherd_prefix_cache_hit_tokens_total{model="demo"}',
        'llamaherd_worker_restarts_total{model="demo"}',
        'llamaherd_requests_total{model="demo",outcome="finished"}',
        'llamaherd_http_responses_total{path="/v1/completions",status="200"}',
    ):
        assert name in text, name


def test_health_follows_the_worker(demo_model_path: Path) -> None:
    with serving() as server, server.client() as client:
        server.kill_worker(signal.SIGKILL)
        wait_for(lambda: client.get("/health").status_code == 503)
        assert "retry-after" in client.get("/health").headers
        wait_for(lambda: client.get("/health").status_code == 200)
        with client.stream("GET", "/metrics") as answer:
            text = "".join(answer.iter_text())
        assert 'llamaherd_worker_restarts_total{model="demo"} 1.0' in text
        assert "SIGKILL" in server.status()["last_death"]


def test_logs_are_json_lines_without_prompts(demo_model_path: Path) -> None:
    with serving() as server:
        complete(server, prompt="a very private secret")
    lines = [json.loads(line) for line in server.log if line.startswith("{")]
    (access,) = [line for line in lines if line["message"].startswith("POST /v1/completions 200")]
    assert len(access["request_id"]) == 32
    assert access["seconds"] > 0
    assert "private secret" not in "".join(server.log)


def test_a_stop_lets_what_runs_finish_and_refuses_what_comes(demo_model_path: Path) -> None:
    with serving("--shutdown-grace", "60") as server:
        answers: list[httpx.Response] = []
        running = threading.Thread(
            target=lambda: answers.append(complete(server, max_tokens=150, ignore_eos=True))
        )
        running.start()
        wait_for(lambda: server.status()["running"] > 0)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: complete(server).status_code == 503, 10)
        refused = complete(server)
        if refused.status_code == 503:
            assert int(refused.headers["retry-after"]) >= 1
        running.join(100)
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 150
        assert server.process.wait(20) == 0


def test_a_second_signal_ends_it_at_once(demo_model_path: Path) -> None:
    with serving("--shutdown-grace", "600") as server:
        thread = threading.Thread(target=lambda: _ignoring_errors(server))
        thread.start()
        wait_for(lambda: server.status()["running"] > 0)
        workers = server.workers
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGINT)
        server.process.wait(20)
        thread.join(20)
        wait_for(lambda: not any(w.is_running() for w in workers))


def _ignoring_errors(server: Server) -> None:
    with contextlib.suppress(httpx.TransportError):
        complete(server, max_tokens=4000, ignore_eos=True)


def test_a_model_that_is_not_there_is_said_at_once() -> None:
    with serving("/no/such/model.gguf", ready=False) as server:
        assert server.process.wait(60) == 1
        server._reader.join()
    assert "no such model file" in "".join(server.log)


def test_an_unknown_parameter_is_named(demo_model_path: Path) -> None:
    with serving("--set", "n_thread=2", ready=False) as server:
        assert server.process.wait(60) == 2
        server._reader.join()
    assert "did you mean 'n_threads'?" in "".join(server.log)


def test_a_port_that_is_taken(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    with serving("--port", port, ready=False) as second:
        assert second.process.wait(30) == 2
        second._reader.join()
    assert f"127.0.0.1:{port}" in "".join(second.log)


def test_settings_come_from_the_line_then_the_environment_then_the_file(
    demo_model_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "herd.toml"
    file.write_text(f'port = 1\nn_ctx = 512\nmax_sequences = 3\n[models.small]\npath = "{demo_model_path}"\n')
    port = str(free_port())
    environment = {"LLAMAHERD_N_CTX": "1024", "LLAMAHERD_CONFIG": str(file)}
    with serving("--port", port, env=environment, ready=False) as server:
        server.url = f"http://127.0.0.1:{port}"
        wait_for(lambda: _up(server))
        with server.client() as client:
            (model,) = client.get("/v1/models").json()["data"]
        assert model["id"] == "small"
        assert model["context_length"] == 1024


def _up(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_several_models_and_one_that_gives_way(demo_model_path: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.gguf"
    os.link(demo_model_path, second) if _same_device(demo_model_path, tmp_path) else shutil.copy(
        demo_model_path, second
    )
    options = [
        "--model",
        f"one={demo_model_path}",
        "--model",
        f"two={second}",
        "--models-memory",
        "200M",
        "--n-ctx",
        "512",
    ]
    with serving(*options) as server:
        with server.client() as client:
            assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["one", "two"]
        first = complete(server, model="one").json()
        other = complete(server, model="two").json()
        assert first["model"] == "one"
        assert other["model"] == "two"
        assert first["choices"][0]["text"] == other["choices"][0]["text"]
        wait_for(lambda: len(server.workers) == 1, 10)  # "one" was unloaded for "two"
        assert complete(server, model="one").json()["choices"] == first["choices"]
        assert complete(server, model="three").status_code == 404


def _same_device(a: Path, b: Path) -> bool:
    return a.stat().st_dev == b.stat().st_dev


def test_a_restarted_server_knows_its_prefixes(demo_model_path: Path, tmp_path: Path) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 20
    options = ("--cache-dir", str(tmp_path / "kv"), "--cache-size", "200M")
    with serving(*options) as server:
        first = complete(server, prompt=prompt).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert list((tmp_path / "kv").glob("*.kv"))
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    with serving(*options) as server:
        again = complete(server, prompt=prompt).json()
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= again["usage"]["prompt_tokens"] - 1
        assert again["choices"] == first["choices"]
        # and after a death, too
        server.kill_worker()
        wait_for(lambda: server.status()["restarts"] == 1)
        third = complete(server, prompt=prompt).json()
        assert third["choices"] == first["choices"]
        assert third["usage"]["prompt_tokens_details"]["cached_tokens"] >= cached


def test_a_damaged_cache_file_is_no_failure(demo_model_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    (folder / "a.kv").write_bytes(b"nonsense")
    (folder / "b.kv").write_bytes(b"LHSEQ1\r\n" + b"\xff" * 100)
    with serving("--cache-dir", str(folder)) as server:
        assert complete(server).status_code == 200
