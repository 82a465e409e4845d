"""Keeps the garbage collector from what lives as long as its process: libraries, prompts, compiled programs.

A collection of the oldest generation passes over all objects and holds every thread meanwhile: a tenth of a second
where a hundred thousand prompts are loaded. JAX adds its own to each, of the youngest too. Independent of what was
loaded.
"""

import functools
import gc

# New objects between two collections; at Python's 700 a step of 128 samples would have dozens.
NEW_OBJECTS = 20_000


@functools.cache
def gc_freeze(stage: str) -> None:
    """Collects once, leaves all that is there now out of later collections, and has fewer of these.

    Args:
      stage: what has just been loaded. Only its first call in a process counts: what a later run of the same process
        leaves behind is collected.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
