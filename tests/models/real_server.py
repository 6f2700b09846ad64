"""A process of its own with llama.cpp's server: ``python real_server.py MODEL.gguf TEMPLATE.jinja``.

Prints its address and serves until its stdin ends, so it never outlives the test.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# Read when the library is loaded: threads that wait would else take both cores.
os.environ["OMP_WAIT_POLICY"] = "passive"


def serve(model: str, template: str) -> None:
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path = model
    params.chat_template = Path(template).read_text()
    params.n_ctx = 4096
    params.n_batch = params.n_ubatch = 256
    params.sampling.temp = 0.0  # the same every time
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(*sys.argv[1:])
