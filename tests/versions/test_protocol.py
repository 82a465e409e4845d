"""The protocol of a push: what a learner writes is what a server reads, and nothing else is read."""

import json

import pytest

from jaxrl_async.records import NOBODY, Identity
from jaxrl_async.versions.protocol import (
    LEASE_HEADER,
    DiskUpdate,
    Fetch,
    Piece,
    Preparation,
    RequestError,
    Update,
    lease_headers,
    read_lease,
)

NAMED = {"weight_version": "run.0.1", "weight_digest": "abc"}


@pytest.mark.parametrize(
    "body",
    [
        Preparation(**NAMED),
        Preparation(**NAMED, writer=Identity("run", 2), difference="from-1.difference", keep=True),
        Preparation(**NAMED, model_path="/weights/1", hand_on=True),
        Update(**NAMED, flush_cache=False),
        DiskUpdate(
            weight_version="1",
            flush_cache=True,
            model_path="/weights/1",
            load_format="auto",
        ),
        Fetch(
            weight_version="1",
            source="http://a:1",
            files={"config.json": Piece(3, "abc")},
            timeout_secs=2.5,
        ),
    ],
)
def test_a_server_reads_what_a_learner_writes(body):
    assert type(body).read(json.loads(json.dumps(body.body()))) == body


def test_a_key_with_its_default_does_not_travel():
    assert Preparation(**NAMED, writer=NOBODY, model_path=None).body() == NAMED
    assert Update(**NAMED, flush_cache=True).body() == NAMED | {"flush_cache": True}


def test_null_is_like_an_absent_key():
    update = Update.read(NAMED | {"flush_cache": None, "weight_digest": None, "writer": None})
    assert update == Update(weight_version="run.0.1", flush_cache=True)


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (
            Update,
            {"colour": 1},
            r"unknown keys: colour \(known: abort_all_requests, flush_cache, weight_digest",
        ),
        (Update, {}, "weight_version must be a string, got None"),
        (Update, {"weight_version": ""}, "weight_version must be a string, got ''"),
        (
            Update,
            {"weight_version": "1" * 129},
            "weight_version has at most 128 characters, got 129",
        ),
        (Update, NAMED | {"flush_cache": 1}, "flush_cache must be true or false, got 1"),
        (Update, NAMED | {"writer": "me"}, "writer must have run_id and generation, got 'me'"),
        (
            Update,
            NAMED | {"writer": {"run_id": 1, "generation": 2}},
            "must have a text and a number",
        ),
        (
            Preparation,
            NAMED | {"difference": "../a.difference"},
            "difference must be a file's name",
        ),
        (
            DiskUpdate,
            NAMED | {"model_path": "/a", "load_format": "dummy"},
            "must be auto or safetensors",
        ),
    ],
)
def test_a_body_that_cannot_be_is_refused(kind, body, message):
    with pytest.raises(RequestError, match=message):
        kind.read(body)


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "soon", "86401"])
def test_a_lease_out_of_its_bounds_is_refused(text):
    with pytest.raises(ValueError, match=rf"{LEASE_HEADER} .*\(0, 86400\], got '{text}'"):
        read_lease(text)


def test_a_lease_is_read_from_the_client_s_header():
    assert read_lease(None) is None and read_lease("2.5") == 2.5
    assert lease_headers(0) == {} and lease_headers(2.5) == {LEASE_HEADER: "2.5"}
