"""The plug-in of SGLang: DeepSeek-V4.1's Engram rows come from a daemon; no table is allocated, none is loaded.

`plugin.py` is the entry point. `embedding.py` stands where SGLang has its table, `stager.py` brings the rows of prompts
on the scheduler's side, `mapped_rows.py` those of layers that the daemon holds resident, `lookups.py` those that only a
forward pass knows, `graph_lanes.py` those of captured graphs; `arrival.py` prefetches the rows of requests that wait.
docs/sglang.md is for operators.
"""
