"""Models by name, built from a specification and a seed, so that every process builds the same model."""

from raysim.models.architecture import Architecture, ModelSpec
from raysim.models.lora import LoraSpec
from raysim.models.modules import build_model, build_skeleton, head_of, output_shape, try_model
from raysim.models.registry import MODELS, find_architecture, import_libraries, prefers_channels_last
