"""The tunix side of peers.py: a long-lived process of its own environment, which works when it is its turn.

    python benchmarks/peers_tunix.py WORKLOAD      WORKLOAD: JSON, from peers.workload_of

A turn is a line of JSON on standard input, {"measure": "training", "count": 5}, and is answered by one on standard
output, {"secs": [...]}: the seconds of each repetition. The measures:

    training      one GRPO update on a batch that lies ready
    generation    the completions of every prompt of a step
    step          generation, rewards, advantages, update: GRPOLearner.train itself, which asks for its next batch
                  when it is done with one

After the first turn of "step" no other measure can be asked for. It knows nothing of what it is compared with.
"""

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

ENDLESS = 10**9  # steps; tunix compares with a number after each


class Characters:
    """One token per character, ids from 2. Padding and end have ids outside the vocabulary: none is ever sampled."""

    def __init__(self, alphabet: str):
        self._texts = ["", "", *alphabet]
        self._ids = {character: i for i, character in enumerate(alphabet, start=2)}

    def encode(self, text: str) -> list[int]:
        return [self._ids[character] for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join([self._texts[i] for i in ids])

    def bos_id(self) -> None:
        return None

    def pad_id(self) -> int:
        return len(self._texts)

    def eos_id(self) -> int:
        return len(self._texts) + 1


class Peer:
    """A model, its optimizer and sampler, and the GRPO learner over them."""

    def __init__(self, workload: dict):
        self._workload = workload
        self._random = random.Random(0)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
        length = workload["prompt_tokens"] + workload["completion_tokens"]
        self._cluster = rl_cluster.RLCluster(
            actor=self._make_model(),
            tokenizer=Characters(workload["alphabet"]),
            cluster_config=rl_cluster.ClusterConfig(
                # One mesh: trainer and sampler share their weights, nothing is copied between them.
                role_to_mesh={role: mesh for role in rl_cluster.Role},
                rollout_engine="vanilla",
                training_config=rl_cluster.RLTrainingConfig(
                    actor_optimizer=optax.chain(
                        optax.clip_by_global_norm(workload["max_grad_norm"]),
                        optax.adam(
                            workload["learning_rate"],
                            b1=workload["adam_b1"],
                            b2=workload["adam_b2"],
                            eps=workload["adam_eps"],
                        ),
                    ),
                    eval_every_n_steps=ENDLESS,
                    max_steps=ENDLESS,
                ),
                rollout_config=base_rollout.RolloutConfig(
                    max_tokens_to_generate=workload["completion_tokens"],
                    max_prompt_length=workload["prompt_tokens"],
                    kv_cache_size=length,
                    temperature=workload["temperature"],
                    top_p=1.0,
                    top_k=None,
                ),
            ),
        )
        # The least that its GRPO can do: no reference, no second forward for the ratio's denominator.
        config = grpo_learner.GRPOConfig(
            num_generations=workload["group_size"],
            num_iterations=1,
            beta=0.0,
            epsilon=workload["clip"],
        )
        self._learner = grpo_learner.GRPOLearner(self._cluster, config, reward_fns=rewards)
        self._example = self._make_example()

    def training(self) -> None:
        self._cluster.update_actor([self._example], None)
        jax.block_until_ready(nnx.state(self._cluster.actor_trainer.model))

    def generation(self) -> None:
        prompts = np.repeat(self._batch()["prompts"], self._workload["group_size"])
        completions = self._cluster.generate(prompts.tolist()).tokens
        assert {len(c) for c in completions} == {self._workload["completion_tokens"]}

    def steps(self, turns: Iterator[dict], answer: Callable[[list[float]], None]) -> None:
        """Trains until there are no more turns."""
        self._learner.train(self._batches(turns, answer))

    def _batches(self, turns, answer):
        for turn in turns:
            secs = []
            for _ in range(turn["count"]):
                start = time.perf_counter()
                yield self._batch()
                secs.append(time.perf_counter() - start)
            answer(secs)

    def _batch(self) -> dict[str, np.ndarray]:
        """Digits to be reversed, as jaxrl_async.tasks.token_reversal asks for them."""
        length = self._workload["prompt_tokens"] - 1
        digits = [
            "".join(self._random.choices("0123456789", k=length))
            for _ in range(self._workload["prompts"])
        ]
        return {
            "prompts": np.array([f"{text}>" for text in digits]),
            "answers": np.array([text[::-1] for text in digits]),
        }

    def _make_model(self) -> nnx.Module:
        model = self._workload["model"]
        config = qwen3.ModelConfig(
            num_layers=model["num_layers"],
            vocab_size=len(self._workload["alphabet"]) + 2,
            embed_dim=model["model_dim"],
            hidden_dim=model["mlp_dim"],
            num_heads=model["num_heads"],
            num_kv_heads=model["num_kv_heads"],
            head_dim=model["head_dim"],
            rope_theta=int(model["rope_theta"]),
            norm_eps=model["norm_eps"],
            use_tied_embedding=model["tied_embeddings"],
        )
        return qwen3.Qwen3(config, rngs=nnx.Rngs(0))

    def _make_example(self) -> grpo_learner.TrainExample:
        """Made-up trajectories of full length."""
        rng, workload = np.random.default_rng(0), self._workload
        samples = workload["prompts"] * workload["group_size"]

        def tokens(length: int) -> jax.Array:
            return jax.numpy.asarray(
                rng.integers(2, len(workload["alphabet"]) + 2, (samples, length))
            )

        prompt, completion = (
            tokens(workload["prompt_tokens"]),
            tokens(workload["completion_tokens"]),
        )
        return grpo_learner.TrainExample(
            prompt_ids=prompt,
            prompt_mask=jax.numpy.ones_like(prompt, bool),
            completion_ids=completion,
            completion_mask=jax.numpy.ones_like(completion, bool),
            advantages=jax.numpy.asarray(rng.normal(size=samples), jax.numpy.float32),
            ref_per_token_logps=None,
            old_per_token_logps=None,
        )


def rewards(prompts: list[str], completions: list[str], answers: list[str], **_) -> list[float]:
    """The share of positions that are right."""
    del prompts
    return [
        sum(a == b for a, b in zip(completion, answer, strict=False))
        / max(len(completion), len(answer))
        for completion, answer in zip(completions, answers, strict=True)
    ]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no answer.

    def answer(secs: list[float]) -> None:
        print(json.dumps({"secs": secs}), file=answers, flush=True)

    peer = Peer(json.loads(sys.argv[1]))
    turns = map(json.loads, sys.stdin)
    for turn in turns:
        if turn["measure"] == "step":
            peer.steps(itertools.chain([turn], turns), answer)
            break
        repeat, secs = getattr(peer, turn["measure"]), []
        for _ in range(turn["count"]):
            start = time.perf_counter()
            repeat()
            secs.append(time.perf_counter() - start)
        answer(secs)


if __name__ == "__main__":
    main()
