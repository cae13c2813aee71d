"""Plug-ins of inference engines: an engine takes its Engram rows from a daemon instead of loading the tables itself.

`core` is what all engines share; it needs numpy and `engram_client` alone. Each engine has a folder of its own, whose
modules import that engine and are loaded in its processes only.
"""
