"""The rows of tokens in the engine's slots, on the host, and the state of each slot that decode steps start from."""

import numpy as np

from jaxrl_async.inference import programs, sampling
from jaxrl_async.inference.requests import Live


class SlotRows:
    """The requests in slots with their tokens, log-probs and kept ids; the engine thread's own."""

    def __init__(self, *, num_slots: int, max_total_tokens: int, max_kept: int, vocab_size: int):
        """Every slot is free."""
        self.running: dict[int, Live] = {}  # by slot
        self.free = dict.fromkeys(range(num_slots))  # the least recently used first
        self.slots = programs.empty_slots(num_slots, max_kept)
        self._vocab_size = vocab_size
        self._lengths = np.zeros(num_slots, np.int32)  # tokens of each slot's row
        shape = num_slots, max_total_tokens
        self._tokens, self._logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        self._kept = np.full((*shape, min(max_kept, vocab_size)), -1, np.int32)

    def occupy(self, slot: int, live: Live) -> None:
        """Puts a request into a free slot, with the tokens it has."""
        del self.free[slot]
        live.slot = slot
        self.running[slot] = live
        num_tokens, prompt_length = len(live.tokens), len(live.request.input_ids)
        self._lengths[slot] = num_tokens
        self._tokens[slot, :num_tokens] = live.tokens
        self._logprobs[slot, prompt_length:num_tokens] = live.logprobs
        if live.kept is not None:
            self._kept[slot, prompt_length:num_tokens] = live.kept
        ask, slots = live.request.sampling, self.slots
        slots.tokens[slot] = live.tokens[-1]
        slots.positions[slot] = num_tokens - 1
        slots.limits[slot] = prompt_length + ask.max_new_tokens
        slots.active[slot] = True
        slots.stop_tokens[slot] = -1
        slots.stop_tokens[slot, : len(ask.stop_token_ids)] = ask.stop_token_ids
        slots.draw.key[slot] = sampling.seed_words(ask.seed)
        slots.draw.temperature[slot] = ask.temperature
        slots.draw.top_p[slot] = ask.top_p
        slots.draw.top_k[slot] = min(ask.top_k, self._vocab_size)
        slots.draw.never[slot] = -1
        slots.draw.never[slot, : len(ask.never_token_ids)] = ask.never_token_ids
        if slots.draw.keep:
            slots.draw.keep.most[slot], slots.draw.keep.min_p[slot] = ask.max_kept, ask.min_p

    def read(self, live: Live, version: str) -> None:
        """Gives a request in a slot its tokens so far; those since its last span are of this version."""
        slot, prompt_length = live.slot, len(live.request.input_ids)
        assert slot is not None
        num_tokens = int(self._lengths[slot])
        live.close_span(version, num_tokens)
        live.tokens = self._tokens[slot, :num_tokens].copy()
        live.logprobs = self._logprobs[slot, prompt_length:num_tokens].copy()
        if live.request.sampling.max_kept:
            live.kept = self._kept[slot, prompt_length:num_tokens].copy()

    def release(self, live: Live, version: str) -> None:
        """Takes a request out of its slot, with its tokens so far."""
        self.read(live, version)
        slot, live.slot = live.slot, None
        assert slot is not None
        self.slots.active[slot] = False
        self.slots.draw.top_p[slot], self.slots.draw.top_k[slot] = 1.0, -1  # nothing to sort for
        self.free[slot] = None
        del self.running[slot]

    def close_spans(self, version: str) -> None:
        """Records that all tokens so far are of this version or an earlier one."""
        for slot, live in self.running.items():
            live.close_span(version, int(self._lengths[slot]))

    def extend(self, decoded: programs.Decoded) -> tuple[list[Live], list[int]]:
        """Adds the tokens of a chunk, as arrays of NumPy.

        Returns:
          the requests that are complete, and the slots, not of these, in which a log-prob is not finite.
        """
        num_steps, num_slots = decoded.tokens.shape
        step, slot = np.nonzero(np.arange(num_steps)[:, None] < decoded.counts[None])
        at = self._lengths[slot] + step
        self._tokens[slot, at] = decoded.tokens[step, slot]
        self._logprobs[slot, at] = decoded.logprobs[step, slot]
        if decoded.kept is not None:
            self._kept[slot, at] = decoded.kept[step, slot]
        self._lengths += decoded.counts
        slots = self.slots
        ended = slots.active & ~decoded.active
        slots.active[:] = decoded.active
        slots.positions[:] = np.maximum(self._lengths - 1, 0)
        slots.tokens[:] = self._tokens[np.arange(num_slots), slots.positions]
        broken = np.unique(slot[~np.isfinite(decoded.logprobs[step, slot])])
        ended[broken] = False
        return [self.running[slot] for slot in np.flatnonzero(ended).tolist()], broken.tolist()

    def cut(self, slot: int) -> Live:
        """Drops the tokens of a row from the first on whose log-prob is not finite; returns its request."""
        live = self.running[slot]
        start = len(live.request.input_ids)
        bad = ~np.isfinite(self._logprobs[slot, start : self._lengths[slot]])
        self._lengths[slot] = start + np.argmax(bad)
        return live
