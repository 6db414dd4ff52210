import socket


def free_port():
    """Return a port of loopback on which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]
