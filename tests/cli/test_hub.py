"""Names on the hub: found with it, found in its cache without it, and refused at once where neither has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

NAME, COMMIT = "acme/tiny", "a" * 40
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99,
}  # fmt: skip


class Hub(ThreadingHTTPServer):
    """On this machine; of one model it has the configuration. While it is out of order it says so: 503."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.out_of_order = False
        self.asked: list[str] = []

    def close(self) -> None:
        """From now on nobody listens on its port."""
        self.shutdown()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        body = json.dumps(CONFIG).encode()
        found = self.path.startswith(f"/{NAME}/resolve/") and self.path.endswith("/config.json")
        found = found and not self.server.out_of_order
        self.send_response(200 if found else 503 if self.server.out_of_order else 404)
        self.send_header("Content-Length", str(len(body) if found else 0))
        if found:
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", COMMIT)
        elif not self.server.out_of_order:
            self.send_header("X-Error-Code", "EntryNotFound" if NAME in self.path else "RepoNotFound")
        self.end_headers()
        if found and self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.close()  # a second time does nothing
    thread.join()


def hf_cce(hub: Hub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home), "HF_HUB_OFFLINE": "0",
        "XDG_CACHE_HOME": str(home), "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "hf_cce", *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_a_name_is_found_on_the_hub_and_then_in_its_cache(hub: Hub, tmp_path: Path) -> None:
    first = hf_cce(hub, tmp_path, "estimate", NAME)
    assert first.returncode == 0 and f"{NAME}: LlamaForCausalLM" in first.stdout, first.stderr
    hub.close()
    for arguments in (["estimate", NAME], ["check", NAME, "--tiny"]):
        done = hf_cce(hub, tmp_path, *arguments)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert arguments[0] == "check" or done.stdout == first.stdout


def test_the_hub_knows_no_such_name(hub: Hub, tmp_path: Path) -> None:
    done = hf_cce(hub, tmp_path, "estimate", "acme/none")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "is not a valid model identifier" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message", "out_of_order"),
    [
        (["estimate", "acme/none"], "or one of qwen2.5-0.5b", True),
        (["check", "acme/none"], "or a model type such as llama", False),
        (["demo", "--model", "acme/none"], "or leave --model out", False),
    ],
    ids=["estimate", "check", "demo --model"],
)
def test_without_the_hub_there_is_one_error_and_no_second_try(
    arguments: list[str], message: str, out_of_order: bool, hub: Hub, tmp_path: Path
) -> None:
    hub.out_of_order = True
    if not out_of_order:
        hub.close()
    done = hf_cce(hub, tmp_path, *arguments)
    assert done.returncode == 2 and message in done.stderr and "nothing of this name" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert len([path for path in hub.asked if "acme/none" in path]) == out_of_order
