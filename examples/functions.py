"""Functions and objects on other processes and hosts: tasks, actors, references.

python examples/functions.py
"""

import os

import gpulayer


@gpulayer.remote
def count_primes(start, stop):
    """A task: runs in a worker process, on a host with a free CPU."""
    return sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(max(2, start), stop))


@gpulayer.remote
def add(*numbers):
    return sum(numbers)


@gpulayer.remote
class Counter:
    """An actor: an object that lives in a worker process, its methods called one at a time."""

    def __init__(self, start=0):
        self.total = start

    def add(self, number):
        self.total += number
        print(f"now {self.total}")  # shows in the caller's terminal
        return self.total

    def where(self):
        return os.getpid()


def main():
    with gpulayer.connect():  # this machine; connect(["gpu1", "gpu2"]) for others
        refs = [count_primes.remote(n, n + 5000) for n in range(0, 20000, 5000)]  # four calls at once
        total = add.remote(*refs)  # references as arguments: no need to wait for their values
        print(f"primes below 20000: {gpulayer.get(total)}")

        counter = Counter.options(name="counter").remote(100)
        counter.add.remote(1)
        print(f"counter says {gpulayer.get(counter.add.remote(20))}")
        print(f"it lives in another process: {gpulayer.get(counter.where.remote()) != os.getpid()}")
        print(f"found by name: {gpulayer.get(gpulayer.get_actor('counter').add.remote(300))}")

        try:
            gpulayer.get(count_primes.remote("one", 10))
        except TypeError as error:
            print(f"errors keep their type: {error}")


if __name__ == "__main__":
    main()
