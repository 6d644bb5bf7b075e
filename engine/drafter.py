"""Drafters for the engine."""

from drafts import prompt_lookup
from engine.request import Request


class PromptLookupDrafter:
    """Prompt-lookup drafts from each sequence itself."""

    def propose(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        return [
            prompt_lookup(request.tokens, count) if count else []
            for request, count in zip(requests, counts)
        ]
