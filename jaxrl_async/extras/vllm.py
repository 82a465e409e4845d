"""A worker extension for vLLM (`--worker-extension-cls jaxrl_async.extras.vllm.Extension`), for what its routes lack.

- Weights that stay loadable. On a CPU vLLM packs its linear layers when they are loaded, and drops what it packed: a
  reload then changes norms and embeddings, and leaves the layers between them at the version before. Without packing,
  a layer computes with its weight as it is. Experts it packs once, and takes those of a reload as packed: they are
  packed each time. Nothing is changed on other devices.
- Seeds on a CPU. A prompt that is computed in parts has its first token discarded and its stream set back, which no
  stream of a CPU can do: without this the server dies of a seeded request.
- Versions for a server that was started without weights (`--load-format dummy`), which vLLM itself does not reload.
- The shape of its model, and digests of some of its tensors.

Imported by vLLM's own processes, in vLLM's environment: it needs the files of this package, and nothing that this
package needs.
"""

import hashlib
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.platforms import current_platform


class Extension:
    """Methods of each worker, which `/collective_rpc` calls."""

    model_runner: Any
    vllm_config: Any
    _weight_checksum_prefix: Any

    def load_version(self, path: str) -> None:
        """Loads the tensors of a version's directory, in Hugging Face's layout and names."""
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=_tensors(pathlib.Path(path)))

    def digests(self, names: list[str]) -> dict[str, str]:
        """The SHA-256 of some of its tensors as they lie on the device, in hex, keyed as by `/weight_checker`."""
        prefix, found = self._weight_checksum_prefix(), {}
        for name, tensor in self.model_runner.get_model().named_parameters():
            if name.replace(".base_layer.", ".") in names:
                raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                found[prefix + name] = hashlib.sha256(raw.numpy()).hexdigest()
        return found

    def model_shape(self) -> dict[str, Any]:
        """Its model's config.json, as vLLM has read it."""
        config = self.vllm_config.model_config.hf_config
        return {"architectures": config.architectures} | config.get_text_config().to_dict()


def _tensors(directory: pathlib.Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} has no *.safetensors")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)


def _keep(layer: torch.nn.Module, remove_weight: bool) -> None:
    """In the place of vLLM's `dispatch_cpu_unquantized_gemm`."""
    del remove_weight
    if layer.weight.ndim == 2:
        layer.cpu_linear = torch.nn.functional.linear


_set_up = UnquantizedFusedMoEMethod._setup_kernel


def _pack_again(
    self: UnquantizedFusedMoEMethod, layer: torch.nn.Module, w13: torch.Tensor, w2: torch.Tensor
) -> None:
    """In the place of `UnquantizedFusedMoEMethod._setup_kernel`, which packs experts when they are loaded first."""
    is_reload = self.moe_kernel is not None
    _set_up(self, layer, w13, w2)
    if is_reload:
        self.moe_kernel.fused_experts.process_weights_after_loading(layer)


class _Generator(torch.Generator):
    """A stream that cannot go back: where vLLM discards the token of a prompt's first part, it skips a number."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        pass


if current_platform.is_cpu():
    torch.Generator = _Generator
    utils.dispatch_cpu_unquantized_gemm = _keep
    UnquantizedFusedMoEMethod._setup_kernel = _pack_again
