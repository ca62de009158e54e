"""Bad input and load: every answer is a proper one, and the server goes on."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .conftest import Server, serving, wait_for

pytestmark = pytest.mark.real

CHAT = "/v1/chat/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}


def raw(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "JSON"),
        (b"", "field required"),
        (b"[]", "object"),
        (b"null", ""),
        (b'"x"', ""),
        (b"\xff\xfe{}", ""),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', ""),
        (b"[" * 100_000, ""),
        (b'{"a":' * 50_000, ""),
        (json.dumps({"messages": []}).encode(), "messages"),
        (json.dumps({"messages": "hi"}).encode(), "messages"),
        (json.dumps({"messages": [{"content": "x"}]}).encode(), "role"),
        (json.dumps({"messages": [{"role": 5, "content": "x"}]}).encode(), "role"),
        (json.dumps(chat(n=-1)).encode(), "n"),
        (json.dumps(chat(n=10**9)).encode(), "n"),
        (json.dumps(chat(n="many")).encode(), "n"),
        (json.dumps(chat(max_tokens=-5)).encode(), "max_tokens"),
        (json.dumps(chat(temperature="hot")).encode(), "temperature"),
        (json.dumps(chat(temperature=1e400)).encode(), "temperature"),
        (json.dumps(chat(top_p=7)).encode(), "top_p"),
        (json.dumps(chat(top_k=10**30)).encode(), "top_k"),
        (json.dumps(chat(logit_bias={"99999999": 1})).encode(), "99999999"),
        (json.dumps(chat(logit_bias={"-1": 1})).encode(), "logit_bias"),
        (json.dumps(chat(stop=["x"] * 99)).encode(), "stop"),
        (json.dumps(chat(tools=[{"type": "function"}])).encode(), "function"),
        (json.dumps(chat(tool_choice="required")).encode(), "tools"),
        (json.dumps(chat(response_format={"type": "json_schema"})).encode(), "json_schema"),
        (json.dumps(chat(response_format={"type": "xml"})).encode(), "response_format"),
        (
            json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}).encode(),
            "image_url",
        ),
        (json.dumps({"messages": [{"role": "<|im_start|>", "content": "x"}]}).encode(), "control token"),
    ],
)
def test_malformed_bodies(server: Server, body: bytes, says: str) -> None:
    with server.client() as client:
        answer = client.post(CHAT, content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert says.lower() in error["message"].lower()
    assert len(error["message"]) < 2000


def test_lone_surrogates_are_no_failure(server: Server) -> None:
    with server.client() as client:
        answer = client.post(
            CHAT, content=b'{"max_tokens":1,"messages":[{"role":"user","content":"a\\ud800b"}]}'
        )
        assert answer.status_code in (200, 400)
        answer = client.post("/tokenize", content=b'{"content":"a\\ud800b"}')
        assert answer.status_code in (200, 400)


def test_unknown_fields_are_ignored(server: Server) -> None:
    with server.client() as client:
        assert client.post(CHAT, json=chat(no_such_thing={"a": 1}, service_tier="auto")).status_code == 200


def test_max_tokens_of_a_billion_is_as_much_as_fits(server: Server) -> None:
    with server.client() as client:
        answer = client.post(CHAT, json=chat(max_tokens=10**9, stop=["."], seed=1)).json()
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_body_that_is_too_large(server: Server) -> None:
    with raw(server) as connection:
        connection.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n" + b"x" * 1000
        )
        assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]

    def chunks() -> Iterator[bytes]:
        for _ in range(200):
            yield b"x" * 100_000

    # the connection may be closed under what nobody wants to read
    with server.client() as client, contextlib.suppress(httpx.WriteError):
        assert client.post("/tokenize", content=chunks()).status_code == 413


def test_a_million_messages(server: Server) -> None:
    body = b'{"max_tokens":1,"messages":[' + b",".join([b'{"role":"user","content":""}'] * 1_000_000) + b"]}"
    with server.client() as client:
        with contextlib.suppress(httpx.WriteError):
            assert client.post(CHAT, content=body).status_code == 413
        many = [{"role": "user", "content": "x"}] * 20_000
        assert client.post(CHAT, json={"messages": many}).json()["error"]["code"] == "context_length_exceeded"


def test_template_errors_are_the_clients(server: Server) -> None:
    with server.client() as client:
        answer = client.post(
            CHAT, json=chat(chat_template_kwargs={"add_generation_prompt": False, "messages": 5})
        )
        assert answer.status_code == 200  # what is the server's to say cannot be overridden


def test_unknown_paths_and_methods(server: Server) -> None:
    with server.client() as client:
        assert client.get("/v1/nothing").status_code == 404
        assert client.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
        assert client.delete("/v1/models").status_code == 405
        assert client.get("/static/../../etc/passwd").status_code == 404
        assert client.get("/static/%2e%2e/%2e%2e/settings.py").status_code == 404
        assert client.get("/v1/models/..%2f..%2fetc%2fpasswd").status_code == 404


def test_pages_of_other_sites_may_not_post(server: Server) -> None:
    with server.client() as client:
        refused = client.post(CHAT, json=chat(), headers={"origin": "https://evil.example"})
        assert refused.status_code == 403
        assert "access-control-allow-origin" not in refused.headers
        own = client.post(CHAT, json=chat(), headers={"origin": server.url})
        assert own.status_code == 200


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    bodies = [json.dumps({"content": "x " * n}).encode() for n in (3, 1, 2)]
    with raw(server) as connection:
        connection.sendall(
            b"".join(
                b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(b), b)
                for b in bodies
            )
        )
        counts = []
        file = connection.makefile("rb")
        for _ in bodies:
            assert b"200" in file.readline()
            length = 0
            while (line := file.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            counts.append(json.loads(file.read(length))["count"])
        file.close()
    assert counts[0] > counts[2] > counts[1]


def test_a_client_that_sends_half_a_request_holds_nobody_up(server: Server) -> None:
    halves = [raw(server) for _ in range(20)]
    try:
        for i, half in enumerate(halves):
            whole = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
            half.sendall(whole[: 10 + i * 5])
        with server.client() as client:
            assert client.post("/tokenize", json={"content": "x"}).status_code == 200
    finally:
        for half in halves:
            half.close()


def test_duplicate_request_ids_are_two_requests(server: Server) -> None:
    with (
        server.client(headers={"x-request-id": "the-same"}) as client,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        answers = list(pool.map(lambda _: client.post(CHAT, json=chat()), range(2)))
    assert [a.status_code for a in answers] == [200, 200]
    assert [a.headers["x-request-id"] for a in answers] == ["the-same"] * 2


def test_an_insane_request_id_is_replaced(server: Server) -> None:
    with server.client() as client:
        answer = client.get("/health", headers={"x-request-id": "a b\tc" * 50})
    assert len(answer.headers["x-request-id"]) == 32


def test_five_hundred_at_once(server: Server) -> None:
    """More than run and wait are told to come again; the others are answered."""
    server.wait_idle()

    def one(i: int) -> tuple[int, str | None]:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=240)
        connection.request("POST", CHAT, body=json.dumps(chat(max_tokens=24, seed=i, ignore_eos=True)))
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status, response.headers.get("retry-after")

    with concurrent.futures.ThreadPoolExecutor(500) as pool:
        results = list(pool.map(one, range(500)))
    codes = [status for status, _ in results]
    assert set(codes) == {200, 429}
    assert codes.count(200) >= 80  # 16 that run and 64 that wait, at the least
    assert all(retry for status, retry in results if status == 429)
    server.wait_idle()


def test_a_reader_that_does_not_read_holds_nobody_up() -> None:
    with serving("--max-sequences", "2", "--n-ctx", "2048") as server, raw(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(chat(max_tokens=1900, ignore_eos=True, stream=True, logprobs=True, top_logprobs=20))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        wait_for(lambda: server.status()["running"] > 0)
        began = time.monotonic()
        with server.client() as client:  # somebody else is served meanwhile
            assert client.post(CHAT, json=chat()).status_code == 200
        assert time.monotonic() - began < 60
        connection.close()
        server.wait_idle()


def test_a_key_is_asked_for() -> None:
    with serving("--api-key", "secret one", "--api-key", "two") as server, server.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/").status_code == 200
        refused = client.post(CHAT, json=chat())
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer", "Bearer secret", "Basic secret one", "Bearer \xe9"):
            assert (
                client.post(CHAT, json=chat(), headers={"authorization": wrong.encode("latin-1")}).status_code
                == 401
            )
        for path in ("/metrics", "/status", "/v1/models", "/openapi.json"):
            assert client.get(path).status_code == 401
        for key in ("secret one", "two"):
            assert (
                client.post(CHAT, json=chat(), headers={"authorization": f"Bearer {key}"}).status_code == 200
            )
        llmstep = client.post("/", json={"tactic_state": "x"})
        assert llmstep.status_code == 401
        assert llmstep.json()["suggestions"] == []
