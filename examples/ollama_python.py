"""Chat through specproxy with the official ollama client.

Works where the upstream speaks Ollama's API: Ollama itself, or the embedded engine.

    python examples/ollama_python.py MODEL [http://127.0.0.1:8484]
"""

from __future__ import annotations

import sys

import ollama

model = sys.argv[1]
host = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8484"
client = ollama.Client(host=host)

for part in client.chat(
    model=model,
    messages=[{"role": "user", "content": "Name three uses of a paper clip."}],
    options={"num_predict": 80},
    stream=True,
):
    print(part.message.content, end="", flush=True)
print()
