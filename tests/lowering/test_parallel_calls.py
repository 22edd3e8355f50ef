"""A compiled model under autocast, DistributedDataParallel and FSDP: it works, or is refused with the reason."""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dovetail

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo over the loopback device")
Result = tuple[list[Tensor], list[Tensor]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def compiled(model: nn.Module, **options: Any) -> Any:
    return dovetail.compile(model, backends="eager", **options)


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def trained(model: nn.Module, x: Tensor, steps: int = 3) -> Result:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results: list[Tensor] = []
    for step in range(steps):
        optimizer.zero_grad()
        y = model(x + step)
        y.square().sum().backward()
        optimizer.step()
        results.append(y.detach())
    return results, [whole(p) for p in model.parameters()]


def same(a: Result, b: Result) -> None:
    for mine, theirs in zip((*a[0], *a[1]), (*b[0], *b[1]), strict=True):
        torch.testing.assert_close(mine, theirs)


def sharded(model: Net) -> Net:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def in_ddp(x: Tensor) -> Result:
    fast = compiled(net())
    result = trained(DistributedDataParallel(fast), x)
    assert len(fast.graphs) == 1
    return result


def in_fsdp(x: Tensor) -> Result:
    fast = compiled(net())
    result = trained(fully_shard(fast), x)
    assert len(fast.graphs) == 1
    return result


def blocks_then_sharded(x: Tensor) -> Result:
    model = net()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = compiled(block)
    result = trained(sharded(model), x)
    assert [len(block.graphs) for block in model.blocks] == [1, 1]
    return result


def sharded_then_blocks(x: Tensor) -> Result:
    model = sharded(net())
    for i, block in enumerate(model.blocks):
        model.blocks[i] = compiled(block)
    result = trained(model, x)
    assert [len(block.graphs) for block in model.blocks] == [1, 1]
    return result


WAYS: list[Callable[[Tensor], Result]] = [in_ddp, in_fsdp, blocks_then_sharded, sharded_then_blocks]


def refuses(model: nn.Module, x: Tensor, reason: str) -> None:
    with pytest.raises(dovetail.CaptureError, match=reason):
        compiled(model, on_error="raise")(x)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("way", WAYS)
def test_a_wrapped_model_trains_as_it_does_uncompiled(way: Callable[[Tensor], Result]) -> None:
    x = torch.randn(4, 8)
    same(way(x), trained(net(), x))


@pytest.mark.usefixtures("alone")
def test_what_communicates_is_not_captured() -> None:
    x = torch.randn(4, 8)
    refuses(DistributedDataParallel(net()), x, r"wrapped by DistributedDataParallel.*Compile what is wrapped")
    refuses(sharded(net()), x, r"'blocks.0' of the model is wrapped by fully_shard.*Compile what is wrapped")
    with pytest.raises(dovetail.CaptureError, match="fully_shard"):
        dovetail.capture(fully_shard(net()), (x,))
    wrapped = DistributedDataParallel(net())
    fast = compiled(wrapped)
    with pytest.warns(UserWarning, match="wrapped by DistributedDataParallel"):
        assert torch.equal(fast(x), net()(x))
    assert not fast.graphs
    assert "DistributedDataParallel" in str(dovetail.explain(fast))


def work(rank: int, port: int, path: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    uncompiled = trained(DistributedDataParallel(net()), x)
    results = [way(x) for way in WAYS]
    refuses(DistributedDataParallel(net()), x, "wrapped by DistributedDataParallel")
    refuses(sharded(net()), x, "wrapped by fully_shard")
    torch.save((uncompiled, results), f"{path}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.long
def test_two_processes_train_as_they_do_uncompiled(tmp_path: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (port, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for uncompiled, results in ranks:
        for result in results:
            same(result, uncompiled)
    for way in range(len(WAYS)):
        for mine, theirs in zip(ranks[0][1][way][1], ranks[1][1][way][1], strict=True):
            torch.testing.assert_close(mine, theirs)
    assert not torch.equal(ranks[0][0][0][0], ranks[1][0][0][0])


def test_autocast_around_a_compiled_model_is_that_around_the_model() -> None:
    x = torch.randn(4, 8)
    model, fast = net(), compiled(net())
    for enabled in (True, False, True):
        for parameters in (model, fast):
            parameters.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            expected, result = model(x), fast(x)
            middle, expected_middle = fast.blocks[0](x), model.blocks[0](x)
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)
        assert middle.dtype == expected_middle.dtype == (torch.bfloat16 if enabled else torch.float32)
        expected.square().sum().backward()
        result.square().sum().backward()
        for mine, theirs in zip(fast.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert len(fast.graphs) == 2


def test_autocast_inside_of_a_model_is_captured() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.first(x)
            with torch.autocast("cpu", enabled=False):
                return self.second(y.float())

    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(4, 8)
    fast = compiled(model)
    assert torch.equal(fast(x), model(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast(x), model(x))
