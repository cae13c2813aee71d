"""Reads the configuration again while the daemon serves: what can change is applied, what cannot is named.

The flags of the command line keep their place over the file. A file that is wrong changes nothing. All of it runs on
the event loop's thread; a change that has to wait for something (a new budget waits for running batches) ends later,
and so does the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from engramd.config import Flags, Settings, settings_from
from engramd.errors import EngramdError
from engramd.options import OPTIONS

Done = Callable[[str | None], None]  # told None, or a sentence on why a change is not in force
Change = Callable[[Settings, Done], None]
_LOG = logging.getLogger("engramd")


@dataclass
class Outcome:
    """Sentences on what is in force now, and on what is not."""

    applied: list[str] = field(default_factory=list)
    not_applied: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        applied = [f"applied: {', '.join(self.applied)}"] if self.applied else []
        return "; ".join([*applied, *self.not_applied]) or "nothing has changed"


@dataclass(frozen=True)
class _Difference:
    """A setting that has another value now, with both as one would write them."""

    key: str
    attribute: str
    before: str
    after: str


def _differences(now: Settings, wanted: Settings) -> list[_Difference]:
    """Between settings of the same tables."""
    found = []
    if now.tables != wanted.tables:
        before, after = (
            "; ".join(f"{table.name}: {table.policy}" for table in settings.tables) for settings in (now, wanted)
        )
        found.append(_Difference("tier", "tables", before, after))
    for option in OPTIONS:
        values = (getattr(now, option.attribute), getattr(wanted, option.attribute))
        if values[0] != values[1]:
            found.append(_Difference(option.key, option.attribute, *map(option.shown, values)))
    return found


class Reconfigure:
    """changes: by the option's key, what makes a new value take effect. budget_bytes: the DRAM budget in force, which
    has ways of its own to change."""

    def __init__(
        self, flags: Flags, settings: Settings, changes: Mapping[str, Change], budget_bytes: Callable[[], int]
    ) -> None:
        self._flags = flags
        self._settings = settings
        self._changes = changes
        self._budget_bytes = budget_bytes

    @property
    def file(self) -> str | None:
        return self._flags.config

    @property
    def settings(self) -> Settings:
        """The configuration in force. Any thread."""
        return replace(self._settings, dram_bytes=self._budget_bytes())

    def __call__(self, done: Callable[[Outcome | str], None]) -> None:
        """Applies what has changed, logs it and calls `done` with the outcome, or with the sentence on why the
        configuration stays as it is."""
        try:
            if self._flags.config is None:
                raise EngramdError("the daemon was started without --config FILE, so there is nothing to read again")
            wanted = settings_from(self._flags)
        except EngramdError as error:
            _LOG.error("the configuration stays as it is: %s", error)
            done(str(error))
            return
        now = self.settings
        outcome = Outcome()
        if [(table.name, table.path) for table in wanted.tables] != [(table.name, table.path) for table in now.tables]:
            outcome.not_applied.append(
                "the set of tables stays as it is until the daemon is restarted (`engramd reload TABLE` takes a new "
                "generation of one of them)"
            )
            wanted = replace(wanted, tables=now.tables)
        changed = _differences(now, wanted)
        waiting = len(changed) + 1

        def finish() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0:
                level = logging.WARNING if outcome.not_applied else logging.INFO
                _LOG.log(level, "configuration %s read again: %s", self.file, outcome)
                done(outcome)

        for difference in changed:
            self._apply(difference, wanted, outcome, finish)
        finish()

    def _apply(self, changed: _Difference, wanted: Settings, outcome: Outcome, finish: Callable[[], None]) -> None:
        def told(problem: str | None) -> None:
            if problem is None:
                value = {changed.attribute: getattr(wanted, changed.attribute)}
                self._settings = replace(self._settings, **value)
                outcome.applied.append(f"{changed.key} = {changed.after}")
            else:
                outcome.not_applied.append(f"{changed.key} stays {changed.before}: {problem}")
            finish()

        change = self._changes.get(changed.key)
        if change is None:
            told(f"{changed.after} takes a restart")
        else:
            change(wanted, told)
