"""What of a conversation a target is to answer: each of its answers, in order, after the answers that it gave itself before."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.corpus.conversation import Message


def split_turns(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """What is said between two answers, from the beginning on; after each piece the target has to answer.

    The first piece may hold a greeting of the assistant, which answers nobody and stays as it is. The last one ends with its
    last user message. Of several answers in a row the target gives one. Empty when no user says anything.
    """
    pieces: list[tuple[Message, ...]] = []
    piece: list[Message] = []
    for message in messages:
        if message.role != "assistant":
            piece.append(message)
        elif any(said.role == "user" for said in piece):
            pieces.append(tuple(piece))
            piece = []
        elif not pieces:
            piece.append(message)
    while piece and piece[-1].role != "user":
        piece.pop()
    return [*pieces, tuple(piece)] if piece else pieces


def uses_tools(messages: Sequence[Message]) -> bool:
    """Whether tools are called or answer: what they say belongs to calls that the target need not make."""
    return any(message.role == "tool" or message.fields.get("tool_calls") for message in messages)
