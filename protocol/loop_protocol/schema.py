"""The protocol as one JSON Schema document, made from the method table, the events and the errors.

``python -m loop_protocol.schema`` writes ``protocol/schema/v1.json`` and the tables of ``protocol/README.md``;
``--check`` changes nothing and fails when they say something else than the code.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from .v1.errors import KINDS
from .v1.events import EVENTS, SERVER_EVENTS, Event, EventParams, ServerEventParams
from .v1.methods import METHODS
from .v1.types import Message

Schema = dict[str, Any]


@cache
def document() -> Schema:
    """All of version 1; what ``server/describe`` answers. Not to be changed by whoever gets it."""
    tables = [record for method in METHODS.values() for record in (method.params, method.result)]
    refs, definitions = msgspec.json.schema_components(
        [*tables, EventParams, ServerEventParams, Message], ref_template="#/$defs/{name}"
    )
    definitions["Message"] = refs[-1]
    for record in definitions.values():
        _describe(record)
    pairs = zip(METHODS.values(), refs[::2], refs[1::2], strict=False)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "loopd protocol",
        "version": 1,
        "methods": {
            method.name: {
                "summary": method.summary,
                "params": params,
                "result": result,
                "startsWork": method.starts_work,
            }
            for method, params, result in pairs
        },
        "notifications": {"event": refs[-3], "server/event": refs[-2]},
        "errors": {kind: about._asdict() for kind, about in KINDS.items()},
        "$defs": dict(sorted(definitions.items())),
    }


def _describe(record: Schema) -> None:
    """Docstrings speak Python and name rows of requirements; a reader of the schema knows neither."""
    text = re.sub(r" \([A-Z]-\d+\)", "", " ".join(record.get("description", "").replace("``", "`").split()))
    for field in record.get("properties", {}):
        text = text.replace(f"`{re.sub('([A-Z])', lambda big: '_' + big[0].lower(), field)}`", f"`{field}`")
    if text:
        record["description"] = text


# --- tables for people ------------------------------------------------------------------------------------------------


def tables() -> dict[str, str]:
    """The generated parts of the README, by the name of their markers."""
    return {
        "methods": _methods(),
        "events": _events(EVENTS),
        "server events": _events(SERVER_EVENTS),
        "errors": _errors(),
        "types": _types(),
    }


def _table(*rows: tuple[str, ...]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    escaped.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in escaped)


def _methods() -> str:
    rows = [
        (
            f"`{name}`" + (" ¹" if about["startsWork"] else ""),
            _fields(about["params"]),
            _result(about),
            about["summary"],
        )
        for name, about in document()["methods"].items()
    ]
    return _table(("method", "parameters", "result", "does"), *rows)


def _result(about: Schema) -> str:
    name = _name(about["result"])
    return _link(name) if name in _shared() else _fields(about["result"]) or "`{}`"


def _events(events: dict[str, type[Event]]) -> str:
    rows = [
        (f"`{tag}`", _fields({"$ref": f"#/$defs/{event.__name__}"}), _about(event.__name__))
        for tag, event in events.items()
    ]
    return _table(("type", "fields", "meaning"), *rows)


def _errors() -> str:
    rows = [
        (f"`{kind}`", str(about.code), "yes" if about.retryable else "", about.meaning) for kind, about in KINDS.items()
    ]
    return _table(("`data.kind`", "code", "retryable", "meaning"), *rows)


def _types() -> str:
    rows = [
        (f'<a id="{name.lower()}"></a>`{name}`', _fields({"$ref": f"#/$defs/{name}"}), _about(name))
        for name in _shared()
    ]
    return _table(("type", "fields", "meaning"), *rows)


@cache
def _shared() -> list[str]:
    """Types that have no row in another table: what fields refer to, and results that are used more than once."""
    events = {event.__name__ for event in (*EVENTS.values(), *SERVER_EVENTS.values())}
    uses = [_name(about["result"]) for about in document()["methods"].values()]
    params = {_name(about["params"]) for about in document()["methods"].values()}
    once = {name for name in uses if uses.count(name) == 1 and name not in _referred()}
    return [
        name
        for name in document()["$defs"]
        if name not in events | params | once | {"EventParams", "ServerEventParams", "Nothing"}
    ]


@cache
def _referred() -> set[str]:
    """What some field of a record refers to."""
    fields = [record.get("properties", {}) for record in document()["$defs"].values()]
    return set(re.findall(r"#/\$defs/(\w+)", json.dumps(fields)))


def _name(schema: Schema) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _about(name: str) -> str:
    return str(document()["$defs"][name].get("description", ""))


def _fields(schema: Schema) -> str:
    record = document()["$defs"][_name(schema)]
    if "anyOf" in record:
        return _type(record)
    required = record.get("required", [])
    names = record.get("properties", {}).items()
    return "<br>".join(f"`{name}{'' if name in required else '?'}` {_type(field)}" for name, field in names)


def _type(schema: Schema) -> str:
    match schema:
        case {"$ref": _}:
            return _link(_name(schema))
        case {"anyOf": options}:
            return " | ".join(_type(option) for option in options if option != {"type": "null"})
        case {"enum": values}:
            return " | ".join(f"`{value}`" for value in values if value is not None)
        case {"type": "array", "items": items}:
            return f"list of {_type(items)}"
        case {"type": "object", "additionalProperties": dict() as values}:
            return f"object of {_type(values)}"
        case {"type": str() as name}:
            return str(schema.get("description", name))
    return "any"


# --- files ------------------------------------------------------------------------------------------------------------

REPAIR = "python -m loop_protocol.schema"


def generated(root: Path) -> Iterator[tuple[Path, str]]:
    """The files below the checkout ``root`` that hold something generated, with the text that they should have."""
    yield root / "protocol/schema/v1.json", json.dumps(document(), indent=2, ensure_ascii=False) + "\n"
    readme = root / "protocol/README.md"
    text = readme.read_text(encoding="utf-8")
    for name, table in tables().items():
        before, opening, rest = text.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- /{name} -->")
        if not closing:
            raise LookupError(f"{readme} has no markers <!-- {name} --> and <!-- /{name} -->")
        text = f"{before}{opening}\n{table}\n\n{closing}{after}"
    yield readme, text


def drifted(root: Path) -> list[tuple[Path, str]]:
    """Those of them that are not so."""
    return [
        (file, text) for file, text in generated(root) if not file.is_file() or file.read_text(encoding="utf-8") != text
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=REPAIR, description="Write what is generated from the protocol's tables.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when something is out of date")
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).parents[2], help="the checkout (default: the one this file is in)"
    )
    options = parser.parse_args(arguments)
    if not (options.root / "protocol/README.md").is_file():
        parser.error(f"{options.root} is no checkout of the project: name one with --root")
    stale = drifted(options.root)
    for file, text in stale:
        if options.check:
            print(f"{file} is out of date; repair: {REPAIR}", file=sys.stderr)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
