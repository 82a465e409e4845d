"""Text that a model wrote commands no terminal, forges no line of a log and makes no element of a page."""

import json
import logging

import pytest

from jaxrl_async import security
from jaxrl_async.report import tables
from jaxrl_async.runtime import supervisor

HOSTILE = "\x1b[2Jgone\r\x07\x9b31m\u202e<b onclick='x'>"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("47+38=85, für α · 数", "47+38=85, für α · 数"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x9b1m \u202e \u2028 \ud800", r"\x9b1m \u202e \u2028 \ud800"),
    ],
)
def test_what_is_not_printable_is_shown_by_its_number(text, shown):
    assert security.escaped(text) == shown
    assert security.escaped(shown).isprintable()


def test_a_log_shows_no_control_character(monkeypatch, capsys):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    security.log_to_stderr("%(levelname)s %(message)s")
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("made_up").exception("a reward failed: %s", HOSTILE)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("ERROR a reward failed: ") and "Traceback" in lines[1]
    assert all(line.isprintable() for line in lines)


def test_a_log_of_objects_has_one_a_line_and_no_control_character(monkeypatch, capsys):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    security.log_to_stderr("json")
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("made_up").exception("a reward failed: %s", HOSTILE)
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert line.isprintable() and line.isascii()
    assert (found["severity"], found["logger"]) == ("ERROR", "made_up")
    assert found["message"] == f"a reward failed: {HOSTILE}" == security.message_of(line)
    assert found["exception"].startswith("Traceback") and found["time"].endswith("+00:00")


def test_the_end_of_a_log_that_a_reward_printed_into_is_shown_safely(tmp_path):
    (tmp_path / "rollout-0.log").write_text(f"first\n{HOSTILE}\n")
    lines = supervisor.last_lines(tmp_path / "rollout-0.log", 2).split("\n")
    assert lines[0] == "first" and len(lines) == 2 and lines[1].isprintable()


def test_a_page_shows_text_and_no_element():
    shown = tables.escape(f"{HOSTILE}\nnext")
    assert "<" not in shown and "'" not in shown and all(s.isprintable() for s in shown.split("\n"))
