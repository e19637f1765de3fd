"""xtok in processes of vLLM's own: a server that speaks OpenAI's protocol, with two ranks (tensor parallelism over gloo)."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("vllm.config", reason="vLLM isn't installed here; `make test-vllm` runs these tests where it is")

from test_proposer import CONSTANT, engine
from vllm import SamplingParams

from xtok.pair import DRAFT, TARGET, prompts

PATIENCE = 150.0
"""Seconds until a server that doesn't answer fails."""
NAME, LENGTH = "pair", 32
PROPOSER = {"method": "custom_class", "model": "xtok.serving.vllm.XTokProposer", "num_speculative_tokens": 5}
SERVER = [
    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TARGET), "--served-model-name", NAME),
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8"),
    *("--kv-cache-memory-bytes", str(1 << 26), "--tensor-parallel-size", "2"),
    *("--speculative-config", json.dumps(PROPOSER)),
    *("--additional-config", json.dumps({"xtok": {"draft": str(DRAFT), "budget": CONSTANT}})),
]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def server(log: Path) -> Iterator[str]:
    """The address of a server that answers, until the block ends."""
    port = free_port()
    command = [*SERVER, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w", encoding="utf-8") as reported:
        process = subprocess.Popen(command, stdout=reported, stderr=subprocess.STDOUT, env={**os.environ, "no_proxy": "*"})
    address, until = f"http://127.0.0.1:{port}", monotonic() + PATIENCE
    try:
        while not answers(address):
            assert process.poll() is None, log.read_text(encoding="utf-8")[-4000:]
            assert monotonic() < until, log.read_text(encoding="utf-8")[-4000:]
            sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(PATIENCE)


def answers(address: str) -> bool:
    try:
        with urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except URLError:
        return False


def asked(address: str, **more: object) -> Iterator[str]:
    """The lines of an answer to some prompts, as they come."""
    reported = {"model": NAME, "prompt": prompts()[:4], "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, **more}
    question = Request(f"{address}/v1/completions", json.dumps(reported).encode(), {"Content-Type": "application/json"})
    with urlopen(question, timeout=PATIENCE) as answer:
        for line in answer:
            yield line.decode().strip()


def texts(address: str) -> list[str]:
    whole = json.loads("".join(asked(address)))
    return [one["text"] for one in sorted(whole["choices"], key=lambda one: one["index"])]


def streamed(address: str) -> list[str]:
    found = [""] * 4
    for line in asked(address, stream=True):
        if line.startswith("data: {"):
            for one in json.loads(line.removeprefix("data: "))["choices"]:
                found[one["index"]] += one["text"]
    return found


def counter(address: str, name: str) -> float:
    with urlopen(f"{address}/metrics", timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}_total"))


def test_a_server_with_two_ranks_streams_what_one_writes_alone(tmp_path: Path) -> None:
    asked = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
    alone = engine(guesses=False, max_model_len=256).generate(prompts()[:4], asked, use_tqdm=False)
    with server(tmp_path / "log") as address:
        assert texts(address) == streamed(address) == [one.outputs[0].text for one in alone]
        assert counter(address, "spec_decode_num_draft_tokens") > counter(address, "spec_decode_num_accepted_tokens") > 0
    assert "xtok guesses nothing" not in (tmp_path / "log").read_text(encoding="utf-8")
