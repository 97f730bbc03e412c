"""The other end of the fake gang: runs one call after another, as a worker does, and sends events and outcomes back."""

import sys
import traceback
from multiprocessing.connection import Client

import cloudpickle

from gpulayer.runtime import context

connection = Client(sys.argv[1])
while True:
    try:
        function, args = cloudpickle.loads(connection.recv_bytes())
    except EOFError:
        break
    context.enter(lambda value: connection.send_bytes(cloudpickle.dumps(("event", value))))
    try:
        outcome = ("done", function(*args))
    except BaseException as error:
        traceback.print_exc()
        outcome = ("failed", error)
    connection.send_bytes(cloudpickle.dumps(outcome))
