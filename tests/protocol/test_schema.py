"""The generated contract: it says what the code says, and the files in the repository are up to date."""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import pytest

from loop_protocol import schema
from loop_protocol.v1.errors import KINDS
from loop_protocol.v1.events import EVENTS, SERVER_EVENTS
from loop_protocol.v1.methods import METHODS

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "protocol").mkdir()
    shutil.copy(ROOT / "protocol/README.md", tmp_path / "protocol/README.md")
    return tmp_path


def test_the_files_in_the_repository_are_what_the_code_generates() -> None:
    stale = [file.name for file, _ in schema.drifted(ROOT)]
    assert not stale, f"out of date: {stale}; repair: {schema.REPAIR}"


def test_no_part_of_any_parameters_takes_an_unknown_field() -> None:  # D-1
    """But for the handshake's, or no later client could negotiate."""
    definitions = schema.document()["$defs"]

    def names(part: object) -> set[str]:
        if isinstance(part, list):
            return {name for one in part for name in names(one)}
        if not isinstance(part, dict):
            return set()
        own = {str(part["$ref"]).removeprefix("#/$defs/")} if "$ref" in part else set()
        return own | names(list(part.values()))

    reached: set[str] = set()
    fresh = {name for method in METHODS if method != "initialize" for name in names(_params(method))}
    while fresh:
        reached |= fresh
        fresh = {name for known in fresh for name in names(definitions[known])} - reached
    lenient = [name for name in reached if definitions[name].get("additionalProperties", True) is not False]
    assert "OpenSession" in reached
    assert lenient == []


def _params(method: str) -> object:
    return schema.document()["methods"][method]["params"]


def test_a_check_names_the_repair_and_the_repair_repairs(
    checkout: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = checkout / "protocol/README.md"
    readme.write_text(readme.read_text().replace("| `session/stop` |", "| `session/halt` |"))
    assert schema.main(["--check", "--root", str(checkout)]) == 1
    assert schema.REPAIR in capsys.readouterr().err
    assert "session/halt" in readme.read_text()
    assert schema.main(["--root", str(checkout)]) == 0
    assert schema.main(["--check", "--root", str(checkout)]) == 0
    assert readme.read_text() == (ROOT / "protocol/README.md").read_text()


def test_without_a_checkout_it_says_so(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        schema.main(["--check", "--root", str(tmp_path)])
    assert exit.value.code == 2
    assert "--root" in capsys.readouterr().err


def test_a_readme_without_its_markers_is_not_passed_over(checkout: pathlib.Path) -> None:
    readme = checkout / "protocol/README.md"
    readme.write_text(readme.read_text().replace("<!-- /events -->", ""))
    with pytest.raises(LookupError, match="events"):
        schema.main(["--check", "--root", str(checkout)])


def test_every_method_event_and_error_is_in_the_document() -> None:
    document = schema.document()
    assert list(document["methods"]) == list(METHODS)
    assert [name for name, about in document["methods"].items() if about["startsWork"]] == [
        "server/watch",
        "runtime/attach",
        "session/prompt",
        "session/resume",
        "queue/add",
    ]
    assert list(document["errors"]) == list(KINDS)
    tags = {record["properties"]["type"]["enum"][0] for name, record in document["$defs"].items() if is_event(name)}
    assert tags == {*EVENTS, *SERVER_EVENTS}


def is_event(name: str) -> bool:
    return name in {event.__name__ for event in (*EVENTS.values(), *SERVER_EVENTS.values())}


def test_every_reference_leads_somewhere() -> None:
    document = schema.document()
    names = set(re.findall(r'"#/\$defs/(\w+)"', json.dumps(document)))
    assert names <= set(document["$defs"])
    readme = (ROOT / "protocol/README.md").read_text()
    assert set(re.findall(r"\(#(\w+)\)", readme)) <= set(re.findall(r'<a id="(\w+)">', readme))


def test_patterns_mean_the_same_to_other_languages() -> None:
    for pattern in re.findall(r'"pattern": (".*?")[,}]', json.dumps(schema.document())):
        assert not re.search(r"\\[AZz]|\(\?", json.loads(pattern))


def test_stored_messages_are_described_where_they_are_passed_on_raw() -> None:
    defs = schema.document()["$defs"]
    assert defs["MessagesResult"]["properties"]["messages"]["items"] == {"$ref": "#/$defs/Message"}
    assert defs["MessageEnd"]["properties"]["message"] == {"$ref": "#/$defs/Message"}


def test_descriptions_speak_of_the_wire_and_of_nothing_inside_the_project() -> None:
    for name, record in schema.document()["$defs"].items():
        assert not re.search(r"\([A-Z]-\d+\)|``|`\w+_index`", record.get("description", "")), name
