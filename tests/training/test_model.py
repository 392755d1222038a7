"""A model's configuration from the hub; its first values, of every family: none is left out."""

import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from running import losses
from tiny_shards import VOCABULARY
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from training.__main__ import main
from training.errors import InputError
from training.kernels.families import FAMILIES, Family, tiny_config
from training.model import materialise, saved_config, skeleton

EACH = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@EACH
def test_nothing_is_left_without_a_value(family: Family) -> None:
    """Parameters are numbers, the same each time; buffers, which no file holds, are those of transformers."""
    config = tiny_config(family).get_text_config()
    models = [skeleton(config, precision="fp32") for _ in range(2)]
    for model in models:
        materialise(model, model=model, device=torch.device("cpu"), seed=3)
    for (name, one), (_, other) in zip(*(model.named_parameters() for model in models), strict=True):
        assert one.isfinite().all(), name
        assert torch.equal(one, other), name
    theirs = dict(AutoModelForCausalLM.from_config(config).named_buffers())
    ours = dict(models[0].named_buffers())
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], msg=name)


@EACH
def test_what_transformers_keeps_in_fp32_stays_so(family: Family) -> None:
    """Under bf16 weights each parameter that `from_pretrained` keeps in fp32 is fp32: routers, for some."""
    config = tiny_config(family).get_text_config()
    ours = dict(skeleton(config, precision="bf16").named_parameters())
    strict = AutoModelForCausalLM.from_config(config)._keep_in_fp32_modules_strict or ()
    kept = [name for name in ours if any(f".{part}" in name for part in strict)]
    assert kept or "gate.weight" not in strict  # newer versions say it of Kimi-linear and Nemotron-H
    assert all(ours[name].dtype == torch.float32 for name in kept)
    assert ours["lm_head.weight" if "lm_head.weight" in ours else min(ours)].dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@EACH
def test_every_family_trains(
    words: Callable[..., list[str]], tmp_path: Path, family: Family, precision: str
) -> None:
    """From a configuration that transformers saved, by the command: two steps with losses near chance."""
    config = tiny_config(family)
    config.get_text_config().vocab_size = VOCABULARY
    config.save_pretrained(tmp_path / "model")
    short = (f"model.precision={precision}", "run.steps=2", "checkpoint.every=0", "checkpoint.last=false")
    assert main(words(f"model.config={tmp_path / 'model'}", *short)) == 0
    found = losses(tmp_path / "run")
    assert list(found) == [1, 2]
    assert all(abs(loss - math.log(VOCABULARY)) < 2 for loss in found.values())


# --- the hub -----------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, for those who have its token; `/mirror` before the path leads to files alone."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        content = None
        if self.path == "/api/models/own/tiny":
            content = b'{"id": "own/tiny", "sha": "%s", "siblings": []}' % (b"a" * 40)
        elif re.fullmatch("(/mirror)?/own/tiny/resolve/(main|a{40})/config.json", self.path):
            content = json.dumps(Qwen3Config(num_hidden_layers=3).to_dict()).encode()
        if self.headers["Authorization"] != "Bearer hf_secret":
            content = None
        self.send_response(200 if content else 404)
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("ETag", '"b"')
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if self.command == "GET" and content:
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def layers_of(name: str, folder: Path, **environment: str) -> str:
    """How many layers a process of its own, with its cache in the folder, sees in a model, or why none."""
    program = """
import sys
from training.errors import InputError
from training.model import saved_config
try:
    print(saved_config(sys.argv[1]).num_hidden_layers)
except InputError as error:
    print(error)
"""
    return subprocess.run(
        [sys.executable, "-c", program, name],
        env={key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        | {"HF_HOME": str(folder / "hf"), "NO_PROXY": "127.0.0.1"}
        | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout.strip()


def test_the_hub_is_asked_with_a_token_and_through_mirrors(hub: str, tmp_path: Path) -> None:
    """A model that needs a token, one behind a mirror of files alone, and, once loaded, without any hub."""
    secret = {"HF_TOKEN": "hf_secret"}
    for number, endpoint in enumerate([hub, f"{hub}/mirror"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert layers_of("own/tiny", folder, HF_ENDPOINT=endpoint, **secret) == "3"
    assert layers_of("own/tiny", folder, HF_ENDPOINT="http://127.0.0.1:9") == "3"
    assert "has no configuration that transformers reads (" in layers_of(
        "own/tiny", tmp_path, HF_ENDPOINT=hub
    )


def test_a_hub_out_of_reach_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip of the pen costs one question of ten seconds at most, and is not handed to the loading."""
    asked = []

    def out_of_reach(name: str, *, timeout: float, revision: None) -> None:
        asked.append((name, timeout))
        raise HTTPError("Name or service not known")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "model_info", out_of_reach)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("asked again"))
    words = r"^mdoel: no such file or directory, and the hub can't be reached \(Name or service not known\)$"
    with pytest.raises(InputError, match=words):
        saved_config("mdoel")
    assert asked == [("mdoel", 10.0)]


def test_what_the_hub_can_not_have_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a blank asks nobody."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError, match=r"^a b: no such file or directory, and no name that the hub can have$"
    ):
        saved_config("a b")
