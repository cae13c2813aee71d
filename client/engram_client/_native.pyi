"""The client's native part, a cffi module. Its functions and types are those of native/include/engram/."""

from typing import Any

ffi: Any
lib: Any
