#!/bin/sh
# A guess and a second thought, with curl alone: no Python package, no tools.
set -eu

ask() {
    curl --silent --show-error --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
        --header "Authorization: Bearer $OPENAI_API_KEY" \
        --header "Content-Type: application/json" --data-binary @-
}

# the endpoint's JSON has the message as its first choice
message() { python3 -c 'import json, sys; print(json.dumps(json.load(sys.stdin)["choices"][0]["message"]))'; }

first='{"role": "user", "content": "Say a word."}'
guess=$(printf '{"model": "policy", "messages": [%s]}' "$first" | ask | message)
second='{"role": "user", "content": "Another one."}'
last=$(printf '{"model": "policy", "messages": [%s, %s, %s]}' "$first" "$guess" "$second" | ask | message)

if [ "$guess" = "$last" ]; then reward=0; else reward=1; fi
printf '{"reward": %s, "success": %s}' "$reward" "$([ "$reward" = 1 ] && echo true || echo false)" > "$RAGEN_RESULT"
