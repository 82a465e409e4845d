"""Versions on disk: whole or absent, readable by others, and every damage named."""

import errno
import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from fixtures.tensors import read_tensors
from safetensors import safe_open

from jaxrl_async.records import Identity, SupersededError
from jaxrl_async.versions.store import StoredVersion, WeightStore, WeightStoreError

CONFIG = {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 4}


def tensors(seed=0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "model.embed_tokens.weight": rng.normal(size=(6, 4)).astype(np.float32),
        "model.layers.0.q.weight": rng.normal(size=(4, 4)).astype(ml_dtypes.bfloat16),
        "model.layers.0.q.bias": rng.normal(size=4).astype(np.float16),
        "model.norm.weight": rng.normal(size=4).astype(np.float32),
    }


def make(tmp_path, keep=3, **values) -> WeightStore:
    return WeightStore(tmp_path / "weights", keep=keep, **values)


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        np.testing.assert_array_equal(left[name], right[name])


def test_what_was_written_is_read(tmp_path):
    store = make(tmp_path)
    path = store.write(12, tensors().items(), CONFIG)
    assert path == store.path(12) == tmp_path / "weights" / "00000012"
    assert sorted(f.name for f in path.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]
    assert json.loads((path / "config.json").read_text()) == CONFIG
    assert_same(read_tensors(store.path(12)), tensors())
    StoredVersion(store.path(12)).verify()
    assert store.versions() == [12]


def test_a_superseded_learner_leaves_the_versions_of_the_younger_one(tmp_path):
    elder, younger = (make(tmp_path, keep=2, writer=Identity("run", n)) for n in (1, 2))
    for version in (5, 6):
        elder.write(version, tensors().items(), CONFIG)
    elder.begin(7)  # It is frozen in the middle of version 7.
    elder.write_part(7, 0, tensors().items())
    for version in (6, 7, 8, 9):
        younger.write(version, tensors(1).items(), CONFIG)
    assert younger.versions() == [8, 9]
    younger.begin(10)
    elder.write(3, tensors().items(), CONFIG)
    assert younger.versions() == [3, 8, 9]
    with pytest.raises(SupersededError, match="00000009 .*generation 2 of run run.*generation 1"):
        elder.write(9, tensors().items(), CONFIG)
    younger.write_part(10, 0, tensors(1).items())
    assert_same(read_tensors(younger.finish(10, 1, CONFIG)), tensors(1))
    assert younger.versions() == [9, 10]


def test_a_learner_replaces_versions_of_another_run(tmp_path):
    make(tmp_path, writer=Identity("other", 9)).write(3, tensors().items(), CONFIG)
    store = make(tmp_path, keep=1, writer=Identity("run", 1))
    assert_same(read_tensors(store.write(3, tensors(1).items(), CONFIG)), tensors(1))
    store.write(4, tensors(1).items(), CONFIG)
    assert store.versions() == [4]


def test_the_safetensors_library_reads_the_files(tmp_path):
    path = make(tmp_path).write(0, tensors().items(), CONFIG) / "model.safetensors"
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == tensors().keys()
    without_bfloat16 = {k: v for k, v in tensors().items() if v.dtype != ml_dtypes.bfloat16}
    path = make(tmp_path).write(1, without_bfloat16.items(), CONFIG) / "model.safetensors"
    assert_same(safetensors.numpy.load_file(path), without_bfloat16)


def test_shards_are_bounded_and_indexed(tmp_path):
    store = make(tmp_path, max_shard_bytes=100)
    path = store.write(0, tensors().items(), CONFIG)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    # 96 | 32 + 8 + 16 bytes
    assert index["metadata"]["total_size"] == store.manifest(0)["total_bytes"] == 152
    assert (
        list(index["weight_map"].values())
        == ["model-00001-of-00002.safetensors"] + ["model-00002-of-00002.safetensors"] * 3
    )
    assert_same(read_tensors(store.path(0)), tensors())
    StoredVersion(store.path(0)).verify()


def test_one_shard_is_in_memory_at_a_time(tmp_path):
    taken = []

    def stream():
        for number in range(5):
            taken.append((number, len(list((tmp_path / "weights").glob(".aside-*/shard-*")))))
            yield f"t{number}", np.zeros(8, np.float32)

    make(tmp_path, max_shard_bytes=32).write(0, stream(), CONFIG)
    # A tensor is taken before the shard of the one before it is closed.
    assert taken == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)]


def test_layouts_that_are_not_contiguous_and_scalars_are_written_by_value(tmp_path):
    values = {"t": np.arange(6, dtype=np.float32).reshape(2, 3).T, "s": np.array(3, np.int32)}
    store = make(tmp_path)
    store.write(0, values.items(), CONFIG)
    assert_same(read_tensors(store.path(0)), values)


def test_the_digest_depends_on_the_values_alone(tmp_path):
    store = make(tmp_path)
    store.write(0, tensors().items(), CONFIG)
    store.write(1, reversed(tensors().items()), CONFIG)
    store.write(2, tensors(seed=1).items(), CONFIG)
    digests = [store.manifest(version)["digest"] for version in (0, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_a_crash_leaves_no_half_version(tmp_path):
    def crashing():
        yield from list(tensors().items())[:3]
        raise RuntimeError("power cut")

    store = make(tmp_path, max_shard_bytes=50)
    with pytest.raises(RuntimeError, match="power cut"):
        store.write(1, crashing(), CONFIG)
    assert store.versions() == []
    assert any(store.path(1).parent.iterdir())
    store.write(2, tensors().items(), CONFIG)
    assert [entry.name for entry in store.path(2).parent.iterdir()] == ["00000002"]


def test_the_newest_are_kept(tmp_path):
    store = make(tmp_path, keep=2)
    for version in (0, 4, 8, 12):
        store.write(version, tensors().items(), CONFIG)
    assert store.versions() == [8, 12]


def test_a_resumed_run_replaces_a_version_and_leaves_the_abandoned_future(tmp_path):
    store = make(tmp_path)
    for version in (3, 4, 5, 6):
        store.write(version, tensors().items(), CONFIG)
    store.write(5, tensors(seed=1).items(), CONFIG)
    assert store.versions() == [4, 5]
    assert_same(read_tensors(store.path(5)), tensors(seed=1))


def test_a_changed_byte_is_found_and_its_tensor_named(tmp_path):
    store = make(tmp_path)
    file = store.write(0, tensors().items(), CONFIG) / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(WeightStoreError, match=r"model\.safetensors.*model\.norm\.weight.*digest"):
        StoredVersion(store.path(0)).verify()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"F16"', '"X16"', "q.bias has dtype X16, its manifest says F16"),
        ('"F16"', '"I16"', "q.bias has dtype I16, its manifest says F16"),
        ("[6, 4]", "[7, 4]", r"embed_tokens.weight has shape \[7, 4\], .* \[6, 4\]"),
        ("[6, 4]", "[4, 6]", r"embed_tokens.weight has shape \[4, 6\], .* \[6, 4\]"),
        ("[0, 96]", "[0, 92]", "embed_tokens.weight has num_bytes 92, its manifest says 96"),
    ],
)
def test_a_changed_header_is_found_and_its_tensor_named(tmp_path, old, new, message):
    store = make(tmp_path)
    file = store.write(0, tensors().items(), CONFIG) / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(old.encode(), new.encode()))
    with pytest.raises(WeightStoreError, match=rf"model\.safetensors.*{message}"):
        StoredVersion(store.path(0)).check()


@pytest.mark.parametrize("size", [0, 5, 40, -1])
def test_a_truncated_file_is_found_and_named(tmp_path, size):
    store = make(tmp_path)
    file = store.write(0, tensors().items(), CONFIG) / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:size])
    with pytest.raises(WeightStoreError, match=r"model\.safetensors.*truncated"):
        read_tensors(store.path(0))


def test_a_missing_tensor_file_or_version_is_named(tmp_path):
    store = make(tmp_path)
    path = store.write(3, tensors().items(), CONFIG)
    with pytest.raises(WeightStoreError, match=r"version 7 .*\[3\]"):
        store.manifest(7)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["tensors"]["lost"] = manifest["tensors"]["model.norm.weight"]
    del manifest["crc"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(WeightStoreError, match=r"model\.safetensors.* lost .*missing"):
        StoredVersion(store.path(3)).verify()
    (path / "model.safetensors").unlink()
    with pytest.raises(WeightStoreError, match=r"model\.safetensors.*No such file"):
        StoredVersion(store.path(3)).verify()


def test_bad_input_is_refused(tmp_path):
    store = make(tmp_path)
    one = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="tensor a .*twice"):
        store.write(0, [("a", one), ("a", one)], CONFIG)
    with pytest.raises(ValueError, match="at least one"):
        store.write(0, [], CONFIG)
    with pytest.raises(ValueError, match="complex64.*float32"):
        store.write(0, [("a", one.astype(np.complex64))], CONFIG)
    with pytest.raises(ValueError, match="keep.* 1.* 0"):
        make(tmp_path, keep=0)
    assert store.versions() == []


def test_a_version_that_a_server_has_open_on_nfs_is_removed_with_a_later_one(tmp_path, monkeypatch):
    store, rmtree, is_open = make(tmp_path, keep=1), shutil.rmtree, True

    def on_nfs(path):
        if is_open and path.name.startswith(".aside-old-00000001"):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", on_nfs)
    for version in (1, 2):
        store.write(version, tensors().items(), CONFIG)
    assert store.versions() == [2]
    is_open = False
    store.write(3, tensors().items(), CONFIG)
    assert [entry.name for entry in (tmp_path / "weights").iterdir()] == ["00000003"]


def test_a_version_is_replaced_and_removed_while_an_older_one_of_its_number_is_open(
    tmp_path, monkeypatch
):
    def on_nfs(path):
        raise OSError(errno.EBUSY, "Device or resource busy", path)

    monkeypatch.setattr(shutil, "rmtree", on_nfs)
    store = make(tmp_path, keep=1)
    for seed, version in enumerate((1, 2, 1, 1, 2)):  # A run that is resumed again and again.
        store.write(version, tensors(seed).items(), CONFIG)
        assert store.versions() == [version]
        assert_same(read_tensors(store.path(version)), tensors(seed))
