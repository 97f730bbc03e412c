"""Remote functions and actors: references, the driver's session, the worker's main, and the zygote workers are forked from."""
