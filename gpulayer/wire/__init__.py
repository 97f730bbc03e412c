"""Messages, payloads, keys, sockets and requests: the only layer that imports zmq, msgpack and cloudpickle."""
