"""Send the requests of a file one after the other, with the headers of the SDK that made them; argv[1] is the file."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path


def main(file: str) -> None:
    """Send the requests of a file, and write a result."""
    requests = json.loads(Path(file).read_text())["requests"]
    for request in requests:
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", **request["headers"]}
        sent = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + request["path"],
            json.dumps(request["body"]).encode(),
            headers,
        )
        with urllib.request.urlopen(sent, timeout=60) as answer:
            text = answer.read().decode()
        if request["body"].get("stream"):
            assert text.endswith("\n\n"), text
            assert text.startswith(("data: ", "event: ")), text
        else:
            assert json.loads(text)["id"], text
    Path(os.environ["RAGEN_RESULT"]).write_text('{"reward": 1.0, "success": true}')


if __name__ == "__main__":
    main(sys.argv[1])
