"""``loopctl prompt`` with the real daemon: from nothing to an answer on the disk, and every way in which a run ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

from loopctl_world import COMMAND, PATIENCE, World, ended, first_output


def roles(world: World, *arguments: str) -> list[str]:
    document = json.loads(world.loopctl("messages", "--json", *arguments).stdout)
    return [message["role"] for message in document["messages"]]


def paths(world: World) -> list[str]:
    return [row["path"] for row in json.loads(world.loopctl("sessions", "--json").stdout)["sessions"]]


def test_a_prompt_from_nothing_shows_tool_and_answer_and_all_of_it_survives_a_kill(world: World) -> None:  # S-1, D-7
    ran = world.loopctl("prompt", "shell: echo hi", "--permission", "danger-full-access")
    assert (ran.returncode, ran.stdout) == (0, "hi\n")
    assert re.search(r"→ bash .*echo hi", ran.stderr)
    assert "practice/echo" in ran.stderr
    world.kill(signal.SIGKILL)
    assert roles(world) == ["user", "assistant", "toolResult", "assistant"]
    assert "hi" in world.loopctl("messages").stdout


def test_ten_prompts_at_once_from_nothing_start_one_daemon_and_have_ten_outcomes(world: World) -> None:
    outcomes = [ended(process) for process in [world.start("prompt", f"hello {n}") for n in range(10)]]
    assert {code for code, _, _ in outcomes} <= {0, 5}
    answered = [n for n, (code, _, _) in enumerate(outcomes) if code == 0]
    assert answered
    assert all(outcomes[n][1] == f"hello {n}\n" for n in answered)
    assert all("busy" in err or "run" in err for code, _, err in outcomes if code == 5)
    assert world.log.read_text().count("serving on") == 1
    assert len(paths(world)) == 1
    world.kill(signal.SIGTERM)
    assert not Path(world.socket).exists()


def test_ctrl_c_stops_the_run_and_the_text_so_far_is_kept(world: World) -> None:  # S-12
    process = world.start("prompt", "slow")
    first_output(process)
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130
    assert "loopctl: stopped" in err
    last = json.loads(world.loopctl("messages", "--json").stdout)["messages"][-1]
    assert (last["role"], last["stopReason"]) == ("assistant", "aborted")


def test_the_time_given_stops_the_run_with_3(world: World) -> None:
    ran = world.loopctl("prompt", "slow", "--timeout", "0.5")
    assert ran.returncode == 3
    assert json.loads(world.loopctl("state", "--json").stdout)["lastRun"]["outcome"] == "cancelled"


def test_a_failing_run_is_1_and_is_stored(world: World) -> None:
    ran = world.loopctl("prompt", "fail")
    assert ran.returncode == 1
    assert "the run failed" in ran.stderr
    assert roles(world)[0] == "user"


def test_a_run_left_alone_refuses_the_next_prompt_can_be_watched_and_stopped(world: World) -> None:
    ids = json.loads(world.loopctl("prompt", "slow", "--no-wait", "--json").stdout)
    busy = world.loopctl("prompt", "me too")
    assert busy.returncode == 5
    assert "loopctl stop" in busy.stderr
    watching = world.start("attach", "--json")
    assert b'"textDelta"' in first_output(watching)
    assert world.loopctl("stop").stdout == "stopped\n"
    assert world.loopctl("stop").stdout == "nothing is running\n"
    waited = json.loads(world.loopctl("rpc", "run/wait", json.dumps({"runId": ids["runId"]})).stdout)
    assert (waited["outcome"], waited["saved"]) == ("cancelled", True)
    watching.send_signal(signal.SIGINT)
    code, out, _ = ended(watching)
    assert code == 130
    assert '"run_settled"' in out


def test_new_continue_session_and_no_session_go_where_they_say(world: World) -> None:  # S-2
    world.loopctl("prompt", "one")
    [first] = paths(world)
    world.loopctl("prompt", "two", "--new")
    second = next(path for path in paths(world) if path != first)
    assert roles(world) == ["user", "assistant"]
    world.loopctl("prompt", "three")  # the current one is the new one
    assert roles(world, "--session", second) == ["user", "assistant"] * 2
    assert world.loopctl("prompt", "four", "--session", first).stdout == "four\n"
    assert world.loopctl("prompt", "five", "--session", first).stdout == "five\n"  # joins the runtime that has it
    assert roles(world, "--session", first) == ["user", "assistant"] * 3
    world.kill(signal.SIGTERM)
    assert world.loopctl("prompt", "six", "--continue").returncode == 0
    assert roles(world, "--session", first) == ["user", "assistant"] * 4  # it was updated last
    before = json.loads(world.loopctl("status", "--json").stdout)["runtimes"]
    assert world.loopctl("prompt", "seven", "--no-session").stdout == "seven\n"
    assert len(paths(world)) == 2
    assert json.loads(world.loopctl("status", "--json").stdout)["runtimes"] == before


def test_a_one_file_session_of_an_earlier_version_goes_on(world: World) -> None:  # S-18
    file = world.root / "old.jsonl"
    head = {"format": "loop-session", "version": 2, "cwd": str(world.workspace)}
    lines = (head, {"role": "user", "content": "long ago"}, {"role": "assistant", "content": "so it was"})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "so it was" in world.loopctl("messages", "--session", str(file)).stdout
    assert file.exists()  # reading is no opening
    ran = world.loopctl("prompt", "and now", "--session", str(file))
    assert (ran.returncode, ran.stdout, file.exists()) == (0, "and now\n", False)
    assert world.loopctl("flush", "--session", str(file)).returncode == 0
    world.kill(signal.SIGKILL)
    for path in (file, world.root / "old" / "meta.json"):
        assert world.loopctl("prompt", "again", "--session", str(path)).returncode == 0
        assert roles(world, "--session", str(path))[:2] == ["user", "assistant"]
    assert len(roles(world, "--session", str(file))) == 8


def test_a_file_that_is_no_session_and_a_path_that_is_nothing_are_refused(world: World) -> None:
    missing = world.loopctl("prompt", "x", "--session", "nothing/meta.json")
    assert missing.returncode == 4
    assert world.loopctl("messages").returncode == 4  # and none was made


def test_a_save_that_fails_is_5_and_flush_mends_it(world: World) -> None:  # S-14, S-25, K-3
    world.loopctl("prompt", "one")
    directory = Path(paths(world)[0]).parent
    directory.rename(directory.with_name("away"))
    ran = world.loopctl("prompt", "two")
    assert (ran.returncode, ran.stdout) == (5, "two\n")
    assert "loopctl flush" in ran.stderr
    assert world.loopctl("prompt", "three").returncode == 5
    assert world.loopctl("flush").returncode == 5
    assert world.loopctl("daemon", "stop").returncode == 5
    directory.with_name("away").rename(directory)
    assert world.loopctl("drain", "--cancel").returncode == 0  # the refused `daemon stop` began to drain
    assert world.loopctl("flush").stdout in ("saved\n", "nothing was unsaved\n")
    world.kill(signal.SIGKILL)
    assert roles(world) == ["user", "assistant"] * 2


def test_a_daemon_killed_in_mid_run_is_69(world: World) -> None:
    process = world.start("prompt", "slow")
    first_output(process)
    world.kill(signal.SIGKILL)
    code, _, err = ended(process)
    assert code == 69
    assert "is kept" in err


def test_a_reader_that_goes_away_leaves_the_run_alone(world: World) -> None:
    process = world.start("prompt", "slow")
    first_output(process)
    assert process.stdout is not None
    process.stdout.close()
    process.wait(PATIENCE)
    assert process.returncode == 0
    assert process.stderr is not None
    process.stderr.close()
    assert json.loads(world.loopctl("state", "--json").stdout)["operation"] == "prompt"
    assert world.loopctl("abort").stdout == "aborted\n"


def test_many_events_at_once_all_arrive(world: World) -> None:
    ran = world.loopctl("prompt", "stream 20000")
    assert ran.returncode == 0
    assert len(ran.stdout.split()) == 20_000


def test_stdin_is_sent_as_it_is(world: World) -> None:
    ran = subprocess.run(
        [*COMMAND, "prompt", "-"],
        cwd=world.workspace,
        env=world.environment,
        input="äöü \u2028 \N{SNOWMAN}".encode(),
        capture_output=True,
        timeout=PATIENCE,
    )
    assert ran.stdout.decode() == "äöü \u2028 \N{SNOWMAN}\n"


def test_the_environment_of_a_tool_is_the_callers_and_holds_no_key(world: World) -> None:  # K-31
    ran = world.loopctl(
        "prompt", "shell: env", "--permission", "danger-full-access", LC_ALL="C.UTF-8", SOME_API_KEY="hush"
    )
    assert "LC_ALL=C.UTF-8" in ran.stdout
    assert f"PATH={os.environ['PATH']}" in ran.stdout
    assert "hush" not in ran.stdout
