"""Titles from the shell, with the settings of a person and the model that is built in."""

from __future__ import annotations

import json

from loopctl_world import World


def test_a_title_comes_by_itself_is_set_by_hand_and_made_anew(world: World) -> None:  # T-3, T-8, T-9
    config = world.root / "c" / "loopd" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('[default]\nmodel = "practice/echo"\ntitle = { mode = "first-prompt" }\n')
    assert world.loopctl("prompt", "what is this all about then").returncode == 0
    waited = world.loopctl("title", "--wait")
    assert (waited.returncode, waited.stdout) == (0, "Practice: what is this all about\n")
    assert world.loopctl("title", "Something else").stdout == "Something else\n"
    assert world.loopctl("title").stdout == "Something else\n"
    assert world.loopctl("title", "--refresh").stdout == waited.stdout
    assert world.loopctl("title", "--cancel").stdout == "no title was being made\n"
    assert world.loopctl("dispose").returncode == 0
    shown = json.loads(world.loopctl("title", "--json").stdout)
    assert shown["title"]["source"] == "model"
    assert world.loopctl("prompt", "--new", "fail").returncode == 1
    waited = world.loopctl("title", "--wait")
    assert (waited.returncode, waited.stdout) == (1, "fail\n")
    assert "practice/echo fails" in waited.stderr
