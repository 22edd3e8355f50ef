"""A scheduled model under DistributedDataParallel: two processes, gradients as without a schedule."""

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from dovetail.scheduling.schedule import schedule
from tests.scheduling.models import Net, mlp


def gradients(rank: int, *, scheduled: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Net().eval()
    x = torch.randn(4, 8) + rank
    if scheduled:
        s = schedule(model, (x,))
        s.fuse(s["blocks.*"].find(mlp))
        s.build()
    wrapped = DistributedDataParallel(model)
    wrapped(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def work(rank: int, port: int, path: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    unfused, fused = gradients(rank, scheduled=False), gradients(rank, scheduled=True)
    torch.save((unfused, fused), f"{path}/{rank}.pt")
    dist.destroy_process_group()


def test_gradients_are_those_of_the_model(tmp_path):  # type: ignore[no-untyped-def]
    if sys.platform != "linux":
        return
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    mp.spawn(work, (port, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for unfused, fused in ranks:
        for a, b in zip(unfused, fused, strict=True):
            torch.testing.assert_close(a, b)
    for a, b in zip(ranks[0][1], ranks[1][1], strict=True):
        assert torch.equal(a, b)
