"""The runbooks as a whole: every alert leads to one, and every one has a test."""

from __future__ import annotations

import re
from pathlib import Path

from alerting import RULES
from runbooks import PLACEHOLDERS, SECTIONS, placeholders


def rules() -> dict[str, str]:
    """Return the anchor of each alert's runbook."""
    found = re.findall(r"- alert: (\w+)\n.*?runbook: runbooks\.md#(\S+)", RULES.read_text(), re.DOTALL)
    assert len(found) == RULES.read_text().count("- alert:")
    return dict(found)


def test_every_alert_has_a_runbook_and_every_runbook_a_test():
    anchors = {section.anchor: section for section in SECTIONS.values()}
    for alert, anchor in rules().items():
        assert alert in anchors[anchor].alerts, alert
    assert {alert for section in SECTIONS.values() for alert in section.alerts} == set(rules())
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert set(re.findall(r'^@of\("(.+)"\)\ndef test_', tests, re.MULTILINE)) == set(SECTIONS)


def test_what_is_to_be_put_in_place_of_a_word_is_said():
    assert len(PLACEHOLDERS) > 8
    steps = {step for section in SECTIONS.values() for step in section.steps}
    assert {word for step in steps for word in placeholders(step)} == PLACEHOLDERS
    # A query with an unknown word fails when it is run.
    typed = " ".join(re.sub(r"\bOUTBOX_\w+", "", one) for section in SECTIONS.values() for one in section.commands)
    assert set(re.findall(r"\b[A-Z][A-Z_]+\b", typed)) <= PLACEHOLDERS
