"""Prefix-aware request router of Ray Serve, for calls of `Replica.generate`."""

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from engine.pages import salt_with_adapter
from server.prefixes import PrefixIndex


def prompts_and_salt(request: PendingRequest) -> tuple[list[list[int]], str]:
    """Return the prompts of a call, and the cache_salt that the engine uses for them."""
    (inputs,) = request.args
    return inputs.prompts, salt_with_adapter(inputs.cache_salt, inputs.adapter)


class PrefixAwareRouter(RequestRouter):
    """Router to the replica with the most cached pages, unless it is overloaded: see PrefixIndex.

    Ray makes one router per handle, and calls it in a single thread.
    """

    def initialize_state(self, **options) -> None:
        self.prefix_index = PrefixIndex(**options)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.prefix_index.set_replicas(set(self.curr_replicas))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates in order; Ray tries the next one if a replica is full."""
        prompts, cache_salt = prompts_and_salt(pending_request)
        request_id = pending_request.metadata.internal_request_id
        candidates = {replica.replica_id: replica for replica in candidate_replicas}
        order = self.prefix_index.rank_replicas(list(candidates), prompts, cache_salt)
        first = order[0]
        # Count the request now, before Ray routes the next one.
        self.prefix_index.add_request(first, request_id, prompts, cache_salt)
        future = pending_request.future
        future.add_done_callback(
            lambda _: future.cancelled() and self.prefix_index.finish_request(first, request_id)
        )
        return [[candidates[each]] for each in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, _) -> None:
        """Correct the replica of an unfinished request that is not with the first choice."""
        prompts, cache_salt = prompts_and_salt(pending_request)
        request_id = pending_request.metadata.internal_request_id
        if self.prefix_index.requests.get(request_id, (replica_id, 0))[0] != replica_id:
            self.prefix_index.add_request(replica_id, request_id, prompts, cache_salt)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self.prefix_index.finish_request(replica_id, internal_request_id)
