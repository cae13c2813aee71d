"""Registration: a session's shared memory, pinned and known to the GPU for as long as somebody copies from it.

A session's memory is registered once however many tables copy from it; a second registration of the same range is an
error of the driver. The registration holds the session, so the memory is unregistered before it is unmapped.
"""

from __future__ import annotations

import threading
import weakref

from .._native import ffi, lib
from ..ring_session import RingSession
from .driver_base import REGISTER_MAPPED, REGISTER_PORTABLE, REGISTER_READ_ONLY, Driver, GpuError


class SessionMemory:
    """Where a session's mappings lie: addresses and sizes of the arena and the ring."""

    def __init__(self, session: RingSession) -> None:
        memory = ffi.new("engram_session_memory *")
        lib.engram_session_read_memory(session.handle, memory)
        self.arena = int(ffi.cast("uintptr_t", memory.arena))
        self.arena_bytes = int(memory.arena_bytes)
        self.ring = int(ffi.cast("uintptr_t", memory.ring))
        self.ring_bytes = int(memory.ring_bytes)
        self.arena_is_writable = bool(memory.arena_is_writable)


class Registration:
    """The arena of one session in one driver; the ring too once a stream needs it."""

    def __init__(self, session: RingSession, driver: Driver) -> None:
        self.session = session
        self.driver = driver
        self.memory = SessionMemory(session)
        self._registered: list[int] = []
        # The garbage collector ends the objects of a cycle in any order: the mapping waits for the unregistering.
        self._native = session.handle
        lib.engram_session_retain(self._native)
        self._ring_device_pointer = 0
        flags = REGISTER_PORTABLE | REGISTER_MAPPED
        if not self.memory.arena_is_writable:
            if not driver.can_register_read_only():
                raise GpuError(
                    f"{driver} cannot register memory that is mapped read-only, as the reply arena is: "
                    "connect with engram_client.connect(..., writable_arena=True)"
                )
            flags |= REGISTER_READ_ONLY
        self._register(self.memory.arena, self.memory.arena_bytes, flags)

    def _register(self, address: int, size_bytes: int, flags: int) -> None:
        self.driver.register(address, size_bytes, flags)
        self._registered.append(address)

    def ring_device_pointer(self) -> int:
        """The device's address of the ring, which is registered at the first call."""
        with _lock:
            if not self._ring_device_pointer:
                memory = self.memory
                self._register(memory.ring, memory.ring_bytes, REGISTER_PORTABLE | REGISTER_MAPPED)
                self._ring_device_pointer = self.driver.device_pointer(memory.ring)
            return self._ring_device_pointer

    def __del__(self) -> None:
        registered = getattr(self, "_registered", None)
        native = getattr(self, "_native", None)
        if native is None or registered is None:
            return
        # While this runs another thread may still find the object; under the lock it sees that nothing is left of it.
        with _lock:
            try:
                entered = self.driver.enter()
                try:
                    while registered:
                        self.driver.unregister(registered.pop())
                finally:
                    self.driver.leave(entered)
            except GpuError:
                # A context that is lost has given everything back; nobody could act on the error here.
                registered.clear()
            finally:
                lib.engram_session_drop(native)

    def is_alive(self) -> bool:
        """Whether the memory is still registered."""
        return bool(self._registered)


_lock = threading.RLock()  # a garbage collection inside may end a registration in the same thread
_registrations: weakref.WeakValueDictionary[tuple[int, str], Registration] = weakref.WeakValueDictionary()


def registration_of(session: RingSession, driver: Driver) -> Registration:
    """The session's registration; made where there is none. Raises GpuError."""
    key = (id(session), driver.kind)
    with _lock:
        found = _registrations.get(key)
        # Object ids are reused: an entry of a session that is gone may still be on its way out.
        if found is None or found.session is not session or not found.is_alive():
            found = _registrations[key] = Registration(session, driver)
        return found
