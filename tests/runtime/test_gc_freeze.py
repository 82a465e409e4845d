"""What is loaded is left out of later collections, once a stage."""

import gc

from jaxrl_async.runtime import gc_freeze as frozen


def test_a_stage_is_frozen_once_in_a_process(monkeypatch):
    calls = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    frozen.gc_freeze.cache_clear()
    try:
        for stage in ("prompts", "programs", "prompts"):
            frozen.gc_freeze(stage)
    finally:
        frozen.gc_freeze.cache_clear()
    assert calls == ["collect", "freeze"] * 2
