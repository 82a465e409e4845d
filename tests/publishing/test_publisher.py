"""The publisher, with fake servers in threads of their own and a list in place of the queue."""

import asyncio
import errno
import functools
import threading
import time

import numpy as np
import pytest
from fixtures.fake_sglang import FakeServer, started

from jaxrl_async import active_clock
from jaxrl_async.active_clock import ActiveClock
from jaxrl_async.publishing import health, keeper
from jaxrl_async.publishing.discovery import Discovery
from jaxrl_async.publishing.health import Server, Table
from jaxrl_async.publishing.keeper import TURN_SHARE, Course, Keeper
from jaxrl_async.publishing.publisher import Publisher, PublisherError
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.records import ServerRecord, SupersededError
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.port import (
    ObsoleteVersionError,
    ServerError,
    ServerTimeoutError,
    UnfitServerError,
)
from jaxrl_async.versions.store import WeightStore

WAIT_SECS = 20.0  # deadline of every wait of these tests
DISK = Transport("disk", mode="retract")


def wait_until(condition):
    deadline = time.monotonic() + WAIT_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Queue:
    """Stands for LearnerQueue.publish_version."""

    def __init__(self):
        self.published = []  # (version, {address: (state, version)}, resume_point)
        self.error = None

    def __call__(self, version, records, resume_point, run_epoch):
        if self.error is not None:
            raise self.error
        states = {r.address: (r.state, r.version) for r in records}
        self.run_epoch = run_epoch
        self.published.append((version, states, resume_point))

    @property
    def versions(self):
        return [version for version, _, _ in self.published]

    def last(self, server):
        return self.published[-1][1].get(server.address)

    def wait_for(self, condition):
        wait_until(lambda: self.published and condition())


@pytest.fixture
def queue():
    return Queue()


@pytest.fixture
def servers():
    with started(2) as servers:
        yield servers


@pytest.fixture
def store(tmp_path, request):
    return WeightStore(tmp_path, keep=getattr(request, "param", 100))


@pytest.fixture
def start(queue, store):
    publishers = []

    def start(
        servers,
        *,
        push_timeout_secs=WAIT_SECS,
        start_timeout_secs=WAIT_SECS,
        router=None,
        transport=DISK,
        **kwargs,
    ):
        addresses = [server.address for server in servers]
        publisher = Publisher(
            {router: addresses} if router else {address: [address] for address in addresses},
            client=InferenceClient(),
            transport=transport,
            pin=store.pin,
            announce=queue,
            push_timeout_secs=push_timeout_secs,
            poll_secs=0.02,
            start_timeout_secs=start_timeout_secs,
            **kwargs,
        )
        publishers.append(publisher)
        return publisher

    yield start
    for publisher in publishers:
        publisher.close()


class Clock:
    """Stands still until the test lets it run."""

    def __init__(self):
        self._start = None  # monotonic seconds

    def __call__(self):
        return 0.0 if self._start is None else time.monotonic() - self._start

    def run(self):
        self._start = time.monotonic()


@pytest.fixture
def clock(monkeypatch):
    """That of the publisher's deadlines: none passes before its servers have done what the test wants of them."""
    clock = Clock()
    monkeypatch.setattr(keeper, "ActiveClock", functools.partial(ActiveClock, clock))
    return clock


def keeper_of(*, poll_secs):
    """A keeper of a server that holds nothing, never started."""
    course = Course(transport=None, pin=None, poll_secs=poll_secs, push_timeout_secs=WAIT_SECS)
    return Keeper(Server("http://gone", "http://gone"), None, course)


@pytest.fixture
def write(store):
    """Makes the `write` of a version, one tensor that holds its number; `held`: gives servers another version."""

    def make(version, held=None):
        def write():
            store.write(version, [("weight", np.array([version]))], {})
            return store.get(version if held is None else held)

        return write

    return make


def test_versions_go_up_and_may_repeat_under_a_new_run_epoch_only(queue, servers, start, write):
    publisher = start(servers)
    push(publisher, 3, write)
    assert queue.run_epoch == 0
    for version, run_epoch in [(3, 0), (2, 0), (2, 1)]:
        with pytest.raises(ValueError, match=f"version {version} .*version 3"):
            publisher.publish(version, write(3), timeout_secs=WAIT_SECS, run_epoch=run_epoch)
    push(publisher, 3, write, run_epoch=1)
    assert [server.version for server in servers] == ["1.3", "1.3"]
    assert (queue.versions[-1], queue.run_epoch) == (3, 1)
    push(publisher, 4, write, run_epoch=1)
    assert [server.version for server in servers] == ["1.4", "1.4"]


def push(publisher, version, write, **kwargs):
    publisher.publish(version, write(version), timeout_secs=WAIT_SECS, **kwargs)
    publisher.wait(version, timeout_secs=WAIT_SECS)


def holds(server, version):
    return f"{server.address} is HEALTHY (holds version {version})"


def push_past_deadline(publisher, version, write, clock, *described):
    """A push whose deadline runs from when the publisher says all of this of its servers."""
    publisher.publish(version, write(version), timeout_secs=WAIT_SECS)
    wait_until(lambda: all(words in publisher.waits_for() for words in described))
    clock.run()
    publisher.wait(version, timeout_secs=WAIT_SECS)


def test_a_version_reaches_every_server_and_then_the_queue(queue, servers, start, write, tmp_path):
    publisher = start(servers)
    push(publisher, 0, write)
    assert [server.version for server in servers] == ["0", "0"]
    for server in servers:
        assert not server.paused
        changes = [route for route in server.routes() if route != "/model_info"]
        assert changes == [
            "/weights/prepare",
            "/pause_generation",
            "/update_weights_from_disk",
            "/continue_generation",
        ]
        assert server.payloads("/pause_generation") == [{"mode": "retract"}]
        (update,) = server.payloads("/update_weights_from_disk")
        assert update["model_path"] == str(tmp_path / "00000000")
    assert queue.published == [(0, {s.address: ("HEALTHY", 0) for s in servers}, None)]
    metrics = publisher.metrics()
    num_bytes = sum(file.stat().st_size for file in (tmp_path / "00000000").iterdir())
    assert (metrics["weights/version"], metrics["weights/bytes"]) == (0, num_bytes)
    assert metrics["weights/push_secs"] > 0


def test_versions_follow_one_another_and_each_has_its_resume_point(queue, servers, start, write):
    publisher = start(servers)
    push(publisher, 4, write, resume_point="where the queue starts")
    push(publisher, 6, write)
    assert [(version, resume_point) for version, _, resume_point in queue.published] == [
        (4, "where the queue starts"),
        (6, None),
    ]
    assert [server.version for server in servers] == ["6", "6"]


def test_the_first_push_ignores_an_equal_version_of_another_run(servers, start, write):
    for server in servers:
        server.version = "0"
    push(start(servers), 0, write)
    assert all(server.payloads("/update_weights_from_disk") for server in servers)


def test_the_first_push_waits_for_a_server_that_is_not_up_yet(queue, servers, start, write):
    late = FakeServer()
    publisher = start([*servers, late])
    publisher.publish(0, write(0), timeout_secs=WAIT_SECS)
    with pytest.raises(PublisherError, match=rf"version 0 .* 0\.2 s.*{late.address}"):
        publisher.wait(0, timeout_secs=0.2)
    assert queue.published == []
    late.start()
    publisher.wait(0, timeout_secs=WAIT_SECS)
    assert late.version == "0" and queue.versions == [0]
    late.stop()


def test_a_wait_for_a_push_ends_when_it_should_stop(queue, servers, start, write):
    publisher = start([*servers, FakeServer()])
    publisher.publish(0, write(0), timeout_secs=WAIT_SECS)
    answers = [False, True]
    publisher.wait(0, timeout_secs=WAIT_SECS, should_stop=lambda: answers.pop(0))
    assert answers == [] and queue.published == []


def test_the_first_push_names_a_server_that_never_answered(queue, servers, start, write, clock):
    absent = FakeServer()
    publisher = start([*servers, absent], start_timeout_secs=2.0)
    states = [*(holds(server, 0) for server in servers), f"{absent.address} is DEAD"]
    with pytest.raises(
        PublisherError,
        match=rf"version 0 .*2 of 3 .* 2 s.*{absent.address} .*DEAD .*/model_info",
    ):
        push_past_deadline(publisher, 0, write, clock, *states)
    assert queue.published == []


def test_a_quorum_lets_the_first_push_go_on_without_a_server_that_never_answers(
    queue, servers, start, write, clock
):
    absent = FakeServer()
    publisher = start([*servers, absent], start_timeout_secs=1.0, quorum=0.5)
    states = [*(holds(server, 0) for server in servers), f"{absent.address} is DEAD"]
    push_past_deadline(publisher, 0, write, clock, *states)
    assert queue.last(absent) == ("DEAD", None)
    assert [queue.last(s) for s in servers] == [("HEALTHY", 0)] * 2
    push(publisher, 1, write)
    absent.start()  # It joins later.
    queue.wait_for(lambda: queue.last(absent) == ("HEALTHY", 1))
    absent.stop()


def test_a_resumed_run_waits_for_a_quorum_and_one_attempt_at_each_server(
    queue, servers, start, write
):
    publisher = start([*servers, FakeServer()], quorum=0.5, is_resumed=True)
    push(publisher, 3, write)  # start_timeout_secs is WAIT_SECS: it is not waited for.
    states = queue.published[0][1].values()
    assert sorted(states, key=str) == [("DEAD", None), ("HEALTHY", 3), ("HEALTHY", 3)]


@pytest.mark.parametrize(
    ("num_absent", "quorum", "needed"), [(0, 1.0, 2), (1, 0.5, 2), (1, 0.7, 3), (2, 0.5, 2)]
)
def test_a_quorum_is_rounded_up(servers, start, write, clock, num_absent, quorum, needed):
    absent = [FakeServer() for _ in range(num_absent)]
    servers[0].stop()
    publisher = start(
        [*servers, *absent], quorum=quorum, start_timeout_secs=1.5, is_resumed=bool(num_absent % 2)
    )
    message = rf"1 of {2 + num_absent} .* 1\.5 s.* {needed} must .*server\.quorum = {quorum:g}"
    with pytest.raises(PublisherError, match=message):
        push_past_deadline(publisher, 0, write, clock, holds(servers[1], 0))
    servers[0].start()


def test_after_a_stop_of_the_process_a_fresh_attempt_comes_first(
    queue, servers, start, write, monkeypatch
):
    monkeypatch.setattr(active_clock, "STOP_SECS", 0.6)
    interrupted, stopped = [], threading.Event()

    async def transport(client, address, *, version, **kwargs):
        if version == "1" and address not in interrupted:
            interrupted.append(address)
            if len(interrupted) == len(servers):
                time.sleep(2.0)  # Nothing of the publisher runs, as in a process that is stopped.
                stopped.set()
            while not stopped.is_set():
                await asyncio.sleep(0.01)
            raise ServerTimeoutError(address, "/update", "no answer within 1 s", retryable=True)
        await DISK(client, address, version=version, **kwargs)

    publisher = start(servers, push_timeout_secs=1.0, start_timeout_secs=1.0, transport=transport)
    push(publisher, 0, write)
    push(publisher, 1, write)
    states = {state for _, states, _ in queue.published for state, _ in states.values()}
    assert states == {"HEALTHY"} and queue.versions == [0, 1]


def test_a_late_server_is_stale_until_it_holds_the_current_version(
    queue, servers, start, write, clock
):
    good, late = servers
    publisher = start(servers, push_timeout_secs=1.5)
    push(publisher, 0, write)
    late.hang.add("/update_weights_from_disk")
    push_past_deadline(publisher, 1, write, clock, holds(good, 1))
    assert (queue.versions[-1], queue.last(good), queue.last(late)) == (
        1,
        ("HEALTHY", 1),
        ("STALE", 0),
    )
    # States first, under the old version: no worker routes to it when version 1 is announced.
    assert (queue.published[-2][0], queue.published[-2][1][late.address]) == (0, ("STALE", 0))
    late.hang.clear()
    queue.wait_for(lambda: queue.last(late) == ("HEALTHY", 1))
    assert late.version == "1" and not late.paused and queue.versions[-1] == 1


def test_a_server_that_takes_the_version_before_during_a_push_is_stale_after_it(
    queue, servers, start, write
):
    good, late = servers
    update = "/update_weights_from_disk"
    publisher = start(servers)
    push(publisher, 0, write)
    late.fail[update] = (400, "not now")
    push(publisher, 1, write)
    loads, loads_late = gated(good), gated(late)
    late.fail.clear()
    late.calls.clear()
    wait_until(lambda: late.payloads(update))
    late.hang.add(update)  # It takes version 1, and will not take version 2.
    publisher.publish(2, write(2), timeout_secs=WAIT_SECS)
    wait_until(lambda: len(good.payloads(update)) == 3)
    loads_late.set()
    queue.wait_for(lambda: queue.last(late) == ("HEALTHY", 1))
    loads.set()
    publisher.wait(2, timeout_secs=WAIT_SECS)
    records = [(version, states[late.address]) for version, states, _ in queue.published]
    assert (1, ("HEALTHY", 1)) in records
    assert [record for version, record in records if version == 2] == [("STALE", 1)]


def test_a_server_that_dies_in_a_push_does_not_hold_it_up(queue, servers, start, write):
    good, dead = servers
    publisher = start(servers)
    push(publisher, 0, write)
    dead.drop.update({"/model_info", "/pause_generation", "/update_weights_from_disk"})
    push(publisher, 1, write)
    assert queue.versions[-1] == 1
    assert (queue.last(good), queue.last(dead)) == (("HEALTHY", 1), ("DEAD", 0))


def test_a_server_that_refuses_an_update_samples_on_and_is_stale(queue, servers, start, write):
    _, refusing = servers
    publisher = start(servers)
    push(publisher, 0, write)
    refusing.fail["/update_weights_from_disk"] = (400, "wrong shapes")
    push(publisher, 1, write)
    assert queue.last(refusing) == ("STALE", 0)
    # It continues with its old weights: paused, it would hold its requests for ever.
    wait_until(lambda: not refusing.paused)


def test_a_server_that_reports_success_and_keeps_its_weights_is_not_healthy(
    queue, servers, start, write
):
    _, lying = servers
    publisher = start(servers)
    push(publisher, 0, write)
    lying.ignore_updates = True
    push(publisher, 1, write)
    assert queue.last(lying)[0] == "STALE"


def test_a_restarted_server_is_given_the_current_version_before_it_is_healthy(
    queue, servers, start, write
):
    _, restarted = servers
    publisher = start(servers)
    push(publisher, 3, write)
    before = len(queue.published)
    restarted.stop()
    restarted.reset()
    restarted.start()
    queue.wait_for(lambda: len(queue.published) > before and queue.last(restarted)[0] == "HEALTHY")
    states = [states[restarted.address] for _, states, _ in queue.published[before:]]
    assert states[0][0] in ("STALE", "DEAD") and states[-1] == ("HEALTHY", 3)
    assert restarted.version == "3" and set(queue.versions) == {3}
    publisher.check()


def test_a_server_that_cannot_take_part_is_refused_before_its_first_byte(servers, start, write):
    """Waiting would not help: the error comes at once, long before the start's deadline."""
    bad = servers[1]

    async def preflight(client, address):
        if address == bad.address:
            raise UnfitServerError(address, "/model_info", "the key in K is not its --api-key")

    publisher = start(servers, start_timeout_secs=3600.0, preflight=preflight)
    with pytest.raises(PublisherError, match=f"{bad.address}.*not its --api-key"):
        push(publisher, 3, write)
    assert "/pause_generation" not in bad.routes()


def test_a_server_restarted_as_another_is_stale_and_the_run_goes_on(queue, servers, start, write):
    _, restarted = servers
    unfit, checked = set(), []

    async def preflight(client, address):
        checked.append(address)
        if address in unfit:
            raise UnfitServerError(address, "/generate", "a vocabulary of 128 tokens")

    publisher = start(servers, preflight=preflight)
    push(publisher, 3, write)
    assert sorted(checked) == sorted(server.address for server in servers)
    unfit.add(restarted.address)
    restarted.version = "default"
    queue.wait_for(lambda: queue.last(restarted)[0] == "STALE")
    wait_until(lambda: "a vocabulary of 128 tokens" in publisher.waits_for())
    push(publisher, 4, write)
    assert queue.last(servers[0]) == ("HEALTHY", 4) and queue.last(restarted)[0] == "STALE"
    assert restarted.version == "default"
    unfit.clear()
    queue.wait_for(lambda: queue.last(restarted) == ("HEALTHY", 4))


def test_a_server_that_comes_back_as_another_after_it_missed_a_version_is_refused(
    queue, servers, start, write
):
    _, restarted = servers
    checked = []

    async def preflight(client, address):
        checked.append(address)
        if checked.count(restarted.address) == 2:
            raise UnfitServerError(address, "/generate", "a vocabulary of 128 tokens")

    publisher = start(servers, preflight=preflight)
    push(publisher, 3, write)
    restarted.stop()
    queue.wait_for(lambda: queue.last(restarted)[0] == "DEAD")
    push(publisher, 4, write)
    restarted.reset()
    restarted.start()
    wait_until(lambda: restarted.routes() and "a vocabulary of" in publisher.waits_for())
    queue.wait_for(lambda: queue.last(restarted) == ("HEALTHY", 4))
    assert checked.count(restarted.address) == 3


@pytest.mark.parametrize(
    ("report", "after_restart"), [("version", "default"), ("digest", "of other weights")]
)
def test_a_restart_between_two_polls_is_found_by_version_or_digest(
    queue, servers, start, write, report, after_restart
):
    _, restarted = servers
    push(start(servers), 3, write)
    setattr(restarted, report, after_restart)
    queue.wait_for(lambda: queue.last(restarted) == ("HEALTHY", 3) and len(queue.published) == 3)
    records = [states[restarted.address] for _, states, _ in queue.published[1:]]
    assert records == [("STALE", None), ("HEALTHY", 3)]
    assert (restarted.version, restarted.digest) == ("3", servers[0].digest)
    assert len(restarted.payloads("/update_weights_from_disk")) == 2


def test_a_server_without_digests_is_polled_for_its_version(queue, servers, start, write):
    _, silent = servers
    push(start(servers), 3, write)
    silent.sglang = True  # reports none
    silent.calls.clear()
    wait_until(lambda: silent.routes().count("/model_info") >= 5)
    assert set(silent.routes()) == {"/model_info"} and len(queue.published) == 1


def test_an_update_that_hangs_is_tried_again_at_every_poll(queue, servers, start, write, clock):
    good, hanging = servers

    async def transport(client, address, **kwargs):
        if address == good.address:
            kwargs["timeout_secs"] = WAIT_SECS
        await DISK(client, address, **kwargs)

    publisher = start(servers, push_timeout_secs=0.2, transport=transport)
    push(publisher, 0, write)
    hanging.hang.add("/update_weights_from_disk")
    push_past_deadline(publisher, 1, write, clock, holds(good, 1))
    wait_until(lambda: len(hanging.payloads("/update_weights_from_disk")) >= 4)
    states = [(version, states[hanging.address]) for version, states, _ in queue.published]
    assert states == [(0, ("HEALTHY", 0)), (0, ("STALE", 0)), (1, ("STALE", 0))]
    hanging.hang.clear()
    queue.wait_for(lambda: queue.last(hanging) == ("HEALTHY", 1))


def test_the_only_server_may_restart_within_the_start_timeout(queue, servers, start, write):
    (server, _) = servers
    publisher = start([server], push_timeout_secs=0.3)
    push(publisher, 0, write)
    server.stop()
    publisher.publish(1, write(1), timeout_secs=WAIT_SECS)  # It is gone in mid-push …
    with pytest.raises(PublisherError, match="version 1 .* 1 s"):
        publisher.wait(1, timeout_secs=1.0)
    server.reset()
    server.start()
    publisher.wait(1, timeout_secs=WAIT_SECS)
    server.stop()  # … and between pushes.
    queue.wait_for(lambda: queue.last(server) == ("DEAD", 1))
    time.sleep(0.6)
    publisher.check()
    server.reset()
    server.start()
    queue.wait_for(lambda: queue.last(server) == ("HEALTHY", 1))
    assert server.version == "1"


@pytest.mark.parametrize(("state", "rests"), [("DEAD", 1.0), ("STALE", 8.0)])
def test_one_that_fails_is_tried_ever_less_often_and_one_that_is_gone_at_every_poll(state, rests):
    keeper = keeper_of(poll_secs=2.0)
    keeper.server.state = state
    for keeper.server.num_failures in range(1, 12):
        rest = keeper._rest_secs()
    assert 0.8 * rests * 2.0 <= rest <= 1.2 * rests * 2.0


ROUTER = "http://router:1"


@pytest.mark.parametrize(
    ("workers", "record"),
    [
        ([("HEALTHY", 4), ("HEALTHY", 3)], ("HEALTHY", 3)),
        ([("HEALTHY", 4), ("DEAD", 2)], ("HEALTHY", 4)),
        ([("HEALTHY", 4), ("STALE", 3)], ("STALE", 4)),
        ([("DEAD", 4), ("STALE", None)], ("STALE", 4)),
        ([("DEAD", 4), ("DEAD", 3)], ("DEAD", 3)),
        ([("STALE", None)], ("STALE", None)),
        ([("STALE", 2)], ("STALE", 2)),
    ],
)
def test_an_address_is_healthy_where_no_server_behind_it_is_stale_and_one_is_healthy(
    workers, record
):
    servers = [Server(f"http://w{i}:1", ROUTER, *_state(w)) for i, w in enumerate(workers)]
    table = Table()
    for server in servers:
        table.add(server)
    assert table.take() == [ServerRecord(ROUTER, *record)]


def _state(worker):
    state, version = worker
    return state, "a reason", version


def test_a_router_gets_requests_when_every_server_behind_it_that_lives_holds_the_version(
    queue, servers, start, write
):
    one, two = servers
    publisher = start(servers, router=ROUTER)
    push(publisher, 0, write)
    assert [(v, states) for v, states, _ in queue.published] == [(0, {ROUTER: ("HEALTHY", 0)})]
    two.fail["/update_weights_from_disk"] = (500, "not now")
    push(publisher, 1, write)
    assert (one.version, two.version) == ("1", "0")
    assert queue.published[-1][:2] == (1, {ROUTER: ("STALE", 1)})
    two.fail.clear()
    queue.wait_for(lambda: queue.published[-1][1] == {ROUTER: ("HEALTHY", 1)})
    assert two.version == "1"
    two.drop.add("/model_info")
    push(publisher, 2, write)
    assert queue.published[-1][:2] == (2, {ROUTER: ("HEALTHY", 2)})


def test_a_router_that_stays_stale_ends_the_run(queue, servers, start, write, clock):
    publisher = start(servers, push_timeout_secs=0.4, router=ROUTER)
    push(publisher, 0, write)
    servers[1].fail["/update_weights_from_disk"] = (400, "wrong shapes")
    push(publisher, 1, write)
    clock.run()
    with pytest.raises(PublisherError, match=r"(?s)no HEALTHY .* 0\.4 s.*wrong shapes"):
        publisher.wait(2, timeout_secs=WAIT_SECS)


def test_a_server_that_missed_a_poll_is_not_pushed_to_again(queue, servers, start, write):
    _, silent = servers
    push(start(servers), 3, write)
    silent.fail["/model_info"] = (500, "busy")
    queue.wait_for(lambda: queue.last(silent) == ("DEAD", 3))
    silent.fail.clear()
    queue.wait_for(lambda: queue.last(silent) == ("HEALTHY", 3))
    assert len(silent.payloads("/update_weights_from_disk")) == 1


@pytest.fixture
def answer_looks(monkeypatch):
    """Ends a server's failing within its next attempt, which fails: the look after it finds an answer."""
    answers = health.answers

    def answer_looks(server):
        async def look(*args):
            server.fail = {}
            return await answers(*args)

        monkeypatch.setattr(health, "answers", look)

    return answer_looks


def test_a_server_that_wakes_has_its_time_to_be_healthy(queue, servers, start, write, answer_looks):
    """The poll in which it wakes fails, and the look after it does not: it is STALE then, and no other is left."""
    (server, _) = servers
    publisher = start([server], push_timeout_secs=2.0)
    push(publisher, 0, write)
    server.fail["/model_info"] = (500, "stopped")
    queue.wait_for(lambda: queue.last(server) == ("DEAD", 0))
    time.sleep(2.5)  # longer than push_timeout_secs
    answer_looks(server)
    queue.wait_for(lambda: queue.last(server) == ("HEALTHY", 0))
    publisher.check()
    states = [states[server.address][0] for _, states, _ in queue.published]
    assert states[states.index("DEAD") :] == ["DEAD", "STALE", "HEALTHY"]


@pytest.mark.parametrize("silent_from", ["before", "within"])
def test_a_server_that_wakes_in_an_attempt_gets_another(
    silent_from, queue, servers, start, write, answer_looks
):
    """The only server is silent for longer than push_timeout_secs, and answers the look after a failed attempt."""
    (server, _) = servers
    publisher = start([server], push_timeout_secs=0.5, start_timeout_secs=WAIT_SECS)
    push(publisher, 0, write)
    if silent_from == "before":
        server.fail["/model_info"] = (500, "stopped")
        queue.wait_for(lambda: queue.last(server) == ("DEAD", 0))
        publisher.publish(1, write(1), timeout_secs=WAIT_SECS)
        time.sleep(1.0)  # longer than push_timeout_secs
        answer_looks(server)
    else:
        server.hang.add("/update_weights_from_disk")
        publisher.publish(1, write(1), timeout_secs=WAIT_SECS)
        queue.wait_for(lambda: queue.last(server) == ("STALE", 0))
        server.hang.clear()
    publisher.wait(1, timeout_secs=WAIT_SECS)
    assert queue.last(server) == ("HEALTHY", 1)


def test_a_server_that_was_late_ends_a_push_beside_one_that_hangs(queue, servers, start, write):
    """Both miss push_timeout_secs, and one of them for good: the push waits for neither's start_timeout_secs."""
    late, hanging = servers
    publisher = start(servers, push_timeout_secs=0.5, start_timeout_secs=3600.0)
    push(publisher, 0, write)
    for server in servers:
        server.hang.add("/update_weights_from_disk")
    publisher.publish(1, write(1), timeout_secs=WAIT_SECS)
    queue.wait_for(lambda: {queue.last(server) for server in servers} == {("STALE", 0)})
    late.hang.clear()
    publisher.wait(1, timeout_secs=WAIT_SECS)
    assert (queue.last(late), queue.last(hanging)) == (("HEALTHY", 1), ("STALE", 0))


def test_no_healthy_server_after_a_push_is_an_error_that_names_each_and_why(
    queue, servers, start, write, clock
):
    refusing, dead = servers
    publisher = start(servers, push_timeout_secs=0.5, start_timeout_secs=1.0)
    push(publisher, 0, write)
    refusing.fail["/update_weights_from_disk"] = (400, "wrong shapes")
    dead.drop.update({"/model_info", "/pause_generation"})
    states = [f"{refusing.address} is STALE", "wrong shapes", f"{dead.address} is DEAD"]
    with pytest.raises(
        PublisherError,
        match=rf"(?s)no HEALTHY .*version 1.*{refusing.address} .*STALE .*wrong shapes.*"
        rf"{dead.address} .*DEAD ",
    ):
        push_past_deadline(publisher, 1, write, clock, *states)
    assert 1 not in queue.versions


def test_no_healthy_server_between_pushes_is_an_error_too(queue, servers, start, write, clock):
    publisher = start(servers, push_timeout_secs=0.3, start_timeout_secs=2.0)
    push(publisher, 0, write)
    for server in servers:
        server.drop.add("/model_info")
    queue.wait_for(lambda: [queue.last(s)[0] for s in servers] == ["DEAD", "DEAD"])
    clock.run()
    with pytest.raises(PublisherError, match=r"no HEALTHY .* 2 s.*DEAD"):
        publisher.wait(1, timeout_secs=WAIT_SECS)


def test_one_server_that_fails_once_is_tried_again_within_the_deadline(
    queue, servers, start, write
):
    (server, _) = servers
    publisher = start([server])
    push(publisher, 0, write)
    server.fail["/update_weights_from_disk"] = (500, "try again")
    publisher.publish(1, write(1), timeout_secs=WAIT_SECS)
    queue.wait_for(lambda: queue.last(server)[0] == "STALE")
    server.fail.clear()
    publisher.wait(1, timeout_secs=WAIT_SECS)
    assert queue.last(server) == ("HEALTHY", 1)


def test_one_push_is_in_flight_at_most_and_the_wait_has_a_name(servers, start, write):
    publisher = start(servers)
    writes, release = threading.Event(), threading.Event()

    def slow():
        writes.set()
        assert release.wait(WAIT_SECS)
        return write(0)()

    publisher.publish(0, slow, timeout_secs=WAIT_SECS)
    assert writes.wait(WAIT_SECS)
    with pytest.raises(PublisherError, match=r"waits for version 0 .*written"):
        publisher.publish(1, write(1), timeout_secs=0.05)
    release.set()
    push(publisher, 1, write)
    assert [server.version for server in servers] == ["1", "1"]


def push_delayed(publisher, version, held, write):
    push(publisher, version, functools.partial(write, held=held))


def test_servers_hold_the_written_version_and_the_queue_counts_the_published_one(
    queue, servers, start, write, tmp_path
):
    publisher = start(servers)
    pushed = [(0, 0), (1, 0), (2, 2), (3, 1), (4, 4)]  # At 3 the servers go back.
    for version, held in pushed:
        push_delayed(publisher, version, held, write)
        assert [server.version for server in servers] == [str(held)] * 2
        metrics = publisher.metrics()
        assert metrics["weights/version"] == held
        assert metrics["weights/delay"] == version - held
    healthy = [(version, {s.address: ("HEALTHY", h) for s in servers}) for version, h in pushed]
    assert [(version, states) for version, states, _ in queue.published] == healthy
    for server in servers:  # Once each: at 1 they held it already.
        updates = server.payloads("/update_weights_from_disk")
        assert [update["weight_version"] for update in updates] == ["0", "2", "1", "4"]
        assert [update["model_path"] for update in updates] == [
            str(tmp_path / f"0000000{held}") for held in (0, 2, 1, 4)
        ]


@pytest.mark.parametrize("newer", [True, False])
def test_a_poll_that_a_push_overtakes_leaves_the_server_healthy(
    queue, servers, start, write, newer
):
    publisher = start(servers)
    for version, held in [(0, 0), (1, 1), (3, 1)]:
        push_delayed(publisher, version, held, write)
    for server in servers:
        server.slow["/model_info"] = 0.2
        server.calls.clear()
    queue.wait_for(lambda: all("/model_info" in server.routes() for server in servers))
    held = 4 if newer else 0
    push_delayed(publisher, 4, held, write)
    states = {state for _, states, _ in queue.published for state, _ in states.values()}
    assert states == {"HEALTHY"} and [server.version for server in servers] == [str(held)] * 2


def test_a_restarted_server_is_given_the_delayed_weights_again(
    queue, servers, start, write, tmp_path
):
    other, restarted = servers
    publisher = start(servers)
    for version, held in [(0, 0), (1, 1), (2, 2), (3, 1)]:
        push_delayed(publisher, version, held, write)
    before = len(queue.published)
    restarted.stop()
    restarted.reset()
    restarted.start()
    queue.wait_for(lambda: len(queue.published) > before and queue.last(restarted)[0] == "HEALTHY")
    assert queue.last(restarted) == queue.last(other) == ("HEALTHY", 1)
    assert (restarted.version, restarted.digest) == ("1", other.digest)
    (update,) = restarted.payloads("/update_weights_from_disk")
    assert update["model_path"] == str(tmp_path / "00000001")
    assert {version for version, _, _ in queue.published[before:]} == {3}


def test_a_failed_write_reaches_the_learner(servers, start, write):
    publisher = start(servers)

    def full():
        raise OSError("no space left")

    publisher.publish(0, full, timeout_secs=WAIT_SECS)
    with pytest.raises(PublisherError, match="no space left"):
        publisher.wait(0, timeout_secs=WAIT_SECS)
    with pytest.raises(PublisherError, match="no space left"):
        publisher.check()
    with pytest.raises(PublisherError, match="no space left"):
        publisher.publish(1, write(1), timeout_secs=WAIT_SECS)


def test_a_queue_that_refuses_reaches_the_learner(queue, servers, start, write):
    queue.error = RuntimeError("the queue is gone")
    publisher = start(servers)
    publisher.publish(0, write(0), timeout_secs=WAIT_SECS)
    with pytest.raises(PublisherError, match="the queue is gone"):
        publisher.wait(0, timeout_secs=WAIT_SECS)


def test_a_superseded_learner_does_not_push_against_the_younger_one(queue, servers, start, write):
    elder = start(servers)
    push(elder, 5, write)
    queue.error = SupersededError("superseded: learner generation 1, whose generation 2 has begun")
    for server in servers:
        server.version = "7"  # The younger learner's push.
    with pytest.raises(PublisherError, match="generation 1"):
        elder.wait(6, timeout_secs=WAIT_SECS)
    assert [server.version for server in servers] == ["7", "7"]


def test_a_runs_versions_have_its_name(servers, start, write):
    publisher = start(servers, run_id="abcdefghij23")
    push(publisher, 3, write, run_epoch=1)
    assert [server.version for server in servers] == ["abcdefghij23.1.3"] * 2


def test_closing_while_a_push_runs_leaves_no_server_paused(servers, start, write):
    publisher = start(servers)
    push(publisher, 0, write)
    for server in servers:
        server.hang.add("/update_weights_from_disk")
    publisher.publish(1, write(1), timeout_secs=WAIT_SECS)
    wait_until(lambda: all(server.paused for server in servers))
    publisher.close()
    assert not any(server.paused for server in servers)
    assert "publisher" not in [thread.name for thread in threading.enumerate()]


def gated(server):
    """From now on the server loads nothing until the returned event is set."""
    gate = threading.Event()

    async def update_weights_from_disk(payload):
        while not gate.is_set():
            await asyncio.sleep(0.005)
        return server._load(payload, payload["model_path"])

    server.update_weights_from_disk = update_weights_from_disk
    return gate


@pytest.mark.parametrize("store", [2], indirect=True)
def test_a_version_that_a_slow_server_loads_is_kept_while_later_ones_go_on(
    queue, servers, start, write, store
):
    good, slow = servers
    publisher = start(servers)
    push(publisher, 0, write)
    gate = gated(slow)
    slow.version = "default"  # It has restarted, and loads version 0 again …
    wait_until(lambda: len(slow.payloads("/update_weights_from_disk")) == 2)
    for version in (1, 2, 3, 4):  # … for longer than four steps take.
        push(publisher, version, write)
    assert store.versions() == [0, 3, 4]
    gate.set()
    queue.wait_for(lambda: queue.last(slow) == ("HEALTHY", 4))
    # Those in between were dropped.
    versions = [update["weight_version"] for update in slow.payloads("/update_weights_from_disk")]
    assert versions == ["0", "0", "4"]
    push(publisher, 5, write)
    assert (good.version, slow.version, store.versions()) == ("5", "5", [4, 5])


def test_whatever_goes_wrong_with_one_server_makes_that_one_stale(queue, servers, start, write):
    good, odd = servers
    is_odd = threading.Event()

    async def transport(client, address, **kwargs):
        if address == odd.address and is_odd.is_set():
            raise KeyError("no such key")
        await DISK(client, address, **kwargs)

    publisher = start(servers, transport=transport)
    push(publisher, 0, write)
    is_odd.set()
    push(publisher, 1, write)
    assert (queue.last(good), queue.last(odd)) == (("HEALTHY", 1), ("STALE", 0))
    assert "no such key" in publisher.waits_for()
    is_odd.clear()
    queue.wait_for(lambda: queue.last(odd) == ("HEALTHY", 1))


def test_a_library_that_is_missing_here_ends_the_run(servers, start, write):
    async def transport(client, address, **kwargs):
        raise ImportError("needs PyTorch")

    publisher = start(servers, transport=transport)
    publisher.publish(0, write(0), timeout_secs=WAIT_SECS)
    with pytest.raises(PublisherError, match="needs PyTorch"):
        publisher.wait(0, timeout_secs=WAIT_SECS)


def test_a_want_of_file_descriptors_here_is_no_servers_illness(
    queue, servers, start, write, caplog
):
    failures = [OSError(errno.EMFILE, "too many open files"), OSError(errno.ENFILE, "too many")]

    async def transport(client, address, *, version, **kwargs):
        if version == "1" and failures:
            try:
                raise failures.pop()
            except OSError as error:
                reason = "connection lost"
                raise ServerError(address, "/pause", reason, retryable=True) from error
        await DISK(client, address, version=version, **kwargs)

    publisher = start(servers, transport=transport)
    push(publisher, 0, write)
    push(publisher, 1, write)
    states = {state for _, states, _ in queue.published for state, _ in states.values()}
    assert states == {"HEALTHY"} and failures == []
    assert "file descriptors" in caplog.text


def test_a_push_is_dropped_for_a_newer_version(queue, servers, start, write, clock):
    good, slow = servers
    pushed, gate = [], threading.Event()

    async def transport(client, address, *, version, is_wanted, **kwargs):
        pushed.append((address, version))
        if (address, version) == (slow.address, "1"):
            while is_wanted():
                await asyncio.sleep(0.005)
            gate.set()
            raise ObsoleteVersionError(address, "", "dropped", retryable=True)
        kwargs["timeout_secs"] = WAIT_SECS
        await DISK(client, address, version=version, is_wanted=is_wanted, **kwargs)

    publisher = start(servers, push_timeout_secs=0.5, transport=transport)
    push(publisher, 0, write)
    # The slow one is late …
    push_past_deadline(publisher, 1, write, clock, holds(good, 1))
    assert queue.last(slow) == ("STALE", 0) and not gate.is_set()
    push(publisher, 2, write)  # … and takes the next one at once.
    queue.wait_for(lambda: queue.last(slow) == ("HEALTHY", 2))
    assert gate.is_set()
    assert [version for address, version in pushed if address == slow.address] == ["0", "1", "2"]


def listed(path, *servers):
    """The discovery of a file that lists these servers."""
    path.write_text("".join(f"{server.address} 0.5\n" for server in servers))
    return Discovery(f"file:{path}")


def test_a_server_that_a_killed_learner_left_paused_continues_also_where_its_push_fails(
    queue, servers, start, write
):
    _, left = servers
    left.sglang = left.paused = True
    left.fail["/server_info"] = (500, "not now")
    publisher = start(servers, quorum=0.5, is_resumed=True)
    push(publisher, 3, write)
    assert queue.last(left)[0] == "STALE" and not left.paused


def test_a_server_that_joins_gets_the_current_version_before_it_is_healthy(
    queue, servers, start, write, tmp_path
):
    fixed, newcomer = servers
    file = tmp_path / "servers.txt"
    publisher = start([fixed], discovery=listed(file), discover_secs=0.02)
    push(publisher, 3, write)
    assert queue.published[-1][1] == {fixed.address: ("HEALTHY", 3)}
    listed(file, newcomer)
    queue.wait_for(lambda: queue.last(newcomer) == ("HEALTHY", 3))
    assert newcomer.version == "3"
    states = [states.get(newcomer.address) for _, states, _ in queue.published]
    assert states[:2] == [None, ("STALE", None)] and states[-1] == ("HEALTHY", 3)
    push(publisher, 4, write)
    assert newcomer.version == "4"


def test_a_server_that_leaves_is_forgotten_also_in_mid_push(queue, servers, start, write, tmp_path):
    fixed, leaver = servers
    file = tmp_path / "servers.txt"
    publisher = start([fixed], discovery=listed(file, leaver), discover_secs=0.02)
    push(publisher, 0, write)
    queue.wait_for(lambda: queue.last(leaver) == ("HEALTHY", 0))
    leaver.hang.add("/update_weights_from_disk")
    publisher.publish(1, write(1), timeout_secs=WAIT_SECS)
    wait_until(lambda: leaver.paused)
    listed(file)
    publisher.wait(1, timeout_secs=WAIT_SECS)  # The push does not wait for it.
    assert queue.published[-1][1] == {fixed.address: ("HEALTHY", 1)}
    wait_until(lambda: not leaver.paused)
    leaver.calls.clear()
    push(publisher, 2, write)
    assert leaver.calls == [] and leaver.version == "0"


def test_a_run_whose_servers_are_all_discovered_waits_for_the_first(
    queue, servers, start, write, tmp_path
):
    file = tmp_path / "servers.txt"
    discovery = Discovery(f"file:{file}")
    publisher = start([], discovery=discovery, discover_secs=0.02, push_timeout_secs=0.2)
    publisher.publish(0, write(0), timeout_secs=WAIT_SECS)
    with pytest.raises(PublisherError, match=r"no server is known \(file:.*servers\.txt"):
        publisher.wait(0, timeout_secs=0.5)
    listed(file, *servers)
    publisher.wait(0, timeout_secs=WAIT_SECS)
    queue.wait_for(lambda: set(queue.published[-1][1].values()) == {("HEALTHY", 0)})


def test_a_list_with_a_bad_line_ends_the_publisher_at_its_first_reading(start, tmp_path):
    file = tmp_path / "servers.txt"
    file.write_text("a:1\n")
    publisher = start([], discovery=Discovery(f"file:{file}"))
    names_the_line = r"servers\.txt, line 1: 'a:1' is no http"
    with pytest.raises(PublisherError, match=names_the_line):
        wait_until(publisher.check)
    wait_until(publisher._loop.is_closed)
    with pytest.raises(PublisherError, match=names_the_line):
        publisher.publish(0, None, timeout_secs=WAIT_SECS)


def test_a_roll_pauses_one_server_after_the_other_and_all_stay_healthy(queue, start, write):
    with started(4) as servers:
        # So long that no other's turn begins before the test ends one.
        publisher = start(servers, max_paused=1, push_timeout_secs=WAIT_SECS / TURN_SHARE)
        push(publisher, 0, write)
        assert publisher.metrics()["weights/paused_secs"] > 0
        num_announced, most = len(queue.published), 0
        gates = [gated(server) for server in servers]
        publisher.publish(1, write(1), timeout_secs=WAIT_SECS)
        for _ in servers:
            wait_until(lambda: any(server.paused for server in servers))
            (paused,) = [i for i, server in enumerate(servers) if server.paused]
            # The others have prepared, and go on with a version that counts.
            wait_until(lambda: all(server.prepared[0] == "1" for server in servers))
            most = max(most, sum(server.paused for server in servers))
            assert queue.published[num_announced:] == []
            gates[paused].set()
            wait_until(lambda: not servers[paused].paused)  # noqa: B023
        publisher.wait(1, timeout_secs=WAIT_SECS)
        assert most == 1
        states = [(version, set(states.values())) for version, states, _ in queue.published[1:]]
        assert states == [(1, {("HEALTHY", 1)})]


def test_a_server_that_hangs_in_its_turn_makes_no_other_late(queue, start, write):
    with started(4) as servers:
        hanging = servers[1]
        publisher = start(servers, max_paused=1, push_timeout_secs=4.0)
        push(publisher, 0, write)
        hanging.hang.add("/update_weights_from_disk")
        push(publisher, 1, write)
        assert queue.last(hanging) == ("STALE", 0)
        assert [queue.last(s) for s in servers if s is not hanging] == [("HEALTHY", 1)] * 3
        hanging.hang.clear()
        queue.wait_for(lambda: queue.last(hanging) == ("HEALTHY", 1))


def test_a_server_that_restarts_between_prepare_and_swap_gets_the_version_again(
    queue, servers, start, write
):
    _, restarted = servers
    publisher = start(servers)
    push(publisher, 0, write)
    restarted.hang.add("/pause_generation")
    publisher.publish(1, write(1), timeout_secs=WAIT_SECS)
    wait_until(lambda: restarted.payloads("/pause_generation")[1:])
    restarted.stop()
    restarted.reset()
    restarted.start()
    publisher.wait(1, timeout_secs=WAIT_SECS)
    queue.wait_for(lambda: queue.last(restarted) == ("HEALTHY", 1))
    assert restarted.version == "1" and restarted.prepared[0] == "1"


def test_a_publisher_needs_a_server(start):
    with pytest.raises(ValueError, match="at least one"):
        start([])
