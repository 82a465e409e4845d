"""Makes a mixture of experts of a dense Llama: copies of its MLP behind a random router.

    python launch/upcycle.py checkpoints/SmolLM2-135M-Instruct checkpoints/SmolLM2-8x135M

The weights of a token's experts add up to 1 and its experts are equal, so logits are those of the dense model; training
makes experts differ. The result is a Mixtral: `--config.model.path=checkpoints/SmolLM2-8x135M`.

Source: Sparse Upcycling (Komatsuzaki et al., arXiv 2212.05055).
"""

import argparse
import dataclasses
import json
import pathlib
import shutil

import numpy as np
import safetensors.numpy
from flax import nnx

from jaxrl_async.models import hf, transformer


def upcycled(
    params: nnx.State,
    config: transformer.ModelConfig,
    *,
    num_experts: int,
    experts_per_token: int,
    seed: int,
) -> tuple[nnx.State, transformer.ModelConfig]:
    """Parameters and shape of the mixture.

    Args:
      params: of the dense model, on the host.
      config: of family llama, as Mixtral has no norms of queries and keys, and no biases.

    Raises:
      ValueError: another shape; names it.
    """
    if config.family != "llama" or config.qk_norm or config.attention_bias:
        raise ValueError(
            f"only a Llama or Mistral can become a Mixtral, got {config.family = }, {config.qk_norm = }, "
            f"{config.attention_bias = }"
        )
    changes = {"num_experts": num_experts, "experts_per_token": experts_per_token}
    config = dataclasses.replace(config, family="mixtral", expert_mlp_dim=config.mlp_dim, **changes)
    rng, dense = np.random.default_rng(seed), dict(nnx.to_flat_state(params))

    def of(path, param):
        if path[1:2] != ("experts",):
            return param.replace(np.asarray(dense[path].get_value()))
        name = path[-1].removesuffix("_kernel")
        if name == "router":
            scale = config.model_dim**-0.5
            return param.replace(rng.normal(0, scale, param.shape).astype(np.float32))
        kernel = np.asarray(dense["blocks", name, "kernel"].get_value())
        return param.replace(np.repeat(kernel[:, None], num_experts, axis=1))

    return nnx.map_state(of, transformer.abstract_params(config)), config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("dense", type=pathlib.Path, help="directory of a Llama")
    parser.add_argument("out", type=pathlib.Path, help="directory to write, new")
    parser.add_argument("--experts", type=int, default=8, help="of each layer")
    parser.add_argument("--per-token", type=int, default=2, help="that compute a token")
    parser.add_argument("--seed", type=int, default=0, help="of the router")
    args = parser.parse_args()
    dense = hf.read_config(args.dense, dtype="float32", remat=False)
    params, config = upcycled(
        hf.from_tensors(hf.read_tensors(args.dense), dense),
        dense,
        num_experts=args.experts,
        experts_per_token=args.per_token,
        seed=args.seed,
    )
    weights = ("*.safetensors", "*.safetensors.index.json", "manifest.json")
    shutil.copytree(args.dense, args.out, ignore=shutil.ignore_patterns(*weights))
    kept = json.loads((args.dense / "config.json").read_text("utf-8"))
    own = hf.write_config(config)
    own |= {
        name: kept[name] for name in ("max_position_embeddings", "eos_token_id") if name in kept
    }
    (args.out / "config.json").write_text(json.dumps(own, indent=2))
    tensors = dict(hf.to_tensors(params, config, "float32"))
    safetensors.numpy.save_file(tensors, args.out / "model.safetensors", {"format": "pt"})
    print(f"{args.out}: {args.experts} experts a layer, {args.per_token} for each token")


if __name__ == "__main__":
    main()
