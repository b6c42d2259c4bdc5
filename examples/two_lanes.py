"""Two tasks that communicate at the same time, each in an order of its own.

    asynccoll run -n 2 examples/two_lanes.py

Ranks must issue the collectives of one communicator in the same order. Two concurrent tasks cannot
promise that, so each child of ``ac.create_task_group()`` has a lane: an order of its own, which meets
its like on the other ranks by name.
"""

import asyncio

import asynccoll as ac


async def count(name: str, numbers: list[int]) -> None:
    for number in numbers:
        total = await ac.all_reduce(number)
        if ac.get_rank() == 0:
            print(f"{name}: {number} on each rank makes {total}")


async def main() -> None:
    ac.initialize()
    jobs = [("apples", [1, 2, 3]), ("pears", [10, 20, 30])]
    if ac.get_rank() % 2:
        jobs.reverse()  # started in opposite order on every other rank: the sums are right
    async with ac.create_task_group() as tasks:
        for name, numbers in jobs:
            tasks.start_soon(count, name, numbers, name=name)
    ac.finalize()


if __name__ == "__main__":
    asyncio.run(main())
