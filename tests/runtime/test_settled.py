"""What is loaded is left out of later collections, once a stage."""

import gc

from jaxrl_async.runtime import settled


def test_a_stage_is_settled_once_in_a_process(monkeypatch):
    calls = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    settled.settle.cache_clear()
    try:
        for stage in ("prompts", "programs", "prompts"):
            settled.settle(stage)
    finally:
        settled.settle.cache_clear()
    assert calls == ["collect", "freeze"] * 2
