"""Agent programs that fail, hang, leave something behind or exceed a limit disturb no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.servers.program_client import SPEAK

from ragen_pl.trajectory import EpisodeStatus


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("report(reward=1.0)", "ended without a request: exit code 0"),
        ("print('no luck'); sys.exit(3)", "exit code 3; its last lines: no luck"),
        ("os.kill(os.getpid(), 9)", "signal 9"),
        (
            "ask('a'); raise ValueError('broken')",
            "the program failed: exit code 1.*ValueError: broken",
        ),
        ("ask('a')", "reported no result"),
        ("ask('a'); report(reward=float('nan'))", "program=nan, expected a finite number"),
        ("ask('a'); report(reward='1')", "expected a finite number"),
        ("ask('a'); report(reward=True)", "expected a finite number"),
        ("ask('a'); report(reward=10**400)", "expected a finite number"),
        ("ask('a'); report(reward=1, rewards={'chatcmpl-9': 1})", "the id of no response"),
        (
            "answer = ask('a'); open(os.environ['RAGEN_RESULT'], 'w')"
            ".write('{\"rewards\": {\"%s\": 1, \"%s\": 2}}' % (answer['id'], answer['id']))",
            "'chatcmpl-000000' is given twice",
        ),
        ("ask('a'); report(reward=1, score=2)", "score is not known"),
        ("ask('a'); open(os.environ['RAGEN_RESULT'], 'w').write('{')", "no JSON"),
        ("ask('a'); os.mkfifo(os.environ['RAGEN_RESULT'])", "RAGEN_RESULT is no file"),
        ("ask('a'); os.symlink('/dev/zero', os.environ['RAGEN_RESULT'])", "RAGEN_RESULT cannot be"),
        ("ask('a'); os.mkdir(os.environ['RAGEN_RESULT'])", "RAGEN_RESULT cannot be"),
        ("ask('a'); report(info={'x': 'x' * (40 << 20)})", "has more than 33554432 bytes"),
        ("ask('a'); report(reward=1, info={'x': 'x' * (2 << 20)})", "info has more than 1048576"),
        ("ask('a'); report(reward=1, info={'x': [[]] * 200_000})", "has more than 100000 values"),
        (r"ask('a'); report(reward=1, info={'x': '\ud800'})", "a lone surrogate"),
        (r"ask('a'); report(reward={'\udfff': 1})", "has a part named"),
        (r"ask('a'); report(reward=1, info={'\ud800': 1})", "a lone surrogate"),
        (
            "ask('a'); open(os.environ['RAGEN_RESULT'], 'w').write("
            "'{\"reward\": 1, \"info\": {\"x\": %s%s}}' % ('[' * 900, ']' * 900))",
            "nested more than 64 deep",
        ),
        (
            "ask('a'); open(os.environ['RAGEN_RESULT'], 'w').write('[' * 90000)",
            "result: no JSON",
        ),
        ("ask('a'); report(reward=1, info={'x': float('inf')})", "Infinity is no finite number"),
        ("ask('a'); report(reward=1e38)", "program=1e.38, expected a finite number"),
        ("answer = ask('a'); report(rewards={answer['id']: -1e39})", "expected a finite number"),
        ("ask('a'); report(reward={'': 1})", "has a part named ''"),
        ("ask('a'); report(reward={'x' * 200: 1})", "has a part named 'xxx"),
        ("ask('a'); report(reward={'a\\nb': 1})", "has a part named"),
        ("ask('a'); report(reward={str(n): 1 for n in range(65)})", "has 65 parts"),
        ("ask('a'); report(reward=1, invalid=[['x']])", "the id of no response"),
        ("ask('a'); report(reward=1, success=1)", "success=1: expected true or false"),
        ("ask('a'); report(reward=1, invalid='x')", "result: invalid='x': expected a list"),
    ],
)
def test_an_episode_without_a_result_fails_with_the_reason(play, script, body, found):
    (episode,) = play(script(body))
    assert episode.status is EpisodeStatus.FAILED
    assert re.search(found, episode.error, flags=re.DOTALL), episode.error
    # what is kept of it can be written
    episode.error.encode()


HANGING = """
if SEED == 0:
    time.sleep(600)
if SEED == 1:
    ask("a")
    time.sleep(600)
if SEED == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.close(1)
    os.close(2)
    ask("a")
    time.sleep(600)
if SEED == 3:
    ask("a")
    report(reward=1)
    while True: pass
if SEED < 32:
    time.sleep(600)
"""


@pytest.mark.parametrize("shuffled", [False, True])
def test_programs_that_hang_fail_at_their_time_limit_and_hold_up_no_other(play, script, shuffled):
    """Before, between and after calls, with engines that wait for all and that do not."""
    hanging = HANGING.replace("while True: pass", "time.sleep(600)").replace(
        "SEED < 32", "SEED < 5"
    )
    episodes = play(
        script(hanging + SPEAK),
        episodes=12,
        num_envs=12,
        workers=12,
        program_s=20.0,
        shuffled=shuffled,
    )
    assert {episode.status for episode in episodes[:10]} == {EpisodeStatus.FAILED}
    assert all("took longer than env.kwargs.program_s=20" in one.error for one in episodes[:10])
    assert [episode.reward for episode in episodes[10:]] == [0.5] * 2


@pytest.mark.soak
def test_64_programs_that_hang_at_once_hold_up_no_other(play, script):
    """Some of them busy all the time."""
    episodes = play(
        script(HANGING + SPEAK), episodes=68, num_envs=68, workers=68, program_s=60.0, shuffled=True
    )
    assert {episode.status for episode in episodes[:64]} == {EpisodeStatus.FAILED}
    assert [episode.reward for episode in episodes[64:]] == [0.5] * 4


def test_nothing_outlives_a_program(play, script, tmp_path):
    """Children in sessions of their own, and what it has written."""
    child = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(60)"
    body = f"""
child = subprocess.Popen([sys.executable, "-S", "-c", {child!r}], stdout=subprocess.PIPE)
number = child.stdout.readline().decode().strip()
with open({str(tmp_path / "number")!r}, "w") as file:
    file.write(number + " " + os.getcwd())
ask("a")
report(reward=1)
"""
    (episode,) = play(script(body))
    assert episode.status is EpisodeStatus.TERMINATED, episode.error
    number, folder = (tmp_path / "number").read_text().split()
    assert not Path(f"/proc/{number}").exists()
    assert not Path(folder).exists()


def test_output_and_files_are_limited(play, script):
    body = """
print("x" * 20_000_000, flush=True)
try:
    with open("big", "wb") as file:
        for _ in range(4):
            file.write(bytes(1 << 20))
            file.flush()
except OSError as error:
    print("refused", flush=True)
ask("a")
report(reward=1)
"""
    body = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + body
    (episode,) = play(script(body), file_mb=2, output_kb=4)
    assert episode.status is EpisodeStatus.TERMINATED, episode.error
    output = episode.turns[-1].info["program"]["output"]
    assert len(output) == 4096 and output.endswith("refused\n")


def test_the_size_of_all_files_is_limited(play, script):
    """Of many small ones, in folders; what is beside it goes on, and the next episode starts clean."""
    body = """
if SEED == 0:
    ask("a")
    for number in range(64):
        os.makedirs(str(number))
        with open(f"{number}/part", "wb") as file:
            file.write(bytes(1 << 19))
    time.sleep(600)
assert not os.listdir()
ask("b")
report(reward=1)
"""
    episodes = play(script(body), episodes=4, num_envs=3, workers=3, disk_mb=16, program_s=600.0)
    for episode in episodes[:2]:
        assert episode.status is EpisodeStatus.FAILED
        assert "its files take more than env.kwargs.disk_mb=16" in episode.error
    assert [episode.reward for episode in episodes[2:]] == [1.0, 1.0]


FAULTS = {
    "no call": ("report(reward=1)", "ended without a request"),
    "exit code": ("ask('a'); sys.exit(3)", "exit code 3"),
    "signal": ("ask('a'); os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
    "closed output": ("os.close(1); os.close(2); ask('a'); sys.exit(4)", "exit code 4"),
    "floods its output": ("ask('a'); os.write(1, bytes(1 << 28)); sys.exit(5)", "exit code 5"),
    "children": (
        "ask('a')\nfor _ in range(8):\n    if os.fork() == 0: os.setsid(); os.fork(); time.sleep(600)\n"
        "sys.exit(6)",
        "exit code 6",
    ),
}


def test_after_each_fault_the_next_episode_starts_clean(play, script, tmp_path):
    """One environment plays one program after the other."""
    note = tmp_path / "notes"
    note.mkdir()
    faults = [body for body, _ in FAULTS.values()]
    body = f"""
open(os.path.join({str(note)!r}, os.getcwd().replace("/", ":")), "w").close()
if SEED % 2 == 0:
    exec({faults!r}[SEED // 2])
    raise SystemExit("the fault was none")
assert not os.listdir()
ask("b")
report(reward=1)
"""
    episodes = play(script(body), episodes=4 * len(FAULTS), num_envs=1, workers=1, program_s=600.0)
    for number, (_, found) in enumerate(FAULTS.values()):
        for episode in episodes[4 * number : 4 * number + 2]:
            assert episode.status is EpisodeStatus.FAILED and found in episode.error
        assert [episode.reward for episode in episodes[4 * number + 2 : 4 * number + 4]] == [1, 1]
    folders = {Path(file.name.replace(":", "/")) for file in note.iterdir()}
    assert len(folders) == len(episodes) and not any(folder.exists() for folder in folders)
    used = [Path("/proc", number.name, "cwd") for number in Path("/proc").glob("[0-9]*")]
    for link in used:
        with suppress(OSError):
            assert link.readlink() not in folders


def test_memory_is_limited(play, script):
    body = "ask('a')\nbytes(1 << 30)"
    (episode,) = play(script(body), memory_mb=256)
    assert "MemoryError" in episode.error


def test_an_owner_that_is_killed_leaves_no_program(script, tmp_path, tmp_path_factory):
    """Its folders are removed by the next one."""
    # the path of a socket has at most 107 characters
    place = tmp_path_factory.mktemp("t")

    def own(body: str, then: str) -> subprocess.Popen[bytes]:
        owner = (
            "from ragen_pl.agent_programs.environment import ProgramEnvironment\n"
            f"environment = ProgramEnvironment(command={script(body)!r})\n"
            f"environment.reset(seed=0)\n{then}"
        )
        variables = os.environ | {"TMPDIR": str(place)}
        return subprocess.Popen([sys.executable, "-c", owner], env=variables)

    number = tmp_path / "number"
    process = own(
        f"open({str(number)!r}, 'w').write(str(os.getpid()))\nask('a')",
        "import time; time.sleep(600)",
    )
    while not (number.exists() and number.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    while Path(f"/proc/{number.read_text()}").exists():
        time.sleep(0.01)
    assert len([*place.glob("ragen_programs_*/program_*/work")]) == 1
    assert own("ask('a')", "environment.close()").wait() == 0
    assert [*place.iterdir()] == []


def test_a_supervisor_that_is_killed_fails_its_episodes_and_another_one_is_started(play, script):
    """The program kills it, as the machine does where memory ends: its keeper's parent."""
    body = """
ask("a")
if SEED == 0:
    keeper = os.getppid()
    with open(f"/proc/{keeper}/stat") as file:
        supervisor = int(file.read().rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGKILL)
    time.sleep(600)
report(reward=1)
"""
    episodes = play(script(body), episodes=4, num_envs=1, workers=1, program_s=600.0)
    assert [episode.status for episode in episodes[:2]] == [EpisodeStatus.FAILED] * 2
    assert [episode.reward for episode in episodes[2:]] == [1.0, 1.0]


WATCHED = """
child = "import os, time; os.setsid(); time.sleep(600)"
other = subprocess.Popen([sys.executable, "-S", "-c", child])
def parent(process):
    with open(f"/proc/{process}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
keeper = os.getppid()
supervisor = parent(keeper)
if SEED == 0:
    ask("a")
    with open(NOTE, "a") as file:
        print(os.getpid(), other.pid, file=file)
    KILL
    time.sleep(600)
other.kill()
ask("b")
report(reward=1)
"""


@pytest.mark.parametrize(
    "kill",
    [
        "os.kill(keeper, signal.SIGKILL)",
        "os.kill(supervisor, signal.SIGKILL)",
        "os.kill(supervisor, signal.SIGSTOP)",
        "os.kill(supervisor, signal.SIGSTOP); os.kill(keeper, signal.SIGKILL)",
    ],
    ids=["keeper", "supervisor", "supervisor_stopped", "both"],
)
def test_a_program_that_kills_what_watches_it_ends_with_its_episode(play, script, tmp_path, kill):
    """With what it has started in sessions of their own; the next episodes are played."""
    note = tmp_path / "note"
    body = WATCHED.replace("NOTE", repr(str(note))).replace("KILL", kill)
    episodes = play(script(body), episodes=4, num_envs=1, workers=1, program_s=600.0)
    assert [episode.status for episode in episodes[:2]] == [EpisodeStatus.FAILED] * 2
    assert [episode.reward for episode in episodes[2:]] == [1.0, 1.0]
    numbers = note.read_text().split()
    assert len(numbers) == 4
    for number in numbers:
        while is_running(number):
            time.sleep(0.01)


def is_running(number: str) -> bool:
    """Return whether a process runs; one that has ended may wait for its parent."""
    with suppress(OSError):
        return ") Z " not in Path(f"/proc/{number}/stat").read_text()
    return False


def test_a_program_that_removes_the_folders_of_all_spoils_its_own_episode_only(play, script):
    """The next episode has a folder that is made anew."""
    body = """
import shutil
assert not os.listdir()
ask("a")
if SEED == 0:
    shutil.rmtree(os.path.dirname(os.path.dirname(os.getcwd())))
    sys.exit(3)
report(reward=1)
"""
    episodes = play(script(body), episodes=6, num_envs=1, workers=1, program_s=600.0)
    assert [episode.status for episode in episodes[:2]] == [EpisodeStatus.FAILED] * 2
    assert all("exit code 3" in episode.error for episode in episodes[:2])
    assert [episode.reward for episode in episodes[2:]] == [1.0] * 4
