"""The prepared version of a server: one at most, and none that nobody wants any more."""

import asyncio
import dataclasses

import pytest

from jaxrl_async.intake.prepared import Prepared, SupersededPreparationError


@dataclasses.dataclass
class Weights:
    digest: str


class Loads:
    """Loads that end when the test says so; counts those under way together."""

    def __init__(self):
        self.num_begun, self.num_now, self.most = 0, 0, 0
        self.gate = asyncio.Event()

    def of(self, digest):
        async def load():
            self.num_begun, self.num_now = self.num_begun + 1, self.num_now + 1
            self.most = max(self.most, self.num_now)
            try:
                await self.gate.wait()
            finally:
                self.num_now -= 1
            return Weights(digest)

        return load


@pytest.fixture
def loads():
    return Loads()


@pytest.fixture
def prepared():
    return Prepared()


async def prepare(prepared, version, loads, *, digest=None, found=None, lease_secs=None):
    digest = digest or f"digest of {version}"
    await prepared.prepare(version, digest, loads.of(found or digest), lease_secs)


async def test_a_version_is_taken_once(prepared, loads):
    loads.gate.set()
    await prepare(prepared, "1", loads)
    assert prepared.version == "1"
    assert prepared.take("1", "digest of 1") == Weights("digest of 1")
    assert prepared.take("1", "digest of 1") is None and prepared.version is None


@pytest.mark.parametrize(
    ("version", "digest"), [("2", "digest of 1"), ("1", "another"), ("1", None)]
)
async def test_an_update_to_another_version_takes_nothing_and_leaves_nothing(
    prepared, loads, version, digest
):
    loads.gate.set()
    await prepare(prepared, "1", loads)
    assert prepared.take(version, digest) is None
    assert prepared.version is None


async def test_a_newer_preparation_supersedes_one_that_loads(prepared, loads):
    older = asyncio.create_task(prepare(prepared, "1", loads))
    await asyncio.sleep(0)
    newer = asyncio.create_task(prepare(prepared, "2", loads))
    await asyncio.sleep(0)
    loads.gate.set()
    with pytest.raises(SupersededPreparationError, match="version 1 is superseded by version 2"):
        await older
    await newer
    assert prepared.version == "2"
    assert (loads.num_begun, loads.most) == (2, 1)  # Two at once would be a third copy.


async def test_a_newer_preparation_frees_the_older_before_it_loads(prepared, loads):
    loads.gate.set()
    await prepare(prepared, "1", loads)
    loads.gate.clear()
    newer = asyncio.create_task(prepare(prepared, "2", loads))
    while not loads.num_now:
        await asyncio.sleep(0)
    assert prepared.version is None
    loads.gate.set()
    await newer


async def test_an_update_makes_a_preparation_under_way_useless(prepared, loads):
    preparing = asyncio.create_task(prepare(prepared, "1", loads))
    await asyncio.sleep(0)
    assert prepared.take("0", "digest of 0") is None
    loads.gate.set()
    with pytest.raises(SupersededPreparationError, match="by an update"):
        await preparing
    assert prepared.version is None


async def test_the_same_preparation_twice_loads_once(prepared, loads):
    both = [asyncio.create_task(prepare(prepared, "1", loads)) for _ in range(2)]
    await asyncio.sleep(0)
    loads.gate.set()
    await asyncio.gather(*both)
    await prepare(prepared, "1", loads)
    assert (loads.num_begun, prepared.version) == (1, "1")


async def test_other_weights_than_those_of_the_push_are_not_kept(prepared, loads):
    loads.gate.set()
    with pytest.raises(ValueError, match="version 1 has digest others, the push is of digest of 1"):
        await prepare(prepared, "1", loads, found="others")
    assert prepared.version is None


async def test_a_load_that_fails_leaves_room_for_the_next(prepared, loads):
    async def load():
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        await prepared.prepare("1", "digest of 1", load, None)
    loads.gate.set()
    await prepare(prepared, "1", loads)
    assert prepared.version == "1"


async def test_a_version_that_nobody_takes_is_dropped_at_the_end_of_its_lease(prepared, loads):
    loads.gate.set()
    await prepare(prepared, "1", loads, lease_secs=0.01)
    for _ in range(1000):
        if prepared.version is None:
            break
        await asyncio.sleep(0.01)
    assert prepared.take("1", "digest of 1") is None


async def test_a_lease_ends_with_the_version_it_is_of(prepared, loads):
    loads.gate.set()
    await prepare(prepared, "1", loads, lease_secs=0.01)
    prepared.take("1", "digest of 1")
    await prepare(prepared, "2", loads)
    await asyncio.sleep(0.05)
    assert prepared.version == "2"
