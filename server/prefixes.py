"""Estimate of the prompt prefixes that each replica has cached, from the requests sent to it."""

from collections import Counter, OrderedDict
from collections.abc import Hashable

from cache import ContextWindow, hash_pages, root_hash


class PrefixIndex:
    """Pages and running requests of each replica, estimated from the requests sent to it.

    num_pages: pages in the KV cache of a replica. The other arguments are options of its engine.
    """

    def __init__(
        self, block_size: int, stride: int | None, page_size: int, num_pages: int, max_num_seqs: int
    ):
        self.context_window = ContextWindow(block_size, stride)
        self.page_size = page_size
        self.max_pages = num_pages
        self.max_num_seqs = max_num_seqs
        # The hashes of each replica's pages, least recently used first.
        self.pages: dict[Hashable, OrderedDict[bytes, None]] = {}
        self.requests: dict[str, tuple[Hashable, int]] = {}  # replica and number of prompts

    def set_replicas(self, replicas: set) -> None:
        """Keep only the state of these replicas, and add new ones."""
        self.pages = {each: self.pages.get(each, OrderedDict()) for each in replicas}
        self.requests = {
            request_id: location
            for request_id, location in self.requests.items()
            if location[0] in replicas
        }

    def rank_replicas(self, replicas: list, prompts: list[list[int]], cache_salt: str) -> list:
        """Return the replicas for a call, best first.

        The score is the number of cached pages minus the number of running requests. Pages do not
        count for a replica with max_num_seqs running requests. Ties go to the fewest pages.
        """
        page_hashes = self.page_hashes(prompts, cache_salt, 1)  # the last token is always computed
        num_running = Counter()
        for replica, count in self.requests.values():
            num_running[replica] += count

        def sort_key(replica) -> tuple[int, int]:
            replica_pages = self.pages[replica]
            num_hits = (
                sum(chained_hash in replica_pages for chained_hash in page_hashes)
                if num_running[replica] < self.max_num_seqs
                else 0
            )
            return num_running[replica] - num_hits, len(replica_pages)

        return sorted(replicas, key=sort_key)

    def add_request(
        self, replica, request_id: str, prompts: list[list[int]], cache_salt: str
    ) -> None:
        """Record that a replica, and no other, has this request."""
        if replica not in self.pages:  # the replica has ended
            return
        self.requests[request_id] = replica, len(prompts)
        replica_pages = self.pages[replica]
        for chained_hash in reversed(self.page_hashes(prompts, cache_salt)):  # evict parents last
            replica_pages[chained_hash] = None
            replica_pages.move_to_end(chained_hash)
        while len(replica_pages) > self.max_pages:
            replica_pages.popitem(last=False)

    def finish_request(self, replica, request_id: str) -> None:
        """Record that a request is finished, unless another replica has it by now."""
        if self.requests.get(request_id, (None, 0))[0] == replica:
            del self.requests[request_id]

    def page_hashes(
        self, prompts: list[list[int]], cache_salt: str, num_excluded: int = 0
    ) -> list[bytes]:
        """Return distinct hashes of the prompt windows' full pages, less num_excluded tokens."""
        page_hashes = {}
        for prompt in prompts:
            window = self.context_window.crop(prompt)
            tokens = window[: len(window) - num_excluded]
            page_hashes |= dict.fromkeys(hash_pages(tokens, self.page_size, root_hash(cache_salt)))
        return list(page_hashes)
