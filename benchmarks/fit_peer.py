"""MaxText's train step, compiled ahead of time for a TPU that is not there, as text for `fit --compare`.

    git clone https://github.com/AI-Hypercomputer/maxtext && git -C maxtext checkout e591f30cb
    python benchmarks/fit_peer.py --install=peer
    python benchmarks/fit_peer.py --maxtext=maxtext --packages=peer --out=maxtext.txt.gz
    python -m jaxrl_async fit --config=configs/gsm8k_qwen2_5_1p5b.py --target=v5e-16 --config.learner.fsdp=16 \
        --config.learner.attention_kernel=splash --config.learner.microbatch_rows=16 \
        --config.learner.shared_prompts=False --compare=maxtext.txt.gz

By MaxText's own `train_compile`: Qwen2.5-1.5B, a row of 4,096 tokens on each device, full remat, splash, float32
parameters, bfloat16 compute, AdamW within the step. --tuned adds its flags for v5e, without windowed einsums. Five
minutes on two cores.

--install puts MaxText's Python packages, without what they need themselves, into a directory beside JAX, libtpu and the
project's own. Of those that compiling never calls (TensorFlow, Google Cloud) there are stand-ins. What was compared:
docs/fit.md.
"""

import argparse
import gzip
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from unittest import mock

PACKAGES = """
antlr4-python3-runtime==4.9.3 aqtp==0.9.0 attrs drjax==0.2.1 einshape immutabledict jaxtyping==0.3.11 jsonlines
ml-collections ml-goodput-measurement==0.2.3 omegaconf==2.4.0 pathwaysutils==0.1.13 qwix==0.1.8 sentencepiece sqlitedict
tiktoken tokamax==0.0.12 typeguard==2.13.3 wadler-lindig
""".split()
STAND_INS = """
cloud_accelerator_diagnostics cloud_tpu_diagnostics datasets fastapi gcsfs google.api_core google.cloud
google_cloud_mldiagnostics seqio tensorflow tensorflow_datasets tensorflow_text uvicorn
""".split()
# Of MaxText's benchmarks/xla_flags_library.py: DATA_PARALLEL_OVERLAP, CF_FOR_ALL_GATHER and DISABLE_COLLECTIVE_MATMUL.
TUNED = (
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true "
    "--xla_tpu_enable_async_collective_fusion=true --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true "
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true "
    "--xla_enable_async_all_gather=true --xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
)
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that take any call, in the place of packages that are not installed."""

    def find_spec(self, name, path, target=None):
        if any(name == absent or name.startswith(f"{absent}.") for absent in STAND_INS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = mock.MagicMock(name=spec.name)
        module.__name__, module.__path__, module.__spec__ = spec.name, [], spec
        return module

    def exec_module(self, module):
        pass


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--install", type=pathlib.Path, help="put MaxText's packages there, and end"
    )
    parser.add_argument("--maxtext", type=pathlib.Path, help="a checkout")
    parser.add_argument("--packages", type=pathlib.Path, help="the directory of --install")
    parser.add_argument("--model", default="qwen2.5-1.5b", help="of MaxText's configs/models")
    parser.add_argument("--target", default="v5e-16")
    parser.add_argument("--tuned", action="store_true", help="with MaxText's flags for v5e")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of MaxText"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("maxtext.txt.gz"))
    args = parser.parse_args(argv)
    if args.install:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", f"--target={args.install}"]
        subprocess.run([*command, *PACKAGES], check=True)
        return
    if not args.maxtext or not args.packages:
        parser.error("needs --maxtext and --packages, or --install")
    words = [*args.set, f"compile_xla_flags={TUNED}"] if args.tuned else args.set
    with tempfile.TemporaryDirectory() as directory:
        source = _readable(args.maxtext / "src", pathlib.Path(directory))
        compile_step(source, args.packages, args.model, args.target, words, args.out)


def _readable(source: pathlib.Path, copy: pathlib.Path) -> pathlib.Path:
    """A copy of the modules and configs; Python 3.11 knows no `type X = …`."""
    for path in source.rglob("*"):
        if path.suffix in (".py", ".yml"):
            to = copy / path.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(re.sub(r"(?m)^type (\w+) = ", r"\1 = ", path.read_text("utf-8")), "utf-8")
    return copy


def compile_step(source, packages, model: str, target: str, words: list[str], out) -> None:
    """Compiles the train step and writes its scheduled text, with the compiler's name in the first line."""
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(source))
    sys.path.append(str(packages))
    sys.meta_path.append(_StandIns())
    from maxtext.trainers.pre_train import train_compile

    compiled_of = train_compile.jit_and_compile

    def kept(*args, **kwargs):
        compiled = compiled_of(*args, **kwargs)
        version = importlib.metadata.version
        with gzip.open(out, "wt", encoding="utf-8") as file:
            file.write(f"// compiler: libtpu {version('libtpu')}, jax {version('jax')}\n")
            file.write(compiled.as_text())
        memory = compiled.memory_analysis().peak_memory_in_bytes / (1 << 30)
        print(f"written: {out}; it needs {memory:.2f} GiB of a device")
        raise SystemExit

    train_compile.jit_and_compile = kept
    settings = {
        "model_name": model,
        "compile_topology": target,
        "compile_topology_num_slices": 1,
        "per_device_batch_size": 1,
        "max_target_length": 4096,
        "remat_policy": "full",
        "attention": "flash",
        "dataset_type": "synthetic",
        "enable_checkpointing": "false",
        "skip_jax_distributed_system": "true",
        "run_name": "fit",
        "base_output_directory": str(source / "out"),
    }
    given = [f"{key}={value}" for key, value in settings.items()]
    base = source / "maxtext" / "configs" / "base.yml"
    train_compile.main(["", str(base), *given, *words])


if __name__ == "__main__":
    main()
