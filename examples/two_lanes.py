"""Two tasks that communicate concurrently, each on its own lane.

    asynccoll run -n 2 examples/two_lanes.py

Ranks must issue the collectives of one communicator in the same order. Two concurrent tasks cannot
guarantee that, so each child task of ``ac.create_task_group()`` has its own lane: a separate order of
collectives, matched by name with the same lane on the other ranks.
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
        jobs.reverse()  # started in the opposite order on every other rank; the sums are still right
    async with ac.create_task_group() as tasks:
        for name, numbers in jobs:
            tasks.start_soon(count, name, numbers, name=name)
    ac.finalize()


if __name__ == "__main__":
    asyncio.run(main())
