"""What the plug-ins of all engines share: settings, the check of table against model, a step's rows, class shapes."""

from .class_shapes import ClassShape, EngineMismatch, check_shapes
from .device_target import DeviceTarget
from .model_check import ModelMismatch, open_layers
from .settings import EngineSettings, connect_when_up
from .step_stager import ArenaTarget, LayerTarget, Part, Step, StepStager

__all__ = [
    "ArenaTarget",
    "ClassShape",
    "DeviceTarget",
    "EngineMismatch",
    "EngineSettings",
    "LayerTarget",
    "ModelMismatch",
    "Part",
    "Step",
    "StepStager",
    "check_shapes",
    "connect_when_up",
    "open_layers",
]
