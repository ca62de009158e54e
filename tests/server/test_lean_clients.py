"""What the stock clients of llmstep and LeanCopilot do, against a real server."""

from __future__ import annotations

import http.client
import json
import select
import shutil
import socket
import subprocess
import threading
from typing import Any

import pytest

from .conftest import Server, serving, wait_for

pytestmark = pytest.mark.real

GOAL = "p q : Prop\nhp : p\n⊢ p ∨ q"


def llmstep(
    server: Server, tactic_state: str, prefix: str = "", context: str = "", **more: Any
) -> tuple[int, Any]:
    """As llmstep's client script: http.client, JSON without a content type, then body["suggestions"]."""
    host = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=120)
    body = {"tactic_state": tactic_state, "prefix": prefix, "context": context, **more}
    connection.request("POST", "/", body=json.dumps(body).encode())
    response = connection.getresponse()
    data = json.loads(response.read())
    connection.close()
    return response.status, data


def test_llmstep_gets_suggestions(server: Server) -> None:
    status, data = llmstep(server, GOAL, context="theorem t (p q : Prop) (hp : p) : p ∨ q := by\n  ")
    assert status == 200
    suggestions = data["suggestions"]
    assert 1 <= len(suggestions) <= 10
    assert len(set(suggestions)) == len(suggestions)
    for suggestion in suggestions:
        assert suggestion.strip() == suggestion != ""
        assert "\n" not in suggestion
        assert "[SUGGESTION]" not in suggestion
        assert "sorry" not in suggestion.split()
        assert "admit" not in suggestion.split()


def test_suggestions_begin_with_the_prefix(server: Server) -> None:
    _, data = llmstep(server, GOAL, prefix="exact ", seed=1)
    assert data["suggestions"]
    assert all(s.startswith("exact") for s in data["suggestions"])


def test_a_seed_repeats_suggestions(server: Server) -> None:
    server.new_worker()  # both begin with an empty cache: see "The same tokens every time" in serving.md
    first = llmstep(server, GOAL, seed=4, context="a")
    server.new_worker()
    assert first == llmstep(server, GOAL, seed=4, context="a")


@pytest.mark.parametrize("preset", ["llmstep", "reprover", "few-shot", "chat", "tactics"])
def test_every_preset_answers(server: Server, preset: str) -> None:
    status, data = llmstep(server, GOAL, preset=preset, n=2, max_tokens=12, context=preset)
    assert status == 200
    assert "suggestions" in data


def test_errors_still_have_the_field_that_the_client_reads(server: Server) -> None:
    status, data = llmstep(server, "")
    assert status == 400
    assert data["suggestions"] == []
    assert "goal" in data["error"]
    status, data = llmstep(server, GOAL, preset="nonsense")
    assert status == 400
    assert "few-shot" in data["error"]
    with server.client() as client:
        answer = client.post("/", json={"prefix": "x"})
    assert answer.status_code == 400
    assert answer.json()["suggestions"] == []


def test_a_newer_request_supersedes_the_older_one(server: Server) -> None:
    older: list[tuple[int, Any]] = []
    slow = threading.Thread(
        target=lambda: older.append(
            llmstep(server, GOAL, context="here", preset="reprover", n=30, max_tokens=2000)
        )
    )
    slow.start()
    wait_for(lambda: server.status()["running"] > 0)
    status, _data = llmstep(server, GOAL, prefix="ex", context="here", n=2, max_tokens=8)
    assert status == 200
    slow.join(30)
    assert older[0][0] == 409
    assert older[0][1]["suggestions"] == []
    server.wait_idle()


def test_requests_about_other_places_do_not_disturb_each_other(server: Server) -> None:
    results: list[tuple[int, Any]] = []
    threads = [
        threading.Thread(
            target=lambda i=i: results.append(llmstep(server, GOAL, context=f"file {i}", n=2, max_tokens=8))
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [status for status, _ in results] == [200] * 4


def test_a_killed_client_frees_the_engine(server: Server) -> None:
    body = json.dumps(
        {
            "tactic_state": GOAL,
            "prefix": "",
            "context": "k",
            "preset": "reprover",
            "n": 16,
            "max_tokens": 2000,
        }
    )
    address = server.url.removeprefix("http://").split(":")
    for _ in range(20):  # a draw may end all 16 at once, before anybody sees them run
        with socket.create_connection((address[0], int(address[1]))) as client:
            client.sendall(
                f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body.encode())}\r\n\r\n{body}".encode()
            )
            wait_for(lambda: server.status()["running"] > 0 or select.select([client], [], [], 0)[0])
            if not select.select([client], [], [], 0)[0]:
                break
    else:
        pytest.fail("every answer came before it was seen running")
    server.wait_idle(20)  # all of it would take minutes


def curl(server: Server, path: str, body: Any) -> Any:
    """As LeanCopilot's: curl, a JSON body, no time limit."""
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    command = ["curl", "-s", "-X", "POST", f"{server.url}{path}", "-H", "accept: application/json"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)


def test_lean_copilot_generates(server: Server) -> None:
    outputs = curl(server, "/generate", {"name": "demo", "input": GOAL, "prefix": None})["outputs"]
    assert outputs
    scores = [o["score"] for o in outputs]
    assert all(0 < s <= 1 for s in scores)
    assert scores == sorted(scores, reverse=True)
    assert len({o["output"] for o in outputs}) == len(outputs)


def test_lean_copilots_outputs_include_the_prefix(server: Server) -> None:
    outputs = curl(server, "/generate", {"name": "demo", "input": GOAL, "prefix": "apply "})["outputs"]
    assert all(o["output"].startswith("apply") for o in outputs)


def test_lean_copilot_encodes(server: Server) -> None:
    outputs = curl(server, "/encode", {"name": "demo", "input": GOAL})["outputs"]
    assert len(outputs) == 576
    assert all(isinstance(x, float) for x in outputs)


def test_an_unknown_name_lists_those_served(server: Server) -> None:
    answer = curl(
        server, "/generate", {"name": "ct2-leandojo-lean4-tacgen-byt5-small", "input": GOAL, "prefix": ""}
    )
    assert "demo" in answer["error"]


def _free(*ports: int) -> bool:
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return False
    return True


def test_the_stock_ports() -> None:
    if not _free(6000, 23337):
        pytest.skip("ports 6000 and 23337 are taken on this machine")
    with serving("--lean") as server:
        for port, path in ((6000, "/"), (6000, "/any/path"), (23337, "/")):
            connection = http.client.HTTPConnection(
                "localhost" if path == "/" else "127.0.0.1", port, timeout=60
            )
            body = json.dumps(
                {"tactic_state": GOAL, "prefix": "", "context": f"{port}{path}", "n": 2, "max_tokens": 8}
            )
            connection.request("POST", path, body=body.encode())
            response = connection.getresponse()
            assert response.status == 200
            assert "suggestions" in json.loads(response.read())
            connection.close()
        assert server.status()["ready"]
