"""Guesses at the next tokens of texts, for an engine."""

from drafts import lookup
from engine.request import Request


class LookupDrafter:
    """Drafts from each text itself, by `lookup`."""

    def propose(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        return [lookup(request.tokens, count) for request, count in zip(requests, counts)]
