"""What operators change while the daemon serves: the DRAM budget, and a table's generation.

Both run on one thread of their own, one at a time from beginning to end, since they wait for running batches; the event
loop publishes the new catalogue and answers. A reload in order: open the new generation, add its layers, publish the
catalogue (clients with the old one get STALE and read it again), retire the old layers once their batches have ended,
place DRAM anew, warm the new rows at the ids that were hot. Each batch is therefore answered from one generation, and
the budget holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from engramd.config import Settings, TablePath
from engramd.daemon.engine import Engine, ServedLayer
from engramd.daemon.heat_keeper import HeatKeeper
from engramd.daemon.memory_limit import check_budget
from engramd.daemon.sampling import Sampling
from engramd.daemon.tables import check_policy, open_table
from engramd.daemon.worker_pool import WorkerPool
from engramd.errors import EngramdError
from engramd.heat.heat_file import Block
from engramd.sizes import format_size
from engramd.tier_policy import TierPolicy

QUEUE_LIMIT = 16
RETIRE_TIMEOUT_MS = 60_000
HEAT_BLOCKS_LIMIT = 128  # of 65,536 rows, 64 MiB in all: what a reload carries over
_LOG = logging.getLogger("engramd")

Reply = Callable[[dict[str, object] | None, str | None], None]  # fields, or the sentence that says why not


class Administration:
    """`publish(layers)` runs on the loop's thread whenever the served layers change."""

    def __init__(self, engine: Engine, settings: Settings, heat: HeatKeeper, publish: Callable[[], None]) -> None:
        self._engine = engine
        self._heat = heat
        self._publish = publish
        self._follows_curve = settings.miss_curve == "on"
        self._paths = {table.name: table for table in settings.tables}
        self.pool = WorkerPool("admin", 1, QUEUE_LIMIT)

    def close(self) -> None:
        self.pool.close()

    def set_budget(self, dram_bytes: int, reply: Reply, policies: dict[str, TierPolicy] | None = None) -> None:
        """Places all tables anew under another budget, and other policies by the tables' names where there are any.
        Rows of caches that change are read back hottest first. What cannot be leaves everything as it was."""

        def task() -> Callable[[], None]:
            hot = self._hot_blocks()
            tables = {layer.table.name: layer.table for layer in self._engine.layers}
            before = {name: table.policy for name, table in tables.items()}
            try:
                check_budget(dram_bytes, sum(table.manifest.logical_bytes for table in tables.values()), 0)
                self._set_policies(policies or {})
                self._engine.check_place(dram_bytes)
            except EngramdError as error:
                self._set_policies(before)
                text = str(error)
                return lambda: reply(None, text)
            try:
                self._engine.place(dram_bytes)
            except EngramdError as error:
                text = str(error)
                return lambda: reply(None, text)
            _LOG.info("the DRAM budget is %s now", format_size(dram_bytes))
            counters = self._engine.counters()
            fields: dict[str, object] = {key: counters[key] for key in ("budget_bytes", "used_bytes")}
            return lambda: self._finish(hot, fields, reply)

        self._submit(task, reply)

    def _set_policies(self, policies: dict[str, TierPolicy]) -> None:
        """Raises EngramdError where a policy speaks of a layer that its table does not have."""
        layers = self._engine.layers
        for name, policy in policies.items():
            table = next(layer.table for layer in layers if layer.table.name == name)
            check_policy(table.name, policy, table.layers)
        for layer in layers:
            if layer.table.name in policies:
                layer.table.policy = policies[layer.table.name]
                self._engine.set_policy(layer, layer.table.policy.of(layer.layer))
        for name, policy in policies.items():
            self._paths[name] = replace(self._paths[name], policy=policy)

    def _restart_curve(self) -> None:
        """The curve's imitated caches are of the row sizes that were served when it began."""
        try:
            Sampling(self._engine).start_curve()
        except EngramdError as error:
            _LOG.warning("%s: it stays that of the rows of other sizes", error)

    def reload(self, name: str, reply: Reply) -> None:
        """Switches a table (its name or its directory) to the generation that the directory holds now."""
        path = self._paths.get(name) or next((p for p in self._paths.values() if p.path == name), None)
        if path is None:
            reply(None, f"no table {name[:127]!r} is served; there is: {', '.join(sorted(self._paths))}")
            return
        name = path.name
        self._submit(lambda: self._switch(self._paths[name], reply), reply)

    def _switch(self, path: TablePath, reply: Reply) -> Callable[[], None]:
        old = [layer for layer in self._engine.layers if layer.table.name == path.name]
        before = old[0].table.manifest
        try:
            table = open_table(path)
        except EngramdError as error:
            text = str(error)
            return lambda: reply(None, f"table {path.name} stays at generation {before.generation}: {text}")
        try:
            fields: dict[str, object] = {
                "name": path.name,
                "generation": table.manifest.generation,
                "identity": table.manifest.identity,
                "previous_generation": before.generation,
            }
            if (table.manifest.generation, table.manifest.table_id) == (before.generation, before.table_id):
                return lambda: reply(fields, None)
            added = self._engine.add_table(table, replaced=old)
        except EngramdError as error:
            text = str(error)
            return lambda: reply(None, f"table {path.name} stays at generation {before.generation}: {text}")
        finally:
            table.close()

        def publish() -> None:
            """From here on clients that look get the new generation."""
            self._engine.layers = [layer for layer in self._engine.layers if layer not in old] + added
            self._publish()

        if not self.pool.on_loop(publish):
            return lambda: reply(None, f"table {path.name}: the daemon is stopping")
        hot = self._retire(old)
        _LOG.info(
            "table %s: generation %d serves, generation %d is gone",
            path.name,
            table.manifest.generation,
            before.generation,
        )
        if self._follows_curve and table.manifest.row_bytes != before.row_bytes:
            self._restart_curve()
        return lambda: self._finish({path.name: hot}, fields, reply)

    def _retire(self, old: list[ServedLayer]) -> list[Block]:
        """Ends layers of a table whose successors are published, and gives these their DRAM. Returns what was hot."""
        name = old[0].table.name
        hot = list(islice(self._heat.hot_blocks(old), HEAT_BLOCKS_LIMIT))
        for layer in old:
            if not self._engine.retire_layer(layer.handle, RETIRE_TIMEOUT_MS):
                _LOG.warning("table %s layer %d: old batches are still running", name, layer.layer)
        try:
            self._engine.place(self._engine.budget_bytes())
        except EngramdError as error:
            _LOG.warning("table %s is served from NVMe alone: %s", name, error)
        return hot

    def _hot_blocks(self) -> dict[str, list[Block]]:
        """The hottest cached rows of each table, within HEAT_BLOCKS_LIMIT."""
        names = {layer.table.name for layer in self._engine.layers}
        hot = {}
        for name in names:
            layers = [layer for layer in self._engine.layers if layer.table.name == name]
            hot[name] = list(islice(self._heat.hot_blocks(layers), max(1, HEAT_BLOCKS_LIMIT // len(names))))
        return hot

    def _finish(self, hot: dict[str, list[Block]], fields: dict[str, object], reply: Reply) -> None:
        """Answers, and reads hot rows back afterwards, since that may take long. Loop's thread."""

        def task() -> Callable[[], None]:
            for name, blocks in hot.items():
                layers = [layer for layer in self._engine.layers if layer.table.name == name]
                self._heat.warm(layers, iter(blocks))
            return lambda: None

        if any(hot.values()):
            self.pool.submit(task)
        reply(fields, None)

    def _submit(self, task: Callable[[], Callable[[], None]], reply: Reply) -> None:
        def answered() -> Callable[[], None]:
            try:
                return task()
            except Exception:  # noqa: BLE001 - whoever asked must not wait for an answer that never comes
                _LOG.exception("an administration request fails")
                return lambda: reply(None, "internal error of the daemon (see its log)")

        if not self.pool.submit(answered):
            reply(None, "the daemon's queue of administration requests is full: try again")
