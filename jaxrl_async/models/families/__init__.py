"""The families of decoders: a module for each, with the table of what is its own."""

from jaxrl_async.models.families import gemma3, llama
from jaxrl_async.models.families.family import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (llama.FAMILY, gemma3.FAMILY)}
FAMILY_OF = {  # model_type of config.json → family
    model_type: family for family in FAMILIES.values() for model_type in family.architectures
}
