"""Chat through specproxy with the official openai client: only the base URL changes.

python examples/openai_python.py [http://127.0.0.1:8484]
"""

from __future__ import annotations

import sys

import openai

base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8484"
client = openai.OpenAI(base_url=f"{base}/v1", api_key="none")

# Streamed: text arrives as the lane writes it.
stream = client.chat.completions.create(
    model="default",
    messages=[{"role": "user", "content": "Explain in two sentences why the sky is blue."}],
    max_tokens=80,
    stream=True,
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
print()

# Not streamed, with the headers that say where it ran and why.
raw = client.chat.completions.with_raw_response.create(
    model="default",
    messages=[{"role": "user", "content": "Make up a user record with name and age. Answer in JSON only."}],
    response_format={
        "type": "json_schema",
        "json_schema": {
            "name": "user",
            "schema": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                "required": ["name", "age"],
            },
        },
    },
    max_tokens=80,
    temperature=0,
)
print(raw.parse().choices[0].message.content)
for name in ("lane", "workload", "reason"):
    print(f"X-Specproxy-{name.title()}: {raw.headers.get(f'x-specproxy-{name}')}")
