"""Differences of versions: lossless, and refused wherever there is a doubt."""

import asyncio
import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.intake.copy import Copy, Source
from jaxrl_async.publishing.push import write_difference
from jaxrl_async.versions import difference
from jaxrl_async.versions.difference import DifferenceError
from jaxrl_async.versions.store import StoredVersion, WeightStore, read_manifest

SHAPES = {"embed": (70, 8), "layers.0.norm": (8,), "layers.0.up": (33, 17)}


def tensors(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def stepped(before, scale, seed=9):
    """A small step: in bfloat16 most elements stay as they are."""
    rng = np.random.default_rng(seed)
    return {
        name: (array.astype(np.float32) + scale * rng.normal(size=array.shape)).astype(array.dtype)
        for name, array in before.items()
    }


class Versions:
    """A store, and the copy of a server, that holds the version written first."""

    def __init__(self, root):
        self.root = root
        self.store = WeightStore(root / "weights", keep=10, max_shard_bytes=3000)
        (root / "own").mkdir()
        self.copy = Copy(root / "own")

    def write(self, version, tensors, config=None):
        return self.store.write(version, tensors.items(), config or {"a": 1})

    def hold(self, path):
        return asyncio.run(self.load(Source(path, is_kept=True), path))

    async def load(self, source, path):
        return await self.copy.load(source, read_manifest(path)["digest"], read)


class Read:
    """The weights that a server read: verified."""

    def __init__(self, path):
        version = StoredVersion(path)
        version.verify()
        self.digest = version.digest


async def read(path):
    return Read(path)


@pytest.fixture
def versions(tmp_path):
    return Versions(tmp_path)


def patch(versions, file, path):
    """Applies a difference as a server does."""
    asyncio.run(versions.load(Source(file.parent, file.name), path))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("scale", [1e-7, 1e-5, 1e-3])
def test_a_difference_leads_to_the_version_to_the_byte(versions, dtype, scale):
    before = tensors(0, dtype)
    versions.hold(versions.write(1, before))
    for number in (2, 3):  # One after the other, on the same copy.
        before = stepped(before, scale, number)
        path = versions.write(number, before)
        file = difference.write(versions.store.path(number - 1), path)
        assert file.name == f"from-0000000{number - 1}.difference"
        patch(versions, file, path)
        assert versions.copy.digest == read_manifest(path)["digest"]
        for shard in path.glob("*.safetensors"):
            assert (versions.copy.path / shard.name).read_bytes() == shard.read_bytes()


def test_few_changes_make_a_short_difference(versions):
    rng = np.random.default_rng(0)
    before = {"w": rng.normal(size=(500, 400)).astype(ml_dtypes.bfloat16)}
    after = {"w": before["w"].copy()}
    after["w"].reshape(-1)[rng.permutation(200_000)[:1000]] *= 2
    versions.write(1, before)
    file = difference.write(versions.store.path(1), versions.write(2, after))
    # 1,000 gaps of about 200, one byte each or two, and 1,000 changes.
    assert file.stat().st_size < 6_000 < 0.02 * before["w"].nbytes


elements = st.integers(0, 2**32 - 1)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 300).flatmap(
        lambda n: st.tuples(
            st.lists(elements, min_size=n, max_size=n),
            st.dictionaries(st.integers(0, n - 1), elements, max_size=n),
        )
    ),
    st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]),
)
def test_any_elements_and_any_changes_of_them_come_back(case, dtype):
    old, changes = case
    old = (np.array(old, np.uint64) * np.uint64(2654435761)).astype(dtype)
    new = old.copy()
    for at, value in changes.items():
        new[at] = np.array(value, np.uint64).astype(dtype)
    changed, planes = difference._changes(old, new)
    if not changed:
        assert (old == new).all()
        return
    planes = [
        difference._unpack(data, codec, changed)
        for codec, data in (difference._pack(plane) for plane in planes)
    ]
    if changed < len(old):
        at = np.cumsum(difference._join(planes[:4]), dtype=np.int64)
        old[at] += difference._unzigzag(difference._join(planes[4:]))
    else:
        old += difference._unzigzag(difference._join(planes))
    np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    "after",
    [
        {"embed": np.zeros((70, 8), np.float32)},  # fewer tensors
        tensors(0) | {"layers.0.norm": np.zeros(8, ml_dtypes.bfloat16)},
        tensors(0) | {"layers.0.up": np.zeros((17, 33), np.float32)},
    ],
)
def test_another_layout_has_no_difference(versions, after):
    versions.write(1, tensors(0))
    with pytest.raises(DifferenceError, match="differ in more than the values"):
        difference.write(versions.store.path(1), versions.write(2, after))


def test_another_config_has_no_difference(versions):
    versions.write(1, tensors(0))
    with pytest.raises(DifferenceError, match="differ in more than the values"):
        difference.write(versions.store.path(1), versions.write(2, tensors(0), {"a": 2}))


def test_unrelated_weights_go_in_full(versions):
    versions.write(1, tensors(0))
    path = versions.write(2, tensors(1))
    with pytest.raises(DifferenceError, match="more than 0.8 of it"):
        difference.write(versions.store.path(1), path)
    assert not list(path.glob("*.difference"))


@pytest.fixture
def step(versions):
    """(difference, version) of a step from the version that the copy holds."""
    before = tensors(0)
    versions.hold(versions.write(1, before))
    path = versions.write(2, stepped(before, 1e-6))
    return difference.write(versions.store.path(1), path), path


def test_a_copy_of_another_base_is_not_patched(versions, step):
    file, path = step
    versions.hold(versions.write(3, tensors(3)))
    with pytest.raises(DifferenceError, match="leads from .* the copy is of"):
        patch(versions, file, path)
    assert versions.copy.digest is None and not versions.copy.path.exists()


def test_a_copy_that_holds_nothing_is_not_patched(versions, step):
    file, path = step
    versions.copy.drop()
    with pytest.raises(DifferenceError, match="the copy is of None"):
        patch(versions, file, path)


def test_a_difference_to_another_version_than_the_push_is_refused(versions, step):
    file, _ = step
    with pytest.raises(DifferenceError, match="the push of"):
        patch(versions, file, versions.write(3, tensors(3)))


def test_a_base_that_was_altered_is_found_by_the_digests_of_the_result(versions, step):
    file, path = step
    shard = sorted(versions.copy.path.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DifferenceError, match="digest .* its manifest says"):
        patch(versions, file, path)
    assert versions.copy.digest is None and not versions.copy.path.exists()


@pytest.mark.parametrize("place", range(0, 100, 7))
def test_an_altered_difference_is_refused_wherever_it_was_altered(versions, step, place):
    file, path = step
    content = bytearray(file.read_bytes())
    content[len(content) * place // 100] ^= 0x55
    file.write_bytes(content)
    with pytest.raises(DifferenceError):
        patch(versions, file, path)
    assert versions.copy.digest is None


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_difference_is_refused(versions, step, share):
    file, path = step
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(DifferenceError):
        patch(versions, file, path)


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 0},
        {"start": 1 << 40},
        {"count": 1 << 40},
        {"count": -1},
        {"changed": 1 << 20},
        {"item": 3},
        {"file": "../../evil"},
        {"packed": []},
    ],
)
def test_a_header_that_points_elsewhere_is_refused(versions, step, monkeypatch, changes):
    file, path = step
    outside = versions.root / "evil"
    outside.write_bytes(b"x" * 100_000)
    header = difference._read_header

    def mangled(stream):
        found = header(stream)
        found["tensors"][0] |= changes
        return found

    monkeypatch.setattr(difference, "_read_header", mangled)
    with pytest.raises(DifferenceError):
        patch(versions, file, path)
    assert outside.read_bytes() == b"x" * 100_000


def test_a_plane_that_unpacks_to_more_than_it_says_is_refused():
    codec, data = difference._pack(np.zeros(1 << 20, np.uint8))
    with pytest.raises(DifferenceError, match="instead of 1000"):
        difference._unpack(data, codec, 1000)


def test_an_upload_that_cannot_be_loaded_lies_where_it_was(versions, tmp_path):
    path = versions.write(1, tensors(0))
    upload = tmp_path / "upload"
    shutil.copytree(path, upload)

    async def full(_):
        raise MemoryError

    async def load():
        source = Source(upload, is_kept=True, is_upload=True)
        await versions.copy.load(source, "digest", full)

    with pytest.raises(MemoryError):
        asyncio.run(load())
    assert (upload / "model-00001-of-00002.safetensors").exists()
    assert versions.copy.digest is None


async def test_servers_share_a_difference_and_a_missing_base_has_none(versions):
    before = tensors(0)
    base = read_manifest(versions.write(1, before))["digest"]
    version = StoredVersion(versions.write(2, stepped(before, 1e-6)))
    first, second = await asyncio.gather(*(version.once(write_difference, base) for _ in range(2)))
    assert first == second and first.exists()
    inode = first.stat().st_ino
    assert (await version.once(write_difference, base)).stat().st_ino == inode  # Not written again.
    assert await version.once(write_difference, "of a version that is gone") is None
    assert json.loads((first.parent / "manifest.json").read_text())["version"] == 2
