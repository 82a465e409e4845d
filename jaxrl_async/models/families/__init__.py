"""The families of decoders: a module for each, with the table of what is its own."""

from jaxrl_async.models.families import gemma3, llama, mixtral, qwen3_moe
from jaxrl_async.models.families.family import Family

_MODULES = (llama, gemma3, qwen3_moe, mixtral)
FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}
FAMILY_OF = {  # model_type of config.json → family
    model_type: family for family in FAMILIES.values() for model_type in family.architectures
}
