"""The table of what may happen when: every operation in every combination of conditions."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from loopd.core.guards import KIND, REFUSED, Condition, Operation, Refused, check, table

# Written out once more, by hand, from the seeds' rules: letters are the conditions in the order of precedence.
EXPECTED = {
    "prompt": "CDARBU",
    "resume": "CDARBU",
    "recover": "CDARBU",
    "compact": "CDARBU",
    "setModel": "CARBU",
    "setPermission": "CARBU",
    "renameTitle": "CARBU",
    "refreshTitle": "CARBU",
    "replace": "CDARBU",
    "flush": "CARB",
    "dispose": "CRU",
    "startQueued": "CDARBU",
    "askApproval": "C",
    "markRead": "CU",
    "changeQueue": "CR",
    "setPinned": "C",
    "cancelTitle": "C",
    "answerApproval": "C",
    "stop": "",
    "abort": "",
    "read": "",
}
LETTER = dict(zip("CDARBU", Condition, strict=True))


def _subsets() -> list[Condition]:
    sets = [subset for size in range(7) for subset in combinations(Condition, size)]
    return [Condition(sum(condition.value for condition in subset)) for subset in sets]


@pytest.mark.parametrize("operation", list(Operation))
def test_an_operation_is_refused_exactly_for_its_conditions_and_names_the_first(operation: Operation) -> None:
    refusing = [LETTER[letter] for letter in EXPECTED[operation.value]]
    subsets = _subsets()
    assert len(subsets) == 64
    for now in subsets:
        against = [condition for condition in refusing if condition in now]
        if not against:
            check(operation, now, "somebody")
            continue
        with pytest.raises(Refused) as refused:
            check(operation, now, "somebody")
        assert refused.value.condition is against[0]
        assert refused.value.kind == KIND[against[0]]


def test_every_operation_and_condition_is_in_the_tables() -> None:
    assert set(REFUSED) == set(Operation)
    assert set(KIND) == set(Condition)
    assert {operation.value for operation in Operation} == set(EXPECTED)


def test_the_documentation_shows_this_table() -> None:
    readme = Path(__file__).parents[2] / "loopd" / "README.md"
    text = readme.read_text(encoding="utf-8")
    assert table() in text, "paste the output of: python -c 'from loopd.core.guards import table; print(table())'"
