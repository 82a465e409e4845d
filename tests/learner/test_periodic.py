"""Periodic mode is the synchronous one: arrival order, chunks, microbatches and devices do not change its gradient.

The loop is the learner's and the queue's admission the queue's own, without wires or processes. Groups complete in an
order that a seed draws.
"""

import collections
import dataclasses
import functools
import queue
import random

import jax
import numpy as np
import pytest
from fixtures import small_learner
from fixtures.models import tiny
from fixtures.small_learner import (
    assert_same,
    empty_status,
    flat,
    host_params,
    make_packer,
    params_on,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.config.settings import PACKINGS
from jaxrl_async.inference import engine as engines
from jaxrl_async.inference.requests import Request
from jaxrl_async.inference.sampling import SamplingParams
from jaxrl_async.learner.train_step import TrainStep
from jaxrl_async.models import sharding
from jaxrl_async.queue.admission import Admission
from jaxrl_async.types import Chunk, Group, Trajectory

CONFIG = tiny(num_layers=1)
B, G, PROMPT = 6, 4, 3
ROW_TOKENS = 24
DEADLINE_SECS = 60.0

A3PO = LossConfig()
GSPO = LossConfig(ratio="sequence", reduction="sequence_mean", advantage="rloo")
CURRENT = LossConfig(
    anchor="current",
    advantage="dr_grpo",
    reduction="fixed_length",
    fixed_length=10.0,
    kl="k3",
    kl_coefficient=0.1,
)
RECOMPUTE = dataclasses.replace(CURRENT, anchor="recompute")
ONE, TWO, EIGHT = (1, 1, 1), (2, 1, 1), (2, 2, 2)  # Devices: data · fsdp · tensor.


class Measured(TrainStep):
    """Keeps the accumulator of the last update."""

    def update(self, state, accumulator):
        self.given = jax.tree.map(np.array, accumulator)
        return super().update(state, accumulator)


@functools.cache  # Compiled once for all tests.
def make_train_step(loss, mesh_shape):
    mesh = sharding.make_mesh(*mesh_shape, jax.devices()[: np.prod(mesh_shape)])
    train_step = small_learner.make_train_step(CONFIG, mesh, loss, of=Measured)
    return train_step, mesh


def made_up(shortest=5, longest=14):
    """A sampler without weights: the completions of a prompt follow from its index."""

    def sample(permit, version):
        rng = np.random.default_rng(permit.prompt_index)

        def trajectory():
            length = int(rng.integers(shortest, longest + 1))
            mask = np.arange(length) >= PROMPT
            return Trajectory(
                tokens=rng.integers(0, CONFIG.vocab_size, length).astype(np.int32),
                logprobs=np.where(mask, -2.5 - rng.random(length), 0).astype(np.float32),
                versions=np.where(mask, version, -1).astype(np.int32),
                mask=mask,
                prompt_length=PROMPT,
                reward=float(rng.integers(0, 2)),  # An eighth of the groups has equal ones.
            )

        return Group(permit.prompt_index, permit.attempt, tuple(trajectory() for _ in range(G)))

    return sample


class Run:
    """Queue, servers, publisher, checkpoints and metrics of a run.

    A seed draws the next event; None takes events in order. A push is in flight until `wait`, or until it is drawn.
    """

    def __init__(
        self, sample, *, chunk_groups=None, seed=None, drop_equal_rewards=False, max_staleness=0
    ):
        self.admission = Admission(
            batch_groups=B,
            max_staleness=max_staleness,
            push_every_steps=1,
            max_running_groups=100,
            max_attempts=1,
            permit_timeout_secs=1.0,
            max_bytes=10**9,
            chunk_groups=chunk_groups,
        )
        self.admission.publish(0)
        self.rows, self.trained, self.running_at_push = [], [], []
        self._sample, self._drop_equal_rewards = sample, drop_equal_rewards
        self._random = random.Random(seed) if seed is not None else None
        self._pushes, self._running, self._groups = collections.deque(), [], {}

    def lease(self, step, timeout_secs, should_stop):
        if not self.admission.chunk_is_ready(step, 0):
            should_stop()
        index, last = 0, False
        while not last:
            while not self.admission.chunk_is_ready(step, index):
                self._next_event()
            chunk = self.admission.lease(step, index)
            groups = tuple(self._groups.pop(i) for i in chunk.indexes)
            self.trained += groups
            yield Chunk(step, index, groups, chunk.last)
            index, last = index + 1, chunk.last

    def commit(self, step):
        self.admission.commit(step)
        return self.admission.resume_point

    def snapshot(self, state):
        return jax.tree.map(np.array, state.params)

    def publish(self, version, snapshot):
        self._pushes.append((version, snapshot))

    def wait(self, should_stop):
        while self._pushes:
            self._push()

    def status(self):
        return empty_status()

    def check(self):
        pass

    def metrics(self):
        return {}

    def save(self, step, state, resume_point):
        pass

    def write(self, step, row):
        self.rows.append(row)

    def _next_event(self):
        possible = [self._push] * bool(self._pushes)
        possible += [self._admit] * bool(self.admission.admissible)
        possible += [self._complete] * bool(self._running)
        self._draw(possible)()

    def _draw(self, values):
        return values[self._random.randrange(len(values)) if self._random else 0]

    def _push(self):
        self.running_at_push.append(self.admission.running)
        version, params = self._pushes.popleft()
        if hasattr(self._sample, "load"):
            self._sample.load(params, version)
        self.admission.publish(version)

    def _admit(self):
        self._running += self.admission.admit(self._draw([100, 1, 2]), now=0.0)

    def _complete(self):
        permit = self._draw(self._running)
        self._running.remove(permit)
        group = self._sample(permit, self.admission.v_pub)
        if self._drop_equal_rewards and np.ptp(group.rewards) == 0:  # As a worker does.
            self.admission.return_permit(permit, "equal_rewards")
            return
        self._groups[permit.prompt_index] = group
        assert self.admission.submit(permit, 1) == "held"


def train(run, loss, *, mesh_shape=ONE, rows=4, policy="in_order", num_steps=1, wait=True, seed=0):
    """The last state of `learner.train`, and the parameters' mesh's train step."""
    train_step, mesh = make_train_step(loss, mesh_shape)
    state = small_learner.train(
        run,
        train_step.init(params_on(mesh, CONFIG, seed)),
        train_step,
        num_steps=num_steps,
        wait_for_push=wait,
        fail_on_recompile=False,
        pack=make_packer(rows, ROW_TOKENS, policy),
        loss=loss,
        # Of other weights, so that a KL to them has a gradient.
        reference=params_on(mesh, CONFIG, seed=1) if loss.needs_reference else None,
    )
    return state, train_step


def accumulated(run, loss, **values):
    """The accumulator of the update of a run of one step."""
    return train(run, loss, **values)[1].given


@functools.cache
def synchronous(loss, drop_equal_rewards):
    """Of the whole batch in prompt order, on one device, in microbatches of 4 rows."""
    return accumulated(Run(made_up(), drop_equal_rewards=drop_equal_rewards), loss)


@pytest.mark.parametrize(
    ("loss", "mesh_shape", "rows"),
    [
        pytest.param(A3PO, ONE, 4, id="A-3PO, one device"),
        pytest.param(A3PO, TWO, 8, id="A-3PO, two devices", marks=pytest.mark.long),
        pytest.param(A3PO, EIGHT, 4, id="A-3PO, eight devices"),
        pytest.param(GSPO, ONE, 4, id="GSPO, sequence_mean"),
        pytest.param(RECOMPUTE, ONE, 4, id="recompute, fixed_length, KL to the reference"),
    ],
)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    chunk_groups=st.integers(1, B),
    policy=st.sampled_from(PACKINGS),
    drop_equal_rewards=st.booleans(),
)
def test_the_gradient_is_the_synchronous_one_in_whatever_order_groups_arrive(
    loss, mesh_shape, rows, seed, chunk_groups, policy, drop_equal_rewards
):
    run = Run(
        made_up(), chunk_groups=chunk_groups, seed=seed, drop_equal_rewards=drop_equal_rewards
    )
    found = accumulated(run, loss, mesh_shape=mesh_shape, rows=rows, policy=policy)
    assert_same(found, synchronous(loss, drop_equal_rewards))
    assert run.rows[0]["staleness/max"] == 0


def test_groups_of_equal_rewards_are_retired_before_the_step_is_full():
    """The step trains the first B prompts that are left, whichever came first; so nothing is taken out of it later."""
    in_order = Run(made_up(), drop_equal_rewards=True)
    train(in_order, A3PO)
    expected = [group.prompt_index for group in in_order.trained]
    assert len(expected) == B and expected[-1] > B - 1, "no group had equal rewards"
    for seed in range(5):
        run = Run(made_up(), chunk_groups=2, seed=seed, drop_equal_rewards=True)
        train(run, A3PO)
        assert sorted(group.prompt_index for group in run.trained) == expected


def test_arrival_orders_of_the_tests_above_are_several():
    """… and none of them is the prompts' order, which alone would prove nothing."""
    orders = set()
    for seed in range(20):
        run = Run(made_up(), chunk_groups=2, seed=seed)
        train(run, A3PO)
        orders.add(tuple(group.prompt_index for group in run.trained))
    assert len(orders) >= 15 and tuple(range(B)) not in orders


def test_in_a_periodic_step_a_recomputed_anchor_is_the_current_policy():
    """No update moves the weights between a chunk's anchor and its gradient."""
    recomputed = accumulated(Run(made_up(), chunk_groups=1, seed=0), RECOMPUTE)
    current = accumulated(Run(made_up(), chunk_groups=1, seed=0), CURRENT)
    assert_same(recomputed, current)  # The ratio is among the sums.


@pytest.mark.parametrize("chunk_groups", [1, 2, 4, 5])
@pytest.mark.parametrize("lengths", [(5, 14), (9, 12), (5, 7), (24, 24)])
def test_chunks_in_prompt_order_are_cut_into_the_microbatches_of_the_whole_batch(
    lengths, chunk_groups
):
    run = Run(made_up(*lengths), chunk_groups=chunk_groups)
    pack, found, of_chunks = make_packer(row_tokens=ROW_TOKENS), [], []
    for chunk in run.lease(1, 1.0, should_stop=lambda: None):
        advantages = np.array([g.prompt_index for g in chunk.groups])[:, None] + np.arange(G)
        found.append(pack(chunk.groups, advantages.astype(np.float32), last=chunk.last))
        of_chunks.append(len(found[-1]))
    advantages = np.arange(B, dtype=np.float32)[:, None] + np.arange(G, dtype=np.float32)
    whole = make_packer(row_tokens=ROW_TOKENS)(run.trained, advantages, last=True)
    found = [batch for batches in found for batch in batches]
    for batch, expected in zip(found, whole, strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, expected)
    assert len(whole) < 3 or sum(of_chunks[:-1]), "all of them waited for the last chunk"


@pytest.mark.parametrize("mesh_shape", [ONE, pytest.param(EIGHT, marks=pytest.mark.long)])
def test_twenty_periodic_steps_in_prompt_order_are_the_synchronous_ones_bit_for_bit(mesh_shape):
    """With packing "in_order", chunks in prompt order, equal shapes and device count."""
    states = []
    for chunk_groups in (None, 1, 2, 4):
        run = Run(made_up(), chunk_groups=chunk_groups)
        state, _ = train(run, A3PO, mesh_shape=mesh_shape, num_steps=20)
        assert [row["staleness/max"] for row in run.rows] == [0] * 20
        states.append(flat(state.params))
    first = flat(host_params(CONFIG))
    assert np.max(np.abs(states[0] - first)) > 1e-2, "nothing was learned"
    for state in states[1:]:
        np.testing.assert_array_equal(state, states[0])


class Engine:
    """The embedded engine as sampler; its weights are those of the last push."""

    def __init__(self, engine):
        self._engine = engine
        self.load(host_params(CONFIG), 0)

    def load(self, params, version):
        self._engine.update_weights(params, str(version)).result(DEADLINE_SECS)

    def __call__(self, permit, version):
        prompt = np.random.default_rng(permit.prompt_index).integers(0, CONFIG.vocab_size, PROMPT)
        prompt = prompt.astype(np.int32)
        requests = [
            Request(str(i), prompt, self._sampling(permit.prompt_index * G + i)) for i in range(G)
        ]
        ended = queue.SimpleQueue()
        for request in requests:
            self._engine.submit(request, ended.put)
        done = []
        while len(done) < G:
            done += [completion for _, completion in ended.get(timeout=DEADLINE_SECS)]
        done.sort(key=lambda completion: completion.rid)
        trajectories = tuple(self._trajectory(prompt, completion) for completion in done)
        return Group(permit.prompt_index, permit.attempt, trajectories)

    def _sampling(self, seed):
        return SamplingParams(
            max_new_tokens=6, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(), seed=seed
        )

    def _trajectory(self, prompt, completion):
        (span,) = completion.spans
        mask = np.arange(PROMPT + 6) >= PROMPT
        return Trajectory(
            tokens=np.concatenate([prompt, completion.output_ids]),
            logprobs=np.concatenate([np.zeros(PROMPT, np.float32), completion.logprobs]),
            versions=np.where(mask, int(span.version), -1).astype(np.int32),
            mask=mask,
            prompt_length=PROMPT,
            reward=float(np.mean(completion.output_ids < CONFIG.vocab_size // 2)),
        )


@pytest.fixture(scope="module")
def engine():
    engine = engines.Engine(
        CONFIG,
        num_slots=G,
        max_total_tokens=16,
        decode_chunk=3,
        max_queued_requests=64,
        name="test-periodic",
    )
    engine.start()
    yield engine
    engine.close(timeout_secs=DEADLINE_SECS)


def test_an_asynchronous_run_without_staleness_is_the_synchronous_one_bit_for_bit(engine):
    """Mode async is: pushes that nobody waits for, and admission by η. At η = 0 the admission itself is the wait."""
    runs = {}
    for name, wait, seed, eta in (
        ("sync", True, None, 0),
        ("async, η = 0", False, 1, 0),
        ("another order", False, 2, 0),
        ("async, η = 1", False, 1, 1),
    ):
        run = Run(Engine(engine), seed=seed, max_staleness=eta)
        state, _ = train(run, A3PO, num_steps=6, wait=wait)
        runs[name] = run, flat(state.params)
    expected = runs["sync"][1]
    assert np.max(np.abs(expected - flat(host_params(CONFIG)))) > 1e-3, "nothing was learned"
    for name in ("async, η = 0", "another order"):
        run, found = runs[name]
        np.testing.assert_array_equal(found, expected)
        assert set(run.running_at_push) == {0}, "a push found a group under way"
        assert [row["staleness/max"] for row in run.rows] == [0] * 6
    stale, found = runs["async, η = 1"]
    assert max(row["staleness/max"] for row in stale.rows) > 0
    assert not np.array_equal(found, expected)
