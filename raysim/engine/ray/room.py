"""Room for trainers: nodes with free resources, or nodes that Ray's autoscaler can start."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping

import ray
from ray._private import ray_constants
from ray._private.state import available_resources_per_node
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply  # type: ignore[attr-defined]  # protobuf makes it on import
from ray.experimental.internal_kv import _internal_kv_get, internal_kv_get_gcs_client
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from raysim.base.errors import Fault, RaysimError, refuse
from raysim.engine.ray.session import offered
from raysim.engine.schedule import fitting

#: Seconds after which a wait for room is first reported. Each further line comes after twice the time, up to a minute.
FIRST_WORD_S, LONGEST_PAUSE_S = 3.0, 60.0


class NoRoom(RaysimError):
    """The resources were not free in time."""


def find_room(
    share: Mapping[str, float],
    count: int,
    *,
    least: int,
    wait_s: float,
    say: Callable[[str], None],
    may_grow: bool = False,
) -> list[str]:
    """Return a node for each of `count` trainers, or for each of `least` trainers if there is no room for `count`.

    A placement group finds the room; Ray's autoscaler starts nodes for the group, and the group ends with this process.
    The group is removed as soon as the nodes are found: after the loss of a node, Ray would otherwise search for a new
    place for the group's bundles without pause.

    Args:
      share: resources of a trainer, by Ray's names.
      say: say(line) reports missing resources during the wait.
      may_grow: see `autoscales`.
    Raises:
      NoRoom: the resources are not free within `wait_s` seconds.
      ConfigError: the cluster and its autoscaler can never offer the resources.
    """
    if least < count:
        with contextlib.suppress(NoRoom):
            return find_room(share, count, least=count, wait_s=FIRST_WORD_S, say=say)
        count = least
    group: PlacementGroup = ray.util.placement_group([dict(share)] * count, strategy="PACK")
    began, pause_s = time.monotonic(), FIRST_WORD_S
    wanted = f"{count} trainers with {dict(share)} each"
    try:
        # Ray truncates the timeout to whole seconds.
        while not group.wait(math.ceil(max(0.0, min(pause_s, began + wait_s - time.monotonic())))):
            waited_s = time.monotonic() - began
            free = {name: amount for name, amount in ray.available_resources().items() if name in share}
            if may_grow and _is_out_of_reach(group, share):
                text = f"{wanted} are more than the cluster and the autoscaler could ever have"
                mend = "lower resources.trainers or the share of each, or raise the autoscaler's maximum of nodes"
                refuse([Fault("resources.trainers", f"{text}; {mend}")], "the resources")
            if waited_s >= wait_s:
                raise NoRoom(
                    f"no room within {wait_s:g} s for {wanted}; free now: {free}",
                    "the Ray cluster",
                    "lower resources.trainers or the share of each, or raise resources.wait_s and wait until other jobs end",
                )
            say(f"waiting for room ({waited_s:.0f} s of at most {wait_s:g}): {wanted}; free now: {free}")
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    finally:  # after a signal, too: an unused group must not block other jobs
        remove_placement_group(group)
    return [nodes[index] for index in range(count)]


def autoscales() -> bool:
    """Return whether Ray's autoscaler may start nodes for pending trainers.

    Version 2 of Ray's autoscaler also runs on clusters that it cannot change; it soon reports that it has no nodes, see
    `find_room`. Version 1 lists a node that it did not start under the node's id, which begins with "node_".
    """
    if is_autoscaler_v2(fetch_from_server=True):
        return True
    status = json.loads(_internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS) or "{}")
    types = (status.get("autoscaler_report") or {}).get("active_nodes", {})
    return any(not name.startswith("node_") for name in types)


def _is_out_of_reach(group: PlacementGroup, share: Mapping[str, float]) -> bool:
    """Return whether the autoscaler can never find room for a placement group.

    This is so if the autoscaler reports the group as infeasible, no node is starting, and all room is free. Version 1
    of Ray's autoscaler reports nothing: the run waits until `wait_s` is over.
    """
    status = GetClusterStatusReply.FromString(internal_kv_get_gcs_client().get_cluster_status())
    autoscaler = status.autoscaling_state
    if not any(group.id.hex() in each.details for each in autoscaler.infeasible_gang_resource_requests):
        return False
    free = sum(fitting(room, share) for room in available_resources_per_node().values())
    is_free = free >= sum(fitting(room, share) for room in offered())
    return is_free and not autoscaler.pending_instance_requests and not autoscaler.pending_instances
