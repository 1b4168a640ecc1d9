"""HTTP/1.1 on both sides of a proxy, as plain protocols of the event loop.

No task and no buffer stands between a piece that a server sends and the client's socket.

- ``message``: a request as it arrived;
- ``reply``: its answer;
- ``headers``: which headers cross a proxy;
- ``server``: connections of clients;
- ``client``: connections to servers;
- ``tls``, ``bearer``, ``key_set``: how both sides prove who they are;
- ``access_log``: where lines about requests go;
- ``address``: where a server listens;
- ``process``: what a process that serves has of its host.

What always holds: of two readings that a message allows, none is chosen, it is refused; every wait for the other side
has an end; who sends faster than the receiver takes is not read from until it has caught up.
"""
