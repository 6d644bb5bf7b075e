"""Which replica has the beginning of a prompt, as far as its sender can know."""

from collections import Counter, OrderedDict
from collections.abc import Hashable

from cache import check_stride, window_start
from engine.pages import default_num_pages, hash_page, root_hash


class Prefixes:
    """What each replica has been sent, and what it writes now.

    All but block_size are options of the replicas' engines. itemsize: as of `default_num_pages`.
    """

    def __init__(
        self,
        block_size: int,
        stride: int | None,
        page_size: int,
        num_pages: int | None,
        max_num_seqs: int,
        itemsize: int = 4,
    ):
        self.block_size = block_size
        self.stride = check_stride(stride, block_size)
        self.page_size = page_size
        self.most = num_pages or default_num_pages(max_num_seqs, block_size, page_size, itemsize)
        self.max_num_seqs = max_num_seqs
        # The names of each replica's pages, in LRU order: those asked for last at the end.
        self.pages: dict[Hashable, OrderedDict[bytes, None]] = {}
        self.calls: dict[str, tuple[Hashable, int]] = {}  # where each is, and its number of texts

    def keep(self, replicas: set) -> None:
        """These are all there are, now."""
        self.pages = {each: self.pages.get(each, OrderedDict()) for each in replicas}
        self.calls = {call: at for call, at in self.calls.items() if at[0] in replicas}

    def order(self, replicas: list, prompts: list[list[int]], cache_salt: str) -> list:
        """The replicas for a call, the best one first.

        A page that it has counts for a replica, and a text that it writes against it. Where no row
        is free, pages do not count. Among equals the one that has the fewest pages comes first.
        """
        names = self.names(
            prompts, cache_salt, 1
        )  # the last token is computed: its logits are wanted
        texts = Counter()
        for replica, count in self.calls.values():
            texts[replica] += count

        def rank(replica) -> tuple[int, int]:
            known = self.pages[replica]
            found = (
                sum(name in known for name in names) if texts[replica] < self.max_num_seqs else 0
            )
            return texts[replica] - found, len(known)

        return sorted(replicas, key=rank)

    def sent(self, replica, call: str, prompts: list[list[int]], cache_salt: str) -> None:
        """A call of this name is with a replica, and no other."""
        if replica not in self.pages:  # it has ended meanwhile
            return
        self.calls[call] = replica, len(prompts)
        known = self.pages[replica]
        for name in reversed(self.names(prompts, cache_salt)):  # no page outlives the one before it
            known[name] = None
            known.move_to_end(name)
        while len(known) > self.most:
            known.popitem(last=False)

    def done(self, replica, call: str) -> None:
        """A call is over there. By now it may be elsewhere."""
        if self.calls.get(call, (None, 0))[0] == replica:
            del self.calls[call]

    def names(self, prompts: list[list[int]], cache_salt: str, less: int = 0) -> list[bytes]:
        """Names of the full pages of all prompts' windows, less their last tokens, each once."""
        names = {}
        for prompt in prompts:
            window = prompt[window_start(len(prompt), self.block_size, self.stride) :]
            name = root_hash(cache_salt)
            for end in range(self.page_size, len(window) - less + 1, self.page_size):
                name = hash_page(name, window[end - self.page_size : end])
                names[name] = None
        return list(names)
