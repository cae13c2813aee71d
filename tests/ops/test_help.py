"""`engramd VERB --help` stands alone: each verb says what it does, each option what it means."""

from __future__ import annotations

import argparse

import pytest

from engramd.cli.main import VERBS, build_parser


def parser_of(verb: str) -> argparse.ArgumentParser:
    (verbs,) = (action for action in build_parser(verb)._actions if isinstance(action, argparse._SubParsersAction))
    found = verbs.choices[verb]
    assert isinstance(found, argparse.ArgumentParser)
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_option_is_described(verb: str) -> None:
    parser = parser_of(verb)
    assert len(parser.description or "") > 30
    assert parser.description.rstrip().endswith(".")  # type: ignore[union-attr]
    for action in parser._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), action
    socket = [action.help for action in parser._actions if "--socket" in action.option_strings]
    assert all("ENGRAMD_SOCKET" in str(text) and "/run/engramd/engramd.sock" in str(text) for text in socket)
    assert parser.format_help()  # a stray % in a text would fail here
