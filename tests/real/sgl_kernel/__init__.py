"""A stand-in for SGLang's CUDA kernels on a machine without CUDA.

SGLang imports names of it unconditionally; on the torch-native path it calls none of them.
"""

__version__ = "0.0.0"
__path__ = []


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs CUDA; this is a stand-in")

    return missing
