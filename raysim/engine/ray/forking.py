"""Fork server for the workers of a local Ray: PyTorch is imported once, in shared memory.

Ray starts this file in place of Ray's `setup_worker.py`; the file asks the fork server for a worker and waits for the
worker's end. Linux only. Ray's own `setup_worker.py` runs without a fork server, or if the runtime environment
contains more than environment variables (Ray Tune sets environment variables for its trials).
"""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Collection

#: Environment variable with the path of the fork server's socket.
ADDRESS = "RAYSIM_FORK_SERVER"

#: Option of Ray's `setup_worker.py`: the runtime environment, as JSON.
CONTEXT = "--serialized-runtime-env-context="

#: Modules imported before the first fork. Each worker imports Ray itself: Ray reads the session's token on import.
PRELOADED = ("raysim.engine.simulation", "raysim.plan.build")

#: File with the priority by which the kernel kills a process when memory runs out.
BADNESS = "/proc/self/oom_score_adj"


#: (name, has adapters) of models.
Models = Collection[tuple[str, bool]]


class ForkServer:
    """A process that has imported PyTorch and forks workers of Ray; ended by `close`, or with the calling process.

    Args:
      models: models of the workers; the server imports torchvision, timm or peft for the models.
    """

    def __init__(self, models: Models = ()) -> None:
        import subprocess
        import tempfile

        self._folder = tempfile.TemporaryDirectory(prefix="raysim-")
        self.address = os.path.join(self._folder.name, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(1024)
            ours, self._lifeline = os.pipe()
            fds = (listener.fileno(), ours)
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--serve", *map(str, fds), json.dumps([*models])],
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C in the terminal does not reach this process
                stdout=subprocess.DEVNULL,  # output of imports; workers report errors in streams of their own
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
            os.close(ours)

    def close(self) -> None:
        """End the server; running workers continue."""
        self._process.terminate()
        self._process.wait()
        os.close(self._lifeline)
        self._folder.cleanup()


def serve(listener: socket.socket, lifeline: int, models: Models) -> None:
    """Fork a worker for each connection until the write end of the pipe `lifeline` closes. models: see `ForkServer`."""
    import gc
    import importlib
    import select
    import signal

    gc.disable()  # imports make many objects and no garbage
    for name in PRELOADED:
        importlib.import_module(name)
    import_libraries = importlib.import_module("raysim.models").import_libraries
    for name, has_lora in models:
        with contextlib.suppress(Exception):  # a worker that needs the library reports the error
            import_libraries(name, has_lora=has_lora)
    gc.freeze()  # otherwise the first garbage collection in a worker copies the pages of all objects
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while select.select([listener.fileno(), lifeline], [], [])[0] == [listener.fileno()]:
        connection, _ = listener.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(lifeline)
            listener.close()
            become_worker(connection)
        connection.close()


def become_worker(connection: socket.socket) -> None:
    """Run Ray's worker with the arguments, folder, environment and streams that `ask_for_worker` sends."""
    import runpy

    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as stream:
        command, folder, environment, badness = json.loads(stream.read(int.from_bytes(size, "big")))
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.setpgid(0, 0)  # Ray kills the child processes of a worker by the worker's process group
    with open(BADNESS, "w") as file:  # the value that Ray gave to the asking process: the kernel kills workers first
        file.write(badness)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = command, os.path.dirname(command[0])
    runpy.run_path(command[0], run_name="__main__")
    sys.exit()


def ask_for_worker(command: list[str], address: str) -> bool:
    """Run a worker in the fork server and return after the worker's end. Return False if no fork server answers.

    The worker inherits the connection, so any end of the worker closes the connection.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(address)
        except OSError:
            return False
        with open(BADNESS) as file:
            text = json.dumps((command, os.getcwd(), dict(os.environ), file.read())).encode()
        socket.send_fds(connection, [len(text).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(text)
        connection.recv(1)
    return True


def main(arguments: list[str]) -> None:
    """Serve forks, or start one worker for Ray."""
    if arguments[0] == "--serve":
        serve(socket.socket(fileno=int(arguments[1])), int(arguments[2]), json.loads(arguments[3]))
        return
    del sys.path[0]  # this folder
    command = [value for value in arguments if not value.startswith(("--language=", CONTEXT))]
    given = [value.removeprefix(CONTEXT) for value in arguments if value.startswith(CONTEXT)]
    context = json.loads(given[0]) if given else {}
    os.environ |= {name: os.path.expandvars(value) for name, value in context.pop("env_vars", {}).items()}
    is_plain = all(value in ([], None, sys.executable) for value in context.values())
    is_plain &= not command[0].startswith("-")  # options of Python come before Ray's worker
    if not (is_plain and ask_for_worker(command, os.environ.get(ADDRESS, ""))):
        import ray

        setup = os.path.join(os.path.dirname(ray.__file__), "_private", "workers", "setup_worker.py")
        os.execv(sys.executable, [sys.executable, setup, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
