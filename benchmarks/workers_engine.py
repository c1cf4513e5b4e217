"""The engine process of benchmarks.workers: no model. Every request gets a token in each step, and a step costs little.

Steps begin every STEP_SECONDS (environment), or one after the other if that is 0.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import zmq

import jaxserve
from jaxserve.config import Config
from jaxserve.engine.child import SocketChannel
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.transport.child import end_with_parent
from jaxserve.transport.shared_state import SharedState
from jaxserve.transport.socket_directory import STATE
from jaxserve.types.messages import Abort, Add, EngineInfo, Located, Outputs, Ready, Stop, ToEngine
from jaxserve.types.step import FinishReason, TokenOutput

MODEL = Path(jaxserve.__file__).parent / "assets" / "demo"
STEP_SECONDS = "WORKERS_STEP_SECONDS"  # environment variable


def info(vocab_size: int) -> EngineInfo:
    return EngineInfo(
        model_path="demo",
        served_names=["demo"],
        architecture="none",
        dtype="float32",
        vocab_size=vocab_size,
        max_model_len=4096,
        page_size=16,
        num_pages=4096,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        attention="none",
        devices=["none:0"],
        num_programs=0,
        eos_token_ids=[],
        generation_defaults={},
        memory_plan={},
        seconds={},
    )


class TokenEngine:
    """Gives each live request one token a step."""

    def __init__(self, channel: SocketChannel, vocab_size: int) -> None:
        self._channel = channel
        self._vocab_size = vocab_size
        self._left: dict[str, int] = {}  # tokens until the end

    def take(self, message: ToEngine) -> None:
        match message:
            case Add():
                count = message.request.params.max_tokens or 1
                self._left |= {each.request_id: count for each in message.siblings}
            case Abort(ids):
                for request_id in ids:
                    self._left.pop(request_id, None)
            case Stop():
                os._exit(0)  # without waiting for the thread that reads stdin

    def run(self, step_seconds: float) -> None:
        while True:
            began = time.monotonic()
            for message in self._channel.receive(0.0 if self._left else 0.5):
                self.take(message)
            if self._left:
                self._channel.send(Outputs([self._output(request_id) for request_id in list(self._left)]))
            time.sleep(max(0.0, began + step_seconds - time.monotonic()))

    def _output(self, request_id: str) -> TokenOutput:
        left = self._left[request_id] = self._left[request_id] - 1
        token = 300 + left % (self._vocab_size - 300)
        if left:
            return TokenOutput(request_id=request_id, token_ids=[token])
        del self._left[request_id]
        return TokenOutput(request_id=request_id, token_ids=[token], finish_reason=FinishReason.LENGTH)


def main() -> None:
    Config.model_validate_json(sys.stdin.buffer.readline())
    end_with_parent()
    channel = SocketChannel(sys.argv[1], zmq.Context())
    SharedState(Path(sys.argv[1]) / STATE)
    vocab_size = Tokenizer.from_directory(MODEL).vocab_size
    channel.send(Located(str(MODEL)))
    channel.send(Ready(info(vocab_size)))
    TokenEngine(channel, vocab_size).run(float(os.environ[STEP_SECONDS]))


if __name__ == "__main__":
    main()
