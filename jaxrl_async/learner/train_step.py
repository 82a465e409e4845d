"""The three jitted programs of the learner, on a mesh: `score`, `accumulate`, `update`.

Microbatches add up to sums and `update` divides once, so the cut of a minibatch into microbatches, hosts and devices
does not change its gradient. Independent of groups, rewards and the queue.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.config.settings import Learner
from jaxrl_async.learner import blocks
from jaxrl_async.learner.optimizer import map_state, stochastic_round
from jaxrl_async.learner.statistics import Statistics
from jaxrl_async.models import (
    attention,
    axes,
    experts,
    gpu_attention,
    logprobs,
    sharding,
    transformer,
)
from jaxrl_async.objectives.objective import objective
from jaxrl_async.objectives.tokens import Tokens
from jaxrl_async.publishing import scored
from jaxrl_async.types import Batch

jax.tree_util.register_dataclass(Batch)

# Of the TPU's compiler: computation goes on while weights are gathered, on a v5p as it does on a v5e. It takes both.
_TPU_OPTIONS = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
}
# On many devices: it gathers small parts, and does not sum them.
_RING_OPTIONS = {"xla_tpu_prefer_async_allgather_to_allreduce": "true"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that an update changes. `update` consumes it: copy arrays that must outlive the call."""

    params: nnx.State  # that are trained: all, or the adapters alone; learner.param_dtype
    opt_state: optax.OptState
    updates: jax.Array  # int32 [], updates applied so far


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Unnormalised sums over the microbatches of a minibatch. `accumulate` and `update` consume it."""

    # Of several slices each array has one more axis, the first: what each slice has summed.
    grads: nnx.State  # float32, of the summed loss, by the block's parameters: `blocks.own`
    sums: jax.Array  # float32 [buckets, columns] of `Statistics`, over the original mask
    maxima: jax.Array  # float32 [columns] of `Statistics`, ≥ 0
    block: int = dataclasses.field(default=0, metadata={"static": True})  # that the step trains


class TrainStep:
    """The programs of one model, mesh, loss and optimizer. Each compiles once, and once for each of `learner.blocks`.

    Of a model with adapters `params` are these, everywhere below, and `freeze` takes the rest.
    Batches are of one shape, in NumPy; with several processes, each hands in its own rows.
    """

    def __init__(
        self,
        config: transformer.ModelConfig,
        mesh: jax.sharding.Mesh,
        *,
        loss: LossConfig,
        learner: Learner,
        temperature: float,
        optimizer: optax.GradientTransformation,
        keeps_params: bool = False,
        device_lock: Callable[[], contextlib.AbstractContextManager] | None = None,
    ):
        """Declares the programs; nothing is compiled yet.

        Args:
          learner: num_steps, max_grad_norm, num_minibatches, blocks, offload_moments, head_chunk_tokens,
            attention_kernel, gradient_sums, shared_prompts, replay_routes, param_dtype, optimizer and rate_by_ess are
            read.
          temperature: the sampler's, > 0: log-probs are of logits / temperature.
          keeps_params: an update leaves the parameters before it to others who hold them, and makes new ones.
          device_lock: held while a program runs, to its end, where others use the device too.

        Raises:
          ValueError: a clip against 'current' with several minibatches, a temperature that is not > 0, more blocks than
            layers, or an attention kernel that does not fit the model's layers or the devices.
        """
        device, shape = mesh.devices.flat[0], (config.windows, config.head_dim)
        part = learner.row_tokens // learner.context
        # What "auto" stands for here.
        self.attention_kernel = kernel = attention.choose(
            learner.attention_kernel, device, part, config.dtype, *shape
        )
        gpu_attention.check_device(kernel, device)
        attention.check_model(kernel, *shape)
        loss.check_minibatches(learner.num_minibatches)
        if temperature <= 0:
            raise ValueError(f"temperature must be > 0, got {temperature}")
        config = dataclasses.replace(config, ring_sums=learner.gradient_sums == "ring")
        self._config, self._loss, self._optimizer = config, loss, optimizer
        self._mesh, self._slices = mesh, mesh.shape[axes.SLICES]
        self._learner, self._temperature = learner, temperature
        self._scores_anchor = loss.needs_recompute and learner.num_minibatches > 1
        if loss.router_balance and not config.num_experts:
            raise ValueError(
                f"loss.router_balance needs a model with experts, got {loss.router_balance}"
            )
        self._statistics = Statistics(
            loss, has_experts=config.num_experts > 0, by_sequence=learner.rate_by_ess
        )
        self._blocks = blocks.Blocks(learner.blocks, config.num_layers, learner.num_minibatches)
        self._rows = rows = sharding.batch_sharding(mesh)
        # XLA's CPU collectives hang when programs of several devices pile up on few threads.
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self._device_lock = device_lock or contextlib.nullcontext
        self._one_at_a_time = device_lock is not None or (mesh.size > 1 and on_cpu)
        state, accumulator = make_shardings(config, mesh, optimizer)
        self._everywhere = everywhere = state.updates
        self._on_devices = state.opt_state
        if learner.offload_moments:
            in_host_memory = optax.tree_utils.tree_map_params(
                optimizer, lambda s: s.with_memory_kind("pinned_host"), state.opt_state
            )
            state = dataclasses.replace(state, opt_state=in_host_memory)
        self._state_shardings = state
        self._accumulator_shardings = [
            dataclasses.replace(accumulator, block=block) for block in range(learner.blocks)
        ]
        reference = state.params if loss.needs_reference else None
        self._base: nnx.State | None = None
        self._base_shardings = frozen = frozen_shardings(config, mesh)
        # Every output names its sharding: a different one would compile the next program again.
        self._init = jax.jit(
            self._init_program,
            in_shardings=(state.params,),
            out_shardings=(state.opt_state, state.updates),
        )
        self._cast = jax.jit(
            functools.partial(_cast, dtype=learner.param_dtype), out_shardings=state.params
        )
        self._zeros = [
            jax.jit(functools.partial(self._zeros_program, own.block), out_shardings=own)
            for own in self._accumulator_shardings
        ]
        on_tpu = mesh.devices.flat[0].platform == "tpu"
        options = _TPU_OPTIONS | (_RING_OPTIONS if config.ring_sums else {}) if on_tpu else None
        self._score = jax.jit(
            self._by_slice(self._score_program, divided=(2,)),
            in_shardings=(state.params, frozen, rows),
            out_shardings=rows,
            compiler_options=options,
        )
        self._score_prompts = jax.jit(
            self._score_prompts_program,
            static_argnums=2,
            in_shardings=(state.params, frozen),
            out_shardings=everywhere,
        )
        self._accumulate = [
            jax.jit(
                self._by_slice(self._accumulate_program, divided=(3, 4, 5)),
                in_shardings=(state.params, frozen, reference, own, rows, rows, everywhere),
                out_shardings=own,
                donate_argnums=3,
                compiler_options=options,
            )
            for own in self._accumulator_shardings
        ]
        self._update = [
            jax.jit(
                self._update_program,
                in_shardings=(state.params, _rest(state), own),
                out_shardings=(state, own, everywhere),
                donate_argnums=(1, 2) if keeps_params else (0, 1, 2),
            )
            for own in self._accumulator_shardings
        ]

    @property
    def runs_ahead(self) -> bool:
        """Whether calls return before the device is done."""
        return not self._one_at_a_time

    def freeze(self, base: nnx.State | None) -> None:
        """Takes the weights that are not trained, laid out as `frozen_shardings`; None where all are trained."""
        self._base = base

    def all_params(self, params: nnx.State) -> nnx.State:
        """All weights of the model: the trained ones, beside those of `freeze`, by reference."""
        return transformer.with_base(self._config, params, self._base)

    def init(self, params: nnx.State) -> TrainState:
        """The state before the first update. It holds float32 parameters themselves, not a copy."""
        rest = self._init(params)
        return TrainState(
            params if self._learner.param_dtype == "float32" else self._cast(params), *rest
        )

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of a state, for restoring a checkpoint."""
        params = transformer.abstract_trained(self._config)
        rest = jax.eval_shape(self._init_program, params)
        state = TrainState(jax.eval_shape(self._cast, params), *rest)
        return jax.tree.map(_abstract, state, self._state_shardings)

    def abstract_base(self) -> nnx.State | None:
        """Shapes, dtypes and shardings of the frozen weights; None where all are trained."""
        return jax.tree.map(
            _abstract, transformer.abstract_frozen(self._config), self._base_shardings
        )

    def abstract_accumulator(self) -> Accumulator:
        """Shapes, dtypes and shardings of an accumulator, of several blocks the first's."""
        zeros = jax.eval_shape(functools.partial(self._zeros_program, 0))
        return jax.tree.map(_abstract, zeros, self._accumulator_shardings[0])

    def abstract_moments(self) -> optax.OptState:
        """Shapes, dtypes and shardings of the optimizer's state in an update, of several blocks the first's."""
        state = self.abstract_state()
        cuts = self._cuts_of_state(state, 0).opt_state
        own = jax.eval_shape(lambda whole: blocks.own(whole, cuts), state.opt_state)
        return jax.tree.map(_abstract, own, self._on_devices)

    def zero_accumulator(
        self, policy_version: int = 0, spent: Accumulator | None = None
    ) -> Accumulator:
        """The accumulator at the start of a step.

        Args:
          policy_version: that the step starts from; it tells the block that the step trains.
          spent: of an update, at zero: returned where it has that block already.
        """
        block = self._blocks.at(policy_version)
        return spent if spent is not None and spent.block == block else self._zeros[block]()

    def warm_up(
        self, state: TrainState, padding: Batch, reference: nnx.State | None = None
    ) -> tuple[TrainState, Accumulator]:
        """Compiles every program that a step runs, by running it on padding.

        Args:
          state: consumed.
          padding: a microbatch without a token.
          reference: as in `accumulate`.

        Returns:
          The same state, as an update without a token is refused, and an accumulator at zero.
        """
        proximal = self.anchor(state.params, padding)
        for version in range(self._blocks.num):
            accumulator = self.zero_accumulator(version)
            accumulator = self.accumulate(
                state.params, accumulator, padding, proximal, version, reference
            )
            state, accumulator, _ = self.update(state, accumulator)
        return state, accumulator

    def trace(self, batch: Batch) -> dict[str, jax.stages.Traced]:
        """The programs of a step, for a microbatch of these shapes. Nothing runs: the mesh's devices need not exist.

        Args:
          batch: one microbatch of all processes, or its shapes.

        Returns:
          name → program: "score" where a step scores its anchor, "accumulate", "update". Of several blocks those of
          the first, whose backward pass runs through all layers.
        """
        state, rows, base = self.abstract_state(), self._rows, self.abstract_base()
        reference = state.params if self._loss.needs_reference else None
        batch = jax.tree.map(lambda leaf: _abstract(leaf, rows), batch)
        accumulator = self.abstract_accumulator()
        version = _abstract(np.int32(0), self._everywhere)
        programs, proximal = {}, None
        if self._scores_anchor:
            programs["score"] = self._score.trace(state.params, base, batch)
            proximal = _abstract(batch.behavior_logprobs, rows)
        arguments = (state.params, base, reference, accumulator, batch, proximal, version)
        programs["accumulate"] = self._accumulate[0].trace(*arguments)
        programs["update"] = self._update[0].trace(state.params, _rest(state), accumulator)
        return programs

    def place(self, batch: Batch) -> Batch:
        """Puts a batch on the devices; returns one that is there already."""
        if isinstance(batch.tokens, jax.Array):
            return batch
        if jax.process_count() == 1:
            return jax.device_put(batch, self._rows)
        return jax.tree.map(self._place_rows, batch)

    def score(self, params: nnx.State, batch: Batch) -> jax.Array:
        """Log-probs of the batch's tokens at these weights, without a gradient.

        Returns:
          float32 [B, T], nats; finite but meaningless where the mask is False.
        """
        return self._run(self._score, params, self._base, self.place(batch))

    def score_prompts(self, params: nnx.State, num_tokens: int) -> jax.Array:
        """Log-probs of every token after each prompt of `publishing.scored`, of num_tokens tokens.

        Returns:
          float32 [K, V], nats, the same on every device; K is a multiple of the mesh's rows.
        """
        return self._run(self._score_prompts, params, self._base, num_tokens)

    def anchor(self, params: nnx.State, batch: Batch) -> jax.Array | None:
        """The proximal_logprobs of `accumulate`, at the weights that the step starts from.

        Returns:
          `score` if the loss needs it ('recompute', proximal_metrics) and the weights move within the step, else None:
          with one minibatch the anchor is the policy, which `accumulate` computes anyway.
        """
        return self.score(params, batch) if self._scores_anchor else None

    def accumulate(
        self,
        params: nnx.State,
        accumulator: Accumulator,
        batch: Batch,
        proximal_logprobs: jax.Array | None,
        policy_version: int,
        reference: nnx.State | None = None,
    ) -> Accumulator:
        """Adds a microbatch's gradient of the summed loss, and its sums and maxima.

        Policy, anchor and reference come from one program and one pass over the batch: "Periodic Asynchrony", Lu, Luo,
        arXiv 2511.18871. Anchor and policy are computed once where they have the same weights.

        Args:
          params: the weights to differentiate at.
          accumulator: consumed; its block's parameters are differentiated by.
          proximal_logprobs: from `anchor`, at the weights the step started from.
          policy_version: v_θ of the step, s − 1.
          reference: weights laid out as `params`, for a loss with a KL to them.

        Raises:
          ValueError: the loss needs reference or proximal_logprobs, which is None.
        """
        if self._loss.needs_reference and reference is None:
            raise ValueError("loss.kl_to = 'reference' needs the reference's weights")
        if self._scores_anchor and proximal_logprobs is None:
            raise ValueError("the loss needs log-probs at the step's first weights: see `anchor`")
        version = sharding.place(np.int32(policy_version), self._everywhere)
        reference = reference if self._loss.needs_reference else None
        return self._run(
            self._accumulate[accumulator.block],
            params,
            self._base,
            reference,
            accumulator,
            self.place(batch),
            proximal_logprobs,
            version,
        )

    def update(
        self, state: TrainState, accumulator: Accumulator
    ) -> tuple[TrainState, Accumulator, dict[str, jax.Array]]:
        """Divides by the minibatch's denominator, clips, and applies the optimizer.

        With several blocks it does so to the step's block alone, and policy/grad_norm is that block's.

        Args:
          state: consumed, but for its parameters with keeps_params.
          accumulator: consumed.

        Returns:
          The next state, with the same numbers where the loss or the gradient norm is not finite, as it is without
          a token; the accumulator at zero; the minibatch's metrics, float32 [] on the device, by the names of
          jaxrl_async.metrics, with "finite" (1 or 0) and "tokens". mismatch/ compares the weights that were
          differentiated at; only in a step's first minibatch are those the weights of policy_version.
        """
        program = self._update[accumulator.block]
        return self._run(program, state.params, _rest(state), accumulator)

    def num_compilations(self) -> int:
        """Programs compiled so far: at most one each of init and score, and of zeros, accumulate and update a block."""
        programs = (self._init, self._score, *self._zeros, *self._accumulate, *self._update)
        return sum(program._cache_size() for program in programs)

    def _place_rows(self, own):
        # With an explicit shape, rows that several processes hold are refused instead of mixed.
        shape = (len(own) * jax.process_count(), *own.shape[1:])
        return jax.make_array_from_process_local_data(self._rows, own, shape)

    def _run(self, program, *args):
        with self._device_lock():
            with jax.transfer_guard("disallow"):  # Transfers to the device are explicit.
                outputs = program(*args)
            return jax.block_until_ready(outputs) if self._one_at_a_time else outputs

    def _init_program(self, params):
        return self._optimizer.init(_cast(params, "float32")), jnp.zeros((), jnp.int32)

    def _zeros_program(self, block):
        params = transformer.abstract_trained(self._config)
        zeros = jax.tree.map(jnp.zeros_like, params)
        grads = blocks.own(zeros, self._blocks.cuts(params, block))
        accumulator = Accumulator(grads, *self._statistics.zeros(), block)
        if self._slices == 1:
            return accumulator
        return jax.tree.map(lambda x: jnp.stack([x] * self._slices), accumulator)

    def _by_slice(self, program, divided: tuple[int, ...]):
        """A program that each slice runs on its part of these arguments; none waits for another's.

        Microbatches and scores are divided by rows; of an accumulator a slice has its own.
        """
        if self._slices == 1:
            return program

        def of_slice(*args):
            own = [
                jax.tree.map(lambda x: x[0], a) if isinstance(a, Accumulator) else a for a in args
            ]
            found = program(*own)
            return (
                jax.tree.map(lambda x: x[None], found) if isinstance(found, Accumulator) else found
            )

        def run(*args):
            whole, part = PartitionSpec(), PartitionSpec(axes.SLICES)
            specs = tuple(part if i in divided else whole for i in range(len(args)))
            names = frozenset([axes.SLICES])
            divide = functools.partial(jax.shard_map, axis_names=names, check_vma=False)
            return divide(of_slice, mesh=self._mesh, in_specs=specs, out_specs=part)(*args)

        return run

    def _score_program(self, params, base, batch):
        return self._outputs(params, base, batch)[0]

    def _score_prompts_program(self, params, base, num_tokens):
        rows = math.prod(self._mesh.shape[axis] for axis in axes.ROWS)
        columns = self._mesh.shape[axes.COLUMNS]
        K = rows * math.ceil(scored.NUM_PROMPTS / rows)
        prompts_KT = scored.prompts(K, num_tokens, self._config.vocab_size)
        prompts_KT = np.pad(prompts_KT, ((0, 0), (0, -num_tokens % columns)))
        model = nnx.merge(
            transformer.graphdef(self._config), transformer.with_base(self._config, params, base)
        )
        positions = np.broadcast_to(np.arange(prompts_KT.shape[1]), prompts_KT.shape)
        hidden = model(prompts_KT, positions, (np.ones_like(prompts_KT),))
        logits_KV = model.logits(hidden)[:, num_tokens - 1].astype(jnp.float32)
        return jax.nn.log_softmax(logits_KV / self._temperature, axis=-1)

    def _accumulate_program(
        self, params, base, reference, accumulator, batch, proximal_logprobs, policy_version
    ):
        block = accumulator.block
        grads, (sums, maxima) = jax.grad(self._summed_loss, has_aux=True)(
            _cast(params, "float32"),
            base,
            reference,
            batch,
            proximal_logprobs,
            policy_version,
            block,
        )
        grads = blocks.own(grads, self._blocks.cuts(params, block))
        return Accumulator(
            jax.tree.map(jnp.add, accumulator.grads, grads),
            accumulator.sums + sums,
            jnp.maximum(accumulator.maxima, maxima),
            block,
        )

    def _update_program(self, params, rest, accumulator):
        state = dataclasses.replace(rest, params=params)
        cuts = self._cuts_of_state(state, accumulator.block)
        own = blocks.own(state, cuts)
        spent = accumulator
        if self._slices > 1:  # The only sum over slices.
            accumulator = dataclasses.replace(
                jax.tree.map(lambda x: x.sum(0), spent), maxima=spent.maxima.max(0)
            )
        denominator = self._statistics.denominator(accumulator.sums)
        loss = self._statistics.summed_loss(accumulator.sums) / denominator
        grads = jax.tree.map(lambda g: g / denominator, accumulator.grads)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        scale = jnp.minimum(1.0, self._learner.max_grad_norm / grad_norm)
        if self._learner.offload_moments:
            own = _move_moments(own, self._on_devices)
        opt_state, params = own.opt_state, _cast(own.params, "float32")
        if self._blocks.num > 1:
            opt_state = blocks.with_adam_count(opt_state, self._blocks.num_own(own.updates))
        updates, opt_state = self._optimizer.update(
            jax.tree.map(lambda g: g * scale, grads), opt_state, params
        )
        metrics = self._statistics.metrics(accumulator.sums, accumulator.maxima)
        if self._learner.rate_by_ess:  # Updates of every optimizer are proportional to its rate.
            share = self._statistics.sequence_ess(accumulator.sums)
            rate_scale = share if self._learner.optimizer == "sgd" else jnp.sqrt(share)
            updates = jax.tree.map(lambda x: x * rate_scale, updates)
            metrics["learner/rate_scale"] = rate_scale
        params = self._stored(optax.apply_updates(params, updates), own.updates)
        moved = TrainState(params, opt_state, own.updates + 1)
        own = jax.tree.map(lambda new, kept: jnp.where(finite, new, kept), moved, own)
        metrics |= {"policy/grad_norm": grad_norm, "finite": finite.astype(jnp.float32)}
        if self._learner.offload_moments:
            own = _move_moments(own, self._state_shardings.opt_state)
        state = blocks.put(state, own, cuts)
        return state, jax.tree.map(jnp.zeros_like, spent), metrics

    def _cuts_of_state(self, state, block):
        params = self._blocks.cuts(state.params, block)
        moments = blocks.cuts_of_state(self._optimizer, state.opt_state, params)
        return TrainState(params, moments, blocks.WHOLE)

    def _stored(self, params, number):
        """The parameters after an update, in their dtype. The noise of rounding follows from the update's number."""
        if self._learner.param_dtype == "float32":
            return params
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), number), len(leaves))
        return tree.unflatten(map(stochastic_round, leaves, keys))

    def _summed_loss(
        self, params, base, reference, batch, proximal_logprobs, policy_version, block
    ):
        params = blocks.constant(params, self._blocks.cuts(params, block))
        trained = self._blocks.layers(block)
        logprobs, entropy, routing = self._outputs(params, base, batch, trained)
        if self._loss.needs_recompute and not self._scores_anchor:
            proximal_logprobs = jax.lax.stop_gradient(logprobs)
        reference_logprobs = None
        if reference is not None:
            of_reference = batch
            if self._loss.teacher and not self._loss.teachers:  # Its experts may be others.
                of_reference = dataclasses.replace(batch, routes=None)
            reference_logprobs = self._score_program(reference, base, of_reference)
        tokens = tokens_of(batch, policy_version, logprobs, proximal_logprobs, reference_logprobs)
        kl_coefficient = self._loss.kl_coefficient_of(policy_version + 1, self._learner.num_steps)
        parts = objective(tokens, self._loss, kl_coefficient)
        measured = self._statistics.measure(tokens, entropy, parts, routing)
        loss = jnp.sum(parts.loss)
        if self._loss.router_balance:
            # A sequence counts as much as its tokens do in the denominator.
            balance = parts.share * routing.balance.mean(axis=0)
            loss += self._loss.router_balance * jnp.sum(balance)
        return loss, jax.lax.stop_gradient(measured)

    def _outputs(self, params, base, batch, trained=None):
        return policy_outputs(
            self._config,
            transformer.with_base(self._config, params, base),
            batch,
            temperature=self._temperature,
            head_chunk_tokens=self._learner.head_chunk_tokens or None,
            attention_kernel=self.attention_kernel,
            shared_prompts=self._learner.shared_prompts,
            replay_routes=self._learner.replay_routes != "off",
            trained=trained,
        )


def _cast(params, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), params)


def _rest(state: TrainState) -> TrainState:
    """A state without its parameters, which may be given to a program apart from it."""
    return dataclasses.replace(state, params=None)


def _move_moments(state: TrainState, shardings: optax.OptState) -> TrainState:
    return dataclasses.replace(state, opt_state=jax.device_put(state.opt_state, shardings))


def _abstract(leaf, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def mesh_of(learner: Learner, devices=None) -> jax.sharding.Mesh:
    """The mesh of a run's settings, of all devices or of these."""
    return sharding.make_mesh(
        learner.data,
        learner.fsdp,
        learner.tensor,
        devices,
        context=learner.context,
        expert=learner.expert,
        slices=learner.slices,
    )


def make_shardings(
    config: transformer.ModelConfig,
    mesh: jax.sharding.Mesh,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Accumulator]:
    """A NamedSharding for each array: optimizer state and gradients lie where their parameter lies."""
    everywhere = jax.sharding.NamedSharding(mesh, PartitionSpec())
    abstract = transformer.abstract_trained(config)
    params = sharding.param_shardings(mesh, abstract)
    opt_state = map_state(
        optimizer,
        # Of statistics by row and column each device has all.
        lambda leaf, param, own: own if leaf.shape == param.shape else everywhere,
        jax.eval_shape(optimizer.init, abstract),
        abstract,
        params,
        otherwise=lambda _: everywhere,
    )
    accumulator = Accumulator(params, everywhere, everywhere)
    if mesh.shape[axes.SLICES] > 1:
        accumulator = jax.tree.map(
            lambda own: jax.sharding.NamedSharding(mesh, PartitionSpec(axes.SLICES, *own.spec)),
            accumulator,
        )
    return TrainState(params, opt_state, everywhere), accumulator


def frozen_shardings(config: transformer.ModelConfig, mesh: jax.sharding.Mesh) -> nnx.State | None:
    """A NamedSharding for each weight that is not trained; None where all are."""
    frozen = transformer.abstract_frozen(config)
    return None if frozen is None else sharding.param_shardings(mesh, frozen)


def tokens_of(
    batch: Batch, policy_version, logprobs, proximal_logprobs, reference_logprobs=None
) -> Tokens:
    """A batch as the loss sees it, with log-probs [B, T] by the policy of a version, the anchor and the reference."""
    return Tokens(
        logprobs=logprobs,
        behavior_logprobs=batch.behavior_logprobs,
        proximal_logprobs=proximal_logprobs,
        reference_logprobs=reference_logprobs,
        advantages=batch.advantages,
        staleness=jnp.where(batch.mask, policy_version - batch.token_versions, 0),
        segment_ids=batch.segment_ids,
        mask=batch.mask,
        sample_share=batch.sample_share,
        teacher_logprobs=batch.teacher,
    )


def policy_logprobs(
    config: transformer.ModelConfig, params: nnx.State, batch: Batch, **settings: Any
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies of `policy_outputs`, which takes the same arguments."""
    return policy_outputs(config, params, batch, **settings)[:2]


def policy_outputs(
    config: transformer.ModelConfig,
    params: nnx.State,
    batch: Batch,
    *,
    temperature: float,
    head_chunk_tokens: int | None,
    attention_kernel: str = "xla",
    shared_prompts: bool = True,
    replay_routes: bool = True,
    trained: tuple[int, int] | None = None,
) -> tuple[jax.Array, jax.Array, experts.Routing | None]:
    """Log-probs and entropies of a batch's tokens, [B, T] in float32, under the parameters; and what routers did.

    Where a batch has routes, its tokens go to those experts, with the weights that the router gives them now; without
    `replay_routes` they are compared alone.
    `trained` is the model's: the layers that get a gradient.
    """
    model = nnx.merge(transformer.graphdef(config), params)
    # Without shared prompts a second pass would find no key.
    unshared = attention_kernel in attention.IN_PASSES and not shared_prompts
    prefix_ids = None if unshared else batch.prefix_ids
    rows = attention.of_rows(attention_kernel, batch.segment_ids, prefix_ids)
    given = None
    if config.num_experts:
        routes = None if batch.routes is None else jnp.moveaxis(batch.routes, 2, 0)
        given = experts.Given(batch.segment_ids > 0, batch.segment_ids, routes, replay_routes)
    hidden, routing = model.routed(
        batch.tokens, batch.positions, *rows, trained=trained, given=given
    )
    found = logprobs.token_logprobs(
        model,
        hidden,
        batch.tokens,
        batch.predictor_index,
        temperature=temperature,
        chunk_tokens=head_chunk_tokens,
        kept_BTM=batch.kept,
    )
    return *found, routing
