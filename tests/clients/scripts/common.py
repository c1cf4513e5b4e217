"""What every client's script shares: the questions, the answers that the demo model gives, and the report.

A script is run as `python NAME.py URL` in the client's own environment, and prints one line of JSON: the version of the
client, and for each capability that it has "ok" or what went wrong.
"""

import base64
import importlib.metadata
import json
import struct
import sys
import traceback
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path

DEMO = Path(__file__).parents[3] / "jaxserve" / "assets" / "demo"  # the model, for clients that read its tokenizer
FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."
WEATHER = "What is the weather in Paris?"
PERSON = "Give me a person as JSON."
RESULT = {"temperature": 21, "sky": "sunny"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "enum": ["Ann", "Bob"]}, "age": {"type": "integer", "enum": [7, 8]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"

TOLD = "The file made.txt is there."  # what the model of scripted_model.py says of a picture
SEEN = "What is in this picture?"


def picture(shade: int) -> bytes:
    """A PNG of 64 x 64 pixels."""
    pieces = b"\x89PNG\r\n\x1a\n"
    rows = zlib.compress(64 * (b"\0" + 64 * bytes([shade, 0, 255 - shade])))
    for kind, body in ((b"IHDR", struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b"")):
        pieces += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return pieces


def picture_url(shade: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture(shade)).decode()}"


def num_pictures() -> int:
    """Pictures that the server has read so far."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{URL}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("jaxserve:images_total"))


def check_person(person: dict) -> None:
    assert person["name"] in ("Ann", "Bob") and person["age"] in (7, 8), person


def check_told(text: str) -> None:
    """The answer to the tool's result."""
    assert "sunny" in text, text


def check(result: str) -> Callable[[], None]:
    """Something that was tried already, with its result."""

    def told() -> None:
        assert result == "ok", result

    return told


def report(package: str, tried: dict[str, Callable[[], None]], *, name: str = "") -> None:
    """name: of the client, if it is not that of its package."""
    results = {}
    for capability, run in tried.items():
        try:
            run()
            results[capability] = "ok"
        except Exception as error:
            traceback.print_exc()
            results[capability] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps({"client": name or package, "version": importlib.metadata.version(package), "results": results}))
