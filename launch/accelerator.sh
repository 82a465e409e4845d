#!/usr/bin/env bash
# Ten minutes on a TPU or GPU without a network: carries what its Python lacks, and measures (benchmarks/accelerator.py).
#
#   launch/accelerator.sh wheels DIR                      here: downloads wheels for Python 3.12, x86-64
#   launch/accelerator.sh [--dry-run] run DIR [FLAG …]    there, in a copy of this tree: installs the missing ones, measures
#
# Nothing is installed into the machine's Python: what it lacks lies in a folder of its own, made anew by each run.
# JAX with its CUDA or TPU plug-in must be there. PYTHON names the Python (python3); flags are the benchmark's. --dry-run
# says what is there already and what is taken from DIR, and prints the command.
set -euo pipefail

usage() { sed -En '2,/^[^#]/s/^#( |$)//p' "$0"; } # the comment at the head
dry=
[ "${1:-}" = --dry-run ] && { dry=1 && shift; }
case ${1:-} in -h | --help) usage && exit ;; wheels | run) ;; *) usage >&2; exit 2 ;; esac
[ $# -ge 2 ] || { usage >&2; exit 2; }
verb=$1 folder=$2
shift 2
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."
# The project's requirements, and theirs that an image with JAX, Flax and PyTorch may lack. The last line is the extra gpu's.
packages=(absl-py aiohttp 'flax>=0.12.8,<0.13' 'grain>=0.2.18' 'grpcio>=1.73.1' jinja2 'ml_collections>=1.1' 'ml_dtypes>=0.5'
    'numpy>=2.0' 'optax>=0.2.8,<0.3' 'orbax-checkpoint>=0.12.8,<0.13' 'protobuf>=6.31,<8' psutil safetensors 'tensorboardX>=2.6.2'
    tokenizers tqdm 'array_record>=0.8.1' cloudpickle portpicker 'etils>=1.13' pytest pytest-asyncio pytest-xdist hypothesis
    sortedcontainers huggingface_hub matplotlib scipy
    'tokamax>=0.0.17' einshape immutabledict jaxtyping wadler_lindig 'pydantic>=2.11' pydantic-core annotated-types typing-inspection qwix)
# These are large, and on every image with JAX.
never=(absl-py aiohttp jinja2 ml_dtypes numpy psutil safetensors tokenizers tqdm pytest pytest-xdist huggingface_hub
    matplotlib scipy)

if [ "$verb" = wheels ]; then
    mkdir -p "$folder"
    platforms=()
    for version in 2_34 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${version}_x86_64"); done
    for package in "${packages[@]}"; do
        name=${package%%[<>=]*}
        case " ${never[*]} " in *" $name "*) continue ;; esac
        "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version=3.12 \
            --implementation=cp "${platforms[@]}" --platform=manylinux2014_x86_64 --dest "$folder" "$package"
    done
    git describe --always --dirty=+ --exclude='*' >"$folder/commit"
    du -sm "$folder" | awk '{ print $1 " MiB of wheels in " $2 }'
    exit
fi

missing=$("$python" - "${packages[@]}" <<'END'
import importlib.metadata
import sys

from packaging.requirements import Requirement

for text in sys.argv[1:]:
    wanted = Requirement(text)
    try:
        found = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        found = ""
    fits = found and wanted.specifier.contains(found, prereleases=True)
    print(f"{text}: {'there, ' + found if fits else 'carried, there is ' + (found or 'none')}", file=sys.stderr)
    if not fits:
        print(wanted.name)
END
)
if [ -n "$dry" ]; then
    echo "$python" benchmarks/accelerator.py "$@"
    exit
fi
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [ -n "$missing" ]; then
    # shellcheck disable=SC2086 # names, without spaces
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --find-links "$folder" \
        --target "$site" $missing
fi
# tokamax imports this module of xprof, of 100 MB, for its own benchmarks alone.
mkdir -p "$site/xprof/cli/tools"
touch "$site"/xprof/{,cli/,cli/tools/}__init__.py "$site/xprof/cli/tools/get_kernel_stats_tool.py"
JAXRL_COMMIT=$(cat "$folder/commit" 2>/dev/null || true)
export JAXRL_COMMIT
PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}" "$python" benchmarks/accelerator.py "$@"
