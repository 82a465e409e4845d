"""What the learner's benchmarks share: shapes of models, a learner's programs, made-up batches, quartiles.

It knows nothing of what is compared.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.config.settings import Learner
from jaxrl_async.learner import optimizer, packing
from jaxrl_async.learner.train_step import TrainStep
from jaxrl_async.models import sharding, transformer
from jaxrl_async.types import NOT_SAMPLED, Batch, Group, Trajectory

MODELS = {
    "smoke": dict(vocab_size=8, num_layers=1, model_dim=8, num_heads=2, num_kv_heads=2, head_dim=4, mlp_dim=16),
    "quickstart": dict(
        vocab_size=14, num_layers=2, model_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=192
    ),
    "17m": dict(
        vocab_size=4096, num_layers=8, model_dim=384, num_heads=6, num_kv_heads=6, head_dim=64, mlp_dim=1152
    ),
    "100m": dict(
        vocab_size=8192, num_layers=12, model_dim=768, num_heads=12, num_kv_heads=12, head_dim=64, mlp_dim=2304
    ),
}  # fmt: skip


def model_config(shape: dict[str, Any], *, remat: bool = False) -> transformer.ModelConfig:
    """A model of the shape of Qwen3, in float32 on a CPU and in bfloat16 elsewhere, unless `shape` says otherwise."""
    plain = dict(rope_theta=10_000.0, rope_scaling=None, norm_eps=1e-6, remat=remat)
    plain |= dict(qk_norm=True, attention_bias=False, tied_embeddings=True)
    plain["dtype"] = "float32" if jax.devices()[0].platform == "cpu" else "bfloat16"
    return transformer.ModelConfig(**plain | shape)


def one_device() -> jax.sharding.Mesh:
    return sharding.make_mesh(1, 1, 1, jax.devices()[:1])


def make_train_step(
    config: transformer.ModelConfig,
    *,
    loss: LossConfig | None = None,
    learning_rate: float = 1e-5,
    num_minibatches: int = 1,
    num_blocks: int = 1,
    offload_moments: bool = False,
    head_chunk: int | None = None,
    attention_kernel: str | None = None,
) -> TrainStep:
    """A learner's programs on one device, with Adam; the default loss and kernel unless others are given."""
    settings = Learner(
        learning_rate=learning_rate,
        num_minibatches=num_minibatches,
        blocks=num_blocks,
        offload_moments=offload_moments,
        head_chunk_tokens=head_chunk or 0,
        **({"attention_kernel": attention_kernel} if attention_kernel else {}),
    )
    return TrainStep(
        config,
        one_device(),
        loss=loss or LossConfig(),
        learner=settings,
        temperature=1.0,
        optimizer=optimizer.make_optimizer(settings),
    )


def make_trajectory(
    rng: np.random.Generator, prompt: np.ndarray, completion: int, *, vocab_size: int, version: int
) -> Trajectory:
    """Random tokens behind a prompt, all sampled by one version, with about a uniform policy's log-probs.

    Args:
      rng: draws the tokens and the log-probs.
      prompt: int [P].
      completion: tokens after it.
      vocab_size: V.
      version: ≥ 0, of the sampled tokens.
    """
    length = len(prompt) + completion
    mask = np.arange(length) >= len(prompt)
    logprobs = -np.log(vocab_size) + 0.1 * rng.normal(size=length)
    tokens = np.append(prompt, rng.integers(0, vocab_size, completion))
    return Trajectory(
        tokens=tokens.astype(np.int32),
        logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        versions=np.where(mask, version, NOT_SAMPLED).astype(np.int32),
        mask=mask,
        prompt_length=len(prompt),
    )


def full_rows(
    work: Mapping[str, int], *, vocab_size: int, num_microbatches: int, versions: Sequence[int]
) -> list[Batch]:
    """Microbatches of full rows: each holds as many made-up trajectories of one length as fit.

    Args:
      work: "rows" of a microbatch, "row_tokens", and tokens of a "prompt" and of a "completion".
      vocab_size: V.
      num_microbatches: ≥ 1.
      versions: of the trajectories' tokens, which take turns on them.
    """
    rng, groups = np.random.default_rng(0), []
    per_row = work["row_tokens"] // (work["prompt"] + work["completion"])
    indexes = range(work["rows"] * num_microbatches * per_row)
    for index, version in zip(indexes, itertools.cycle(versions), strict=False):
        prompt = rng.integers(0, vocab_size, work["prompt"])
        trajectory = make_trajectory(
            rng, prompt, work["completion"], vocab_size=vocab_size, version=version
        )
        groups.append(Group(index, 0, (trajectory,)))
    learner = Learner(microbatch_rows=work["rows"], row_tokens=work["row_tokens"])
    advantages = rng.normal(size=(len(groups), 1)).astype(np.float32)
    return packing.Packer(learner)(groups, advantages, last=True)
