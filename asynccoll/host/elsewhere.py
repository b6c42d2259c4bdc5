"""Names from torch.distributed, Horovod and ignite, and what to write with this library instead.

Used by the error about a name that this library lacks; docs/coming-from.md has the full list, with the
differences. This module must not import anything: ``hasattr`` looks names up as well.
"""

from __future__ import annotations

_TORCH = {
    "all_gather_coalesced": "await ac.all_gather(xs)",
    "all_gather_into_tensor": "await ac.all_gather(x)",
    "all_gather_single": "await ac.all_gather(x)",
    "all_reduce_coalesced": "await ac.all_reduce(xs)",
    "all_to_all_single": "await ac.all_to_all(x, input_split_sizes=sizes)",
    "broadcast_object_list": "await ac.broadcast_object(obj, src=0)",
    "destroy_process_group": "ac.finalize()",
    "get_backend": "ac.backend()",
    "get_global_rank": "group.ranks[i]",
    "get_group_rank": "group.ranks.index(rank)",
    "get_node_local_rank": "ac.get_local_rank()",
    "get_process_group_ranks": "group.ranks",
    "init_process_group": 'ac.initialize("gloo")',
    "irecv": "ac.recv(x, src=0), or ac.P2POp(ac.recv, x, 0) for a batch",
    "is_available": "ac.available_backends()",
    "is_backend_available": "ac.available_backends()",
    "isend": "ac.send(x, dst=1), or ac.P2POp(ac.send, x, 1) for a batch",
    "new_subgroups_by_enumeration": "[ac.new_group(ranks) for ranks in lists]",
    "recv_object_list": "await ac.recv_object(src=0)",
    "reduce_scatter_single": "await ac.reduce_scatter(x)",
    "reduce_scatter_tensor": "await ac.reduce_scatter(x)",
    "scatter_object_list": "await ac.scatter_object(objs, src=0)",
    "send_object_list": "await ac.send_object(obj, dst=1)",
    "shrink_group": "ac.new_group(ranks)",
    "split_group": "[ac.new_group(ranks) for ranks in lists]",
    "DistributedDataParallel": "ac.overlap_gradients(model)",
    "DistributedSampler": "ac.auto_dataloader(dataset)",
    "ZeroRedundancyOptimizer": "ac.overlap.shard_optimizer(model, optimizer)",
}
_HOROVOD = {
    "add_process_set": "ac.new_group(ranks)",
    "allgather": "await ac.all_gather(x, uneven=True)",
    "allgather_async": "ac.all_gather(x, uneven=True)",
    "allgather_object": "await ac.all_gather_object(obj)",
    "allreduce": 'await ac.all_reduce(x, op="avg")',
    "allreduce_": 'await ac.all_reduce(x, op="avg", out=x)',
    "allreduce_async": 'ac.all_reduce(x, op="avg")',
    "allreduce_async_": 'ac.all_reduce(x, op="avg", out=x)',
    "alltoall": "await ac.all_to_all(x, input_split_sizes=splits)",
    "alltoall_async": "ac.all_to_all(x, input_split_sizes=splits)",
    "broadcast_": "await ac.broadcast(x, src=0, out=x)",
    "broadcast_async": "ac.broadcast(x, src=0)",
    "broadcast_async_": "ac.broadcast(x, src=0, out=x)",
    "broadcast_optimizer_state": (
        "optimizer.load_state_dict(await ac.broadcast_object(optimizer.state_dict()))"
    ),
    "cross_rank": "ac.get_node_rank()",
    "cross_size": "ac.get_nnodes()",
    "grouped_allgather": "await ac.wait_all([ac.all_gather(x) for x in xs])",
    "grouped_allreduce": 'await ac.all_reduce(xs, op="avg")',
    "grouped_reducescatter": 'await ac.wait_all([ac.reduce_scatter(x, op="avg") for x in xs])',
    "init": "ac.initialize()",
    "local_rank": "ac.get_local_rank()",
    "local_size": "ac.get_nproc_per_node()",
    "poll": "work.done()",
    "rank": "ac.get_rank()",
    "reducescatter": 'await ac.reduce_scatter(x, op="avg")',
    "shutdown": "ac.finalize()",
    "size": "ac.get_world_size()",
    "sparse_allreduce_async": "ac.all_reduce(x)",
    "start_timeline": "with ac.trace.recording() as timeline:",
    "synchronize": "work.wait()",
    "Average": 'op="avg"',
    "Compression": 'compression="fp16"',
    "DistributedOptimizer": "ac.async_optim(optimizer)",
    "Max": 'op="max"',
    "Min": 'op="min"',
    "ProcessSet": "ac.new_group(ranks)",
    "Product": 'op="product"',
    "Sum": 'op="sum"',
    "SyncBatchNorm": "ac.auto_model(model, sync_bn=True)",
}
_IGNITE = {
    "model_name": "ac.backend()",
    "one_rank_first": "ac.main_first()",
    "one_rank_only": "ac.is_main()",
    "show_config": "ac.backend(), ac.get_rank(), ac.get_world_size() ...",
}
#: Names that a user might guess from other names.
_GUESSED = {
    "get_size": "ac.get_world_size()",
    "init_process": "ac.initialize()",
    "is_main_process": "ac.is_main()",
    "world_size": "ac.get_world_size()",
}
_HERE = _TORCH | _HOROVOD | _IGNITE | _GUESSED


def called_here(name: str) -> str:
    """Return this library's counterpart of what other libraries call ``name``; "" if the name is unknown."""
    return _HERE.get(name, "")
