"""Keeps the garbage collector from what lives as long as its process: libraries, prompts, compiled programs.

A collection of the oldest generation passes over all objects and holds every thread meanwhile: a tenth of a second
where a hundred thousand prompts are loaded. Independent of what was loaded.
"""

import functools
import gc


@functools.cache
def gc_freeze(stage: str) -> None:
    """Collects once, and leaves all that is there now out of later collections.

    Args:
      stage: what has just been loaded. Only its first call in a process counts: what a later run of the same process
        leaves behind is collected.
    """
    gc.collect()
    gc.freeze()
