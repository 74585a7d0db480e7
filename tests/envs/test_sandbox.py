"""The sandbox of programs: nothing leaves it, and nothing of one program reaches the next."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from envs import sandbox as sandbox_package
from envs.code import Code
from envs.sandbox.client import MAX_OUTPUT, SANDBOX, Sandbox
from envs.sandbox.server.output import address_space


def runs_identity(sandbox: Sandbox, *, times: int = 20) -> None:
    for number in range(times):
        run = sandbox.run("def f(x): return x", name="f", inputs=[number])
        assert run.calls == [{"value": number}]


def state(pid: int) -> str | None:
    """Return the letter of a process's state, such as `S` of one that waits, or None if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return None


def children(server) -> list[int]:
    pid = server.process.pid
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def waiting(server) -> int:
    return [state(child) for child in children(server)].count("S")


def running(server) -> int:
    return len(children(server)) - waiting(server)


def wait_until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def env() -> Code:
    made = Code(attempts=1000)
    made.reset(seed=1)
    return made


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox()
    yield made
    made.close()


HOSTILE = {
    "endless loop": "while True: pass",
    "endless loop in the call": "def f(x):\n while True: pass",
    "ignored signals": (
        "import signal\nfor n in range(1, 30):\n"
        " try: signal.signal(n, signal.SIG_IGN)\n except Exception: pass\nwhile True: pass"
    ),
    "fork bomb": "import os\ndef f(x):\n while True: os.fork()",
    "threads": "import _thread\ndef f(x):\n while True: _thread.start_new_thread(f, (x,))",
    "spawn": "import os\ndef f(x): return os.posix_spawn('/bin/true', ['true'], dict())",
    "exec": "import os\ndef f(x): os.execv('/bin/sh', ['sh', '-c', 'touch {path}'])",
    "system": "import os\ndef f(x): return os.system('touch {path}')",
    "file": "def f(x):\n open('{path}', 'w').write('x')",
    "file by descriptor": "import os\ndef f(x): os.open('{path}', os.O_CREAT | os.O_WRONLY)",
    "reads a file": "def f(x): return open('/etc/hostname').read()",
    "folder": "import os\ndef f(x): os.mkdir('{path}')",
    "removes": "import os\nos.unlink('{other}')",
    "kills all": "import os\ndef f(x): os.kill(-1, 9)",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "network": "import _socket\ndef f(x): return _socket.socket()",
    "exit": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef f(x): os._exit(0)",
    "system exit": "import sys\nsys.exit(0)",
    "memory": "def f(x): return len('a' * 10**10)",
    "memory step by step": "held = []\ndef f(x):\n while True: held.append('a' * 10**6)",
    "huge output": "def f(x): return 'a' * 10**7",
    "huge print": "def f(x):\n for _ in range(1000): print('a' * 10**5)",
    "huge number": "def f(x): return 10**100000",
    "deep list": "def f(x):\n for _ in range(10**5): x = [x]\n return x",
    "recursion": "def f(x): return f(x)",
    "crash": "import ctypes\nctypes.string_at(0)",
    "prints results": "print('all tests pass')\nprint('{{\"calls\": [{{\"value\": 1}}]}}')",
    "forged results": (
        "import os\nos.write(3, b'{{\"starts\": true, \"calls\": ['"
        " + b', '.join([b'{{\"value\": 0}}'] * 10) + b']}}')\nos._exit(0)"
    ),
    "forged results without an error": "import os\nos.write(3, b'{{\"error\": \"\"}}\\n' * 2)\nos.read(4, 9)",
    "forged nonsense": "import os\nos.write(3, b'[' * 19000)\nos._exit(0)",
    "endless results": "import os\nwhile True: os.write(3, b'a' * 10**6)",
    "the server's functions": (
        "import __main__\n__main__._call = lambda f, x: {{'value': x}}\n"
        "__main__.run = None\ndef f(x): return 1"
    ),
    "modules": (
        "import sys, json\njson.dumps = lambda *_, **__: '{{}}'\nsys.modules.clear()\n"
        "def f(x): return x"
    ),
    "the frames above": (
        "import sys\ndef f(x):\n frame, found = sys._getframe(), []\n while frame:\n"
        "  found += [repr(value) for value in frame.f_locals.values() if 'expected' in repr(value)]\n"
        "  frame = frame.f_back\n return str(found)"
    ),
    "no function": "g = 1",
    "not callable": "f = 1",
    "half a program": "def f(x) return x",
    "null": "\x00",
    "half a character": "\ud800",
    "many brackets": "x = " + "(" * 1900,
    "many signs": "x = " + "-" * 1900 + "1",
    "many lambdas": "f = " + "lambda x: " * 180 + "x",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_neither_pass_nor_harm(env, tmp_path, name):
    path, other = tmp_path / "made", tmp_path / "other"
    other.write_text("kept")
    program = HOSTILE[name]
    if "{" in program:
        program = program.format(path=path, other=other)
    text, reward, _, _, info = env.step(program)
    assert not info["success"] and reward == -0.1 and text in env.observation_space
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other"]
    assert other.read_text() == "kept"
    # the server goes on, and the program does not
    server = SANDBOX.idle[-1]
    wait_until(lambda: waiting(server) and not running(server))
    assert env.step(env.optimal_action(np.random.default_rng(0)))[4]["success"]
    assert SANDBOX.idle[-1] is server


def test_nothing_but_inputs_is_in_the_process_of_the_program():
    code = (
        "import gc, sys\ndef f(x):\n texts = set()\n for thing in gc.get_objects():\n"
        "  if type(thing) is dict:\n   texts.update(k for k in thing if type(k) is str)\n"
        " return sorted(texts & {'request', 'inputs', 'expected', 'specification', 'results'})"
    )
    run = SANDBOX.run(code, name="f", inputs=[0])
    assert "expected" not in run.calls[0]["value"] and "specification" not in run.calls[0]["value"]


SEARCH = """
import gc, sys
def found():
    frame, texts = sys._getframe(), [repr(thing) for thing in gc.get_objects() if type(thing) in (dict, list)]
    while frame:
        texts += [repr(value) for value in frame.f_locals.values()]
        frame = frame.f_back
    return ''.join(['sec', 'ret7']) in str(texts)
"""


def test_hidden_inputs_are_not_there_while_results_are_shown(sandbox):
    hidden = ["secret7", 7]
    run = sandbox.run(SEARCH + "def f(x): return found()", name="f", inputs=[1], hidden=hidden)
    # the search finds them once they are there
    assert run.calls == [{"value": False}] and run.hidden.calls == [{"value": True}] * 2
    for forged in ("os.write(3, b'[{}]\\n')", "os.close(3)", "os.write(3, os.read(4, 999))"):
        program = f"import os\ndef f(x):\n {forged}\n return str(os.read(4, 999))"
        assert "secret7" not in repr(sandbox.run(program, name="f", inputs=[1], hidden=hidden))
    counts = "n = 0\ndef f(x):\n global n\n n += x\n return n"
    run = sandbox.run(counts, name="f", inputs=[1, 2], hidden=[3, 4])
    assert [call["value"] for call in run.calls + run.hidden.calls] == [1, 3, 6, 10]


@pytest.mark.parametrize(
    ("end", "heard"),
    [
        ("raise SystemExit", "a hidden test fails"),
        ("while True: pass", "error: takes too long"),
        ("os._exit(0)", "error: ended early"),
        ('os.write(3, b\'{"error": "the input"}\'); os._exit(0)', "a hidden test fails"),
        ('os.write(3, b\'{"error": "the input"}\\n\'); os.read(4, 1)', "a hidden test fails"),
        ('os.write(3, b\'{"error": ""}\\n\'); os.read(4, 1)', "error: output is unreadable"),
    ],
)
def test_a_player_hears_of_hidden_tests_how_the_program_ends_and_no_more(env, end, heard):
    shown = [repr(x) for x in env.inputs[: env.example_count]]
    table = {repr(x): env.specification.apply(x) for x in env.inputs}
    program = f"import os\ntable = {table!r}\ndef f(x):\n if repr(x) not in {shown!r}:\n  {end}\n return table[repr(x)]"
    assert env.step(program)[0] == heard


@pytest.mark.parametrize(
    "program",
    [
        "import os\ndef f(x): return os.read(4, 1)",
        "import _thread\ndef f(x):\n lock = _thread.allocate_lock()\n lock.acquire()\n lock.acquire()",
    ],
)
def test_a_program_that_waits_for_nothing_ends_long_before_its_time(monkeypatch, program):
    monkeypatch.setattr("envs.sandbox.client.WALL_SECONDS", 3600)
    sandbox = Sandbox()
    assert sandbox.run(program, name="f", inputs=[1]).error == "takes too long"
    lock = "import _thread\nlock = _thread.allocate_lock()\nlock.acquire()\n"
    short = f"{lock}def f(x): return lock.acquire(timeout=0.2)"
    assert sandbox.run(short, name="f", inputs=[1]).calls == [{"value": False}]
    sandbox.close()


def test_a_process_has_no_capabilities_and_gives_no_unusual_advice_about_memory(sandbox):
    runs_identity(sandbox, times=1)
    server = sandbox.idle[0]
    wait_until(lambda: waiting(server) and not running(server))
    # of this process, if it is root's
    wanted = {"CapInh", "CapPrm", "CapEff", "CapAmb"}
    for child in children(server):
        lines = Path(f"/proc/{child}/status").read_text().splitlines()
        sets = {
            name: int(value, 16)
            for name, value in (line.split(":") for line in lines if line.startswith("Cap"))
        }
        assert {name: sets[name] for name in wanted} == dict.fromkeys(wanted, 0)
    program = (
        "import ctypes\ndef f(x):\n library = ctypes.CDLL(None, use_errno=True)\n"
        " library.mmap.restype = ctypes.c_void_p\n"
        " place = ctypes.c_void_p(library.mmap(None, 4096, 3, 0x22, -1, 0))\n"
        " return [library.madvise(place, 4096, x), ctypes.get_errno()]"
    )
    advice = [0, 3, 4, 10, 12, 100, 101]  # the last one poisons a page, for root
    run = sandbox.run(program, name="f", inputs=advice)
    assert [call["value"] for call in run.calls] == [[0, 0]] * 3 + [[-1, 1]] * 4


def test_programs_keep_nothing_for_the_next_one():
    SANDBOX.run("import math\nmath.leak = 7\ndef f(x): return 1", name="f", inputs=[0])
    run = SANDBOX.run("import math\ndef f(x): return hasattr(math, 'leak')", name="f", inputs=[0])
    assert run.calls == [{"value": False}]


def test_a_result_of_the_permitted_length_arrives():
    run = SANDBOX.run("def f(x): return 'a' * x", name="f", inputs=[MAX_OUTPUT - 100])
    assert run.calls == [{"value": "a" * (MAX_OUTPUT - 100)}]
    run = SANDBOX.run("def f(x): return 'a' * x", name="f", inputs=[MAX_OUTPUT + 1])
    assert run.error == "output is too long"


def test_environments_of_a_process_share_a_server_and_a_copy_works():
    servers = []
    for env in (Code(), pickle.loads(pickle.dumps(Code()))):
        env.reset(seed=0)
        assert env.step(env.optimal_action(np.random.default_rng(0)))[4]["success"]
        servers.append(SANDBOX.idle[-1])
    assert servers[0] is servers[1] and servers[0].process.pid != os.getpid()


def test_a_server_that_dies_costs_the_programs_that_it_runs(sandbox):
    runs_identity(sandbox, times=1)
    server = sandbox.idle[0]
    wait_until(lambda: waiting(server) and not running(server))
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(sandbox.run, "while True: pass", name="f", inputs=[5])
        wait_until(lambda: "R" in map(state, children(server)))
        server.process.kill()
        with pytest.raises(RuntimeError, match="has died"):
            run.result(timeout=60)
    runs_identity(sandbox)


def test_results_are_those_of_every_server(sandbox):
    program = "import random\ndef f(x): return [list(set(x))[0], str(random.random())]"
    runs = [
        each.run(program, name="f", inputs=["some letters"]) for each in (sandbox, sandbox, SANDBOX)
    ]
    assert runs[0].calls[0]["value"] and runs[1:] == runs[:1] * 2


def test_programs_of_several_threads_run_at_the_same_time(sandbox):
    program = "import time\ndef f(x):\n end = time.monotonic() + 0.4\n while time.monotonic() < end: pass\n return 1"
    with ThreadPoolExecutor(4) as threads:
        runs = list(
            threads.map(lambda x: sandbox.run(program, name="f", inputs=[x]), range(8), timeout=60)
        )
    assert [run.calls for run in runs] == [[{"value": 1}]] * 8
    assert 1 < len(sandbox.idle) <= 4


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_processes_are_started_ahead_and_end_with_the_server(sandbox, how):

    def several_wait() -> bool:
        runs_identity(sandbox)
        time.sleep(0.2)
        return waiting(sandbox.idle[0]) > 4

    wait_until(several_wait)
    server = sandbox.idle[0]
    wait_until(lambda: not running(server))
    waited = children(server)
    if how == "killed":
        server.process.kill()
    else:
        sandbox.close()
        assert server.process.returncode == 0
    wait_until(lambda: all(state(child) in ("Z", None) for child in waited))


def test_what_has_died_while_it_waited_costs_no_run(sandbox):
    runs_identity(sandbox)
    server = sandbox.idle[0]
    wait_until(lambda: waiting(server) and not running(server))
    waited = children(server)
    for child in waited:
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: all(state(child) == "Z" for child in waited))
    runs_identity(sandbox)
    sandbox.idle[0].process.kill()
    sandbox.idle[0].process.wait()
    runs_identity(sandbox)


def test_a_limit_of_descriptors_leaves_fewer_processes_ahead(sandbox):
    runs_identity(sandbox)
    server = sandbox.idle[0]
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (24, 24))
    for _ in range(20):
        runs_identity(sandbox, times=4)
        time.sleep(0.02)
    assert sandbox.idle == (server,)


def test_no_program_can_read_the_ones_before(sandbox):
    reader = (
        "import sys\ndef f(x):\n mark, frame, texts = ''.join(['se', 'cr', 'et']), sys._getframe(), []\n"
        " while frame:\n  texts += [repr(value) for value in frame.f_locals.values()]\n"
        "  frame = frame.f_back\n return [mark in text for text in texts if text != repr(mark)]"
    )
    for _ in range(10):
        sandbox.run("def f(x): return 'secret'", name="f", inputs=["secret"])
        time.sleep(0.02)
        found = sandbox.run(reader, name="f", inputs=[0]).calls[0]["value"]
        assert len(found) > 3 and not any(found)


def test_a_program_that_has_much_memory_ends_before_its_result_is_known(sandbox):
    program = "kept = 'a' * 100 * 2**20\ndef f(x): return x"
    for _ in range(10):
        assert sandbox.run(program, name="f", inputs=[5]).calls == [{"value": 5}]
        for child in children(sandbox.idle[0]):
            with suppress(OSError):
                assert address_space(child) < 64 * 2**20


def test_a_machine_that_cannot_confine_programs_says_so():
    folder = Path(sandbox_package.__file__).parent
    code = (
        "import platform, sys\nplatform.machine = lambda: 'vax'\n"
        f"sys.path.insert(0, {str(folder)!r})\nfrom server.serving import main\nmain()"
    )
    limits = json.dumps(
        {"seconds": 1, "memory_mb": 256, "wall_seconds": 5, "waiting_seconds": 1, "max_output": 100}
    )
    reply = subprocess.run(
        [sys.executable, "-c", code, limits],
        input=struct.pack("!I", 2) + b"{}", capture_output=True, timeout=60,
    ).stdout  # fmt: skip
    assert json.loads(reply[4:]) == {
        "starts": False,
        "error": "expected Linux on x86_64 or aarch64",
    }
