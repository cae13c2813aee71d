"""The GPU's driver library, opened at run time: libcuda.so.1, or libamdhip64.so where that is what there is.

About thirty entry points of the driver API behind one set of methods (driver_base.py), so that the rest of the package
does not know which of the two it talks to. No CUDA package is needed to import or install this; where no driver is
installed, open_driver() raises GpuError.
"""

from __future__ import annotations

import functools
import sys

from cffi import FFI

from .cuda_driver import CUDA_DECLARATIONS, CudaDriver
from .driver_base import Driver, GpuError
from .hip_driver import HIP_DECLARATIONS, HipDriver

__all__ = ["Driver", "GpuError", "open_driver", "parse_device"]

_LIBRARIES: dict[str, tuple[tuple[str, ...], str, type[Driver]]] = {
    "cuda": (("libcuda.so.1",), CUDA_DECLARATIONS, CudaDriver),
    "hip": (("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"), HIP_DECLARATIONS, HipDriver),
}


def parse_device(device: object) -> tuple[str | None, int]:
    """(kind or None, number) of 1, "cuda:1", "hip:0" or a torch.device. Raises ValueError."""
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return None, device
    kind, _, number = str(device).partition(":")
    if kind not in ("cuda", "hip") or (number and not number.isdigit()):
        raise ValueError(f"device must be a number, 'cuda:N', 'hip:N' or a torch.device, not {device!r}")
    if not isinstance(device, str):
        torch = sys.modules.get("torch")
        # torch says "cuda" on AMD devices too.
        if torch is not None and getattr(torch.version, "hip", None):
            kind = "hip"
        if not number:
            number = str(torch.cuda.current_device()) if torch is not None else "0"
    return kind, int(number or 0)


def open_driver(device: object = 0) -> Driver:
    """The driver of a device: a number, "cuda:N", "hip:N" or a torch.device. A plain number tries CUDA first.

    Raises GpuError where no driver is installed or it has no such device, ValueError where `device` names none.
    """
    kind, number = parse_device(device)
    return _open(kind, number)


@functools.cache
def _open(kind: str | None, number: int) -> Driver:
    missing = []
    for name in (kind,) if kind is not None else tuple(_LIBRARIES):
        files, declarations, make = _LIBRARIES[name]
        ffi = FFI()
        ffi.cdef(declarations)
        for file in files:
            try:
                library = ffi.dlopen(file)
            except OSError as error:
                missing.append(str(error))
                continue
            try:
                return make(ffi, library, number)
            except AttributeError as error:
                raise GpuError(f"{file} is too old: {error}") from None
    raise GpuError(f"no GPU driver is installed here: {'; '.join(missing)}")
