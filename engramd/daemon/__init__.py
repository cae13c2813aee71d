"""The daemon: event loop, sockets, sessions and control plane around the native engine."""
