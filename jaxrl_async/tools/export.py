"""Export: a checkpoint, or the model that a run starts from, as a Hugging Face directory.

It is for transformers, SGLang, or `model.path` of a new run.
"""

import dataclasses
import json
import pathlib
import tempfile

import jax

from jaxrl_async import parts
from jaxrl_async.config.settings import Settings
from jaxrl_async.models import hf, lora, sharding
from jaxrl_async.versions.store import ADAPTER, WeightStore


def export(
    settings: Settings,
    workdir: pathlib.Path,
    step: int | None,
    out: pathlib.Path,
    *,
    dtype: str,
    adapter: bool = False,
) -> int:
    """Writes config.json, safetensors with their digests (manifest.json) and the tokenizer's files, all or none.

    Adapters are merged into the weights, or alone are written, in PEFT's format.

    Args:
      step: the checkpoint; None is the last one.
      out: the directory to write, new or empty.
      dtype: "float32" | "bfloat16", of the tensors.

    Returns:
      The step of the checkpoint.

    Raises:
      CheckpointError: no such checkpoint, or one of another shape.
      FileExistsError: `out` is not empty.
      OSError, ValueError: `out` cannot be written, the files at model.path are missing or damaged, or the run has no
        adapters.
    """
    _refuse_full(out)
    if adapter and not settings.model.lora.rank:
        raise ValueError("the run has no adapters: model.lora.rank is 0")
    tokenizer = parts.tokenizer_of(settings, workdir)
    model = parts.model_config_of(settings, tokenizer)
    step, params = parts.checkpoint_params(settings, workdir, step)
    if adapter:
        assert model.lora is not None
        config = hf.write_adapter_config(model.lora, parts.base_name(settings, workdir))
        params, _ = lora.split(params)
        _write(model, tokenizer, step, params, out, dtype, config, ADAPTER)
        return step
    if model.lora:
        model, params = dataclasses.replace(model, lora=None), lora.merged(params, model.lora)
    _write(model, tokenizer, step, params, out, dtype, _config(settings, model, tokenizer, dtype))
    return step


def init(settings: Settings, out: pathlib.Path, *, dtype: str, warm: bool) -> None:
    """Writes the model that a run of these settings starts from, before there is a run.

    Args:
      settings: of a run without model.path.
      out, dtype: as of `export`.
      warm: after the warm start, which is version 0; else the random weights before it.

    Raises:
      FileExistsError: `out` is not empty.
      OSError, ValueError: `out` cannot be written, or the task or its tokenizer cannot be made.
    """
    _refuse_full(out)
    if not warm:
        stage = dataclasses.replace(settings.warm_start, num_steps=0)
        settings = dataclasses.replace(settings, warm_start=stage)
    with tempfile.TemporaryDirectory(prefix="jaxrl-init-") as workdir:
        # Until the files are written: some tokenizers copy theirs from there.
        tokenizer = parts.tokenizer_of(settings, pathlib.Path(workdir))
        model = parts.model_config_of(settings, tokenizer)
        mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
        params = parts.first_params_of(settings, model, mesh, tokenizer)
        config = _config(settings, model, tokenizer, dtype)
        _write(model, tokenizer, 0, params, out, dtype, config)


def _refuse_full(out: pathlib.Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")


def _write(
    model, tokenizer, step: int, params, out: pathlib.Path, dtype: str, config, prefix: str = ""
) -> None:
    """Writes beside `out` and renames, so that there is all or nothing."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.partial-", dir=out.parent) as partial:
        tensors = hf.to_tensors(params, model, dtype)
        written = WeightStore(partial, keep=1).write(step, tensors, config, prefix=prefix)
        for name, content in tokenizer.hf_files().items():
            (written / name).write_bytes(content)
        written.rename(out)


def _config(settings: Settings, model, tokenizer, dtype: str) -> dict:
    """The content of config.json: the published model's, or the shape and the tokens that end a completion."""
    if settings.model.path:
        path = parts.model_directory(settings) / "config.json"
        config = json.loads(path.read_text("utf-8"))
        # transformers 5 writes it in place of torch_dtype, and would believe it.
        config.pop("dtype", None)
        return config | {"torch_dtype": dtype}
    return hf.write_config(model) | parts.ends_of(tokenizer) | {"torch_dtype": dtype}
