"""Export: a checkpoint as a Hugging Face directory, for transformers, SGLang, or `model.path` of a new run."""

import json
import pathlib
import tempfile

from jaxrl_async.config.settings import Settings
from jaxrl_async.models import hf
from jaxrl_async.roles import parts
from jaxrl_async.weights.store import WeightStore


def export(
    settings: Settings, workdir: pathlib.Path, step: int | None, out: pathlib.Path, *, dtype: str
) -> int:
    """Writes config.json, safetensors with their digests (manifest.json) and the tokenizer's files, all or none.

    Args:
      settings: the run's settings.
      workdir: its directory.
      step: the checkpoint; None is the last one.
      out: the directory to write, new or empty.
      dtype: "float32" | "bfloat16", of the tensors.

    Returns:
      The step of the checkpoint.

    Raises:
      CheckpointError: no such checkpoint, or one of another shape.
      FileExistsError: `out` is not empty.
      OSError, ValueError: `out` cannot be written, or the files at model.path are missing or damaged.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")
    tokenizer = parts.tokenizer_of(settings, workdir)
    model = parts.model_config_of(settings, tokenizer)
    step, params = parts.checkpoint_params(settings, workdir, step)
    config = _config(settings, model, tokenizer) | {"torch_dtype": dtype}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.partial-", dir=out.parent) as partial:
        written = WeightStore(partial, keep=1).write(
            step, hf.to_tensors(params, model, dtype), config
        )
        for name, content in tokenizer.hf_files().items():
            (written / name).write_bytes(content)
        written.rename(out)
    return step


def _config(settings: Settings, model, tokenizer) -> dict:
    """The content of config.json: the published model's, or the shape and the tokens that end a completion."""
    if settings.model.path:
        path = pathlib.Path(settings.model.path) / "config.json"
        config = json.loads(path.read_text("utf-8"))
        # transformers 5 writes it in place of torch_dtype, and would believe it.
        config.pop("dtype", None)
        return config
    ends = {"eos_token_id": list(tokenizer.stop_token_ids), "pad_token_id": tokenizer.pad_id}
    return hf.write_config(model) | ends | {"bos_token_id": None}
