import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import DEMO, URL, report


def stream() -> None:
    """Four requests, one at a time, each streamed to its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={URL},model=demo"),
            *("--profile", "kind=synchronous"),
            *("--constraint", "kind=max_requests,count=4"),
            *("--tokenizer", f"kind=huggingface_auto,model={DEMO}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--output", f"kind=json,path={folder}/report.json"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
        [benchmark] = json.loads(Path(folder, "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 4 and not requests["errored"], requests
    assert all(request["output_metrics"]["text_tokens"] == 8 for request in requests["successful"])


report("guidellm", {"stream": stream})
