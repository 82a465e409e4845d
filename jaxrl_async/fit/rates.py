"""The rates of `simulate` from data sheets: what a chip would reach at half of its published peaks.

Published: peak FLOPs and bandwidth of the memory (`targets.CHIPS`). Assumed, not measured: SHARE of both, LINK_BYTES a
second, a server on one chip with weights, keys and values in bfloat16. `measure` gives the rates of a real server.
"""

import math
import statistics

from jaxrl_async.fit import flops as flops_of
from jaxrl_async.fit.targets import Chip
from jaxrl_async.models.transformer import ModelConfig, abstract_trained

SHARE = 0.5  # of the peaks
LINK_BYTES = 3e9  # per second, 25 Gbit/s, of the network that carries weights
UPDATE_BYTES = 28  # a parameter: gradient, parameter and two moments in float32, read, and all but the first written


def rates_of(
    chip: Chip,
    config: ModelConfig,
    *,
    context_tokens: float,
    learner_devices: int,
    num_updates: int,
) -> dict[str, float]:
    """The rates of a plan.

    A decode step reads the weights once, and for each request the keys and values that its layers see; it computes 2
    FLOPs a parameter for each. The learner computes 6 FLOPs a parameter and token, 8 with remat, 2 less where it is
    frozen beside adapters. A push writes the trained weights, and pauses the servers while they read them.

    Args:
      chip: of learner and servers.
      context_tokens: that a request has on average while it runs.
      learner_devices: over which a step is divided.
      num_updates: of the optimizer in a step.

    Returns:
      request_rate and server_rate, tokens/s; step_secs, token_secs, push_secs and pause_secs, seconds.
    """
    c = config
    table = c.model_dim * c.vocab_size
    # By a token: it looks its embedding up, and goes to some of the experts.
    num_used = flops_of.used_by_a_token(c) + table
    num_params = num_used + (0 if c.tied_embeddings else table)
    unused_experts = c.num_experts - c.experts_per_token
    num_params += len(c.expert_layers) * 3 * c.model_dim * unused_experts * c.expert_mlp_dim
    flops, bandwidth = SHARE * chip.peak_flops, SHARE * chip.bandwidth
    seen_tokens = context_tokens
    if c.windows:
        seen_tokens = statistics.fmean(min(w or math.inf, context_tokens) for w in c.windows)
    cache_bytes = 2 * 2 * c.num_layers * c.num_kv_heads * c.head_dim * seen_tokens
    num_trained = flops_of.size(abstract_trained(c)) if c.lora else num_params
    load_secs = 2 * num_trained / LINK_BYTES
    # Forwards, and backwards to inputs and to weights, if they are trained; remat computes the first again.
    passes = 3 + bool(c.remat) - (c.lora is not None)
    return {
        "request_rate": bandwidth
        / (2 * num_used),  # of one request; many together read all experts
        "server_rate": 1 / (2 * num_used / flops + cache_bytes / bandwidth),
        "step_secs": num_updates * UPDATE_BYTES * num_trained / (bandwidth * learner_devices),
        "token_secs": 2 * passes * num_used / (flops * learner_devices),
        "push_secs": 2 * load_secs,
        "pause_secs": load_secs,
    }
