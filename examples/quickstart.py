"""Start a collective, compute while it is in flight, await it.

    asynccoll run -n 2 examples/quickstart.py

or, as a world of one, ``python examples/quickstart.py``.
"""

import asyncio

import torch

import asynccoll as ac


async def main() -> None:
    ac.initialize()
    gradient = torch.full((1 << 20,), float(ac.get_rank() + 1))
    work = ac.all_reduce(gradient)  # it has started: the call returned at once
    local = torch.randn(512, 512) @ torch.randn(512, 512)  # computes while it is in flight
    total = await work  # asyncio or trio; work.wait() without a loop
    print(f"rank {ac.get_rank()}: {total[0]:.0f}, and meanwhile {tuple(local.shape)} computed")
    ac.finalize()


if __name__ == "__main__":
    asyncio.run(main())
