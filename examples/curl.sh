#!/bin/sh
# The same with curl: a request, the headers that say why it ran where it did, and a pinned strategy.
#     sh examples/curl.sh [http://127.0.0.1:8484]
set -eu
base=${1:-http://127.0.0.1:8484}
body='{"messages":[{"role":"user","content":"Write a haiku about rivers."}],"max_tokens":40}'

curl -sS -D - "$base/v1/chat/completions" -H 'Content-Type: application/json' -d "$body"
echo

# Pin a strategy for one request. An unknown one is answered with the names that exist.
curl -sS "$base/v1/chat/completions" -H 'Content-Type: application/json' -H 'X-Specproxy-Strategy: plain' -d "$body"
echo

# What was routed where so far.
curl -sS "$base/specproxy/api/status"
echo
