"""The engramd daemon: owns embedding tables and serves their rows to inference servers on the same machine.

The row path is native (`engramd._engine`); this package holds the control plane, the packer and the command line. It
never imports `engram_client` in the daemon's process.
"""

__version__ = "0.1.0"
