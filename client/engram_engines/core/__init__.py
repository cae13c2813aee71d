"""What the plug-ins of all engines share: settings, the check of table against model, a step's rows, class shapes."""

from .class_shapes import ClassShape, EngineMismatch, check_shapes
from .device_target import DeviceTarget
from .host_target import HostTarget
from .mapped_layers import map_layers
from .model_check import ModelMismatch, open_layers
from .settings import EngineSettings, connect_when_up
from .step_metrics import StepMetrics
from .step_stager import ArenaTarget, LayerTarget, Part, Step, StepStager
from .table_tensors import is_table_tensor, without_table_tensors

__all__ = [
    "ArenaTarget",
    "ClassShape",
    "DeviceTarget",
    "EngineMismatch",
    "EngineSettings",
    "HostTarget",
    "LayerTarget",
    "ModelMismatch",
    "Part",
    "Step",
    "StepMetrics",
    "StepStager",
    "check_shapes",
    "connect_when_up",
    "is_table_tensor",
    "map_layers",
    "open_layers",
    "without_table_tensors",
]
