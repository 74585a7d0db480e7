"""Agent programs of tests: a client of the standard library, and a program of three calls."""

CLIENT = """
import json, os, signal, subprocess, sys, threading, time, urllib.error, urllib.request
SEED = int(os.environ["RAGEN_SEED"])
TASK = json.loads(os.environ["RAGEN_TASK"])

def post(path, body, key=os.environ["OPENAI_API_KEY"], **headers):
    data = json.dumps(body).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json", **headers}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, data, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}

def ask(messages, headers={}, **more):
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return post("/chat/completions", {"model": "policy", "messages": messages, **more}, **headers)

def said(answer):
    return answer["choices"][0]["message"]["content"]

def report(**result):
    with open(os.environ["RAGEN_RESULT"], "w") as file:
        json.dump(result, file)
"""

SPEAK = """
messages = []
for turn in range(3):
    messages.append({"role": "user", "content": f"turn {turn} of {SEED}"})
    messages.append(ask(messages)["choices"][0]["message"])
report(reward=0.5, success=True)
print("done")
"""
