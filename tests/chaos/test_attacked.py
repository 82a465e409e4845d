"""The runs that chaos strikes: whom a strike finds."""

import types

import attacked
import psutil


class Child:
    def __init__(self, role):
        self.role = role

    def cmdline(self):
        if self.role is None:
            raise psutil.ZombieProcess(2)
        return ["python", f"--role={self.role}"]


def test_a_process_that_has_just_ended_hides_no_other(monkeypatch):
    children = [Child("queue"), Child(None), server := Child("server")]
    parent = types.SimpleNamespace(children=lambda: children)
    monkeypatch.setattr(psutil, "Process", lambda pid: parent)
    run = types.SimpleNamespace(process=types.SimpleNamespace(pid=1))
    assert attacked.Run.processes_of(run, "server") == [server]
    assert attacked.Run.processes_of(run, "learner") == []
