"""The parts of the SGLang-JAX server that need no engine: spans, checkpoints, keys."""

import json
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from jaxrl_async.extras.sglang_jax import checkpoints as sglang_jax_checkpoints
from jaxrl_async.extras.sglang_jax import server
from jaxrl_async.extras.sglang_jax.checkpoints import check_checkpoint, identity
from jaxrl_async.extras.sglang_jax.engine import VersionLog, check_prompt, copied_result
from jaxrl_async.versions import protocol
from jaxrl_async.versions.layout import WeightsError, version_digest
from jaxrl_async.versions.protocol import RequestError
from jaxrl_async.versions.store import WeightStore

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "rope_theta": 500000.0,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def tensors():
    rng = np.random.default_rng(0)
    return {
        "b.weight": rng.normal(size=(4, 8)).astype(np.float32),
        "a.weight": rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16),
        "c.weight": rng.normal(size=(7,)).astype(np.float16),
    }


def write(root, *, config=CONFIG, changed=None, **values):
    store = WeightStore(root / "weights", keep=1, **values)
    return store, store.write(1, (tensors() | (changed or {})).items(), config)


def refused(path, served=CONFIG):
    with pytest.raises(WeightsError) as caught:
        check_checkpoint(path, served)
    return str(caught.value)


# Spans.


def log_of(*changes):
    log = VersionLog()
    for start, version in changes:
        log.change("r", start, version)
    return log


def spans_of(num_tokens, *changes):
    spans = log_of(*changes).spans("r", num_tokens)
    return [(span["version"], span["start"], span["end"]) for span in spans]


def test_a_request_that_saw_no_swap_is_of_one_version():
    assert spans_of(5, (0, "1")) == [("1", 0, 5)]


def test_each_swap_starts_a_span():
    assert spans_of(9, (0, "1"), (4, "2"), (6, "3")) == [("1", 0, 4), ("2", 4, 6), ("3", 6, 9)]


def test_swaps_without_a_token_between_them_leave_the_last():
    assert spans_of(9, (0, "1"), (0, "2"), (4, "3"), (4, "4")) == [("2", 0, 4), ("4", 4, 9)]


def test_the_same_version_again_goes_on():
    assert spans_of(9, (0, "1"), (4, "1"), (4, "2"), (4, "1")) == [("1", 0, 9)]


def test_an_answer_that_is_older_than_a_swap_does_not_know_of_it():
    assert spans_of(4, (0, "1"), (4, "2")) == [("1", 0, 4)]
    assert spans_of(3, (0, "1"), (4, "2")) == [("1", 0, 3)]


def test_no_tokens_are_of_no_version():
    assert spans_of(0, (0, "1"), (0, "2")) == []


def test_an_ended_request_is_forgotten():
    log = log_of((0, "1"))
    log.end("r")
    assert log.spans("r", 3) == []
    log.end("r")


def test_spans_cover_the_tokens_whatever_the_swaps():
    rng = np.random.default_rng(0)
    for _ in range(300):
        starts = np.sort(rng.integers(0, 20, rng.integers(0, 6)))
        versions = rng.integers(0, 3, len(starts))
        changes = [(0, "0")]
        changes += [(int(s), str(v)) for s, v in zip(starts, versions, strict=True)]
        num = int(rng.integers(1, 25))
        covered = [t for _, start, end in spans_of(num, *changes) for t in range(start, end)]
        assert covered == list(range(num))
        owner = [
            version for version, start, end in spans_of(num, *changes) for _ in range(start, end)
        ]
        assert owner == [[v for s, v in changes if s <= t][-1] for t in range(num)]


# Checkpoints.


@pytest.mark.parametrize("max_shard_bytes", [1 << 20, 50])
def test_the_digest_is_that_of_the_store(tmp_path, max_shard_bytes):
    store, path = write(tmp_path, max_shard_bytes=max_shard_bytes)
    digests = check_checkpoint(path, CONFIG)
    assert digests == {n: t["digest"] for n, t in store.manifest(1)["tensors"].items()}
    assert version_digest(digests) == store.manifest(1)["digest"]


def test_a_tensor_larger_than_a_chunk_is_read_in_full(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_jax_checkpoints, "_CHUNK_BYTES", 16)
    store, path = write(tmp_path)
    digests = check_checkpoint(path, CONFIG)
    assert version_digest(digests) == store.manifest(1)["digest"]


def test_model_safetensors_alone_is_enough(tmp_path):
    _, path = write(tmp_path)
    for name in ("config.json", "manifest.json"):
        (path / name).unlink()
    assert check_checkpoint(path, CONFIG).keys() == tensors().keys()


def test_a_missing_or_empty_directory_is_refused(tmp_path):
    assert "nowhere is not a directory" in refused(tmp_path / "nowhere")
    assert "no *.safetensors file" in refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    _, path = write(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert re.search(r"model\.safetensors.*truncated", refused(path))


@pytest.mark.parametrize(
    "header",
    [
        "nonsense",
        "[]",
        '{"a": 1}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 4]}}',
    ],
)
def test_a_mangled_header_is_refused(tmp_path, header):
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    assert str(tmp_path) in refused(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", tensors())
def test_a_number_that_is_not_finite_is_refused(tmp_path, name, value):
    array = tensors()[name]
    array.reshape(-1)[-1] = value
    _, path = write(tmp_path, changed={name: array})
    assert f"tensor {name} holds a number that is not finite" in refused(path)


def test_the_largest_and_smallest_numbers_are_finite(tmp_path):
    changed = {}
    for name, array in tensors().items():
        info = ml_dtypes.finfo(array.dtype)
        array.reshape(-1)[:3] = info.max, info.min, info.smallest_subnormal
        changed[name] = array
    check_checkpoint(write(tmp_path, changed=changed)[1], CONFIG)


def test_a_tensor_that_was_altered_is_refused(tmp_path):
    _, path = write(tmp_path)
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "manifest.json: tensor c.weight has digest" in refused(path)


def edit_manifest(path, edit):
    manifest = json.loads((path / "manifest.json").read_text())
    edit(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_manifest_and_files_hold_the_same_tensors(tmp_path):
    _, path = write(tmp_path)
    edit_manifest(path, lambda m: m["tensors"].update({"z": m["tensors"].pop("b.weight")}))
    assert "tensor b.weight is in the files only" in refused(path)
    edit_manifest(path, lambda m: m["tensors"].update({"b.weight": m["tensors"]["z"]}))
    assert "tensor z is in the manifest only" in refused(path)


def test_the_total_digest_of_a_manifest_is_checked(tmp_path):
    _, path = write(tmp_path)
    edit_manifest(path, lambda m: m.update(digest="0" * 64))
    assert "the manifest says 0000" in refused(path)


def test_json_that_is_not_a_manifest_is_refused(tmp_path):
    _, path = write(tmp_path)
    for text in ("{", "[1]", '{"tensors": 3}', '{"tensors": {"a.weight": 3}}'):
        (path / "manifest.json").write_text(text)
        assert str(path) in refused(path)


def test_a_missing_shard_is_refused(tmp_path):
    _, path = write(tmp_path, max_shard_bytes=50)
    (path / "manifest.json").unlink()
    (path / "model-00002-of-00002.safetensors").unlink()
    assert "is not in model-00002-of-00002.safetensors" in refused(path)


def test_a_name_in_two_files_is_refused(tmp_path):
    _, path = write(tmp_path)
    (path / "model-2.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    assert "stands in model-2.safetensors too" in refused(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-5},
        {"rope_theta": 1e6},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"num_key_value_heads": 1},
        {"head_dim": 8},
        {"tie_word_embeddings": False},
        {"model_type": "qwen2"},
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path, changes):
    _, path = write(tmp_path, config=CONFIG | changes)
    assert "config.json is of another model" in refused(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"torch_dtype": "bfloat16", "max_position_embeddings": 7, "transformers_version": "5"},
        {"num_key_value_heads": 2, "head_dim": 4, "rope_scaling": None, "use_sliding_window": None},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 500000, "rope_type": "default"}},
    ],
)
def test_another_spelling_of_the_same_model_is_served(tmp_path, changes):
    _, path = write(tmp_path, config=CONFIG | changes)
    check_checkpoint(path, CONFIG)


def test_a_config_that_does_not_tie_is_not_of_a_tied_model(tmp_path):
    _, path = write(tmp_path, config={k: v for k, v in CONFIG.items() if not k.startswith("tie")})
    assert "tie_word_embeddings False" in refused(path)


def test_a_dtype_of_no_weights_is_refused_with_those_that_are(tmp_path):
    _, path = write(tmp_path, changed={"c.weight": np.arange(3, dtype=np.int32)})
    assert "tensor c.weight is I32, not one of F64, F32, F16, BF16" in refused(path)


def test_a_file_that_is_replaced_is_another(tmp_path):
    _, path = write(tmp_path)
    before = identity(path)
    assert identity(path) == before
    data = (path / "model.safetensors").read_bytes()
    (path / "aside").write_bytes(data)
    (path / "aside").rename(path / "model.safetensors")
    assert identity(path) != before


# Prompts.


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], r"1 to 4 tokens"),
        ("text", r"1 to 4 tokens"),
        ([1] * 5, r"5 tokens, at most 4"),
        ([1, 10], r"10 is not in \[0, 10\)"),
        ([-1], r"-1 is not in \[0, 10\)"),
        ([True], r"True is not in"),
        ([1.0], r"1.0 is not in"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_with_its_bound(prompt, message):
    with pytest.raises(RequestError, match=message):
        check_prompt(prompt, vocab_size=10, max_tokens=4)


def test_the_bounds_of_a_prompt_are_served():
    check_prompt([0, 9, 9, 0], vocab_size=10, max_tokens=4)


# Keys.

CONTROL = ["/pause_generation", "/update_weights_from_disk", "/weights/1/config.json"]
OTHERS = ["/generate", "/model_info", "/nowhere"]


def allowed(path, given, api_key=None, admin_api_key=None):
    authorization = f"Bearer {given}" if given else ""
    return server.is_allowed(path, authorization, api_key=api_key, admin_api_key=admin_api_key)


@pytest.mark.parametrize("path", CONTROL + OTHERS)
def test_without_keys_everything_is_open(path):
    assert allowed(path, None) and allowed(path, "x")


@pytest.mark.parametrize("path", CONTROL + OTHERS)
def test_with_one_key_everything_takes_it(path):
    assert allowed(path, "k", "k")
    assert not allowed(path, None, "k") and not allowed(path, "x", "k")


def test_with_both_keys_each_level_takes_its_own_only():
    for path in CONTROL:
        assert allowed(path, "a", "k", "a") and not allowed(path, "k", "k", "a")
    for path in OTHERS:
        assert allowed(path, "k", "k", "a") and not allowed(path, "a", "k", "a")


def test_an_admin_key_alone_closes_the_control_routes():
    assert all(allowed(path, "a", None, "a") for path in CONTROL + OTHERS)
    assert not any(allowed(path, None, None, "a") for path in CONTROL)
    assert all(allowed(path, None, None, "a") for path in OTHERS)


def test_health_is_always_open():
    assert allowed("/health", None, "k", "a") and allowed("/health_generate", None, "k", "a")


@pytest.mark.parametrize("authorization", ["", "k", "Bearer", "Basic k", "Bearer  k", "Bearer ké"])
def test_a_header_of_another_form_is_refused(authorization):
    assert not server.is_allowed("/generate", authorization, api_key="k", admin_api_key=None)


def test_the_keys_are_taken_out_of_arguments_and_environment():
    environ = {"SGLANG_API_KEY": "e", "SGLANG_ADMIN_API_KEY": "f", "HOME": "/"}
    keys, rest = server.take_keys(["--port", "1", "--api-key", "k", "--model-path", "m"], environ)
    assert (keys.api_key, keys.admin_api_key) == ("k", "f")
    assert rest == ["--port", "1", "--model-path", "m"]
    assert environ == {"HOME": "/"}
    assert not {"k", "f"} & set(re.findall(r"\w+", repr(keys)))


def test_an_empty_key_is_none():
    keys, _ = server.take_keys(["--api-key="], {"SGLANG_ADMIN_API_KEY": ""})
    assert keys == server.Keys(None, None)


# Start.


def test_another_version_of_the_engine_is_refused_with_both_named(monkeypatch):
    monkeypatch.setattr(server.importlib.metadata, "version", lambda name: "0.0.2")
    with pytest.raises(SystemExit, match=r"must be 0\.1\.0rc0, it is 0\.0\.2"):
        server.check_version()


def test_the_version_that_is_known_is_served(monkeypatch):
    monkeypatch.setattr(server.importlib.metadata, "version", lambda name: "0.1.0rc0")
    server.check_version()


def test_no_engine_is_refused():
    with pytest.raises(SystemExit, match="it is not installed"):
        server.check_version()


def test_the_command_line_of_older_workdirs_still_starts_it():
    command = [sys.executable, "-m", "jaxrl_async.sglang_jax.server", "--port", "1"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "sglang-jax must be 0.1.0rc0, it is not installed" in ended.stderr


def test_a_taken_port_is_named():
    listener = server._bind("127.0.0.1", 0, None)
    listener.listen()
    port = listener.getsockname()[1]
    with pytest.raises(SystemExit, match=f"cannot listen on 127.0.0.1:{port}: Address already"):
        server._bind("127.0.0.1", port, None)
    listener.close()


def test_everyone_is_not_listened_to_without_a_key():
    message = r"listen on 0\.0\.0\.0:0, which is not loopback, without a key: set SGLANG_API_KEY"
    with pytest.raises(SystemExit, match=message):
        server._bind("0.0.0.0", 0, None)
    server._bind("0.0.0.0", 0, "key").close()


def test_the_roots_of_weights_are_taken_out_of_the_arguments():
    argv = ["--weights-root", "/a", "--port", "1", "--weights-root=/b"]
    assert server.take_roots(argv) == (["/a", "/b"], ["--port", "1"])
    assert server.take_roots(["--port", "1"]) == ([], ["--port", "1"])


class Asked:
    """A request of Starlette's, as far as it is looked at."""

    def __init__(self, body: bytes):
        self._body = body

    async def stream(self):
        for start in range(0, len(self._body), 1 << 20):
            yield self._body[start : start + (1 << 20)]


@pytest.mark.parametrize(
    "place", ["outside", "root/../outside", "root/link", "root/none/../../outside"]
)
async def test_weights_from_outside_the_roots_are_refused(tmp_path, place):
    (tmp_path / "outside").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    routes = server.Routes(None, None, [str(tmp_path / "root")], None)
    body = {"model_path": f"{tmp_path}/{place}", "weight_version": "1"}
    status, answer = await routes.receiver.update_from_disk(body)
    assert (status, answer["success"]) == (400, False)
    assert "within the directories that weights may come from" in answer["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "must be a JSON object, got list"),
        (b" " * (server.MAX_BODY_BYTES + 1), f"at most {server.MAX_BODY_BYTES} bytes"),
    ],
)
async def test_a_body_that_is_no_object_within_the_bound_is_refused(body, message):
    with pytest.raises(RequestError, match=message):
        await server._read(Asked(body))


def test_what_is_handed_to_jax_is_a_copy():
    buffer = np.arange(4)
    view = copied_result(lambda: buffer[:2])()
    buffer[:] = 0
    assert view.tolist() == [0, 1]


# Pauses.


class Recorded:
    """Stands for a PauseLease."""

    def __init__(self):
        self.calls = []

    def begin(self, secs):
        self.calls.append(secs)

    def end(self):
        self.calls.append("end")


async def test_a_refused_call_neither_begins_nor_ends_the_lease_of_a_pause():
    calls = [("PAUSE", 401), ("PAUSE", 200), ("CONTINUE", 401), ("CONTINUE", 200)]
    lease, statuses, sent = Recorded(), iter([status for _, status in calls]), []

    async def upstream(scope, receive, send):
        await send({"type": "http.response.start", "status": next(statuses)})
        await send({"type": "http.response.body"})

    async def send(message):
        sent.append((message["type"], len(lease.calls)))

    leases = server._PauseLeases(upstream, lease=lease)
    header = [(protocol.LEASE_HEADER.lower().encode(), b"7.5")]
    for name, _ in calls:
        scope = {"type": "http", "path": getattr(protocol, name), "headers": header}
        await leases(scope, None, send)
    assert lease.calls == [7.5, "end"]
    starts = [num_calls for kind, num_calls in sent if kind == "http.response.start"]
    assert starts == [0, 1, 1, 2]
