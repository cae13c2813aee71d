"""Finding a checkpoint and the shards of its tensors: a directory, an index file, or a repo in the Hugging Face cache.

Nothing is ever fetched from a network.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from engramd import strict_json
from engramd.bounded_file import read_at_most
from engramd.checkpoint.safetensors import Shard, Tensor, read_header
from engramd.errors import EngramdError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 100_000_000
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_REVISION = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


@dataclass
class Checkpoint:
    """A checkpoint's files. `weight_map` maps tensor names to shard file names inside `directory`.

    Headers are read when a tensor is asked for, each once; shards that nobody asks for need not exist.
    """

    directory: str
    index_path: str
    weight_map: dict[str, str]
    revision: str | None = None
    shards: dict[str, Shard] = field(default_factory=dict)

    def shard_of(self, tensor_name: str) -> Shard:
        """The checked header of the shard that the index names for a tensor."""
        file_name = self.weight_map[tensor_name]
        if file_name not in self.shards:
            path = os.path.join(self.directory, file_name)
            if not os.path.exists(path):
                raise EngramdError(
                    f"{self.index_path} names {file_name!r}, which is not there: download or copy it to {path}"
                )
            self.shards[file_name] = read_header(path)
        return self.shards[file_name]

    def tensor(self, name: str) -> tuple[Shard, Tensor]:
        """A tensor and the shard that holds it; raises EngramdError where it is missing."""
        if name not in self.weight_map:
            raise EngramdError(f"{self.index_path}: no tensor {name!r}")
        shard = self.shard_of(name)
        if name not in shard.tensors:
            raise EngramdError(f"{shard.path}: no tensor {name!r}, though {self.index_path} says that it is here")
        return shard, shard.tensors[name]


def open_checkpoint(source: str, revision: str | None = None) -> Checkpoint:
    """Opens CHECKPOINT as the command line takes it: a directory, an index file, or ORG/NAME in the Hugging Face cache
    (there `revision` is a branch, tag or commit; main unless given). Raises EngramdError."""
    if os.path.isdir(source) or os.path.isfile(source):
        if revision is not None:
            raise EngramdError(f"--revision {revision} goes with a repo id, but {source} is a path")
        if os.path.isdir(source):
            return _open_directory(os.path.abspath(source), None)
        return _open_index(os.path.abspath(source), None)
    if _REPO_ID.fullmatch(source) and ".." not in source:
        directory, commit = _cached_snapshot(source, revision or "main")
        return _open_directory(directory, commit)
    raise EngramdError(f"no checkpoint at {source}: not a directory, not an index file, not a repo id such as ORG/NAME")


def hub_cache() -> str:
    """The Hugging Face cache directory, by the same variables as its own library: HF_HUB_CACHE, HF_HOME, else
    ~/.cache/huggingface/hub (or below XDG_CACHE_HOME)."""
    if path := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return os.path.expanduser(path)
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "huggingface"
    )
    return os.path.join(os.path.expanduser(home), "hub")


def _cached_snapshot(repo_id: str, revision: str) -> tuple[str, str]:
    """(snapshot directory, commit) of a repo in the cache."""
    cache = hub_cache()
    repo = os.path.join(cache, "models--" + repo_id.replace("/", "--"))
    if not os.path.isdir(repo):
        raise EngramdError(
            f"no checkpoint {repo_id}: neither a path nor in the Hugging Face cache at {cache} "
            "(download it there first, or set HF_HUB_CACHE or HF_HOME)"
        )
    if not _REVISION.fullmatch(revision) or any(set(part) == {"."} for part in revision.split("/")):
        raise EngramdError(f"{repo_id}: {revision!r} is not a revision")
    commit = revision
    if not _COMMIT.fullmatch(revision):
        try:
            with open(os.path.join(repo, "refs", revision), encoding="ascii") as file:
                commit = file.read(100).strip()
        except (OSError, UnicodeDecodeError):
            known = sorted(os.listdir(os.path.join(repo, "refs"))) if os.path.isdir(os.path.join(repo, "refs")) else []
            raise EngramdError(f"{repo_id}: revision {revision!r} is not in the cache (it has: {known})") from None
        if not _COMMIT.fullmatch(commit):
            raise EngramdError(f"{repo}/refs/{revision}: {commit[:80]!r} is not a commit")
    directory = os.path.join(repo, "snapshots", commit)
    if not os.path.isdir(directory):
        raise EngramdError(f"{repo_id}: revision {revision!r} ({commit}) has no snapshot in the cache at {cache}")
    return directory, commit


def _open_directory(directory: str, revision: str | None) -> Checkpoint:
    index = os.path.join(directory, INDEX_NAME)
    if os.path.isfile(index):
        return _open_index(index, revision)
    single = os.path.join(directory, SINGLE_NAME)
    if os.path.isfile(single):
        shard = read_header(single)
        return Checkpoint(directory, single, dict.fromkeys(shard.tensors, SINGLE_NAME), revision, {SINGLE_NAME: shard})
    raise EngramdError(f"{directory}: no checkpoint: neither {INDEX_NAME} nor {SINGLE_NAME} is there")


def _open_index(path: str, revision: str | None) -> Checkpoint:
    index = strict_json.loads(read_at_most(path, MAX_INDEX_BYTES, ", so not an index"), path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise EngramdError(f"{path}: not a safetensors index: it has no weight_map")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _is_plain_name(file_name):
            raise EngramdError(
                f"{path}: the file of tensor {name[:200]!r} is {str(file_name)[:200]!r}, not a plain file name"
            )
    return Checkpoint(os.path.dirname(path), path, weight_map, revision)


def _is_plain_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name and name.isprintable()
