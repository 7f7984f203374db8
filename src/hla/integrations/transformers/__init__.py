"""Transformers: a model of its own, and attention functions for models that exist.

`HLAConfig` and `HLAForCausalLM` are known to `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` once this module is
imported, under the model type "hla". `register` adds "hla2" and the others to what `attn_implementation` takes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hla.integrations.transformers.cache import HLACache, HLACacheLayer, cache_layer
from hla.integrations.transformers.config import HLAConfig
from hla.integrations.transformers.functions import register
from hla.integrations.transformers.model import HLAForCausalLM, HLAModel

__all__ = ["HLACache", "HLACacheLayer", "HLAConfig", "HLAForCausalLM", "HLAModel", "cache_layer", "register"]

AutoConfig.register(HLAConfig.model_type, HLAConfig, exist_ok=True)
AutoModel.register(HLAConfig, HLAModel, exist_ok=True)
AutoModelForCausalLM.register(HLAConfig, HLAForCausalLM, exist_ok=True)
# by these names `Trainer` knows whose labels it has to shift when it smooths them itself
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[HLAConfig.model_type] = HLAForCausalLM.__name__
