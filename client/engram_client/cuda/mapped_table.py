"""MappedTable: a resident layer's rows under a device address, for kernels that gather them over the bus themselves.

The table stays one copy a machine, in the daemon's memory: mapped read-only, registered once, and not read again when
this process starts anew.
"""

from __future__ import annotations

import contextlib

from ..arrays import Rows
from ..layer_map import LayerMap
from ..table import Table
from .closing import Closing
from .driver import open_driver
from .driver_base import REGISTER_MAPPED, REGISTER_PORTABLE, REGISTER_READ_ONLY, Driver, GpuError


class MappedTable(Closing):
    """A layer that the daemon holds resident, registered with one GPU. Used from any thread; closed by one.

    table: of a client over the ring; it is mapped with Table.map(). device: a number, "cuda:N", "hip:N" or a
    torch.device. Device addresses are valid until close(), which waits for nothing: no kernel may still use them.
    Raises what Table.map() raises, and GpuError where the device cannot register memory that is mapped read-only.
    """

    def __init__(self, table: Table, device: object = 0) -> None:
        self._is_registered = False
        self._whole: Rows | None = None
        self.driver: Driver = open_driver(device)
        self.map: LayerMap = table.map()
        whole = self._whole = self.map.whole
        entered = self.driver.enter()
        try:
            if not self.driver.can_register_read_only():
                raise GpuError(
                    f"{self.driver} cannot register memory that is mapped read-only, and a table is never mapped "
                    "writable: use DeviceTable, with a client of engram_client.connect(..., writable_arena=True)"
                )
            flags = REGISTER_PORTABLE | REGISTER_MAPPED | REGISTER_READ_ONLY
            self.driver.register(whole.ctypes.data, whole.nbytes, flags)
            self._is_registered = True
            self._device_address = self.driver.device_pointer(whole.ctypes.data)
        except BaseException:
            del whole
            self.close()
            raise
        finally:
            self.driver.leave(entered)

    @property
    def rows_pointer(self) -> int:
        """Device address of uint8 [num_rows, row_bytes]. Raises EngramError in split layout."""
        return self._address_of(self.map.rows, 0)

    @property
    def values_pointer(self) -> int:
        """Device address of uint8 [num_rows, value_bytes]. Raises EngramError in packed layout."""
        return self._address_of(self.map.values, 0)

    @property
    def scales_pointer(self) -> int:
        """Device address of uint8 [num_rows, row_bytes - value_bytes]. Raises EngramError in packed layout."""
        return self._address_of(self.map.scales, self.map.scales_offset)

    def _address_of(self, checked: Rows, offset: int) -> int:
        del checked  # asking for it has raised what there is to raise
        return self._device_address + offset

    def close(self) -> None:
        """Unregisters the rows and unmaps them; arrays that were taken from `map` keep the mapping until they die."""
        whole = getattr(self, "_whole", None)
        if whole is None:
            return
        self._whole = None
        try:
            if self._is_registered:
                self._is_registered = False
                entered = self.driver.enter()
                try:
                    self.driver.unregister(whole.ctypes.data)
                finally:
                    self.driver.leave(entered)
        finally:
            del whole
            with contextlib.suppress(BufferError):
                self.map.close()
